"""LTX-Video: latents come packed, and their grid as arguments of the forward or from the pipeline that runs."""

import math

from ..grid import TokenGrid
from .base import Facts, Family, preset_as_wan

_PIPELINE_SIDES = ("latent_num_frames", "latent_height", "latent_width")


def _grid(transformer, inputs) -> TokenGrid:
    tokens = inputs["hidden_states"].shape[1]
    sides = [inputs.get(name) for name in ("num_frames", "height", "width")]
    if None not in sides and math.prod(sides) == tokens:
        return TokenGrid(*(int(side) for side in sides))
    # the other pipeline gives the transformer coordinates; its frames of conditions stand before the video
    sides = [inputs.get(name) for name in _PIPELINE_SIDES]
    if None in sides or math.prod(sides) > tokens:
        raise NotImplementedError(
            f"LTX latents are packed, and the grid of these {tokens} tokens is not known: expected num_frames, height "
            "and width whose product they are, or LTXConditionPipeline; leave this pipeline dense"
        )
    conditions = tokens - math.prod(sides)
    return TokenGrid(*(int(side) for side in sides), text_tokens=conditions, text_first=conditions > 0)


LTX = Family(
    name="ltx",
    transformers={
        "LTXVideoTransformer3DModel": Facts(
            "LTX-Video 2B and 13B",
            (64, 128),
            pipelines=("LTXPipeline", "LTXConditionPipeline"),
        ),
    },
    video_attention=r"transformer_blocks\.\d+\.attn1",
    grid=_grid,
    preset=preset_as_wan,
    pipeline_values=("LTXConditionPipeline", _PIPELINE_SIDES),
    masks="cross-attention",
    others="frames of conditions before the video",
    grid_source="num_frames, height, width, or the running LTXConditionPipeline",
)
