"""Allegro: video alone in the sequence, text in cross-attention."""

from ..config import Preset
from ..grid import TokenGrid
from .base import Family, patched_grid


def _grid(transformer, inputs) -> TokenGrid:
    return patched_grid(transformer, inputs["hidden_states"].shape[2:])


def _preset(transformer, grid) -> Preset:
    return Preset(density=0.3, warmup_steps=0.2, dense_layers=0.03, source="as for Wan; no published setting")


ALLEGRO = Family(
    name="allegro",
    transformers=("AllegroTransformer3DModel",),
    video_attention=r"transformer_blocks\.\d+\.attn1",
    grid=_grid,
    preset=_preset,
)
