"""EasyAnimate: text of one or two encoders before the video, its padding attended."""

from ..grid import TokenGrid
from .base import Facts, Family, patched_grid, preset_as_wan, rotate_part


def _grid(transformer, inputs) -> TokenGrid:
    texts = [inputs.get(name) for name in ("encoder_hidden_states", "encoder_hidden_states_t5")]
    text_tokens = sum(text.shape[1] for text in texts if text is not None)
    return patched_grid(transformer, inputs["hidden_states"].shape[2:], text_tokens=text_tokens, text_first=True)


def _default_processor(transformer, path, module):
    from diffusers.models.transformers.transformer_easyanimate import EasyAnimateAttnProcessor2_0

    return EasyAnimateAttnProcessor2_0()


def _apply_rotary(x, rotary):
    cos, sin = rotary
    # the text before the video is not rotated
    return rotate_part(x, cos, sin, x.shape[1] - len(cos))


EASYANIMATE = Family(
    name="easyanimate",
    transformers={"EasyAnimateTransformer3DModel": Facts("EasyAnimate 5.1", (64,))},
    video_attention=r"transformer_blocks\.\d+\.attn1",
    grid=_grid,
    preset=preset_as_wan,
    rotary_argument="image_rotary_emb",
    apply_rotary=_apply_rotary,
    default_processor=_default_processor,
    text="before the video",
)
