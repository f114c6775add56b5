"""Pipelines keep timesteps on the host where torch_xla is installed, and hand them to the transformer as they are."""

import functools
import inspect

import torch

from .patch import Patch


def _moving_timesteps(forward):
    signature = inspect.signature(forward)

    @functools.wraps(forward)
    def wrapper(self, *args, **kwargs):
        call = signature.bind(self, *args, **kwargs)
        for name, value in call.arguments.items():
            if "timestep" in name and isinstance(value, torch.Tensor) and value.device.type == "cpu":
                device = next(self.parameters()).device
                if device.type == "xla":
                    call.arguments[name] = value.to(device)
        return forward(*call.args, **call.kwargs)

    return wrapper


_FAMILIES = (
    "Allegro",
    "CogVideoX",
    "ConsisID",
    "Cosmos",
    "EasyAnimate",
    "HunyuanVideo",
    "HunyuanVideo15",
    "HunyuanVideoFramepack",
    "Kandinsky5",
    "LTXVideo",
    "Latte",
    "Mochi",
    "SanaVideo",
    "SkyReelsV2",
    "Wan",
    "WanAnimate",
    "WanVACE",
)
TRANSFORMERS = tuple(("diffusers", f"{family}Transformer3DModel.forward") for family in _FAMILIES)

PATCH = Patch(
    name="timesteps_to_device",
    what="the first step raises `Expected XLA tensor. Got: torch.FloatTensor`, since the timestep is on the host",
    upstream="https://github.com/huggingface/diffusers/pull/11501",
    versions={"diffusers": ">=0.41,<0.43"},
    delete_when="diffusers' CogVideoX pipeline moves its timestep to the latents' device",
    targets=TRANSFORMERS,
    wrap=_moving_timesteps,
)
