"""The probe of a plan's patterns on TPU: sampled query rows, dense and every mask in one sweep over the keys.

A step of the sweep is one frame of keys. Within a frame a band keeps an interval of places in either order, so the
masks are two small tables of integers, whatever the pattern. Scores are ``key @ query^T``; each sampled query stands
in one column per sparse pattern. The weights of all columns are computed once: masked they serve the patterns, and
unmasked the dense result. Both go through one product with the values.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..pattern import Pattern, Plan
from .block_sparse import check_arrays, lane_tiles, padded_head_dim
from .kernel_shape import LANES

_STEP = 256
_FAR = -1e30
_OUT_OF_REACH = 2**30
# a pattern that keeps nothing of a row's weight has the dense result's norm as its error
_LEAST_SUM = 1e-30


def probe_errors(
    query, key, value, text_lengths=None, *, plan: Plan, rows: tuple[int, ...], scale=None, interpret=False
):
    """Mean squared error of every pattern of a plan against dense attention, on sampled query rows.

    Args:
        query, key, value: (batch, tokens, heads, head_dim), bf16 or f32, in the grid's memory order.
        text_lengths: (batch,) int32 valid text tokens, or None when all are valid.
        plan: Grid and patterns; static.
        rows: Memory rows of the sampled video queries, at most 128; static.
        scale: Factor on the scores. Default: ``head_dim ** -0.5``.
        interpret: Run in Pallas' interpreter.

    Returns:
        (batch, heads, patterns) f32, 0 for a dense pattern.

    Raises:
        ValueError: The shapes do not fit the plan, or a row is not one of a video token, or there are too many.
        NotImplementedError: head_dim above 256.
    """
    batch, tokens, heads, head_dim = query.shape
    grid = plan.grid
    grid.check_tokens(tokens)
    check_arrays(query, key, value, "auto")
    outside = [row for row in rows if not 0 <= row - grid.video_start < grid.video_tokens]
    if outside or not 0 < len(rows) <= LANES:
        raise ValueError(f"rows must be 1 to {LANES} memory rows of video tokens, got {len(rows)}, outside: {outside}")
    sparse = [index for index, pattern in enumerate(plan.patterns) if pattern.half_width is not None]
    if not sparse:
        return jnp.zeros((batch, heads, len(plan.patterns)), jnp.float32)
    scale = (head_dim**-0.5 if scale is None else scale) * math.log2(math.e)
    # as many columns per pattern as divide a tile of lanes, so that dense columns line up with every pattern's
    group = 1 << (len(rows) - 1).bit_length()
    padded_rows = rows + rows[-1:] * (group - len(rows))
    columns = math.ceil(len(sparse) * group / LANES) * LANES
    # in lane tiles first, where a token is a row of whole tiles: sampling must not relayout the whole query
    queries = lane_tiles(query)
    sampled = jnp.concatenate([queries[:, row : row + 1] for row in padded_rows], axis=1)
    sampled = (sampled.astype(jnp.float32) * scale).astype(query.dtype)
    sampled = jnp.concatenate([sampled] * (columns // group), axis=1)
    kept = kept_places(plan, padded_rows, columns)
    sums = _sweep(sampled, key, value, text_lengths, plan, kept, heads, head_dim, interpret)
    sums = sums[..., : len(sparse) * group].reshape(batch, heads, len(sparse), group)[..., : len(rows)].sum(-1)
    errors = jnp.zeros((batch, heads, len(plan.patterns)), jnp.float32)
    return errors.at[..., np.asarray(sparse)].set(sums / (len(rows) * head_dim))


def _sweep(sampled, key, value, text_lengths, plan, kept, heads, head_dim, interpret):
    """(batch, heads, columns): the sum over head_dim of squared differences to the dense result."""
    grid, batch = plan.grid, key.shape[0]
    frames, places = grid.frames, grid.tokens_per_frame
    columns = sampled.shape[1]
    width = padded_head_dim(head_dim)
    heads_per_lanes, lanes = (2, LANES) if width < LANES else (1, width)
    keys, values = lane_tiles(key), lane_tiles(value)
    video = slice(grid.video_start, grid.video_start + grid.video_tokens)
    by_frame = [x[:, video].reshape(batch, frames, places, x.shape[-1]) for x in (keys, values)]

    def lanes_of(head):
        return lax.div(head, heads_per_lanes)

    query_spec = pl.BlockSpec((None, columns, lanes), lambda b, h, t, lengths: (b, 0, lanes_of(h)))
    frame_spec = pl.BlockSpec((None, None, places, lanes), lambda b, h, t, lengths: (b, t, 0, lanes_of(h)))
    kept_spec = pl.BlockSpec((None, 8, columns), lambda b, h, t, lengths: (t, 0, 0))
    inputs, specs = [sampled, *by_frame, jnp.asarray(kept)], [query_spec, frame_spec, frame_spec, kept_spec]
    if grid.text_tokens:
        text = slice(grid.text_start, grid.text_start + grid.text_tokens)
        text_rows = math.ceil(grid.text_tokens / 16) * 16
        more = ((0, 0), (0, text_rows - grid.text_tokens), (0, 0))
        inputs += [jnp.pad(x[:, text], more) for x in (keys, values)]
        specs += [pl.BlockSpec((None, text_rows, lanes), lambda b, h, t, lengths: (b, 0, lanes_of(h)))] * 2
    if text_lengths is None:
        text_lengths = jnp.full((batch,), grid.text_tokens, jnp.int32)
    kernel = functools.partial(
        _kernel,
        heads_per_lanes=heads_per_lanes,
        has_text=bool(grid.text_tokens),
        has_prefix=any(map(_needs_prefix, plan.patterns)),
    )
    sums = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, heads, frames),
            in_specs=specs,
            out_specs=pl.BlockSpec((None, None, 8, columns), lambda b, h, t, lengths: (b, h, 0, 0)),
            scratch_shapes=[
                pltpu.VMEM((8, columns), jnp.float32),
                pltpu.VMEM((8, columns + LANES), jnp.float32),
                pltpu.VMEM((lanes, columns + LANES), jnp.float32),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((batch, heads, 8, columns), jnp.float32),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=100 * 2**20
        ),
        interpret=interpret,
        name="probe_errors",
    )(text_lengths.astype(jnp.int32), *inputs)
    return sums[:, :, 0]


@functools.lru_cache(maxsize=16)
def kept_places(plan: Plan, rows: tuple[int, ...], columns: int) -> np.ndarray:
    """(frames, 8, columns) int32: the places of each frame that each column keeps.

    Row 0 of the tile is the first place, row 1 the last, and places below row 2 are kept too. Where a column keeps
    nothing, the interval lies out of reach; row 2 is 0 wherever it can be, see ``_needs_prefix``.
    """
    grid = plan.grid
    frames, places = grid.frames, grid.tokens_per_frame
    token = np.asarray(rows) - grid.video_start
    frame = np.arange(frames)[:, None]
    kept = np.zeros((frames, 8, columns), np.int64)
    kept[:, :2] = _OUT_OF_REACH
    column = 0
    for pattern in plan.patterns:
        if pattern.half_width is None:
            continue
        if pattern.order == "spatial":
            first = token - pattern.half_width - frame * places
            last = token + pattern.half_width - frame * places
        else:
            position = token % places * frames + token // places
            first = -((frame - position + pattern.half_width) // frames)
            last = (position + pattern.half_width - frame) // frames
        first, last = np.maximum(first, 0), np.minimum(last, places - 1)
        first, last = np.where(first > last, _OUT_OF_REACH, (first, last))
        below = 0
        if _needs_prefix(pattern):
            below = np.maximum(0, -(-(places - frame) // frames))
        elif pattern.sink != "none":
            first[0], last[0] = 0, places - 1
        span = slice(column, column + len(rows))
        kept[:, 0, span], kept[:, 1, span], kept[:, 2, span] = first, last, below
        column += len(rows)
    return kept.astype(np.int32)


def _needs_prefix(pattern: Pattern) -> bool:
    """Whether a frame's kept places can be two intervals; else a sink is frame 0, all of it."""
    return pattern.half_width is not None and pattern.order == "temporal" and pattern.sink == "svg"


