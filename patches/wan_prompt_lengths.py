"""Wan's pipelines and their kin cut every prompt to its length and pad it again: a graph for every length."""

import functools

import torch
from torch.overrides import TorchFunctionMode

from .patch import Patch


class _Masking(TorchFunctionMode):
    """Within it, ``x[:length]`` of an XLA tensor with a tensor as length keeps its rows and zeroes those behind."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.__getitem__:
            tensor, index = args
            length = index.stop if isinstance(index, slice) else None
            if tensor.device.type == "xla" and isinstance(length, torch.Tensor):
                # torch_xla lets equal scalars share a parameter, so that the graph would depend on the length
                kept = torch.arange(tensor.shape[0], device=tensor.device) < length.reshape(1).to(tensor.device)
                return torch.where(kept.reshape(-1, *[1] * (tensor.dim() - 1)), tensor, 0)
        return function(*args, **(kwargs or {}))


def _masked(encode):
    @functools.wraps(encode)
    def wrapper(self, *args, **kwargs):
        with _Masking():
            return encode(self, *args, **kwargs)

    return wrapper


PIPELINES = (
    "ChronoEditPipeline",
    "HeliosPipeline",
    "HeliosPyramidPipeline",
    "LucyEditPipeline",
    "SkyReelsV2DiffusionForcingImageToVideoPipeline",
    "SkyReelsV2DiffusionForcingPipeline",
    "SkyReelsV2DiffusionForcingVideoToVideoPipeline",
    "SkyReelsV2ImageToVideoPipeline",
    "SkyReelsV2Pipeline",
    "WanAnimatePipeline",
    "WanImageToVideoPipeline",
    "WanPipeline",
    "WanVACEPipeline",
    "WanVideoToVideoPipeline",
)

PATCH = Patch(
    name="wan_prompt_lengths",
    what="every new prompt compiles a graph for its length, since the text is cut to it and padded again",
    upstream="https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/pipelines/wan/pipeline_wan.py#L188",
    versions={"diffusers": ">=0.41,<0.43", "torch_xla": "==2.9.*"},
    delete_when="diffusers' Wan pipelines mask the padding of their text instead of cutting it",
    targets=tuple(("diffusers", f"{name}._get_t5_prompt_embeds") for name in PIPELINES),
    wrap=_masked,
)
