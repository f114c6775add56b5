"""Nearest upsampling runs on the host: every feature map of a decoder crosses to the CPU and back."""

import torch.nn.functional as F

from .patch import Patch, redirecting


def _upsample(input, size=None, scale_factor=None, mode="nearest", **options):
    """`F.interpolate`; nearest upsampling by whole factors, which only repeats elements, as a broadcast."""
    factors = _whole_factors(input.shape[2:], size, scale_factor)
    if mode not in ("nearest", "nearest-exact") or factors is None:
        return F.interpolate(input, size=size, scale_factor=scale_factor, mode=mode, **options)
    # (..., size) -> (..., size, 1) -> (..., size, factor), one dimension after the other
    for dim, factor in enumerate(factors, start=2):
        if factor > 1:
            repeated = input.unsqueeze(dim + 1)
            shape = list(repeated.shape)
            shape[dim + 1] = factor
            input = repeated.expand(shape).flatten(dim, dim + 1)
    return input


def _whole_factors(old, size, scale_factor):
    """The factor of each spatial dimension, or None when one of them is not whole."""
    per_dimension = size if size is not None else scale_factor
    if not isinstance(per_dimension, tuple | list):
        per_dimension = [per_dimension] * len(old)
    factors = (
        [new / length for new, length in zip(per_dimension, old, strict=True)] if size is not None else per_dimension
    )
    if all(factor >= 1 and factor == int(factor) for factor in factors):
        return [int(factor) for factor in factors]
    return None


AUTOENCODERS = "diffusers.models.autoencoders"

PATCH = Patch(
    name="nearest_upsampling",
    what="decoders copy feature maps to the host and back: torch_xla lowers neither `_upsample_nearest_exact2d` nor "
    "`upsample_nearest3d`",
    upstream="https://github.com/pytorch/xla/issues/6932",
    versions={"diffusers": ">=0.41,<0.43", "torch_xla": "==2.9.*"},
    delete_when="torch_xla's counters show no `aten::_upsample_nearest_exact2d` and no `aten::upsample_nearest3d`",
    targets=(
        (f"{AUTOENCODERS}.autoencoder_kl_wan", "WanUpsample.forward"),
        (f"{AUTOENCODERS}.autoencoder_kl_hunyuan_video", "HunyuanVideoUpsampleCausal3D.forward"),
        (f"{AUTOENCODERS}.autoencoder_kl_cogvideox", "CogVideoXSpatialNorm3D.forward"),
        (f"{AUTOENCODERS}.autoencoder_kl_magvit", "EasyAnimateUpsampler3D.forward"),
        ("diffusers.models.upsampling", "CogVideoXUpsample3D.forward"),
    ),
    wrap=redirecting(F.interpolate, _upsample),
)
