"""Motif-Video: image and text after the video, padding masked; in decoder layers the encoder's video instead."""

import dataclasses
import re

from ..grid import TokenGrid
from .base import Facts, Family, patched_grid, preset_as_wan


def _grid(transformer, inputs) -> TokenGrid:
    others = [inputs.get(name) for name in ("image_embeds", "encoder_hidden_states")]
    text_tokens = sum(tokens.shape[1] for tokens in others if tokens is not None)
    return patched_grid(transformer, inputs["hidden_states"].shape[2:], text_tokens=text_tokens)


def _layer_grid(transformer, path, grid) -> TokenGrid:
    block = re.match(r"single_transformer_blocks\.(\d+)\.", path)
    first_decoder = len(transformer.single_transformer_blocks) - transformer.config.num_decoder_layers
    if block is None or int(block[1]) < first_decoder:
        return grid
    return dataclasses.replace(grid, text_tokens=grid.video_tokens)


MOTIF_VIDEO = Family(
    name="motif_video",
    transformers={"MotifVideoTransformer3DModel": Facts("Motif-Video", (128,))},
    video_attention=r"(single_)?transformer_blocks\.\d+\.attn",
    grid=_grid,
    preset=preset_as_wan,
    layer_grid=_layer_grid,
    text="after the video",
    masks="key lengths",
    others="image tokens with the text's; in decoder layers the encoder's video instead",
)
