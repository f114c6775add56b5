"""Helios: [older frames, coarser with age | frames to generate]; the older ones stay exact, text is cross-attention."""

from ..grid import TokenGrid
from .base import Facts, Family, patched_grid, preset_as_wan, rotate_pairs, segment_tokens


def _grid(transformer, inputs) -> TokenGrid:
    patch = transformer.config.patch_size
    history = 0
    for age, factor in (("short", 1), ("mid", 2), ("long", 4)):
        latents = inputs.get(f"latents_history_{age}")
        if latents is not None and inputs.get(f"indices_latents_history_{age}") is not None:
            patch_of_age = tuple(factor * side for side in patch)
            history += segment_tokens(latents.shape[2:], patch_of_age, padded=factor > 1)
    return patched_grid(
        transformer, inputs["hidden_states"].shape[2:], text_tokens=history, text_first=history > 0
    )


def _apply_rotary(x, rotary):
    # (batch, tokens, cosines and sines)
    return rotate_pairs(x, *rotary[:, :, None].chunk(2, dim=-1))


HELIOS = Family(
    name="helios",
    transformers={"HeliosTransformer3DModel": Facts("Helios", (128,))},
    video_attention=r"blocks\.\d+\.attn1",
    grid=_grid,
    preset=preset_as_wan,
    rotary_argument="rotary_emb",
    apply_rotary=_apply_rotary,
    others="older frames before the video",
)
