"""Cosmos 3: packed [text | video | sound | action]; text attends causally to itself, the others to everything."""

import math

import numpy as np

from ..config import Preset
from ..grid import TokenGrid
from .base import Facts, Family, host_values


def _grid(transformer, inputs) -> TokenGrid:
    shapes, text = inputs["vision_token_shapes"], inputs["und_len"]
    if len(shapes) != 1:
        raise NotImplementedError(
            f"Cosmos 3 got {len(shapes)} videos and images in one sequence; served is one video: {shapes}"
        )
    video = math.prod(shapes[0])
    if not np.array_equal(host_values(inputs["vision_sequence_indexes"]), np.arange(text, text + video)):
        raise NotImplementedError(
            f"Cosmos 3's video must stand right after the {text} text tokens, as Cosmos3OmniPipeline packs it, but "
            "vision_sequence_indexes are others; leave this pipeline dense"
        )
    others = inputs["sequence_length"] - video
    return TokenGrid(*(int(side) for side in shapes[0]), text_tokens=others, text_first=others == text)


def _leading_tokens(transformer, inputs) -> int:
    return 0 if _grid(transformer, inputs).text_first else inputs["und_len"]


def _preset(transformer, grid) -> Preset:
    return Preset(density=0.25, warmup_steps=0.3, dense_layers=0.03, source="as for Cosmos 1; no published setting")


COSMOS3 = Family(
    name="cosmos3",
    transformers={"Cosmos3OmniTransformer": Facts("Cosmos 3", (128,), note="one video a sequence")},
    video_attention=r"layers\.\d+\.self_attn",
    grid=_grid,
    preset=_preset,
    leading_tokens=_leading_tokens,
    causal_calls=True,
    timestep_argument="vision_timesteps",
    text="before the video",
    others="sound and action after the video",
    grid_source="vision_token_shapes",
)
