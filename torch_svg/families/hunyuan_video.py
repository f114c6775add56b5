"""HunyuanVideo: text to video and image to video; text stands after the video, its padding at the end."""

from ..config import Preset
from ..grid import TokenGrid
from .base import Facts, Family, patched_grid, rotate_part


def _grid(transformer, inputs) -> TokenGrid:
    text_tokens = inputs["encoder_hidden_states"].shape[1]
    return patched_grid(transformer, inputs["hidden_states"].shape[2:], text_tokens=text_tokens)


def _preset(transformer, grid) -> Preset:
    return Preset(
        density=0.25,
        warmup_steps=0.1,
        dense_layers=0.03,
        source="Sparse-VideoGen's HunyuanVideo 720p script: sparsity 0.25, 10 % of steps and 3 % of layers dense",
    )


def _default_processor(transformer, path, module):
    from diffusers.models.attention_processor import AttnProcessor2_0
    from diffusers.models.transformers.transformer_hunyuan_video import HunyuanVideoAttnProcessor2_0

    # the text refiner inside the context embedder has plain attention
    return AttnProcessor2_0() if path.startswith("context_embedder") else HunyuanVideoAttnProcessor2_0()


def _apply_rotary(x, rotary):
    # what stands after the video is not rotated
    return rotate_part(x, *rotary, 0)


HUNYUAN_VIDEO = Family(
    name="hunyuan_video",
    transformers={
        "HunyuanVideoTransformer3DModel": Facts(
            "HunyuanVideo: T2V, I2V", (128,), pipelines=("HunyuanVideoPipeline",)
        )
    },
    video_attention=r"(single_)?transformer_blocks\.\d+\.attn",
    grid=_grid,
    preset=_preset,
    rotary_argument="image_rotary_emb",
    apply_rotary=_apply_rotary,
    default_processor=_default_processor,
    text="after the video",
    masks="key lengths",
)
