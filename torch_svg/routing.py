"""Which kind each head gets: a probe of sampled query rows, with the masks that really run.

The reference SVG samples its rows from the first 10,000 tokens and tests a fixed two-frame mask; here the rows are
spread over the whole clip and every pattern is tested with the very predicate that the kernel executes. Everything
stays on the device: a head's kind is data, so routing neither recompiles nor waits for the host.
"""

from __future__ import annotations

import functools

import numpy as np
import torch

from .grid import TokenGrid
from .pattern import Plan, keep

# scores of one chunk of heads are the largest tensor of the probe; 2**26 f32 values are 256 MiB
_MAX_SCORES = 2**26


@functools.lru_cache(maxsize=32)
def sample_rows(grid: TokenGrid, count: int) -> tuple[int, ...]:
    """Memory rows of the query tokens that the probe looks at.

    One row from each of ``count`` equal stretches of the video, at a place drawn once from a fixed generator of its
    own, so that the global random state is untouched and the rows are the same in every process.

    Args:
        grid: The token grid.
        count: Number of rows; fewer are returned where the video has fewer tokens.

    Returns:
        Increasing memory rows.
    """
    count = min(count, grid.video_tokens)
    edges = np.linspace(0, grid.video_tokens, count + 1).astype(np.int64)
    places = np.random.default_rng(0).random(count)
    rows = edges[:-1] + (places * np.diff(edges)).astype(np.int64)
    return tuple(int(row) + grid.video_start for row in rows)


def probe_errors(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    text_lengths: torch.Tensor | None = None,
    *,
    plan: Plan,
    rows: tuple[int, ...],
    scale: float,
) -> torch.Tensor:
    """Mean squared error of every pattern of a plan against dense attention, on sampled query rows.

    Args:
        query, key, value: (batch, tokens, heads, head_dim), any float dtype; computed in f32.
        text_lengths: (batch,) valid text tokens, or None when all are valid.
        plan: The plan whose patterns are tested.
        rows: Memory rows of the sampled queries.
        scale: Factor on the scores.

    Returns:
        (batch, heads, patterns) f32. A dense pattern has error 0. Memory is rows x tokens x heads, never
        tokens x tokens.
    """
    rows_on_device, masks = _probe_constants(plan, rows, query.device)
    sampled = query.index_select(1, rows_on_device)
    valid = None
    if text_lengths is not None and plan.grid.text_tokens:
        valid = _valid_keys(plan.grid, text_lengths)[:, None, None, :]
    heads = query.shape[2]
    chunk = max(1, min(heads, _MAX_SCORES // (query.shape[0] * len(rows) * key.shape[1])))
    parts = [
        _errors_of_heads(*(x[:, :, start : start + chunk] for x in (sampled, key, value)), valid, masks, plan, scale)
        for start in range(0, heads, chunk)
    ]
    return torch.cat(parts, dim=1)


def choose_kinds(errors: torch.Tensor, plan: Plan) -> torch.Tensor:
    """The sparse pattern with the smallest probe error, per (batch, head).

    Args:
        errors: (batch, heads, patterns) f32 from ``probe_errors``.
        plan: The plan; dense patterns are not candidates unless there is nothing else.

    Returns:
        (batch, heads) int32 indices into ``plan.patterns``.
    """
    sparse = [index for index, pattern in enumerate(plan.patterns) if pattern.half_width is not None]
    if not sparse:
        return torch.zeros(errors.shape[:2], dtype=torch.int32, device=errors.device)
    if sparse == list(range(len(sparse))):
        return errors[..., : len(sparse)].argmin(dim=-1).to(torch.int32)
    candidates = torch.tensor(sparse, dtype=torch.int32, device=errors.device)
    best = torch.stack([errors[..., index] for index in sparse], dim=-1).argmin(dim=-1)
    return candidates[best]


def _errors_of_heads(query, key, value, valid, masks, plan, scale):
    # (batch, heads, rows or tokens, head_dim) in f32
    query, key, value = (x.transpose(1, 2).float() for x in (query, key, value))
    scores = torch.matmul(query, key.transpose(2, 3)) * scale
    if valid is not None:
        scores = scores.masked_fill(~valid, float("-inf"))
    weights = torch.exp(scores - scores.amax(dim=-1, keepdim=True))
    dense = torch.matmul(weights, value) / weights.sum(dim=-1, keepdim=True)
    errors = []
    for pattern, mask in zip(plan.patterns, masks, strict=True):
        if pattern.half_width is None:
            errors.append(torch.zeros_like(dense[..., 0, 0]))
            continue
        kept = weights * mask
        # a row whose kept weights all underflow keeps nothing of the dense result: its error is the dense norm
        sparse = torch.matmul(kept, value) / kept.sum(dim=-1, keepdim=True).clamp_min(1e-30)
        errors.append((sparse - dense).square().mean(dim=(-1, -2)))
    return torch.stack(errors, dim=-1)


def _valid_keys(grid: TokenGrid, text_lengths: torch.Tensor) -> torch.Tensor:
    """(batch, tokens) bool: video keys and the valid prefix of the text."""
    token = torch.arange(grid.tokens, device=text_lengths.device)
    in_text = token - grid.text_start
    is_text = (in_text >= 0) & (in_text < grid.text_tokens)
    return ~is_text[None] | (in_text[None] < text_lengths[:, None])


@functools.lru_cache(maxsize=16)
def _probe_constants(plan: Plan, rows: tuple[int, ...], device: torch.device):
    """The sampled rows and each pattern's (rows, tokens) mask as f32, on the device once per plan."""
    query_rows = np.asarray(rows)
    key_rows = np.arange(plan.grid.tokens)
    masks = [
        None
        if pattern.half_width is None
        else torch.from_numpy(keep(pattern, plan.grid, query_rows, key_rows)).to(torch.float32).to(device)
        for pattern in plan.patterns
    ]
    return torch.from_numpy(query_rows).to(device), masks
