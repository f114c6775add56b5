"""EasyAnimate: text of one or two encoders before the video, its padding attended."""

from ..grid import TokenGrid
from .base import Family, patched_grid, preset_as_wan


def _grid(transformer, inputs) -> TokenGrid:
    texts = [inputs.get(name) for name in ("encoder_hidden_states", "encoder_hidden_states_t5")]
    text_tokens = sum(text.shape[1] for text in texts if text is not None)
    return patched_grid(transformer, inputs["hidden_states"].shape[2:], text_tokens=text_tokens, text_first=True)


def _default_processor(transformer, path, module):
    from diffusers.models.transformers.transformer_easyanimate import EasyAnimateAttnProcessor2_0

    return EasyAnimateAttnProcessor2_0()


EASYANIMATE = Family(
    name="easyanimate",
    transformers=("EasyAnimateTransformer3DModel",),
    video_attention=r"transformer_blocks\.\d+\.attn1",
    grid=_grid,
    preset=preset_as_wan,
    default_processor=_default_processor,
)
