"""Block-sparse attention on TPU: arrays and work tables as the kernel of ``block_kernel`` wants them."""

from __future__ import annotations

import functools
import math

import jax.numpy as jnp
import numpy as np
from jax import lax

from ..pattern import Plan
from ..worktable import Blocks, Layout, WorkTable, block_bounds, has_spatial_sink, sink_prefix, work_table
from .block_kernel import LANES, Inputs, KernelShape, Tables, call
from .dense import attend_dense
from .tuning import blocks_for, online_blocks_for

SOFTMAX = ("auto", "online")


def block_sparse_attention(
    query,
    key,
    value,
    kinds,
    text_lengths=None,
    *,
    plan: Plan,
    scale: float | None = None,
    softmax: str = "auto",
    interpret=False,
    blocks: Blocks | None = None,
):
    """Attention in which every head computes the pattern that its kind names, by one Pallas TPU kernel.

    Args:
        query, key, value: (batch, tokens, heads, head_dim), bf16 or f32, in the grid's memory order. Read in place
            where a frame is a whole number of units and there is no text; else padded copies are made.
        kinds: (batch, heads) int32, an index into ``plan.patterns`` per head; data, no recompile.
        text_lengths: (batch,) int32 valid text tokens, or None when all are valid.
        plan: Grid and patterns; static.
        scale: Factor on the scores. Default: ``head_dim ** -0.5``.
        softmax: ``"auto"``: a fixed offset, and an online softmax for query blocks that it does not suit.
            ``"online"``: an online softmax everywhere.
        interpret: Run in Pallas' interpreter: True, or ``pltpu.InterpretParams`` for race and memory checks.
        blocks: Block sizes; default: ``tuning.blocks_for``.

    Returns:
        (batch, tokens, heads, head_dim), the dtype of ``query``. Output rows of padded text queries are finite and
        mean nothing.

    Raises:
        ValueError: The shapes do not fit the plan, or the dtype is neither bf16 nor f32.
        NotImplementedError: head_dim above 256.
    """
    batch, tokens, heads, head_dim = query.shape
    grid = plan.grid
    grid.check_tokens(tokens)
    check_arrays(query, key, value, softmax)
    scale = head_dim**-0.5 if scale is None else scale
    if blocks is None:
        blocks = online_blocks_for(grid) if softmax == "online" else blocks_for(grid, head_dim)
    table = work_table(plan, blocks)
    layout = table.layout
    kinds = jnp.clip(kinds.astype(jnp.int32), 0, len(plan.patterns) - 1)
    flagged = bool(grid.text_tokens) or layout.frame_rows != grid.tokens_per_frame
    keys, values = (in_layout(x, layout, with_text=True) for x in (key, value))
    flags = key_flags(layout, batch, text_lengths, query.dtype) if flagged else None
    queries = in_layout(query, layout, with_text=False)
    video = attend_video(queries, keys, values, flags, kinds, table, heads, head_dim, scale, softmax, interpret)
    video = video.reshape(batch, layout.frames, layout.frame_rows, -1)
    video = video[:, :, : grid.tokens_per_frame].reshape(batch, grid.video_tokens, -1)
    if not grid.text_tokens:
        return from_lane_tiles(video, heads, head_dim)
    # text queries see every key: a dense kernel with a small query block of their own
    text = attend_dense(
        lane_tiles(query)[:, grid.text_start : grid.text_start + grid.text_tokens],
        keys,
        values,
        flags,
        heads=heads,
        head_dim=head_dim,
        scale=scale,
        softmax=softmax,
        interpret=interpret,
        key_rows=layout.granule_rows * (layout.granules + layout.text_granules),
    )
    output = jnp.concatenate([text, video] if grid.text_first else [video, text], axis=1)
    return from_lane_tiles(output, heads, head_dim)


def check_arrays(query, key, value, softmax: str) -> None:
    if query.dtype not in (jnp.bfloat16, jnp.float32) or key.dtype != query.dtype or value.dtype != query.dtype:
        raise ValueError(
            f"the kernel needs query, key and value of one dtype, bfloat16 or float32, got {query.dtype}, {key.dtype}, "
            f"{value.dtype}: cast them"
        )
    if query.shape[-1] > 2 * LANES:
        raise NotImplementedError(f"head_dim up to {2 * LANES} is served, got {query.shape[-1]}")
    if softmax not in SOFTMAX:
        raise ValueError(f"softmax must be one of {SOFTMAX}, got {softmax!r}")


