"""The definition of correct: masked attention in f32, by query chunks, on any torch device."""

from __future__ import annotations

import functools

import numpy as np
import torch
import torch.nn.functional as F

from ..pattern import Plan, keep

# scores of one chunk of query rows: 2**24 f32 values are 64 MiB
_MAX_SCORES = 2**24


def reference_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kinds: torch.Tensor,
    text_lengths: torch.Tensor | None = None,
    *,
    plan: Plan,
    scale: float | None = None,
) -> torch.Tensor:
    """Attention in which every head keeps the keys of its own pattern.

    Args:
        query, key, value: (batch, tokens, heads, head_dim), any float dtype, in the grid's memory order. Computed in
            f32; memory grows linearly with tokens.
        kinds: (batch, heads) integers, an index into ``plan.patterns`` per head.
        text_lengths: (batch,) valid text tokens, or None when all are valid. Padded text keys get no weight; the
            output rows of padded text queries are finite and mean nothing.
        plan: Grid and patterns.
        scale: Factor on the scores. Default: ``head_dim ** -0.5``.

    Returns:
        (batch, tokens, heads, head_dim), the dtype of ``query``.
    """
    batch, tokens, heads, head_dim = query.shape
    scale = head_dim**-0.5 if scale is None else scale
    plan.grid.check_tokens(tokens)
    if text_lengths is None or not plan.grid.text_tokens:
        valid = None
    else:
        token = torch.arange(tokens, device=query.device) - plan.grid.text_start
        is_text = (token >= 0) & (token < plan.grid.text_tokens)
        # (batch, tokens)
        valid = ~is_text[None] | (token[None] < text_lengths[:, None])
    rows = max(1, min(tokens, _MAX_SCORES // (batch * heads * tokens)))
    keys, values = (x.float().transpose(1, 2) for x in (key, value))
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    for start in range(0, tokens, rows):
        stop = min(start + rows, tokens)
        mask = _masks(plan, start, stop).to(query.device)[kinds.long()]
        if valid is not None:
            mask = mask & valid[:, None, None, :]
        output[:, start:stop] = _attend(query[:, start:stop], keys, values, mask, scale)
    return output


def reference_dense(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_lengths: torch.Tensor | None = None,
    *,
    scale: float | None = None,
) -> torch.Tensor:
    """Dense attention with query and key lengths of their own.

    Args:
        query: (batch, query_tokens, heads, head_dim), any float dtype; computed in f32.
        key, value: (batch, key_tokens, heads, head_dim).
        key_lengths: (batch,) valid keys, at least 1 each, or None when all are valid.
        scale: Factor on the scores. Default: ``head_dim ** -0.5``.

    Returns:
        (batch, query_tokens, heads, head_dim), the dtype of ``query``.
    """
    batch, query_tokens, heads, head_dim = query.shape
    key_tokens = key.shape[1]
    scale = head_dim**-0.5 if scale is None else scale
    mask = None
    if key_lengths is not None:
        mask = (torch.arange(key_tokens, device=key.device)[None] < key_lengths[:, None])[:, None, None, :]
    rows = max(1, min(query_tokens, _MAX_SCORES // (batch * heads * key_tokens)))
    keys, values = (x.float().transpose(1, 2) for x in (key, value))
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    for start in range(0, query_tokens, rows):
        output[:, start : start + rows] = _attend(query[:, start : start + rows], keys, values, mask, scale)
    return output


def _attend(query, keys, values, mask, scale):
    output = F.scaled_dot_product_attention(query.float().transpose(1, 2), keys, values, mask, scale=scale)
    return output.transpose(1, 2).to(query.dtype)


@functools.lru_cache(maxsize=16)
def _masks(plan: Plan, start: int, stop: int) -> torch.Tensor:
    """(patterns, stop - start, tokens) bool."""
    keys = np.arange(plan.grid.tokens)
    return torch.from_numpy(np.stack([keep(p, plan.grid, np.arange(start, stop), keys) for p in plan.patterns]))
