"""AutoencoderKLWan slices beyond the size of a dimension, which torch_xla refuses and torch clamps."""

import torch

from .patch import Patch, redirecting


def _clamped(tensor, index):
    """The item at `index`, with slice bounds below -size taken as 0, as torch does on other devices."""
    entries = index if isinstance(index, tuple) else (index,)
    # what comes after an ellipsis, or beside an index of several dimensions, has no fixed dimension: leave it alone
    if all(entry is None or type(entry) in (int, slice) for entry in entries):
        sizes = iter(tensor.shape)
        index = tuple(None if entry is None else _clamp(entry, next(sizes)) for entry in entries)
    return tensor[index]


def _clamp(entry, size):
    if not isinstance(entry, slice):
        return entry
    start, stop = (0 if isinstance(bound, int) and bound < -size else bound for bound in (entry.start, entry.stop))
    return slice(start, stop, entry.step)


AUTOENCODER = "diffusers.models.autoencoders.autoencoder_kl_wan"

PATCH = Patch(
    name="wan_vae_slices",
    what="encoding and decoding with AutoencoderKLWan raises `Value out of range (expected to be in range of [-1, 0])`",
    # the same fault reported against another user of torch_xla
    upstream="https://github.com/tenstorrent/tt-xla/issues/4465",
    versions={"diffusers": ">=0.41,<0.43", "torch_xla": "==2.9.*"},
    delete_when="`torch.ones(1, device='xla')[-2:]` no longer raises",
    targets=((AUTOENCODER, "WanEncoder3d.forward"), (AUTOENCODER, "WanDecoder3d.forward")),
    wrap=redirecting(torch.Tensor.__getitem__, _clamped),
)
