"""Mochi: text after the video; the processor takes the valid text tokens of each batch row out by their indices."""

import torch

from ..grid import TokenGrid
from .base import Facts, Family, TextMask, patched_grid, preset_as_wan


def _grid(transformer, inputs) -> TokenGrid:
    text_tokens = inputs["encoder_hidden_states"].shape[1]
    return patched_grid(transformer, inputs["hidden_states"].shape[2:], text_tokens=text_tokens)


def _default_processor(transformer, path, module):
    from diffusers.models.attention_processor import MochiAttnProcessor2_0

    return MochiAttnProcessor2_0()


def _keep_all(mask: torch.Tensor) -> torch.Tensor:
    # on the host, so that looking for the valid tokens does not wait for the device; padding is masked by its length
    return torch.ones(mask.shape, dtype=torch.bool)


MOCHI = Family(
    name="mochi",
    transformers={"MochiTransformer3DModel": Facts("Mochi 1", (128,))},
    video_attention=r"transformer_blocks\.\d+\.attn1",
    grid=_grid,
    preset=preset_as_wan,
    default_processor=_default_processor,
    text_mask=TextMask("attention_mask", _keep_all),
    text="after the video",
    masks="key lengths",
)
