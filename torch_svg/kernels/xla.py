"""The work of a plan with ordinary JAX operations, for devices without Mosaic (XLA:CPU).

Walks the very same work table as the Pallas kernel, item by item, and computes in f32 with an online softmax; a
head's kind stays data. Memory is linear in tokens.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
from jax import lax

from ..pattern import Plan
from ..worktable import (
    FIRST_FULL,
    TAIL,
    Blocks,
    WorkTable,
    body_of,
    coordinate_bounds,
    does_end_sink,
    granules_of,
    has_spatial_sink,
    is_spatial,
    sink_prefix,
    start_of,
    work_table,
)
from .tuning import small_blocks_for

_MASKED = -1e30
# scores of one chunk of query rows of dense attention: 2**24 f32 values are 64 MiB
_MAX_SCORES = 2**24


def work_table_attention(query, key, value, kinds, text_lengths=None, *, plan: Plan, scale=None, blocks=None):
    """Attention in which every head computes the pattern that its kind names.

    Args:
        query, key, value: (batch, tokens, heads, head_dim), f32 or bf16, in the grid's memory order.
        kinds: (batch, heads) int32, an index into ``plan.patterns`` per head; data, no recompile.
        text_lengths: (batch,) int32 valid text tokens, or None when all are valid.
        plan: Grid and patterns; static.
        scale: Factor on the scores. Default: ``head_dim ** -0.5``.
        blocks: Block sizes; default: ``tuning.small_blocks_for``.

    Returns:
        (batch, tokens, heads, head_dim), the dtype of ``query``. Output rows of padded text queries are finite and
        mean nothing.

    Raises:
        ValueError: The shapes do not fit the plan.
    """
    batch, tokens, _, head_dim = query.shape
    plan.grid.check_tokens(tokens)
    scale = head_dim**-0.5 if scale is None else scale
    table = work_table(plan, blocks or small_blocks_for(plan.grid))
    if text_lengths is None:
        text_lengths = jnp.full((batch,), plan.grid.text_tokens, jnp.int32)
    video = _video_attention(query, key, value, kinds, text_lengths, table, scale)
    if not plan.grid.text_tokens:
        return video
    start, stop = plan.grid.text_start, plan.grid.text_start + plan.grid.text_tokens
    text = _dense(query[:, start:stop], key, value, _valid_keys(plan, text_lengths), scale)
    return jnp.concatenate([text, video] if plan.grid.text_first else [video, text], axis=1)


def chunked_dense_attention(query, key, value, key_lengths=None, *, scale=None):
    """Dense attention by chunks of query rows, with query and key lengths of their own.

    Args:
        query: (batch, query_tokens, heads, head_dim), f32 or bf16; computed in f32.
        key, value: (batch, key_tokens, heads, head_dim).
        key_lengths: (batch,) int32 valid keys, at least 1 each, or None when all are valid.
        scale: Factor on the scores. Default: ``head_dim ** -0.5``.

    Returns:
        (batch, query_tokens, heads, head_dim), the dtype of ``query``.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    valid = None
    if key_lengths is not None:
        valid = jnp.arange(key.shape[1])[None] < key_lengths[:, None]
    return _dense(query, key, value, valid, scale)


