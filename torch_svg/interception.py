"""Puts our attention core into a diffusers processor that stays what it is.

A processor reaches its core in one of two ways: through diffusers' dispatcher (``dispatch_attention_fn``), or by a
direct ``F.scaled_dot_product_attention``. Projections, norms, image keys, LoRA and output stay the processor's own.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

BACKEND_NAME = "torch_svg"

# core(query, key, value, mask, scale) on (batch, tokens, heads, head_dim), returns the same layout
Core = Callable[..., torch.Tensor]

_core: contextvars.ContextVar[Core | None] = contextvars.ContextVar("torch_svg_core", default=None)
_causal_calls: contextvars.ContextVar[bool] = contextvars.ContextVar("torch_svg_causal_calls", default=False)


@contextlib.contextmanager
def intercept_core(processor, core: Core, *, causal_calls: bool = False):
    """Within the block, ``processor`` computes attention with ``core`` instead of its own.

    Args:
        processor: A diffusers attention processor.
        core: ``core(query, key, value, mask, scale)`` with (batch, tokens, heads, head_dim) tensors; ``mask`` and
            ``scale`` as the processor gives them, or None. With fewer key heads than query heads, the core gets
            every key head as often as it is used.
        causal_calls: Whether calls that are causal run as torch computes them; otherwise they are refused.
    """
    token, causal_token = _core.set(core), _causal_calls.set(causal_calls)
    try:
        if hasattr(type(processor), "_attention_backend"):
            before = processor._attention_backend
            processor._attention_backend = backend_member()
            try:
                yield
            finally:
                processor._attention_backend = before
        else:
            with _CatchScaledDotProduct():
                yield
    finally:
        _core.reset(token)
        _causal_calls.reset(causal_token)


def backend_member():
    """Our member of diffusers' closed enum of attention backends, registered once, on first use.

    The enum has no public way in; adding a member by hand is what other libraries that plug into the dispatcher do
    (NVIDIA ModelOpt among them).
    """
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

    member = AttentionBackendName._value2member_map_.get(BACKEND_NAME)
    if member is None:
        member = str.__new__(AttentionBackendName, BACKEND_NAME)
        member._name_ = "TORCH_SVG"
        member._value_ = BACKEND_NAME
        AttentionBackendName._member_map_["TORCH_SVG"] = member
        AttentionBackendName._value2member_map_[BACKEND_NAME] = member
        AttentionBackendName._member_names_.append("TORCH_SVG")
        _AttentionBackendRegistry.register(member)(_dispatched_core)
    return member


def _dispatched_core(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    _parallel_config=None,
) -> torch.Tensor:
    core = _core.get()
    if core is None:
        raise ValueError(
            f"the attention backend {BACKEND_NAME!r} works through SparseVideoAttnProcessor only: use "
            "transformer.set_attn_processor(SparseVideoAttnProcessor()), not set_attention_backend"
        )
    if (is_causal and not _causal_calls.get()) or dropout_p:
        raise NotImplementedError(f"attention with {is_causal=}, {dropout_p=} is not served; expected a plain one")
    if _parallel_config is not None:
        raise NotImplementedError(PARALLEL_CONFIG_MESSAGE)
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[2] // x.shape[2], dim=2) for x in (key, value))
    if is_causal:
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=attn_mask, is_causal=True, scale=scale)
        return out.transpose(1, 2)
    return core(query, key, value, attn_mask, scale)


PARALLEL_CONFIG_MESSAGE = (
    "diffusers' context parallelism splits tokens over torch.distributed processes, which sparse video attention does "
    "not serve: turn it off for this transformer"
)


class _CatchScaledDotProduct(TorchFunctionMode):
    """Sends ``F.scaled_dot_product_attention`` of a wrapped processor to the active core."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        return _scaled_dot_product_core(*args, **kwargs)


def _scaled_dot_product_core(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    # (batch, heads, tokens, head_dim) outside, (batch, tokens, heads, head_dim) inside
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    out = _dispatched_core(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    return out.transpose(1, 2)
