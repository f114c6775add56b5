"""CogVideoX 2B, 5B and 1.5: text before the video, its padding attended; latents are (batch, frames, channels, ...)."""

from ..config import Preset
from ..grid import TokenGrid
from .base import Family


def _grid(transformer, inputs) -> TokenGrid:
    frames, _, height, width = inputs["hidden_states"].shape[1:]
    patch, patch_frames = transformer.config.patch_size, transformer.config.patch_size_t or 1
    text_tokens = inputs["encoder_hidden_states"].shape[1]
    return TokenGrid(frames // patch_frames, height // patch, width // patch, text_tokens, text_first=True)


def _preset(transformer, grid) -> Preset:
    return Preset(
        density=0.25,
        warmup_steps=0.2,
        dense_layers=0.025,
        source="Sparse-VideoGen's CogVideoX scripts: sparsity 0.25, 20 % of the steps and 2.5 % of the layers dense",
    )


def _default_processor(path, module):
    from diffusers.models.attention_processor import CogVideoXAttnProcessor2_0, FusedCogVideoXAttnProcessor2_0

    return FusedCogVideoXAttnProcessor2_0() if module.fused_projections else CogVideoXAttnProcessor2_0()


COGVIDEOX = Family(
    name="cogvideox",
    transformers=("CogVideoXTransformer3DModel",),
    video_attention=r"transformer_blocks\.\d+\.attn1",
    grid=_grid,
    preset=_preset,
    default_processor=_default_processor,
)
