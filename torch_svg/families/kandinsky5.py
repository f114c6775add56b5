"""Kandinsky 5, and the video stream of Kandinsky 6: channels-last latents, text and audio in cross-attention."""

from ..config import Preset
from ..grid import TokenGrid
from .base import Family, patched_grid


def _grid(transformer, inputs) -> TokenGrid:
    if inputs.get("sparse_params") is not None:
        raise NotImplementedError(
            "Kandinsky 5 runs its own sparse attention (NABLA) here, with tokens in blocks of 8 x 8: use a checkpoint "
            "without it, or leave it as it is"
        )
    # (batch, frames, height, width, channels)
    return patched_grid(transformer, inputs["hidden_states"].shape[1:4])


def _preset(transformer, grid) -> Preset:
    return Preset(density=0.3, warmup_steps=0.2, dense_layers=0.03, source="as for Wan; no published setting")


KANDINSKY5 = Family(
    name="kandinsky5",
    transformers=("Kandinsky5Transformer3DModel", "Kandinsky6Transformer3DModel"),
    video_attention=r"visual_transformer_blocks\.\d+\.(video_dec_block\.)?self_attention",
    grid=_grid,
    preset=_preset,
)