def _kernel(
    lengths, query_ref, key_ref, value_ref, kept_ref, *refs, heads_per_lanes: int, has_text: bool, has_prefix: bool
):
    text_refs, refs = (refs[:2], refs[2:]) if has_text else ((), refs)
    output_ref, maximum_ref, total_ref, weighted_ref = refs
    batch, head, frame = (pl.program_id(axis) for axis in range(3))
    columns = query_ref.shape[0]
    dtype = query_ref.dtype
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else None
    dot = functools.partial(lax.dot_general, precision=precision, preferred_element_type=jnp.float32)
    lane = lax.broadcasted_iota(jnp.int32, query_ref.shape, 1)
    width = query_ref.shape[1] // heads_per_lanes
    own = lax.div(lane, width) == lax.rem(head, heads_per_lanes)
    query = jnp.where(own, query_ref[...].astype(jnp.float32), 0.0).astype(dtype)

    @pl.when(frame == 0)
    def _():
        maximum_ref[...] = jnp.full_like(maximum_ref, _FAR)
        total_ref[...] = jnp.zeros_like(total_ref)
        weighted_ref[...] = jnp.zeros_like(weighted_ref)

    def add(keys_ref, values_ref, kept, seen_by_all):
        rows = keys_ref.shape[0]
        scores = [
            dot(keys_ref[first : min(first + _STEP, rows)], query, (((1,), (1,)), ((), ())))
            for first in range(0, rows, _STEP)
        ]
        if seen_by_all is not None:
            scores = [
                jnp.where(lax.broadcasted_iota(jnp.int32, part.shape, 0) + number * _STEP < seen_by_all, part, _FAR)
                for number, part in enumerate(scores)
            ]
        old = maximum_ref[0:1]
        peak = functools.reduce(jnp.maximum, [part.max(axis=0, keepdims=True) for part in scores], old)
        decay = jnp.exp2(old - peak)
        maximum_ref[...] = jnp.broadcast_to(peak, maximum_ref.shape)
        decay = jnp.concatenate([decay, decay[:, :LANES]], axis=1)
        total, weighted = total_ref[...] * decay, weighted_ref[...] * decay
        for number, part in enumerate(scores):
            first, height = number * _STEP, part.shape[0]
            weights = jnp.exp2(part - peak)
            masked = weights if kept is None else kept(weights, first)
            both = jnp.concatenate([masked, weights[:, :LANES]], axis=1)
            whole = height // 8 * 8
            if whole:
                total += both[:whole].reshape(whole // 8, 8, -1).sum(axis=0)
            if whole < height:
                rest = both[whole:].sum(axis=0, keepdims=True)
                total += jnp.where(lax.broadcasted_iota(jnp.int32, total.shape, 0) == 0, rest, 0.0)
            values = values_ref[first : first + height]
            weighted += dot(values, both.astype(dtype), (((0,), (0,)), ((), ())))
        total_ref[...], weighted_ref[...] = total, weighted

    place = lax.broadcasted_iota(jnp.int32, (8, columns), 0)
    from_first, span = place - kept_ref[0:1], (kept_ref[1:2] - kept_ref[0:1]).astype(jnp.uint32)
    from_below = place - kept_ref[2:3]

    def kept(weights, first):
        # a last group of fewer than 8 keys is a group of its own
        parts = []
        for row in range(0, weights.shape[0], 8):
            part = weights[row : row + 8]
            height, at = part.shape[0], first + row
            mask = (from_first + at).astype(jnp.uint32) <= span
            if has_prefix:
                mask |= from_below < -at
            parts.append(jnp.where(mask[:height], part, 0.0))
        return jnp.concatenate(parts, axis=0)

    add(key_ref, value_ref, kept, None)
    if has_text:

        @pl.when(frame == 0)
        def _():
            add(*text_refs, None, lengths[batch])

    @pl.when(frame == pl.num_programs(2) - 1)
    def _():
        total = total_ref[...].sum(axis=0, keepdims=True)
        result = weighted_ref[...] / jnp.maximum(total, _LEAST_SUM)
        dense = jnp.concatenate([result[:, columns:]] * (columns // LANES), axis=1)
        difference = result[:, :columns] - dense
        row = lax.broadcasted_iota(jnp.int32, difference.shape, 0)
        mine = lax.div(row, width) == lax.rem(head, heads_per_lanes)
        squares = jnp.where(mine, difference * difference, 0.0).sum(axis=0, keepdims=True)
        output_ref[...] = jnp.broadcast_to(squares, output_ref.shape)
