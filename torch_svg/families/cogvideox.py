"""CogVideoX 2B, 5B and 1.5, and ConsisID: text before the video, its padding attended; latents come frames first."""

from ..config import Preset
from ..grid import TokenGrid
from .base import Facts, Family, patched_grid, rotate_part


def _grid(transformer, inputs) -> TokenGrid:
    # (batch, frames, channels, height, width)
    frames, _, height, width = inputs["hidden_states"].shape[1:]
    text_tokens = inputs["encoder_hidden_states"].shape[1]
    return patched_grid(transformer, (frames, height, width), text_tokens=text_tokens, text_first=True)


def _preset(transformer, grid) -> Preset:
    return Preset(
        density=0.25,
        warmup_steps=0.2,
        dense_layers=0.025,
        source="Sparse-VideoGen's CogVideoX scripts: sparsity 0.25, 20 % of steps and 2.5 % of layers dense",
    )


def _default_processor(transformer, path, module):
    from diffusers.models.attention_processor import CogVideoXAttnProcessor2_0, FusedCogVideoXAttnProcessor2_0

    return FusedCogVideoXAttnProcessor2_0() if module.fused_projections else CogVideoXAttnProcessor2_0()


def _apply_rotary(x, rotary):
    cos, sin = rotary
    # the text before the video is not rotated
    return rotate_part(x, cos, sin, x.shape[1] - len(cos))


COGVIDEOX = Family(
    name="cogvideox",
    transformers={
        "CogVideoXTransformer3DModel": Facts("CogVideoX 2B, 5B and 1.5", (64,), pipelines=("CogVideoXPipeline",)),
        "ConsisIDTransformer3DModel": Facts("ConsisID", (64,)),
    },
    video_attention=r"transformer_blocks\.\d+\.attn1",
    grid=_grid,
    preset=_preset,
    rotary_argument="image_rotary_emb",
    apply_rotary=_apply_rotary,
    default_processor=_default_processor,
    text="before the video",
    grid_source="latents, frames first",
)
