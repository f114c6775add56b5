"""Block-sparse attention on TPU: arrays and work tables as the kernel of ``block_kernel`` wants them."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from ..pattern import Plan
from ..worktable import Blocks, Layout, WorkTable, block_bounds, has_spatial_sink, sink_prefix, work_table
from .block_kernel import call
from .dense import Text, attend_dense, no_text, text_operands
from .kernel_shape import LANES, Inputs, KernelShape, Place, Tables
from .rows import move_rows
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
            where a frame, the sequence and the text in front of the video are whole numbers of units; else the
            video's rows are moved first.
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
    tiles = [lane_tiles(x) for x in (query, key, value)]
    place = _place_in_memory(layout)
    in_place = place.total_units * layout.unit == tokens
    queries, keys, values = tiles if in_place else (_video_rows(x, layout, interpret) for x in tiles)
    flags = key_flags(layout, batch, query.dtype) if layout.frame_rows != grid.tokens_per_frame else None
    text = text_of(tiles, grid, text_lengths) if grid.text_tokens else None
    video = attend_video(
        queries, keys, values, flags, text, kinds, table, place, heads, head_dim, scale, softmax, interpret
    )
    if layout.frame_rows != grid.tokens_per_frame:
        video = video.reshape(batch, layout.frames, layout.frame_rows, -1)[:, :, : grid.tokens_per_frame]
        video = video.reshape(batch, grid.video_tokens, -1)
    first_row = 0 if in_place else -grid.video_start
    if first_row or padded_head_dim(head_dim) < LANES:
        # the video to where it belongs, and heads of 64 in pairs, in one pass
        halves = padded_head_dim(head_dim) < LANES
        video = move_rows(video, first_row, tokens, halves=halves, interpret=interpret)
    if not grid.text_tokens:
        return from_lane_tiles(video, heads, head_dim)
    # text queries see every key: a dense kernel with a small query block of their own
    start, stop = grid.text_start, grid.text_start + grid.text_tokens
    answers = attend_dense(
        tiles[0][:, start:stop],
        keys,
        values,
        flags,
        text,
        heads=heads,
        head_dim=head_dim,
        scale=scale,
        softmax=softmax,
        interpret=interpret,
        key_rows=layout.rows,
        first_key_row=place.start_units * layout.unit,
    )
    if video.shape[1] != tokens:
        video = jnp.pad(video, ((0, 0), (0, tokens - video.shape[1]), (0, 0)))
    return from_lane_tiles(video.at[:, start:stop].set(answers), heads, head_dim)


def _place_in_memory(layout: Layout) -> Place:
    """Where the kernel finds the video: in the caller's arrays where they have whole units, else in moved copies."""
    grid, unit = layout.grid, layout.unit
    whole = layout.frame_rows == grid.tokens_per_frame and grid.tokens % unit == 0 and grid.video_start % unit == 0
    return Place(grid.tokens // unit, grid.video_start // unit) if whole else Place(layout.rows // unit)


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


def from_lane_tiles(x, heads: int, head_dim: int):
    """(batch, tokens, lanes) -> (batch, tokens, heads, head_dim)."""
    return x.reshape(*x.shape[:2], -1, padded_head_dim(head_dim))[:, :, :heads, :head_dim]


def _video_rows(x, layout: Layout, interpret):
    """(batch, tokens, lanes) -> (batch, layout rows, lanes): the video alone, its frames in whole units."""
    grid = layout.grid
    if layout.frame_rows == grid.tokens_per_frame:
        return move_rows(x, grid.video_start, layout.rows, interpret=interpret)
    batch, _, lanes = x.shape
    video = x[:, grid.video_start : grid.video_start + grid.video_tokens]
    video = video.reshape(batch, layout.frames, grid.tokens_per_frame, lanes)
    video = jnp.pad(video, ((0, 0), (0, 0), (0, layout.frame_rows - grid.tokens_per_frame), (0, 0)))
    return video.reshape(batch, layout.rows, lanes)


def key_flags(layout: Layout, batch: int, dtype):
    """(batch, layout rows, 128): the flag lanes of the video's keys, see ``block_kernel``."""
    row = np.arange(layout.rows)
    flags = np.zeros((layout.rows, LANES), np.float32)
    flags[:, 0] = 1
    flags[:, 1] = row % layout.frame_rows >= layout.grid.tokens_per_frame
    flags[:, 2] = row < layout.frame_rows
    return jnp.broadcast_to(jnp.asarray(flags, dtype), (batch, *flags.shape))


def text_of(tiles, grid, text_lengths) -> Text:
    """The text's keys and values out of the caller's arrays in lane tiles (batch, tokens, lanes)."""
    keys, values = (x[:, grid.text_start : grid.text_start + grid.text_tokens] for x in tiles[1:])
    return text_operands(keys, values, text_lengths)


def kernel_shape(
    table: WorkTable,
    place: Place,
    batch: int,
    heads: int,
    head_dim: int,
    dtype,
    scale: float,
    softmax: str,
    flagged: bool,
    text_units: int,
) -> KernelShape:
    """The static description of the kernel that runs a work table."""
    layout, plan = table.layout, table.plan
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
        frame_units=layout.granules,
        query_place=place,
        key_place=place,
        output_place=place,
        item_granules=table.item_granules,
        full_granules=table.blocks.full_granules,
        left_edges=table.left_edges,
        right_edges=table.right_edges,
        clipped=table.clipped,
        bodies=table.bodies,
        tail_rows=table.tail_rows,
        text_units=text_units,
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


def attend_video(
    queries,
    keys,
    values,
    flags,
    text: Text | None,
    kinds,
    table: WorkTable,
    place: Place,
    heads,
    head_dim,
    scale,
    softmax,
    interpret,
):
    """The video's output, (batch, rows, ``output_lanes``), from arrays (batch, rows, lanes) with the video at a place.

    Rows of the result that are not the video's hold anything.
    """
    batch = queries.shape[0]
    unit = table.layout.unit
    text_units = 0 if text is None else text.key.shape[1]
    shape = kernel_shape(
        table, place, batch, heads, head_dim, queries.dtype, scale, softmax, flags is not None, text_units
    )
    if isinstance(interpret, pltpu.InterpretParams):
        shape = replace(shape, unit_copies=True)
    bounds = _bounds(table.plan, table.blocks) if shape.masked else np.zeros((1, 8, LANES), np.int32)
    if flags is None:
        flags = jnp.zeros((unit, LANES), queries.dtype)
    arrays = (x.reshape(-1, unit, x.shape[-1]) for x in (queries, keys, values, flags))
    inputs = Inputs(*arrays, *(text or no_text(queries.dtype)), jnp.asarray(bounds))
    output = call(shape, scalar_operands(table, kinds), inputs, output_lanes(heads, head_dim), interpret)
    return output.reshape(batch, -1, output.shape[-1])
