"""Framepack: [older frames, coarser with age | frames to generate | image and text]; all but the middle stay exact."""

from .. import patches
from ..config import Preset
from ..grid import TokenGrid
from .base import Facts, Family, host_values, patched_grid, segment_tokens
from .hunyuan_video import HUNYUAN_VIDEO

# argument of older frames, that of their places in time, and their patch (frames, height, width)
_HISTORY = (
    ("latents_clean", "indices_latents_clean", (1, 2, 2)),
    ("latents_history_2x", "indices_latents_history_2x", (2, 4, 4)),
    ("latents_history_4x", "indices_latents_history_4x", (4, 8, 8)),
)


def _leading_tokens(transformer, inputs) -> int:
    return sum(
        segment_tokens(inputs[name].shape[2:], patch, padded=name != "latents_clean")
        for name, places, patch in _HISTORY
        if inputs.get(name) is not None and inputs.get(places) is not None
    )


def _grid(transformer, inputs) -> TokenGrid:
    mask = inputs["encoder_attention_mask"]
    prompt_tokens = mask.shape[1]
    if mask.shape[0] == 1 and not (mask.device.type == "xla" and patches.applied("framepack_text_length")):
        # a batch of one has its padding cut off, for which the model reads the length on the host as well
        prompt_tokens = int(host_values(mask).sum())
    others = _leading_tokens(transformer, inputs) + inputs["image_embeds"].shape[1] + prompt_tokens
    return patched_grid(transformer, inputs["hidden_states"].shape[2:], text_tokens=others)


def _preset(transformer, grid) -> Preset:
    return Preset(density=0.25, warmup_steps=0.1, dense_layers=0.03, source="as for HunyuanVideo; no published setting")


FRAMEPACK = Family(
    name="framepack",
    transformers={
        "HunyuanVideoFramepackTransformer3DModel": Facts(
            "Framepack",
            (128,),
            note="with torch_svg.patches, else it waits for the device, and each prompt length is a graph of its own",
        ),
    },
    video_attention=HUNYUAN_VIDEO.video_attention,
    grid=_grid,
    preset=_preset,
    rotary_argument=HUNYUAN_VIDEO.rotary_argument,
    apply_rotary=HUNYUAN_VIDEO.apply_rotary,
    default_processor=HUNYUAN_VIDEO.default_processor,
    leading_tokens=_leading_tokens,
    text="after the video",
    masks="key lengths",
    others="older frames before the video, image tokens after it",
)
