"""Tiled decoding blends neighbouring tiles one row of pixels after the other: thousands of operations in one graph."""

import functools

import torch

from .patch import Patch, on_xla

# the dimension along which tiles overlap, of (batch, channels, frames, height, width)
_DIMENSIONS = {"blend_t": -3, "blend_v": -2, "blend_h": -1}


def _at_once(blend):
    dim = _DIMENSIONS[blend.__name__]

    @functools.wraps(blend)
    def wrapper(self, a, b, blend_extent):
        extent = min(a.shape[dim], b.shape[dim], blend_extent)
        if extent <= 0 or not on_xla(a, b):
            return blend(self, a, b, blend_extent)
        weight = torch.arange(extent, device=b.device) / extent
        weight = weight.reshape(-1, *[1] * (-dim - 1))
        before, overlap = a.narrow(dim, a.shape[dim] - extent, extent), b.narrow(dim, 0, extent)
        # in place, as upstream: the next tile is blended with this one as it is now
        overlap.copy_(before * (1 - weight) + overlap * weight)
        return b

    return wrapper


_VIDEO = (
    "AutoencoderKLCogVideoX",
    "AutoencoderKLHunyuanVideo",
    "AutoencoderKLHunyuanVideo15",
    "AutoencoderKLLTX2Video",
    "AutoencoderKLLTXVideo",
    "AutoencoderKLMagvit",
    "AutoencoderKLMochi",
    "AutoencoderKLWan",
)
_IN_TIME = (
    "AutoencoderKLHunyuanVideo",
    "AutoencoderKLHunyuanVideo15",
    "AutoencoderKLLTX2Video",
    "AutoencoderKLLTXVideo",
)

PATCH = Patch(
    name="tile_blending",
    what="tiled decoding makes a graph of thousands of operations, one for every row of pixels in which tiles overlap",
    upstream="https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/models/autoencoders/"
    "autoencoder_kl_wan.py#L1247",
    versions={"diffusers": ">=0.41,<0.43", "torch_xla": "==2.9.*"},
    delete_when="diffusers blends tiles without a loop over rows",
    targets=(
        *(("diffusers", f"{name}.{blend}") for name in _VIDEO for blend in ("blend_v", "blend_h")),
        *(("diffusers", f"{name}.blend_t") for name in _IN_TIME),
    ),
    wrap=_at_once,
)
