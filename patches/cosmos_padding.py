"""AutoencoderKLCosmos repeats its first frame zero times where it needs no padding, which torch_xla refuses."""

import torch

from .patch import Patch, redirecting


def _repeat(tensor, *counts):
    """`Tensor.repeat`; of zero times, an empty tensor of the shape that torch gives on other devices."""
    sizes = counts[0] if len(counts) == 1 and not isinstance(counts[0], int) else counts
    if 0 not in sizes:
        return tensor.repeat(*counts)
    shape = (1,) * (len(sizes) - tensor.dim()) + tuple(tensor.shape)
    return tensor.new_empty([size * count for size, count in zip(shape, sizes, strict=True)])


PATCH = Patch(
    name="cosmos_padding",
    what="encoding and decoding with AutoencoderKLCosmos raises `Concatenate expects at least one argument`",
    upstream="https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/models/autoencoders/"
    "autoencoder_kl_cosmos.py#L76",
    versions={"diffusers": ">=0.41,<0.43", "torch_xla": "==2.9.*"},
    delete_when="`torch.ones(2, 1, device='xla').repeat(1, 0)` no longer raises",
    targets=(("diffusers.models.autoencoders.autoencoder_kl_cosmos", "CosmosCausalConv3d.forward"),),
    wrap=redirecting(torch.Tensor.repeat, _repeat),
)
