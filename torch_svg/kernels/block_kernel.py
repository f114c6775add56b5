"""The body of the block-sparse kernel: one pass over a work table, with its own copies from slow to fast memory.

A program of the grid is one query block of one head. It walks its items; an item's keys and values are copied while
the item before it is computed. Scores are computed as ``key @ query^T`` and the output as ``value^T @ weights``, so
that queries lie along lanes and every reduction over keys is a plain addition of vector registers.

The 256-deep contraction of the matrix unit has room beside the head: every key carries flag lanes, and every query
carries one value against each of them. So the softmax offset, padded keys and the keys of frame 0 cost nothing:

    lane 0   key 1                          query -offset
    lane 1   key 1 where it is padding      query -1e30
    lane 2   key 1 where it is in frame 0   query -1e30 once a temporal head's sink is done

The offset is one number for the block, from its scores against the first keys that it visits. A row's scores may lie
far above or below it: the f32 exponent has room for 2**100 either way. A block in which some row's sum leaves that
room is computed once more with an online softmax.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..worktable import FIRST_FULL, PARTIAL, TAIL

LANES = 128
# rows of keys per weight tile of the matrix unit
_STEP = 256
# keys that the softmax offset is taken from
_OFFSET_KEYS = 128
_FAR = -1e30
# a sum of weights outside this range has lost, or is about to lose, what f32 can hold
_LEAST_SUM, _LARGEST_SUM = 2.0**-100, 2.0**100
# the offset lies this far below the largest score that it was taken from: most rows peak lower
_BELOW_PEAK = 20.0

_KEYS_BY_QUERIES = (((1,), (1,)), ((), ()))
_OVER_KEYS = (((0,), (0,)), ((), ()))


@dataclass(frozen=True)
class KernelShape:
    """Everything static about a kernel.

    Args:
        batch, heads: As in the arrays.
        query_heads_per_lanes: 2 where two heads of 64 share a tile of lanes, else 1.
        lanes: Lanes of one head's tile, a multiple of 128.
        unit: Rows of a unit.
        key_units: Units in a granule of keys.
        query_units: Units in a granule of queries.
        query_granules: Granules in a query block.
        query_blocks: Query blocks of a head.
        query_frame_units: Units in one frame of the query array.
        query_total_units, key_total_units: Units of the whole sequences.
        item_granules: Granules of the largest item.
        full_granules: Sizes of the mask-free bodies.
        left_edges, right_edges: Column ranges of the edge bodies, see ``WorkTable``.
        bodies: The bodies that are used; others are not compiled.
        tail_rows: Rows that the tail body computes.
        any_temporal: Whether any pattern is temporal.
        any_prefix: Whether any pattern keeps a prefix of its coordinates beside the band.
        ends_sink: Whether any item does.
        keys_flagged: Whether key flags come from memory; else they are the constants of an unpadded grid.
        scale: Factor on the query, base-2 logits.
        dtype: Of query, key, value and output.
        online: Online softmax everywhere instead of a fixed offset.
    """

    batch: int
    heads: int
    query_heads_per_lanes: int
    lanes: int
    unit: int
    key_units: int
    query_units: int
    query_granules: int
    query_blocks: int
    query_frame_units: int
    query_total_units: int
    key_total_units: int
    item_granules: int
    full_granules: tuple[int, ...]
    left_edges: tuple
    right_edges: tuple
    bodies: frozenset
    tail_rows: int
    any_temporal: bool
    any_prefix: bool
    ends_sink: bool
    keys_flagged: bool
    scale: float
    dtype: jnp.dtype
    online: bool

    @property
    def granule_rows(self) -> int:
        return self.unit * self.key_units

    @property
    def query_rows(self) -> int:
        return self.unit * self.query_units * self.query_granules

    @property
    def first_edge(self) -> int:
        return FIRST_FULL + len(self.full_granules)

    @property
    def masked(self) -> bool:
        """Whether any body looks at bounds."""
        return PARTIAL in self.bodies or any(body >= self.first_edge for body in self.bodies)


class Tables(NamedTuple):
    """Scalar-prefetch operands, int32."""

    kinds: object
    offsets: object
    counts: object
    items: object
    starts: object
    orders: object
    prefixes: object


class Inputs(NamedTuple):
    """Arrays in slow memory: by units, and the same by frames for temporal heads."""

    query: object
    query_frames: object
    key: object
    key_frames: object
    value: object
    value_frames: object
    flags: object
    flags_frames: object
    bounds: object


class Scratch(NamedTuple):
    """Fast memory of a kernel; two slots where copies overlap with work."""

    query_in: object
    query: object
    key: object
    value: object
    output: object
    bounds: object
    # (8, query rows): distance of the sublane's key from either end of a query's band
    from_low: object
    to_high: object
    # (8, query rows) sums and running maxima, (lanes, query rows) weighted values, both f32
    total: object
    maximum: object
    weighted: object
    slot: object
    offset: object
    key_arrived: object
    value_arrived: object
    query_arrived: object
    bounds_arrived: object
    output_left: object


def scratch_shapes(shape: KernelShape) -> Scratch:
    units, item_units = shape.query_granules * shape.query_units, shape.item_granules * shape.key_units
    rows, wide = shape.query_rows, shape.lanes + LANES
    bound_rows = rows if shape.masked else LANES
    bound_lanes = -(-bound_rows // LANES) * LANES
    sums = (8, rows)
    return Scratch(
        query_in=pltpu.VMEM((2, units, shape.unit, shape.lanes), shape.dtype),
        query=pltpu.VMEM((rows, wide), shape.dtype),
        key=pltpu.VMEM((2, item_units, shape.unit, wide), shape.dtype),
        value=pltpu.VMEM((2, item_units, shape.unit, shape.lanes), shape.dtype),
        output=pltpu.VMEM((2, units, shape.unit, shape.lanes), shape.dtype),
        bounds=pltpu.VMEM((2, 8, bound_lanes), jnp.int32),
        from_low=pltpu.VMEM((8, bound_rows), jnp.int32),
        to_high=pltpu.VMEM((8, bound_rows), jnp.int32),
        total=pltpu.VMEM(sums, jnp.float32),
        maximum=pltpu.VMEM(sums, jnp.float32),
        weighted=pltpu.VMEM((shape.lanes, rows), jnp.float32),
        slot=pltpu.SMEM((1,), jnp.int32),
        offset=pltpu.SMEM((1,), jnp.float32),
        key_arrived=pltpu.SemaphoreType.DMA((2,)),
        value_arrived=pltpu.SemaphoreType.DMA((2,)),
        query_arrived=pltpu.SemaphoreType.DMA((2,)),
        bounds_arrived=pltpu.SemaphoreType.DMA((2,)),
        output_left=pltpu.SemaphoreType.DMA((2,)),
    )


def run_query_block(shape: KernelShape, *refs) -> None:
    """The kernel: one (batch and head, query block) of the grid."""
    refs = iter(refs)
    tables, inputs = (kind(*itertools.islice(refs, len(kind._fields))) for kind in (Tables, Inputs))
    _QueryBlock(shape, tables, inputs, next(refs), Scratch(*refs)).run()


class _QueryBlock:
    """One program: the names of its refs and scalars, and the steps of its work."""

    def __init__(self, shape: KernelShape, tables: Tables, inputs: Inputs, output, scratch: Scratch):
        self.shape, self.tables, self.inputs, self.output, self.at = shape, tables, inputs, output, scratch
        self.head, self.block = pl.program_id(0), pl.program_id(1)
        self.pattern = tables.kinds[self.head]
        self.temporal = tables.orders[self.pattern] == 1
        entry = self.pattern * shape.query_blocks + self.block
        self.first_item, self.item_count = tables.offsets[entry], tables.counts[entry]
        program = self.head * shape.query_blocks + self.block
        self.programs = shape.batch * shape.heads * shape.query_blocks
        self.program, self.query_slot = program, program & 1

    def run(self) -> None:
        shape, at = self.shape, self.at
        last_block = self.block == shape.query_blocks - 1
        next_head = jnp.where(last_block, self.head + 1, self.head)
        next_block = jnp.where(last_block, 0, self.block + 1)
        has_next = self.program + 1 < self.programs

        @pl.when(self.program == 0)
        def _():
            at.slot[0] = 0
            if not shape.keys_flagged:
                self._write_constant_flags()
            self._copy_query(0, 0, 0)
            self._copy_item(self._first_item_of(0, 0), 0, 0)

        @pl.when(has_next)
        def _():
            self._copy_query(next_head, next_block, 1 - self.query_slot)

        if shape.masked:
            self._load_bounds()
        first_slot = at.slot[0]
        self._wait_query()
        self._scale_query()
        self._wait_granules(self._item(0) >> 8 & 127, first_slot)
        self._choose_offset(first_slot)
        self._clear()

        def visit(index, _):
            slot = (first_slot + index) & 1
            item = self._item(index)

            @pl.when(index + 1 < self.item_count)
            def _():
                self._copy_item(self._item(index + 1), self.head, 1 - slot)

            @pl.when((index + 1 == self.item_count) & has_next)
            def _():
                self._copy_item(self._first_item_of(next_head, next_block), next_head, 1 - slot)

            self._compute(item, index, slot)
            return 0

        lax.fori_loop(0, self.item_count, visit, 0)
        next_slot = (first_slot + self.item_count) & 1
        at.slot[0] = next_slot
        if not shape.online:
            pl.when(jnp.logical_not(self._sums_are_sound()))(lambda: self._start_over(1 - next_slot))
        self._write_output()

    # --- work table ---

    def _item(self, index):
        return self.tables.items[self.first_item + index]

    def _first_item_of(self, head, block):
        entry = self.tables.kinds[head] * self.shape.query_blocks + block
        return self.tables.items[self.tables.offsets[entry]]

    # --- copies ---

    def _lanes_of(self, head):
        pair = lax.div(lax.rem(head, self.shape.heads), self.shape.query_heads_per_lanes)
        return pl.ds(pl.multiple_of(pair * self.shape.lanes, LANES), self.shape.lanes)

    def _copy_item(self, item, head, slot) -> None:
        """Starts the copies of an item's keys, values and key flags."""
        shape, inputs = self.shape, self.inputs
        start, granules = item >> 15, item >> 8 & 127
        batch, lanes = lax.div(head, shape.heads), self._lanes_of(head)
        base = batch * shape.key_total_units + start * shape.key_units
        pairs = [
            (inputs.key, inputs.key_frames, self.at.key, pl.ds(0, shape.lanes), lanes, self.at.key_arrived),
            (inputs.value, inputs.value_frames, self.at.value, pl.ds(0, shape.lanes), lanes, self.at.value_arrived),
        ]
        if shape.keys_flagged:
            to = pl.ds(shape.lanes, LANES)
            pairs.append((inputs.flags, inputs.flags_frames, self.at.key, to, pl.ds(0, LANES), self.at.key_arrived))

        def copy(granule, count, in_frames):
            target = pl.ds(granule * shape.key_units, count * shape.key_units)
            for by_units, by_frames, buffer, to, lane, arrived in pairs:
                if in_frames:
                    source = by_frames.at[batch, pl.ds(0, shape.key_units), start + granule, :, lane]
                else:
                    source = by_units.at[pl.ds(base + granule * shape.key_units, count * shape.key_units), :, lane]
                pltpu.make_async_copy(source, buffer.at[slot, target, :, to], arrived.at[slot]).start()

        def copy_all(in_frames):
            # the commonest size with as few instructions as can be
            most = min(shape.full_granules[0], shape.item_granules)

            @pl.when(granules == most)
            def _():
                for granule in range(most if in_frames else 1):
                    copy(granule, 1 if in_frames else most, in_frames)

            @pl.when(granules != most)
            def _():
                lax.fori_loop(0, granules, lambda granule, _: (copy(granule, 1, in_frames), 0)[1], 0)

        if not shape.any_temporal:
            copy_all(False)
            return
        in_frames = (self.tables.orders[self.tables.kinds[head]] == 1) & (item >> 1 & 1 == 0)
        pl.when(in_frames)(lambda: copy_all(True))
        pl.when(jnp.logical_not(in_frames))(lambda: copy_all(False))

    def _wait_granules(self, granules, slot) -> None:
        """Waits for what ``_copy_item`` started: as many bytes, whichever way they were read."""
        if isinstance(granules, int):
            self._wait_units(granules * self.shape.key_units, slot)
        else:
            lax.fori_loop(0, granules, lambda *_: (self._wait_units(self.shape.key_units, slot), 0)[1], 0)

    def _wait_units(self, count: int, slot) -> None:
        shape, inputs, at = self.shape, self.inputs, self.at
        units, lanes, flags = pl.ds(0, count), pl.ds(0, shape.lanes), pl.ds(shape.lanes, LANES)
        waits = [
            (inputs.key.at[units, :, lanes], at.key.at[slot, units, :, lanes], at.key_arrived),
            (inputs.value.at[units, :, lanes], at.value.at[slot, units, :, lanes], at.value_arrived),
        ]
        if shape.keys_flagged:
            waits.append((inputs.flags.at[units], at.key.at[slot, units, :, flags], at.key_arrived))
        for source, target, arrived in waits:
            pltpu.make_async_copy(source, target, arrived.at[slot]).wait()

    def _copy_query(self, head, block, slot) -> None:
        shape, inputs = self.shape, self.inputs
        start, lanes, batch = self.tables.starts[block], self._lanes_of(head), lax.div(head, shape.heads)
        units = shape.query_granules * shape.query_units
        base = batch * shape.query_total_units + start * shape.query_units

        def in_rows():
            source = inputs.query.at[pl.ds(base, units), :, lanes]
            pltpu.make_async_copy(source, self.at.query_in.at[slot], self.at.query_arrived.at[slot]).start()

        def in_frames():
            for granule in range(shape.query_granules):
                source = inputs.query_frames.at[batch, pl.ds(0, shape.query_units), start + granule, :, lanes]
                target = self.at.query_in.at[slot, pl.ds(granule * shape.query_units, shape.query_units)]
                pltpu.make_async_copy(source, target, self.at.query_arrived.at[slot]).start()

        pattern = self.tables.kinds[head]
        if shape.masked:
            bounds = inputs.bounds.at[pattern * shape.query_blocks + block]
            pltpu.make_async_copy(bounds, self.at.bounds.at[slot], self.at.bounds_arrived.at[slot]).start()
        if not shape.any_temporal:
            in_rows()
            return
        temporal = self.tables.orders[pattern] == 1
        pl.when(temporal)(in_frames)
        pl.when(jnp.logical_not(temporal))(in_rows)

    def _wait_query(self) -> None:
        source = self.inputs.query.at[
            pl.ds(0, self.shape.query_granules * self.shape.query_units), :, self._lanes_of(0)
        ]
        slot = self.query_slot
        pltpu.make_async_copy(source, self.at.query_in.at[slot], self.at.query_arrived.at[slot]).wait()

    def _copy_output(self, slot) -> None:
        shape = self.shape
        start, batch = self.tables.starts[self.block], lax.div(self.head, shape.heads)
        head, shared = lax.rem(self.head, shape.heads), shape.query_heads_per_lanes
        # heads that share a tile are written apart: first all even ones, then all odd ones
        tile = lax.rem(head, shared) * -(-shape.heads // shared) + lax.div(head, shared)
        lanes = pl.ds(pl.multiple_of(tile * shape.lanes, LANES), shape.lanes)
        base = batch * shape.query_total_units + start * shape.query_units
        units = shape.query_granules * shape.query_units

        def in_rows():
            target = self.output.at[pl.ds(base, units), :, lanes]
            pltpu.make_async_copy(self.at.output.at[slot], target, self.at.output_left.at[slot]).start()

        def in_frames():
            def copy(frame, _):
                for granule in range(shape.query_granules):
                    source = self.at.output.at[slot, granule * shape.query_units + frame]
                    to = batch * shape.query_total_units + frame * shape.query_frame_units + start + granule
                    pltpu.make_async_copy(source, self.output.at[to, :, lanes], self.at.output_left.at[slot]).start()
                return 0

            lax.fori_loop(0, shape.query_units, copy, 0)

        if not shape.any_temporal:
            in_rows()
            return
        pl.when(self.temporal)(in_frames)
        pl.when(jnp.logical_not(self.temporal))(in_rows)

    def _wait_output(self, slot) -> None:
        units = self.shape.query_granules * self.shape.query_units
        target = self.output.at[pl.ds(0, units), :, pl.ds(0, self.shape.lanes)]
        pltpu.make_async_copy(self.at.output.at[slot], target, self.at.output_left.at[slot]).wait()

    # --- before the items ---

    def _write_constant_flags(self) -> None:
        shape = self.shape
        units = shape.item_granules * shape.key_units
        flags = (2, units, shape.unit, LANES)
        lane, unit = lax.broadcasted_iota(jnp.int32, flags, 3), lax.broadcasted_iota(jnp.int32, flags, 1)
        in_frame_0 = (lane == 2) & (lax.rem(unit, shape.key_units) == 0)
        self.at.key[:, :, :, shape.lanes :] = ((lane == 0) | in_frame_0).astype(shape.dtype)

    def _load_bounds(self) -> None:
        """Bounds of the block's queries, as distances that a key's scalar place is compared with."""
        shape = self.shape
        slot = self.query_slot
        pltpu.make_async_copy(self.inputs.bounds.at[0], self.at.bounds.at[slot], self.at.bounds_arrived.at[slot]).wait()
        sublane = lax.broadcasted_iota(jnp.int32, (8, shape.query_rows), 0) * self._sublane_step()
        self.at.from_low[...] = sublane - self.at.bounds[slot, 0:1, : shape.query_rows]
        self.at.to_high[...] = self.at.bounds[slot, 1:2, : shape.query_rows] - sublane

    def _sublane_step(self):
        # neighbouring rows of a temporal granule are neighbouring places of one frame
        return jnp.where(self.temporal, self.shape.key_units, 1)

    def _scale_query(self) -> None:
        shape = self.shape
        query = self.at.query_in[self.query_slot].reshape(shape.query_rows, shape.lanes).astype(jnp.float32)
        query = query * shape.scale
        if shape.query_heads_per_lanes > 1:
            lane = lax.broadcasted_iota(jnp.int32, query.shape, 1)
            width = shape.lanes // shape.query_heads_per_lanes
            place = lax.rem(lax.rem(self.head, shape.heads), shape.query_heads_per_lanes)
            query = jnp.where(lax.div(lane, width) == place, query, 0.0)
        self.at.query[:, : shape.lanes] = query.astype(shape.dtype)

    def _choose_offset(self, slot) -> None:
        """Takes the block's offset from its scores against a few keys of the first item, and writes the flags."""
        shape = self.shape
        if shape.online:
            self.at.offset[0] = 0.0
            self._write_query_flags(in_sink=True)
            return
        units = max(1, min(_OFFSET_KEYS, shape.granule_rows) // shape.unit)
        keys = self.at.key[slot, :units, :, : shape.lanes].reshape(units * shape.unit, shape.lanes)
        scores = self._dot(keys, self.at.query[:, : shape.lanes], _KEYS_BY_QUERIES)
        self.at.offset[0] = jnp.max(scores) - _BELOW_PEAK
        self._write_query_flags(in_sink=True)

    def _write_query_flags(self, in_sink: bool) -> None:
        lane = lax.broadcasted_iota(jnp.int32, (self.shape.query_rows, LANES), 1)
        flags = jnp.where(lane == 1, _FAR, 0.0 if in_sink else _FAR)
        flags = jnp.where(lane == 0, -self.at.offset[0], jnp.where(lane <= 2, flags, 0.0))
        self.at.query[:, self.shape.lanes :] = flags.astype(self.shape.dtype)

    def _clear(self) -> None:
        self.at.total[...] = jnp.zeros_like(self.at.total)
        self.at.weighted[...] = jnp.zeros_like(self.at.weighted)
        self.at.maximum[...] = jnp.full_like(self.at.maximum, _FAR)

    # --- an item ---

    def _compute(self, item, index, slot) -> None:
        shape = self.shape
        start, granules, body = item >> 15, item >> 8 & 127, item >> 2 & 63
        if shape.ends_sink:
            pl.when(item & 1 == 1)(lambda: self._write_query_flags(in_sink=False))

        def run(used):
            # the first item was waited for already, to choose the offset
            pl.when(index > 0)(lambda: self._wait_granules(self._granules_of(used, granules), slot))
            self._run_body(used, start, granules, slot)

        commonest, rest = FIRST_FULL, sorted(shape.bodies - {FIRST_FULL})
        if commonest in shape.bodies:
            pl.when(body == commonest)(lambda: run(commonest))
        if rest:

            @pl.when(body != commonest)
            def _():
                for used in rest:
                    pl.when(body == used)(lambda used=used: run(used))

    def _granules_of(self, body, granules):
        """Granules of an item of this body, static where they are."""
        shape = self.shape
        if body == PARTIAL:
            return granules
        if body == TAIL:
            return 1
        if body < shape.first_edge:
            return shape.full_granules[body - FIRST_FULL]
        return len((shape.left_edges + shape.right_edges)[body - shape.first_edge])

    def _run_body(self, body, start, granules, slot) -> None:
        shape = self.shape
        rows, place = shape.granule_rows, start * shape.granule_rows
        everything = (0, shape.query_rows)
        if body == TAIL:
            self._attend(slot, shape.tail_rows, [everything])
        elif body == PARTIAL:

            def visit(granule, _):
                self._attend(slot, rows, [everything], self._in_band_or_sink(place + granule * rows), granule)
                return 0

            lax.fori_loop(0, granules, visit, 0)
        elif body < shape.first_edge:
            count = shape.full_granules[body - FIRST_FULL]
            self._attend(slot, count * rows, [everything] * count)
        else:
            edges = shape.left_edges + shape.right_edges
            columns = edges[body - shape.first_edge]
            is_left = body - shape.first_edge < len(shape.left_edges)
            self._attend(slot, len(columns) * rows, columns, self._one_side(place, is_left))

    def _attend(self, slot, rows, columns, mask=None, granule=0) -> None:
        """Adds ``rows`` keys of a slot, from ``granule`` on, to the sums of the query columns that see them.

        Args:
            columns: Per granule, the range of query columns to compute.
            mask: ``mask(row, first column, last column)`` gives (8, columns) bool for 8 keys from a static row on.
        """
        shape, at = self.shape, self.at
        units = -(-rows // shape.unit)
        first_unit = granule * shape.key_units
        keys = at.key[slot, pl.ds(first_unit, units)].reshape(units * shape.unit, -1)
        values = at.value[slot, pl.ds(first_unit, units)].reshape(units * shape.unit, -1)
        parts = []
        # all scores first: the scheduler overlaps them with the softmax
        for first in range(0, rows, _STEP):
            last = min(first + _STEP, rows)
            seen = columns[first // shape.granule_rows : (last - 1) // shape.granule_rows + 1]
            low, high = min(c[0] for c in seen), max(c[1] for c in seen)
            parts.append((first, last, low, high, self._dot(keys[first:last], at.query[low:high], _KEYS_BY_QUERIES)))
        total, weighted = at.total[...], at.weighted[...]
        maximum = at.maximum[...] if shape.online else None
        for first, last, low, high, scores in parts:
            if mask is not None:
                scores = self._masked(scores, mask, first, low, high)
            if shape.online:
                old = maximum[:, low:high]
                peak = jnp.maximum(old, scores.max(axis=0, keepdims=True))
                decay = jnp.exp2(old - peak)
                weights = jnp.exp2(scores - peak[0:1])
                maximum = _replaced(maximum, peak, low, high)
            else:
                decay = None
                weights = jnp.exp2(scores)
            added = weights.reshape((last - first) // 8, 8, high - low).sum(axis=0)
            values_added = self._dot(values[first:last], weights.astype(shape.dtype), _OVER_KEYS)
            total = _added(total, added, decay, low, high)
            weighted = _added(weighted, values_added, None if decay is None else decay[0:1], low, high)
        at.total[...], at.weighted[...] = total, weighted
        if shape.online:
            at.maximum[...] = maximum

    def _masked(self, scores, mask, first, low, high):
        groups = scores.reshape(scores.shape[0] // 8, 8, high - low)
        kept = [
            jnp.where(mask(first + 8 * number, low, high), groups[number], _FAR) for number in range(groups.shape[0])
        ]
        return jnp.concatenate(kept, axis=0)

    def _place_of(self, row: int):
        """Coordinate, from the item's start, of a static row of an item."""
        shape = self.shape
        granule, row_in_granule = divmod(row, shape.granule_rows)
        unit, row_in_unit = divmod(row_in_granule, shape.unit)
        if not shape.any_temporal:
            return row
        return jnp.where(self.temporal, granule * shape.granule_rows + row_in_unit * shape.key_units + unit, row)

    def _one_side(self, place, is_left):
        def mask(row, low, high):
            at = place + self._place_of(row)
            return self.at.from_low[:, low:high] >= -at if is_left else self.at.to_high[:, low:high] >= at

        return mask

    def _in_band_or_sink(self, place):
        sublane = lax.broadcasted_iota(jnp.int32, (8, self.shape.query_rows), 0) * self._sublane_step()
        prefix = self.tables.prefixes[self.pattern]

        def mask(row, low, high):
            at = place + self._place_of(row)
            kept = (self.at.from_low[:, low:high] >= -at) & (self.at.to_high[:, low:high] >= at)
            return kept | (sublane[:, low:high] < prefix - at) if self.shape.any_prefix else kept

        return mask

    # --- after the items ---

    def _sums_are_sound(self):
        total = self.at.total[...].sum(axis=0, keepdims=True)
        # 0 * infinity is not a number, and compares false
        total = total + (self.at.weighted[...] * 0.0).sum(axis=0, keepdims=True)
        return jnp.min(jnp.where((total > _LEAST_SUM) & (total < _LARGEST_SUM), 1.0, 0.0)) > 0.0

    def _start_over(self, slot) -> None:
        """The block once more: unit by unit, online softmax, nothing overlapped. Rare, small and safe."""
        shape = self.shape
        self.at.offset[0] = 0.0
        self._write_query_flags(in_sink=True)
        self._clear()

        def visit(index, _):
            item = self._item(index)
            granules = item >> 8 & 127
            self._copy_item(item, self.head, slot)
            self._wait_granules(granules, slot)
            if shape.ends_sink:
                pl.when(item & 1 == 1)(lambda: self._write_query_flags(in_sink=False))
            units = granules * shape.key_units
            if TAIL in shape.bodies:
                units = jnp.where(item >> 2 & 63 == TAIL, shape.tail_rows // shape.unit, units)
            lax.fori_loop(0, units, lambda unit, _: self._visit_unit(item, unit, slot), 0)
            return 0

        lax.fori_loop(0, self.item_count, visit, 0)

    def _visit_unit(self, item, unit, slot):
        shape, at = self.shape, self.at
        keys, values = at.key[slot, unit], at.value[slot, unit]
        scores = self._dot(keys, at.query[...], _KEYS_BY_QUERIES)
        if shape.masked:
            body = item >> 2 & 63
            is_whole = ((body != PARTIAL) & (body < shape.first_edge)).astype(jnp.int32)
            granule = lax.div(unit, shape.key_units)
            place = ((item >> 15) + granule) * shape.granule_rows
            unit = lax.rem(unit, shape.key_units)
            place += jnp.where(self.temporal, unit, unit * shape.unit) if shape.any_temporal else unit * shape.unit
            seen = self._in_band_or_sink(place)
            scores = self._masked(scores, lambda *at: seen(*at) | (is_whole > 0), 0, 0, shape.query_rows)
        old = at.maximum[...]
        peak = jnp.maximum(old, scores.max(axis=0, keepdims=True))
        decay, weights = jnp.exp2(old - peak), jnp.exp2(scores - peak[0:1])
        at.maximum[...] = peak
        at.total[...] = at.total[...] * decay + weights.reshape(shape.unit // 8, 8, -1).sum(axis=0)
        added = self._dot(values, weights.astype(shape.dtype), _OVER_KEYS)
        at.weighted[...] = at.weighted[...] * decay[0:1] + added
        return 0

    def _write_output(self) -> None:
        shape, at = self.shape, self.at
        slot = self.query_slot
        # the last block of a head has waited for the slot of the first block of the next
        pl.when((self.program >= 2) & (self.block > 0))(lambda: self._wait_output(slot))
        total = at.total[...].sum(axis=0, keepdims=True)
        output = (at.weighted[...] * (1.0 / total)).astype(shape.dtype).T
        at.output[slot] = output.reshape(shape.query_granules * shape.query_units, shape.unit, shape.lanes)
        # a last block that was moved back writes rows of the one before it again
        pl.when((self.block == shape.query_blocks - 1) & (self.program >= 1))(lambda: self._wait_output(1 - slot))
        self._copy_output(slot)

        @pl.when(self.program + 1 == self.programs)
        def _():
            self._wait_output(slot)

    def _dot(self, left, right, dimensions):
        precision = lax.Precision.HIGHEST if self.shape.dtype == jnp.float32 else None
        return lax.dot_general(left, right, dimensions, precision=precision, preferred_element_type=jnp.float32)


def _replaced(old, new, low, high):
    """``old`` with columns low .. high replaced."""
    before, after = [old[:, :low]] if low else [], [old[:, high:]] if high < old.shape[1] else []
    return jnp.concatenate([*before, new, *after], axis=1)


def _added(old, new, decay, low, high):
    """``old`` with ``new`` added to columns low .. high, which are multiplied by ``decay`` first."""
    part = old[:, low:high]
    return _replaced(old, (part if decay is None else part * decay) + new, low, high)


def call(shape: KernelShape, tables: Tables, inputs: Inputs, output_lanes: int, interpret=False) -> jax.Array:
    """Runs the kernel; returns (batch * query units, unit, output lanes)."""
    return pl.pallas_call(
        functools.partial(run_query_block, shape),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(Tables._fields),
            grid=(shape.batch * shape.heads, shape.query_blocks),
            in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * len(Inputs._fields),
            out_specs=pl.BlockSpec(memory_space=pl.ANY),
            scratch_shapes=list(scratch_shapes(shape)),
        ),
        out_shape=jax.ShapeDtypeStruct((shape.batch * shape.query_total_units, shape.unit, output_lanes), shape.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"),
            vmem_limit_bytes=100 * 2**20,
            disable_bounds_checks=True,
        ),
        interpret=interpret,
        name="block_sparse_attention",
    )(*tables, *inputs)
