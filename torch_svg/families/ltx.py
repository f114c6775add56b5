"""LTX-Video: latents come packed, and their grid as arguments of the forward."""

from ..config import Preset
from ..grid import TokenGrid
from .base import Family


def _grid(transformer, inputs) -> TokenGrid:
    sides = [inputs.get(name) for name in ("num_frames", "height", "width")]
    if None in sides:
        raise NotImplementedError(
            "LTX latents are packed, and this pipeline gives the transformer coordinates instead of num_frames, height "
            "and width (LTXConditionPipeline does): sparse video attention does not know their grid; use LTXPipeline "
            "or LTXImageToVideoPipeline, or leave this pipeline dense"
        )
    return TokenGrid(*(int(side) for side in sides))


def _preset(transformer, grid) -> Preset:
    return Preset(density=0.3, warmup_steps=0.2, dense_layers=0.03, source="as for Wan; no published setting")


LTX = Family(
    name="ltx",
    transformers=("LTXVideoTransformer3DModel",),
    video_attention=r"transformer_blocks\.\d+\.attn1",
    grid=_grid,
    preset=_preset,
)