def _dense(query, key, value, valid, scale):
    batch, query_tokens, heads, head_dim = query.shape
    rows = max(1, min(query_tokens, _MAX_SCORES // (batch * heads * key.shape[1])))
    chunks = -(-query_tokens // rows)
    padded = jnp.pad(query, ((0, 0), (0, chunks * rows - query_tokens), (0, 0), (0, 0)))
    keys, values = key.astype(jnp.float32), value.astype(jnp.float32)

    def attend(chunk):
        scores = jnp.einsum("bqhd,bkhd->bhqk", chunk.astype(jnp.float32) * scale, keys)
        if valid is not None:
            scores = jnp.where(valid[:, None, None], scores, _MASKED)
        weights = jnp.exp(scores - scores.max(-1, keepdims=True))
        weighted = jnp.einsum("bhqk,bkhd->bqhd", weights, values)
        return (weighted / weights.sum(-1).transpose(0, 2, 1)[..., None]).astype(query.dtype)

    if chunks == 1:
        return attend(padded)
    parts = lax.map(attend, padded.reshape(batch, chunks, rows, heads, head_dim).swapaxes(0, 1))
    return parts.swapaxes(0, 1).reshape(padded.shape)[:, :query_tokens]


def _valid_keys(plan: Plan, text_lengths):
    """(batch, tokens) bool: the video and the valid prefix of the text."""
    token = jnp.arange(plan.grid.tokens) - plan.grid.text_start
    is_text = (token >= 0) & (token < plan.grid.text_tokens)
    return ~is_text[None] | (token[None] < text_lengths[:, None])


def _video_attention(query, key, value, kinds, text_lengths, table: WorkTable, scale):
    """The video rows of the output, head by head."""
    batch, _, heads, head_dim = query.shape
    plan, grid = table.plan, table.plan.grid
    constants = _constants(plan, table.blocks)
    valid = _valid_keys(plan, text_lengths)

    def head(inputs):
        q, k, v, kind, ok = inputs
        text = tuple(x[grid.text_start : grid.text_start + grid.text_tokens] for x in (k, v, ok))
        # keys in the head's own order, then once more in memory order for items that want it
        rows = jnp.asarray(constants["key_rows"])[kind]
        k, v = (x[jnp.maximum(rows, 0)].astype(jnp.float32) for x in (k, v))
        ok = (rows >= 0) & ok[jnp.maximum(rows, 0)]
        own = jnp.asarray(constants["query_rows"])[kind]
        out = _head(q[own].astype(jnp.float32) * scale, k, v, ok, text, kind, table, constants)
        return out[jnp.asarray(constants["inverse"])[kind]].astype(query.dtype)

    flat = tuple(x.transpose(0, 2, 1, 3).reshape(batch * heads, -1, head_dim) for x in (query, key, value))
    out = lax.map(head, (*flat, kinds.reshape(-1), jnp.repeat(valid, heads, axis=0)))
    return out.reshape(batch, heads, grid.video_tokens, head_dim).transpose(0, 2, 1, 3)


def _head(q, k, v, ok, text, kind, table: WorkTable, constants):
    """Own-order queries (padded video rows, head_dim) over text and over own-order and memory-order keys."""
    layout = table.layout
    rows, block_rows = layout.granule_rows, table.query_rows
    items = jnp.asarray(table.items)
    step = table.item_granules * rows
    starts = jnp.asarray(np.asarray(table.starts, np.int32))
    prefix = jnp.asarray(constants["prefix"])[kind]
    drops_first_frame = jnp.asarray(constants["drops_first_frame"])[kind]
    lows, highs = (jnp.asarray(constants[name])[kind] for name in ("low", "high"))
    lane = jnp.arange(step)

    def query_block(block):
        first = starts[block] * rows
        queries = lax.dynamic_slice_in_dim(q, first, block_rows)
        low, high = (lax.dynamic_slice_in_dim(x, first, block_rows)[:, None] for x in (lows, highs))
        offset, count = jnp.asarray(table.offsets)[kind, block], jnp.asarray(table.counts)[kind, block]

        def add(state, keys, values, mask):
            maximum, total, weighted = state
            scores = jnp.where(mask, queries @ keys.T, _MASKED)
            peak = jnp.maximum(maximum, scores.max(1))
            weights = jnp.where(mask, jnp.exp(scores - peak[:, None]), 0.0)
            decay = jnp.exp(maximum - peak)
            return peak, total * decay + weights.sum(1), weighted * decay[:, None] + weights @ values

        def visit(index, state):
            *sums, in_sink = state
            item = items[offset + index]
            start, granules, body = start_of(item), granules_of(item), body_of(item)
            in_sink = in_sink & (does_end_sink(item) == 0)
            coordinate = start * rows + lane
            used = lane < jnp.where(body == TAIL, table.tail_rows, granules * rows)
            at = coordinate[0] + jnp.where(is_spatial(item) == 1, constants["memory_order"], 0)
            keys, values, valid = (lax.dynamic_slice_in_dim(x, at, step) for x in (k, v, ok))
            of_first_frame = drops_first_frame & ~in_sink & (coordinate % layout.frames == 0)
            seen = ((coordinate >= low) & (coordinate <= high)) | (coordinate < prefix)
            is_whole = (body == TAIL) | ((body >= FIRST_FULL) & (body < table.first_edge))
            mask = (seen | is_whole) & (used & valid & ~of_first_frame)
            return (*add(sums, keys, values, mask), in_sink)

        sums = jnp.full((block_rows,), _MASKED), jnp.zeros((block_rows,)), jnp.zeros((block_rows, q.shape[1]))
        if table.plan.grid.text_tokens:
            text_keys, text_values, text_valid = text
            sums = add(sums, text_keys.astype(jnp.float32), text_values.astype(jnp.float32), text_valid)
        _, total, weighted, _ = lax.fori_loop(0, count, visit, (*sums, jnp.asarray(True)))
        return weighted / total[:, None]

    parts = lax.map(query_block, jnp.arange(table.query_blocks))
    # the last block is moved back to end with the video, so it repeats rows of the one before
    return parts.reshape(-1, q.shape[1])[constants["block_rows"]]


@functools.lru_cache(maxsize=32)
def _constants(plan: Plan, blocks: Blocks) -> dict:
    """Index arrays per pattern, padded so that every item is one slice of equal length."""
    table = work_table(plan, blocks)
    layout, grid = table.layout, plan.grid
    slack = table.item_granules * layout.granule_rows
    padded = layout.rows
    coordinate = np.arange(padded)
    key_rows, query_rows, inverse = [], [], []
    token = np.arange(grid.video_tokens)
    frame, place = np.divmod(token, grid.tokens_per_frame)
    orders = {
        "spatial": (coordinate // layout.frame_rows, coordinate % layout.frame_rows),
        "temporal": (coordinate % layout.frames, coordinate // layout.frames),
    }
    memory = {}
    for order, (frames, places) in orders.items():
        row = grid.video_start + frames * grid.tokens_per_frame + places
        memory[order] = np.where(places < grid.tokens_per_frame, row, -1)
    for pattern in plan.patterns:
        own = memory[pattern.order]
        tail = np.full(slack, -1)
        key_rows.append(np.concatenate([own, tail, memory["spatial"], tail]))
        query_rows.append(np.maximum(own, 0))
        inverse.append(
            frame * layout.frame_rows + place if pattern.order == "spatial" else place * layout.frames + frame
        )
    bounds = [coordinate_bounds(pattern, layout) for pattern in plan.patterns]
    # the row of the concatenated blocks that holds each coordinate
    block_rows = np.zeros(padded, np.int64)
    for block, start in enumerate(table.starts):
        first = start * layout.granule_rows
        block_rows[first : first + table.query_rows] = block * table.query_rows + np.arange(table.query_rows)
    return {
        "key_rows": np.stack(key_rows).astype(np.int32),
        "query_rows": np.stack(query_rows).astype(np.int32),
        "inverse": np.stack(inverse).astype(np.int32),
        "low": np.stack([low for low, _ in bounds]),
        "high": np.stack([high for _, high in bounds]),
        "block_rows": block_rows.astype(np.int32),
        "memory_order": layout.rows + slack,
        "prefix": np.asarray([sink_prefix(pattern, layout) for pattern in plan.patterns], np.int32),
        "drops_first_frame": np.asarray([has_spatial_sink(pattern) for pattern in plan.patterns]),
    }