def lane_tiles(x):
    """(batch, tokens, heads, head_dim) -> (batch, tokens, lanes): whole lane tiles, two heads of 64 in one."""
    batch, tokens, heads, head_dim = x.shape
    width = padded_head_dim(head_dim)
    more_heads = heads % 2 if width == LANES // 2 else 0
    if width != head_dim or more_heads:
        x = jnp.pad(x, ((0, 0), (0, 0), (0, more_heads), (0, width - head_dim)))
    return x.reshape(batch, tokens, -1)


def padded_head_dim(head_dim: int) -> int:
    return LANES // 2 if head_dim <= LANES // 2 else math.ceil(head_dim / LANES) * LANES


def output_lanes(heads: int, head_dim: int) -> int:
    """Lanes of the kernel's output: a whole tile per head, also where two heads share a tile of the input."""
    width = padded_head_dim(head_dim)
    return heads * width if width >= LANES else (heads + heads % 2) * LANES


def joined(output, head_dim: int):
    """(batch, tokens, output lanes) -> (batch, tokens, lanes) as ``lane_tiles`` lays heads.

    A head of 64 comes with its neighbour's half, which is not its own: even heads stand in the first half of the
    output and keep their lower lanes, odd heads in the second half and keep their upper lanes.
    """
    if padded_head_dim(head_dim) >= LANES:
        return output
    lanes = output.shape[-1] // 2
    even, odd = output[..., :lanes], output[..., lanes:]
    return jnp.where(jnp.arange(lanes) % LANES < LANES // 2, even, odd)


def from_lane_tiles(x, heads: int, head_dim: int):
    """(batch, tokens, lanes) -> (batch, tokens, heads, head_dim)."""
    return x.reshape(*x.shape[:2], -1, padded_head_dim(head_dim))[:, :, :heads, :head_dim]


def in_layout(x, layout: Layout, with_text: bool):
    """(batch, tokens, heads, head_dim) -> (batch, layout rows, lanes): frames in whole units, text behind them."""
    grid = layout.grid
    x = lane_tiles(x)
    batch, _, lanes = x.shape
    if layout.frame_rows == grid.tokens_per_frame and with_text and grid.text_tokens:
        # one pass: the text's rows are dropped or kept and the end is padded in the same operation
        text = x[:, : grid.video_start]
        x = lax.pad(
            x,
            jnp.zeros((), x.dtype),
            ((0, 0, 0), (-grid.video_start, layout.rows - x.shape[1] + grid.video_start, 0), (0, 0, 0)),
        )
        return x.at[:, grid.video_tokens : grid.video_tokens + text.shape[1]].set(text) if grid.text_first else x
    video = x[:, grid.video_start : grid.video_start + grid.video_tokens]
    if layout.frame_rows != grid.tokens_per_frame:
        video = video.reshape(batch, layout.frames, grid.tokens_per_frame, lanes)
        video = jnp.pad(video, ((0, 0), (0, 0), (0, layout.frame_rows - grid.tokens_per_frame), (0, 0)))
    video = video.reshape(batch, layout.frames * layout.frame_rows, lanes)
    if not (with_text and grid.text_tokens):
        return video
    text = x[:, grid.text_start : grid.text_start + grid.text_tokens]
    text = jnp.pad(text, ((0, 0), (0, layout.rows - video.shape[1] - grid.text_tokens), (0, 0)))
    return jnp.concatenate([video, text], axis=1)


def key_flags(layout: Layout, batch: int, text_lengths, dtype):
    """(batch, layout rows, 128): the flag lanes of every key, see ``block_kernel``."""
    grid = layout.grid
    row = np.arange(layout.rows)
    video_rows = layout.frames * layout.frame_rows
    in_video = row < video_rows
    valid = jnp.asarray(in_video & (row % layout.frame_rows < grid.tokens_per_frame))[None]
    if grid.text_tokens:
        lengths = jnp.full((batch,), grid.text_tokens) if text_lengths is None else text_lengths
        valid = valid | (jnp.asarray(~in_video) & (jnp.asarray(row - video_rows)[None] < lengths[:, None]))
    valid = jnp.broadcast_to(valid, (batch, layout.rows))
    lanes = [jnp.ones_like(valid), ~valid, jnp.broadcast_to(jnp.asarray(row < layout.frame_rows), valid.shape)]
    flags = jnp.stack(lanes, axis=-1).astype(dtype)
    return jnp.pad(flags, ((0, 0), (0, 0), (0, LANES - len(lanes))))


def kernel_shape(
    table: WorkTable, batch: int, heads: int, head_dim: int, dtype, scale: float, softmax: str, flagged: bool
) -> KernelShape:
    """The static description of the kernel that runs a work table."""
    layout, plan = table.layout, table.plan
    units, frame_units = layout.rows // layout.unit, layout.frame_rows // layout.unit
    width = padded_head_dim(head_dim)
    return KernelShape(
        batch=batch,
        heads=heads,
        query_heads_per_lanes=2 if width < LANES else 1,
        lanes=max(width, LANES),
        unit=layout.unit,
        key_units=layout.frames,
        query_units=layout.frames,
        query_granules=table.blocks.query_granules,
        query_blocks=table.query_blocks,
        query_frame_units=frame_units,
        query_total_units=layout.frames * frame_units,
        key_total_units=units,
        item_granules=table.item_granules,
        full_granules=table.blocks.full_granules,
        left_edges=table.left_edges,
        right_edges=table.right_edges,
        bodies=table.bodies,
        tail_rows=layout.sink_tail_rows,
        any_temporal=any(pattern.order == "temporal" for pattern in plan.patterns),
        any_prefix=any(sink_prefix(pattern, layout) for pattern in plan.patterns),
        ends_sink=any(has_spatial_sink(pattern) for pattern in plan.patterns),
        keys_flagged=flagged,
        # logits to base 2, so that the softmax is a bare exp2
        scale=scale * math.log2(math.e),
        dtype=jnp.dtype(dtype),
        online=softmax == "online",
    )


def scalar_operands(table: WorkTable, kinds) -> Tables:
    """The kernel's scalar-prefetch operands for given head kinds (batch, heads)."""
    layout, patterns = table.layout, table.plan.patterns
    orders, prefixes = zip(
        *((pattern.order == "temporal", sink_prefix(pattern, layout)) for pattern in patterns), strict=True
    )
    return Tables(
        kinds=kinds.reshape(-1),
        offsets=table.offsets.reshape(-1),
        counts=table.counts.reshape(-1),
        items=table.items,
        starts=np.asarray(table.starts, np.int32),
        orders=np.asarray(orders, np.int32),
        prefixes=np.asarray(prefixes, np.int32),
    )


@functools.lru_cache(maxsize=32)
def _bounds(plan: Plan, blocks: Blocks) -> np.ndarray:
    """(patterns * query blocks, 8, query rows in whole lanes) int32: first and last key kept, in rows 0 and 1."""
    table = work_table(plan, blocks)
    lanes = -(-table.query_rows // LANES) * LANES
    bounds = np.zeros((len(plan.patterns), table.query_blocks, 8, lanes), np.int32)
    for index, pattern in enumerate(plan.patterns):
        low, high = block_bounds(pattern, table.layout, blocks.query_granules, table.starts)
        bounds[index, :, 0, : table.query_rows], bounds[index, :, 1, : table.query_rows] = low, high
    return bounds.reshape(-1, 8, lanes)


def attend_video(queries, keys, values, flags, kinds, table, heads, head_dim, scale, softmax, interpret):
    """The video's output rows, (batch, padded video rows, lanes), from arrays in ``in_layout``."""
    batch = queries.shape[0]
    layout = table.layout
    shape = kernel_shape(table, batch, heads, head_dim, queries.dtype, scale, softmax, flags is not None)
    if flags is None:
        flags = jnp.zeros((batch, layout.frame_rows, LANES), queries.dtype)
    by_units = [x.reshape(-1, layout.unit, x.shape[-1]) for x in (queries, keys, values, flags)]
    by_frames = [
        x.reshape(batch, -1, layout.frame_rows // layout.unit, layout.unit, x.shape[-1])
        for x in (queries, keys, values, flags)
    ]
    bounds = _bounds(table.plan, table.blocks) if shape.masked else np.zeros((1, 8, LANES), np.int32)
    inputs = Inputs(*(x for pair in zip(by_units, by_frames, strict=True) for x in pair), bounds=jnp.asarray(bounds))
    lanes = output_lanes(heads, head_dim)
    output = call(shape, scalar_operands(table, kinds), inputs, lanes, interpret)
    return joined(output.reshape(batch, -1, lanes), head_dim)
