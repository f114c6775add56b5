"""What torch_svg has to know about a diffusers video transformer: a declaration, one per family."""

from __future__ import annotations

import inspect
import math
import re
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from ..config import Preset
from ..grid import TokenGrid


@dataclass(frozen=True)
class TextMask:
    """A padding mask that a processor takes in a form of its own, which is read once and kept out of the graph.

    Args:
        argument: Processor argument that carries (batch, text_tokens), nonzero where a token is valid; the valid ones
            are a prefix.
        stand_in: ``stand_in(mask) -> mask``, what the processor gets instead. Whatever it makes of that never meets
            the attention core, which has the lengths.
    """

    argument: str
    stand_in: Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Facts:
    """What the table of models (``torch-svg models``) says of one transformer class, and nothing computes with.

    Args:
        models: The released models that use the class.
        head_dims: Channels of a head in those.
        note: What of the class is not served, or costs more than a user may expect.
        pipelines: Names of the diffusers pipelines that the tests run whole, with tiny random weights.
    """

    models: str
    head_dims: tuple[int, ...]
    note: str = ""
    pipelines: tuple[str, ...] = ()


# where text stands in the video's sequence, if it does
TEXT = ("cross-attention", "after the video", "before the video")
# what becomes of padded text: masked in the kernel, masked in cross-attention by the model, or nothing
MASKS = ("key lengths", "cross-attention", "attended")


@dataclass(frozen=True)
class Family:
    """One family of diffusers video transformers.

    Args:
        name: Short name, as in the docs and the report.
        transformers: The diffusers classes it serves, by name, with what the table of models says of them.
        video_attention: Regular expression on the module path of the video self-attention modules.
        grid: ``grid(transformer, inputs) -> TokenGrid``, with the forward's arguments by name.
        preset: ``preset(transformer, grid) -> Preset``, the published settings for this model and size.
        default_processor: ``default_processor(transformer, path, module)``: what the model's constructor puts there.
            Default: what the module's class names.
        rotary_argument: Processor argument that carries rotary embeddings which are applied in a form that XLA
            compiles badly; the processor is then called without it and ``apply_rotary`` is used instead.
        apply_rotary: ``apply_rotary(x, rotary) -> x`` on (batch, tokens, heads, head_dim).
        text_mask: For processors that take the text's padding other than as a bool mask over the keys.
        leading_tokens: ``leading_tokens(transformer, inputs) -> int`` for sequences that have other tokens on both
            sides of the video. The grid counts all of them as text after the video, in the order in which they stand.
        layer_grid: ``layer_grid(transformer, path, grid) -> TokenGrid`` for layers whose sequence is another one.
        causal_calls: Whether the processor attends causally among the text tokens in a call of its own, which stays
            what it is.
        pipeline_values: A pipeline's class name and names of local variables of its call, which join the inputs of a
            forward that it runs: for pipelines that do not tell the transformer its grid.
        timestep_argument: Argument of the forward by which a step is told from the next outside a pipeline.
        text: Where text stands, one of ``TEXT``.
        masks: What becomes of padded text, one of ``MASKS``.
        others: Other tokens in the video's sequence; they stay exact.
        grid_source: What the grid is read from, in words.
    """

    name: str
    transformers: dict[str, Facts]
    video_attention: str
    grid: Callable[[torch.nn.Module, dict], TokenGrid]
    preset: Callable[[torch.nn.Module, TokenGrid], Preset]
    default_processor: Callable[[torch.nn.Module, str, torch.nn.Module], object] | None = None
    rotary_argument: str | None = None
    apply_rotary: Callable[[torch.Tensor, object], torch.Tensor] | None = None
    text_mask: TextMask | None = None
    leading_tokens: Callable[[torch.nn.Module, dict], int] | None = None
    layer_grid: Callable[[torch.nn.Module, str, TokenGrid], TokenGrid] | None = None
    causal_calls: bool = False
    pipeline_values: tuple[str, tuple[str, ...]] | None = None
    timestep_argument: str = "timestep"
    text: str = "cross-attention"
    masks: str = "attended"
    others: str = ""
    grid_source: str = "latents"

    def __post_init__(self):
        if self.text not in TEXT or self.masks not in MASKS:
            raise ValueError(f"got {self.text=}, {self.masks=}, expected one of {TEXT} and one of {MASKS}")

    def default_processor_of(self, transformer: torch.nn.Module, path: str, module: torch.nn.Module):
        """A new default processor for an attention module.

        Raises:
            NotImplementedError: It is not known; use ``torch_svg.enable``, which keeps the one that is there.
        """
        if self.default_processor is not None:
            return self.default_processor(transformer, path, module)
        own = getattr(module, "_default_processor_cls", None)
        if own is not None:
            return own()
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


def preset_as_wan(transformer: torch.nn.Module, grid: TokenGrid) -> Preset:
    """The settings of a family for which nothing is published: Wan's."""
    return Preset(density=0.3, warmup_steps=0.2, dense_layers=0.03, source="as for Wan; no published setting")


def patched_grid(transformer: torch.nn.Module, sizes, **text) -> TokenGrid:
    """The grid of latents of ``sizes`` (frames, height, width) after the transformer's patch embedding.

    Patch sizes are a (frames, height, width) tuple, or a side and perhaps a ``patch_size_t``; what does not fill a
    patch is cropped, as the embeddings' convolutions do.
    """
    patch = transformer.config.patch_size
    if isinstance(patch, int):
        patch = (getattr(transformer.config, "patch_size_t", None) or 1, patch, patch)
    return TokenGrid(*(size // side for size, side in zip(sizes, patch, strict=True)), **text)


def segment_tokens(sizes, patch: tuple[int, int, int], *, padded: bool = False) -> int:
    """Tokens of a segment of latents of ``sizes`` (frames, height, width), cropped or padded to whole patches."""
    counts = [-(-size // side) if padded else size // side for size, side in zip(sizes, patch, strict=True)]
    return math.prod(counts)


def host_values(tensor: torch.Tensor) -> np.ndarray:
    """The values of an input that says where tokens stand.

    A pipeline hands the same tensor to every step: it is read from the device once, not once a step.
    """
    version = 0 if tensor.is_inference() else tensor._version
    reference, known_version, values = _HOST_VALUES.get(id(tensor), (lambda: None, None, None))
    if reference() is not tensor or known_version != version:
        for key in [key for key, (reference, *_) in _HOST_VALUES.items() if reference() is None]:
            del _HOST_VALUES[key]
        values = tensor.detach().cpu().numpy()
        _HOST_VALUES[id(tensor)] = (weakref.ref(tensor), version, values)
    return values


_HOST_VALUES: dict[int, tuple[weakref.ref, int, np.ndarray]] = {}


def set_processor(module: torch.nn.Module, processor) -> None:
    """Puts a processor into an attention module; some classes have no setter."""
    if hasattr(module, "set_processor"):
        module.set_processor(processor)
    else:
        module.processor = processor


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


def rotate_part(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, start: int) -> torch.Tensor:
    """``rotate_pairs`` of some tokens of a sequence; the others, text for the most part, stay as they are.

    Where the processors rotate a slice of the joint sequence and put it back, XLA copies queries and keys once more;
    a table that does not turn the others needs no slice.

    Args:
        x: (batch, tokens, heads, head_dim).
        cos, sin: (rotated tokens, head_dim) f32.
        start: The first token to rotate.
    """
    sides = (0, 0, start, x.shape[1] - start - cos.shape[0])
    return rotate_pairs(x, F.pad(cos, sides, value=1.0)[None, :, None], F.pad(sin, sides)[None, :, None])


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
