"""Cosmos 1, 2 and 2.5: video alone in the sequence, text in cross-attention."""

from ..config import Preset
from ..grid import TokenGrid
from .base import Facts, Family, patched_grid


def _grid(transformer, inputs) -> TokenGrid:
    return patched_grid(transformer, inputs["hidden_states"].shape[2:])


def _preset(transformer, grid) -> Preset:
    return Preset(
        density=0.25,
        warmup_steps=0.3,
        dense_layers=0.03,
        source="Sparse-VideoGen's Cosmos script: sparsity 0.25, 30 % of steps and 3 % of layers dense",
    )


COSMOS = Family(
    name="cosmos",
    transformers={"CosmosTransformer3DModel": Facts("Cosmos 1, 2 and 2.5", (128,))},
    video_attention=r"transformer_blocks\.\d+\.attn1",
    grid=_grid,
    preset=_preset,
)
