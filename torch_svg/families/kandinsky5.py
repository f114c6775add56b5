"""Kandinsky 5, and the video stream of Kandinsky 6: channels-last latents, text and audio in cross-attention."""

from ..grid import TokenGrid
from .base import Facts, Family, patched_grid, preset_as_wan


def _grid(transformer, inputs) -> TokenGrid:
    if inputs.get("sparse_params") is not None:
        raise NotImplementedError(
            "Kandinsky 5 runs its own sparse attention (NABLA) here, with tokens in blocks of 8 x 8: use a checkpoint "
            "without it, or leave it as it is"
        )
    # (batch, frames, height, width, channels)
    return patched_grid(transformer, inputs["hidden_states"].shape[1:4])


KANDINSKY5 = Family(
    name="kandinsky5",
    transformers={
        "Kandinsky5Transformer3DModel": Facts(
            "Kandinsky 5 Lite and Pro",
            (64, 128),
            note="its own NABLA sparsity is refused; each prompt length is a graph of its own",
        ),
    },
    video_attention=r"visual_transformer_blocks\.\d+\.self_attention",
    grid=_grid,
    preset=preset_as_wan,
    grid_source="latents, channels last",
)

KANDINSKY6 = Family(
    name="kandinsky6",
    transformers={"Kandinsky6Transformer3DModel": Facts("Kandinsky 6", (128,))},
    video_attention=r"visual_transformer_blocks\.\d+\.video_dec_block\.self_attention",
    grid=_grid,
    preset=preset_as_wan,
    masks="cross-attention",
    others="audio has a stream of its own",
    grid_source="latents, channels last",
)
