"""HunyuanVideo 1.5: after the video stand image, glyph and prompt tokens, the valid ones of each before all padding."""

from ..config import Preset
from ..grid import TokenGrid
from .base import Facts, Family, TextMask, patched_grid
from .hunyuan_video import HUNYUAN_VIDEO


def _grid(transformer, inputs) -> TokenGrid:
    streams = ("image_embeds", "encoder_hidden_states_2", "encoder_hidden_states")
    text_tokens = sum(inputs[name].shape[1] for name in streams)
    return patched_grid(transformer, inputs["hidden_states"].shape[2:], text_tokens=text_tokens)


def _preset(transformer, grid) -> Preset:
    return Preset(density=0.25, warmup_steps=0.1, dense_layers=0.03, source="as for HunyuanVideo; no published setting")


def _default_processor(transformer, path, module):
    from diffusers.models.attention_processor import AttnProcessor2_0
    from diffusers.models.transformers.transformer_hunyuan_video15 import HunyuanVideo15AttnProcessor2_0

    # the text refiner inside the context embedder has plain attention
    return AttnProcessor2_0() if path.startswith("context_embedder") else HunyuanVideo15AttnProcessor2_0()


HUNYUAN_VIDEO15 = Family(
    name="hunyuan_video15",
    transformers={
        "HunyuanVideo15Transformer3DModel": Facts(
            "HunyuanVideo 1.5: T2V, I2V",
            (128,),
            note="with torch_svg.patches, else it waits for the device, and each prompt length is a graph of its own",
        ),
    },
    video_attention=r"transformer_blocks\.\d+\.attn",
    grid=_grid,
    preset=_preset,
    rotary_argument=HUNYUAN_VIDEO.rotary_argument,
    apply_rotary=HUNYUAN_VIDEO.apply_rotary,
    default_processor=_default_processor,
    # the processor makes a tokens x tokens mask of it in every layer: on the meta device that costs nothing
    text_mask=TextMask("attention_mask", lambda mask: mask.to("meta")),
    text="after the video",
    masks="key lengths",
    others="image and glyph tokens with the prompt's",
)
