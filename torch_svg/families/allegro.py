"""Allegro: video alone in the sequence, text in cross-attention."""

from ..grid import TokenGrid
from .base import Facts, Family, patched_grid, preset_as_wan


def _grid(transformer, inputs) -> TokenGrid:
    return patched_grid(transformer, inputs["hidden_states"].shape[2:])


ALLEGRO = Family(
    name="allegro",
    transformers={"AllegroTransformer3DModel": Facts("Allegro", (96,))},
    video_attention=r"transformer_blocks\.\d+\.attn1",
    grid=_grid,
    preset=preset_as_wan,
    masks="cross-attention",
)
