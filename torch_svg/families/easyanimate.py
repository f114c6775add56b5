"""EasyAnimate: text of one or two encoders before the video, its padding attended."""

from ..config import Preset
from ..grid import TokenGrid
from .base import Family, patched_grid


def _grid(transformer, inputs) -> TokenGrid:
    texts = [inputs.get(name) for name in ("encoder_hidden_states", "encoder_hidden_states_t5")]
    text_tokens = sum(text.shape[1] for text in texts if text is not None)
    return patched_grid(transformer, inputs["hidden_states"].shape[2:], text_tokens=text_tokens, text_first=True)


def _preset(transformer, grid) -> Preset:
    return Preset(density=0.3, warmup_steps=0.2, dense_layers=0.03, source="as for Wan; no published setting")


def _default_processor(transformer, path, module):
    from diffusers.models.transformers.transformer_easyanimate import EasyAnimateAttnProcessor2_0

    return EasyAnimateAttnProcessor2_0()


EASYANIMATE = Family(
    name="easyanimate",
    transformers=("EasyAnimateTransformer3DModel",),
    video_attention=r"transformer_blocks\.\d+\.attn1",
    grid=_grid,
    preset=_preset,
    default_processor=_default_processor,
)
