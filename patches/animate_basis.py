"""Wan-Animate orthogonalises a constant weight in every forward, on the host: torch_xla has no QR decomposition."""

import functools

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from .patch import Patch, on_xla


class _Remembering(TorchFunctionMode):
    """Answers ``torch.linalg.qr`` of what is made from ``weight`` with what it was the first time."""

    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is not torch.linalg.qr:
            return function(*args, **(kwargs or {}))
        version = 0 if self.weight.is_inference() else self.weight._version
        known_version, parts = _PARTS.get(self.weight, (None, None))
        if known_version != version:
            matrix, *rest = args
            parts = [part.to(matrix.device) for part in function(matrix.cpu(), *rest, **(kwargs or {}))]
            _PARTS[self.weight] = version, parts
        return parts


_PARTS = WeakTensorKeyDictionary()


def _once(forward):
    @functools.wraps(forward)
    def wrapper(self, *args, **kwargs):
        if torch.is_grad_enabled() or not on_xla(*args, *kwargs.values()):
            return forward(self, *args, **kwargs)
        with _Remembering(self.motion_synthesis_weight):
            return forward(self, *args, **kwargs)

    return wrapper


PATCH = Patch(
    name="animate_basis",
    what="Wan-Animate waits for the device in every forward: a QR decomposition of a constant weight runs on the host",
    upstream="https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/models/transformers/"
    "transformer_wan_animate.py#L345",
    versions={"diffusers": ">=0.41,<0.43", "torch_xla": "==2.9.*"},
    delete_when="torch_xla's counters show no `aten::linalg_qr`, or diffusers keeps the orthogonal basis",
    targets=(
        ("diffusers.models.transformers.transformer_wan_animate", "WanAnimateMotionEncoder.forward"),
    ),
    wrap=_once,
)
