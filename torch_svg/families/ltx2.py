"""LTX-2: the video stream of a model of video and audio; audio and everything between the two stay exact."""

import math

from ..grid import TokenGrid
from .base import Facts, Family, preset_as_wan


def _grid(transformer, inputs) -> TokenGrid:
    tokens = inputs["hidden_states"].shape[1]
    sides = [inputs.get(name) for name in ("num_frames", "height", "width")]
    if None in sides or math.prod(sides) > tokens:
        raise NotImplementedError(
            f"LTX-2 latents are packed, and the grid of these {tokens} tokens is not known: expected num_frames, "
            f"height and width of the video, got {sides} (the DFR pipelines give coordinates alone); leave this "
            "pipeline dense"
        )
    # frames of conditions and references stand behind the video
    return TokenGrid(*(int(side) for side in sides), text_tokens=tokens - math.prod(sides))


def _default_processor(transformer, path, module):
    from diffusers.models.transformers.transformer_ltx2 import LTX2AudioVideoAttnProcessor, LTX2PerturbedAttnProcessor

    return LTX2PerturbedAttnProcessor() if transformer.config.perturbed_attn else LTX2AudioVideoAttnProcessor()


LTX2 = Family(
    name="ltx2",
    transformers={
        "LTX2VideoTransformer3DModel": Facts(
            "LTX-2, LTX-2.3",
            (128,),
            note="DFR pipelines, which give no grid, and masks over the video are refused",
        ),
    },
    video_attention=r"transformer_blocks\.\d+\.attn1",
    grid=_grid,
    preset=preset_as_wan,
    default_processor=_default_processor,
    masks="cross-attention",
    others="frames of conditions and references after the video; audio has a stream of its own",
    grid_source="num_frames, height, width",
)
