"""What torch_svg has to know about a diffusers video transformer: a declaration, one per family."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..config import Preset
from ..grid import TokenGrid


@dataclass(frozen=True)
class Family:
    """One family of diffusers video transformers.

    Args:
        name: Short name, as in the docs and the report.
        transformers: Names of the diffusers classes it serves.
        video_attention: Regular expression on the module path of the video self-attention modules.
        grid: ``grid(transformer, inputs) -> TokenGrid``, with the forward's arguments by name.
        preset: ``preset(transformer, grid) -> Preset``, the published settings for this model and size.
        default_processor: ``default_processor(path, module)`` for modules that do not name their own default class:
            what the model's constructor puts there.
        rotary_argument: Processor argument that carries rotary embeddings which are applied in a form that XLA
            compiles badly; the processor is then called without it and ``apply_rotary`` is used instead.
        apply_rotary: ``apply_rotary(x, rotary) -> x`` on (batch, tokens, heads, head_dim).
    """

    name: str
    transformers: tuple[str, ...]
    video_attention: str
    grid: Callable[[torch.nn.Module, dict], TokenGrid]
    preset: Callable[[torch.nn.Module, TokenGrid], Preset]
    default_processor: Callable[[str, torch.nn.Module], object] | None = None
    rotary_argument: str | None = None
    apply_rotary: Callable[[torch.Tensor, object], torch.Tensor] | None = None

    def default_processor_of(self, path: str, module: torch.nn.Module):
        """A new default processor for an attention module.

        Raises:
            NotImplementedError: It is not known; use ``torch_svg.enable``, which keeps the one that is there.
        """
        own = getattr(module, "_default_processor_cls", None)
        if own is not None:
            return own()
        if self.default_processor is not None:
            return self.default_processor(path, module)
        raise NotImplementedError(
            f"the default processor of {path} ({type(module).__name__}) is not known once it has been replaced: use "
            "torch_svg.enable(pipe), which keeps it"
        )

    def video_attention_modules(self, transformer: torch.nn.Module) -> dict[str, torch.nn.Module]:
        """The video self-attention modules by path, in the order of the layers."""
        return {
            name: module
            for name, module in transformer.named_modules()
            if hasattr(module, "processor") and re.fullmatch(self.video_attention, name)
        }


def patched_grid(transformer: torch.nn.Module, sizes, **text) -> TokenGrid:
    """The grid of latents of ``sizes`` (frames, height, width) after the transformer's patch embedding.

    Patch sizes are a (frames, height, width) tuple, or a side and perhaps a ``patch_size_t``; what does not fill a
    patch is cropped, as the embeddings' convolutions do.
    """
    patch = transformer.config.patch_size
    if isinstance(patch, int):
        patch = (getattr(transformer.config, "patch_size_t", None) or 1, patch, patch)
    return TokenGrid(*(size // side for size, side in zip(sizes, patch, strict=True)), **text)


def forward_inputs(transformer: torch.nn.Module, args: tuple, kwargs: dict) -> dict:
    """The arguments of a forward call by name."""
    return inspect.signature(type(transformer).forward).bind_partial(transformer, *args, **kwargs).arguments


def rotate_pairs(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of interleaved pairs in a form that XLA compiles well.

    The stock form writes strided slices, which becomes interior padding and selects: a one-layer graph at 75,600
    tokens had not compiled after 590 s, this one takes a minute and moves a tenth of the bytes. Swapping a pair with
    a sign is a product with a fixed matrix of 0, 1 and -1, exact in bf16.

    Args:
        x: (batch, tokens, heads, head_dim).
        cos, sin: (1, tokens, 1, head_dim) f32, each value twice, as diffusers' tables have them.

    Returns:
        The rotated tensor in the dtype of ``x``.
    """
    swapped = torch.matmul(x, _pair_swap(x.shape[-1], x.device, x.dtype))
    return (x.float() * cos + swapped.float() * sin).type_as(x)


def _pair_swap(size: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    key = (size, device, dtype)
    matrix = _PAIR_SWAPS.get(key)
    if matrix is None:
        even = torch.arange(0, size, 2)
        matrix = torch.zeros(size, size)
        matrix[even + 1, even] = -1.0
        matrix[even, even + 1] = 1.0
        matrix = _PAIR_SWAPS[key] = matrix.to(device, dtype)
    return matrix


_PAIR_SWAPS: dict[tuple, torch.Tensor] = {}
