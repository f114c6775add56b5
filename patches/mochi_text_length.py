"""Mochi's processor takes the valid text tokens out by their indices, which waits for the device in every layer."""

import functools

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from .patch import Patch


class _Masking(TorchFunctionMode):
    """Keeps all text tokens of each row and masks the padded ones as keys.

    As queries they are computed and never read again. Valid tokens come first, as tokenizers put them.

    Args:
        text_mask: (batch, text_tokens), nonzero where a token is valid.
        video_tokens: Tokens that stand before the text.
    """

    def __init__(self, text_mask, video_tokens):
        super().__init__()
        self.rows = iter(torch.nn.functional.pad(text_mask.bool(), (video_tokens, 0), value=True))
        self.text_tokens = text_mask.shape[1]

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.nonzero:
            return torch.arange(self.text_tokens, device=args[0].device)[:, None]
        if function is F.scaled_dot_product_attention:
            kwargs = {**kwargs, "attn_mask": next(self.rows)[None, None, None]}
        return function(*args, **kwargs)


def _without_waiting(call):
    @functools.wraps(call)
    def wrapper(self, attn, hidden_states, encoder_hidden_states, attention_mask, *args, **kwargs):
        inputs = (self, attn, hidden_states, encoder_hidden_states, attention_mask, *args)
        # torch_svg's own processor hands over a mask on the host
        if attention_mask.device.type != "xla":
            return call(*inputs, **kwargs)
        with _Masking(attention_mask, hidden_states.shape[1]):
            return call(*inputs, **kwargs)

    return wrapper


PATCH = Patch(
    name="mochi_text_length",
    what="Mochi waits for the device in every layer, and compiles anew for every prompt length, since it takes its "
    "valid text tokens out by their indices",
    upstream="https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/models/attention_processor.py#L1068",
    versions={"diffusers": ">=0.41,<0.43", "torch_xla": "==2.9.*"},
    delete_when="Mochi's processor masks padded text instead of taking it out",
    targets=(("diffusers.models.attention_processor", "MochiAttnProcessor2_0.__call__"),),
    wrap=_without_waiting,
)
