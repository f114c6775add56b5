"""The body of the block-sparse kernel: one pass over a work table, with its own copies from slow to fast memory.

A program of the grid is one query block of one head. It takes the text, which every query sees, and walks its items;
an item's keys and values are copied while the item before it is computed. Scores are computed as ``key @ query^T`` and
the output as ``value^T @ weights``, so that queries lie along lanes and every reduction over keys is a plain addition
of vector registers.

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

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..worktable import (
    FIRST_FULL,
    PARTIAL,
    TAIL,
    body_of,
    does_end_sink,
    granules_of,
    is_at_end,
    start_of,
)
from .block_copies import BlockCopies
from .kernel_shape import LANES, TEXT_UNIT, Inputs, KernelShape, Scratch, Tables, scratch_shapes

# rows of keys per weight tile of the matrix unit
_STEP = 256
# keys that the softmax offset is taken from
_OFFSET_KEYS = 128
# units of text that one straight piece of code takes
_TEXT_UNITS = 32
_FAR = -1e30
# a sum of weights outside this range has lost, or is about to lose, what f32 can hold
_LEAST_SUM, _LARGEST_SUM = 2.0**-100, 2.0**100
# the offset lies this far below the largest score that it was taken from: most rows peak lower
_BELOW_PEAK = 20.0

_KEYS_BY_QUERIES = (((1,), (1,)), ((), ()))
_OVER_KEYS = (((0,), (0,)), ((), ()))


def run_query_block(shape: KernelShape, *refs) -> None:
    """The kernel: one (batch and head, query block) of the grid."""
    refs = iter(refs)
    tables, inputs = (kind(*itertools.islice(refs, len(kind._fields))) for kind in (Tables, Inputs))
    _QueryBlock(shape, tables, inputs, next(refs), Scratch(*refs)).run()


class _QueryBlock:
    """One program: the names of its refs and scalars, and the steps of its work."""

    def __init__(self, shape: KernelShape, tables: Tables, inputs: Inputs, output, scratch: Scratch):
        self.shape, self.tables, self.at = shape, tables, scratch
        self.copies = BlockCopies(shape, tables, inputs, output, scratch)
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
            self.copies.start_query(0, 0, 0)
            self.copies.start_item(self._first_item_of(0, 0), 0, 0)
            if shape.text_units:
                self.copies.start_text(0)

        @pl.when(has_next)
        def _():
            self.copies.start_query(next_head, next_block, 1 - self.query_slot)

        if shape.text_units:
            pl.when(has_next & last_block)(lambda: self.copies.start_text(next_head))
            pl.when(self.block == 0)(lambda: self.copies.wait_text(self.head))

        if shape.masked:
            self._load_bounds()
        first_slot = at.slot[0]
        self.copies.wait_query(self.query_slot)
        self.copies.wait_granules(granules_of(self._item(0)), first_slot)
        self._take_query(first_slot)
        self._clear()
        if shape.text_units:
            self._attend_text()

        def visit(index, _):
            slot = (first_slot + index) & 1
            item = self._item(index)

            @pl.when(index + 1 < self.item_count)
            def _():
                self.copies.start_item(self._item(index + 1), self.head, 1 - slot)

            @pl.when((index + 1 == self.item_count) & has_next)
            def _():
                self.copies.start_item(self._first_item_of(next_head, next_block), next_head, 1 - slot)

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

    # --- before the items ---

    def _write_constant_flags(self) -> None:
        for slot in range(2):
            self._write_flags(slot, 0, self.shape.item_granules, hidden=False)

    def _write_flags(self, slot, first, granules, hidden: bool) -> None:
        """Writes the flag lanes of some granules: of unpadded frames, or of keys that nobody sees."""
        shape = self.shape
        flags = (shape.key_units, shape.unit, LANES)
        lane, unit = lax.broadcasted_iota(jnp.int32, flags, 2), lax.broadcasted_iota(jnp.int32, flags, 0)
        flags = (lane == 0) | (lane == 1 if hidden else (lane == 2) & (unit == 0))
        flags = flags.astype(shape.dtype)

        def write(granule, _):
            units = pl.ds((first + granule) * shape.key_units, shape.key_units)
            self.at.key[slot, units, :, shape.lanes :] = flags
            if hidden:
                # what an earlier item, or nobody, left there may be no number
                self.at.key[slot, units, :, : shape.lanes] = jnp.zeros((*flags.shape[:2], shape.lanes), shape.dtype)
                self.at.value[slot, units] = jnp.zeros((*flags.shape[:2], shape.lanes), shape.dtype)
            return 0

        lax.fori_loop(0, granules, write, 0)

    def _load_bounds(self) -> None:
        """Bounds of the block's queries, as distances that a key's scalar place is compared with."""
        shape = self.shape
        slot = self.query_slot
        self.copies.wait_bounds(slot)
        sublane = lax.broadcasted_iota(jnp.int32, (8, shape.query_rows), 0) * self._sublane_step()
        self.at.from_low[...] = sublane - self.at.bounds[slot, 0:1, : shape.query_rows]
        self.at.to_high[...] = self.at.bounds[slot, 1:2, : shape.query_rows] - sublane

    def _sublane_step(self):
        # neighbouring rows of a temporal granule are neighbouring places of one frame
        return jnp.where(self.temporal, self.shape.key_units, 1)

    def _take_query(self, slot) -> None:
        """Scales the block's queries, takes the softmax offset from their scores against a few keys of the first item,
        and writes the flags. A few queries at a time: all at once would go through memory on the way."""
        shape, at = self.shape, self.at
        units = max(1, min(_OFFSET_KEYS, shape.granule_rows) // shape.unit)
        first = self.copies.skipped(self._item(0)) * shape.key_units
        keys = at.key[slot, pl.ds(first, units), :, : shape.lanes].reshape(units * shape.unit, shape.lanes)
        step = max(1, _STEP // shape.unit)
        peaks = []
        for unit in range(0, at.query_in.shape[1], step):
            query = at.query_in[self.query_slot, unit : unit + step]
            query = query.reshape(-1, shape.lanes).astype(jnp.float32) * shape.scale
            if shape.query_heads_per_lanes > 1:
                lane = lax.broadcasted_iota(jnp.int32, query.shape, 1)
                query = jnp.where(lax.div(lane, shape.head_lanes) == self._place_in_tile(), query, 0.0)
            query = query.astype(shape.dtype)
            at.query[unit * shape.unit : unit * shape.unit + query.shape[0], : shape.lanes] = query
            if not shape.online:
                scores = self._dot(keys, query, _KEYS_BY_QUERIES)
                peaks.append(scores.reshape(scores.shape[0] // 8, 8, -1).max(axis=0))
        at.offset[0] = 0.0 if shape.online else self._largest(peaks) - _BELOW_PEAK
        self._write_query_flags(in_sink=True)

    def _largest(self, peaks):
        """Maximum over arrays of one shape but for the last."""
        *alike, last = peaks
        return jnp.maximum(functools.reduce(jnp.maximum, alike).max(), last.max()) if alike else last.max()

    def _place_in_tile(self):
        return lax.rem(lax.rem(self.head, self.shape.heads), self.shape.query_heads_per_lanes)

    def _own_lanes(self, values):
        """The head's part of values that hold two heads: the matrix unit pays for every lane of the output."""
        width = self.shape.head_lanes
        if width == self.shape.lanes:
            return values
        return jnp.where(self._place_in_tile() == 0, values[:, :width], values[:, width:])

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
        body = body_of(item)
        if shape.ends_sink:
            pl.when(does_end_sink(item) == 1)(lambda: self._write_query_flags(in_sink=False))

        def run(used):
            # the first item was waited for already, to choose the offset
            pl.when(index > 0)(lambda: self._wait(used, item, slot))
            self._run_body(used, item, slot)

        commonest, rest = FIRST_FULL, sorted(shape.bodies - {FIRST_FULL})
        if commonest in shape.bodies:
            pl.when(body == commonest)(lambda: run(commonest))
        if rest:

            @pl.when(body != commonest)
            def _():
                for used in rest:
                    pl.when(body == used)(lambda used=used: run(used))

    def _wait(self, body, item, slot) -> None:
        """Waits for an item of this body: for a static number of granules where it has one."""
        granules, most = granules_of(item), self._body_granules(body)
        if most is None:
            self.copies.wait_granules(granules, slot)
        elif body < self.shape.first_edge or not self.shape.clipped:
            self.copies.wait_granules(most, slot)
        else:
            pl.when(granules == most)(lambda: self.copies.wait_granules(most, slot))
            pl.when(granules != most)(lambda: self.copies.wait_granules(granules, slot))

    def _body_granules(self, body) -> int | None:
        """Granules that a body computes; None where the item says it."""
        shape = self.shape
        if body == PARTIAL:
            return None
        if body == TAIL:
            return -(-shape.tail_rows // shape.granule_rows)
        if body < shape.first_edge:
            return shape.full_granules[body - FIRST_FULL]
        return len(shape.edges[body - shape.first_edge].columns)

    def _run_body(self, body, item, slot) -> None:
        shape = self.shape
        rows, granules = shape.granule_rows, granules_of(item)
        place = (start_of(item) - self.copies.skipped(item)) * rows
        if body == TAIL:
            self._attend(*self._slot_rows(slot, shape.tail_rows))
        elif body == PARTIAL:

            def visit(granule, _):
                keys, values = self._slot_rows(slot, rows, granule)
                self._attend(keys, values, mask=self._in_band_or_sink(place + granule * rows))
                return 0

            lax.fori_loop(0, granules, visit, 0)
        elif body < shape.first_edge:
            self._attend(*self._slot_rows(slot, self._body_granules(body) * rows))
        else:
            edge = shape.edges[body - shape.first_edge]
            is_left = body - shape.first_edge < len(shape.left_edges)
            hidden = len(edge.columns) - granules
            first_hidden = jnp.where(is_at_end(item) == 1, 0, granules)
            if shape.clipped:
                pl.when(hidden > 0)(lambda: self._write_flags(slot, first_hidden, hidden, hidden=True))
            keys, values = self._slot_rows(slot, len(edge.columns) * rows)
            self._attend(keys, values, edge.columns, self._one_side(place, is_left), edge.whole)
            if shape.clipped and not shape.keys_flagged:
                pl.when(hidden > 0)(lambda: self._write_flags(slot, first_hidden, hidden, hidden=False))

    def _slot_rows(self, slot, rows: int, granule=0):
        """``rows`` keys and values of a slot, from a granule on."""
        units = pl.ds(granule * self.shape.key_units, -(-rows // self.shape.unit))
        return tuple(
            buffer[slot, units].reshape(-1, buffer.shape[-1])[:rows] for buffer in (self.at.key, self.at.value)
        )

    def _attend_text(self) -> None:
        """The text of the head: seen by every query."""
        shape, slot = self.shape, self.head & 1

        def attend(first, units):
            rows = (
                buffer[slot, pl.ds(first, units)].reshape(units * TEXT_UNIT, -1)
                for buffer in (self.at.text_key, self.at.text_value)
            )
            self._attend(*rows)

        pieces, rest = divmod(shape.text_units, _TEXT_UNITS)
        if pieces:
            lax.fori_loop(0, pieces, lambda piece, _: (attend(piece * _TEXT_UNITS, _TEXT_UNITS), 0)[1], 0)
        if rest:
            attend(pieces * _TEXT_UNITS, rest)

    def _attend(self, keys, values, columns=None, mask=None, whole=None) -> None:
        """Adds keys to the sums of the query columns that see them.

        Args:
            keys: (rows, lanes with flags), whole granules but for the last.
            values: (rows, lanes).
            columns: Per granule, the range of query columns to compute; None for all.
            mask: ``mask(row, first column, last column)`` gives (8, columns) bool for 8 keys from a static row on.
            whole: Per granule, the range of columns that need no mask.
        """
        shape, at = self.shape, self.at
        values, rows = self._own_lanes(values), keys.shape[0]
        parts = []
        # all scores first: the scheduler overlaps them with the softmax
        for first in range(0, rows, _STEP):
            last = min(first + _STEP, rows)
            low, high = 0, shape.query_rows
            if columns is not None:
                seen = columns[first // shape.granule_rows : (last - 1) // shape.granule_rows + 1]
                low, high = min(c[0] for c in seen), max(c[1] for c in seen)
            parts.append((first, last, low, high, self._dot(keys[first:last], at.query[low:high], _KEYS_BY_QUERIES)))
        total, weighted = at.total[...], at.weighted[...]
        maximum = at.maximum[...] if shape.online else None
        for first, last, low, high, scores in parts:
            if mask is not None:
                scores = self._masked(scores, mask, first, low, high, whole)
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

    def _masked(self, scores, mask, first, low, high, whole=None):
        """Scores of the keys from row ``first`` on and the queries ``low .. high``, hidden where the mask says so."""
        if whole is None:
            return self._all_masked(scores, mask, first, low, high)
        parts, rows = [], self.shape.granule_rows
        for granule in range(first // rows, (first + scores.shape[0] - 1) // rows + 1):
            start, stop = max(first, granule * rows), min(first + scores.shape[0], (granule + 1) * rows)
            left = min(max(whole[granule][0], low), high)
            right = max(min(whole[granule][1], high), left)
            part = scores[start - first : stop - first]
            pieces = [
                self._all_masked(part[:, begin - low : end - low], mask, start, begin, end)
                if hidden
                else part[:, begin - low : end - low]
                for begin, end, hidden in ((low, left, True), (left, right, False), (right, high, True))
                if begin < end
            ]
            parts.append(jnp.concatenate(pieces, axis=1))
        return jnp.concatenate(parts, axis=0)

    def _all_masked(self, scores, mask, first, low, high):
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
        shape, at = self.shape, self.at
        self.at.offset[0] = 0.0
        self._write_query_flags(in_sink=True)
        self._clear()

        def visit_text(unit, _):
            keys, values = (buffer[self.head & 1, unit] for buffer in (at.text_key, at.text_value))
            self._attend_online(keys, values, lambda scores: scores)
            return 0

        def visit(index, _):
            item = self._item(index)
            granules = granules_of(item)
            self.copies.start_item(item, self.head, slot)
            self.copies.wait_granules(granules, slot)
            if shape.ends_sink:
                pl.when(does_end_sink(item) == 1)(lambda: self._write_query_flags(in_sink=False))
            units = granules * shape.key_units
            if TAIL in shape.bodies:
                units = jnp.where(body_of(item) == TAIL, shape.tail_rows // shape.unit, units)
            lax.fori_loop(0, units, lambda unit, _: self._visit_unit(item, unit, slot), 0)
            return 0

        if shape.text_units:
            lax.fori_loop(0, shape.text_units, visit_text, 0)
        lax.fori_loop(0, self.item_count, visit, 0)

    def _visit_unit(self, item, unit, slot):
        shape = self.shape

        def masked(scores):
            if not shape.masked:
                return scores
            body = body_of(item)
            is_whole = ((body != PARTIAL) & (body < shape.first_edge)).astype(jnp.int32)
            granule, place = lax.div(unit, shape.key_units), lax.rem(unit, shape.key_units)
            first = (start_of(item) + granule) * shape.granule_rows
            first += jnp.where(self.temporal, place, place * shape.unit) if shape.any_temporal else place * shape.unit
            seen = self._in_band_or_sink(first)
            return self._masked(scores, lambda *at: seen(*at) | (is_whole > 0), 0, 0, shape.query_rows)

        held = self.copies.skipped(item) * shape.key_units + unit
        self._attend_online(self.at.key[slot, held], self.at.value[slot, held], masked)
        return 0

    def _attend_online(self, keys, values, masked) -> None:
        """Adds a few keys to the sums, with running maxima."""
        at = self.at
        scores = masked(self._dot(keys, at.query[...], _KEYS_BY_QUERIES))
        old = at.maximum[...]
        peak = jnp.maximum(old, scores.max(axis=0, keepdims=True))
        decay, weights = jnp.exp2(old - peak), jnp.exp2(scores - peak[0:1])
        at.maximum[...] = peak
        at.total[...] = at.total[...] * decay + weights.reshape(keys.shape[0] // 8, 8, -1).sum(axis=0)
        added = self._dot(self._own_lanes(values), weights.astype(self.shape.dtype), _OVER_KEYS)
        at.weighted[...] = at.weighted[...] * decay[0:1] + added

    def _write_output(self) -> None:
        shape, at = self.shape, self.at
        slot = self.query_slot
        # the last block of a head has waited for the slot of the first block of the next
        pl.when((self.program >= 2) & (self.block > 0))(lambda: self.copies.wait_output(slot))
        total = at.total[...].sum(axis=0, keepdims=True)
        output = (at.weighted[...] * (1.0 / total)).astype(shape.dtype)
        # a tile has room for two heads of 64: whole tiles are turned quickest, and the reader takes the head's own half
        output = jnp.concatenate([output] * shape.query_heads_per_lanes, axis=0).T
        at.output[slot] = output.reshape(shape.query_granules * shape.query_units, shape.unit, shape.lanes)
        # a last block that was moved back writes rows of the one before it again
        pl.when((self.block == shape.query_blocks - 1) & (self.program >= 1))(lambda: self.copies.wait_output(1 - slot))
        self.copies.start_output(self.head, self.block, slot)

        @pl.when(self.program + 1 == self.programs)
        def _():
            self.copies.wait_output(slot)

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
    """Runs the kernel; returns (batch * output units, unit, output lanes)."""
    return pl.pallas_call(
        functools.partial(run_query_block, shape),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(Tables._fields),
            grid=(shape.batch * shape.heads, shape.query_blocks),
            in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * len(Inputs._fields),
            out_specs=pl.BlockSpec(memory_space=pl.ANY),
            scratch_shapes=list(scratch_shapes(shape)),
        ),
        out_shape=jax.ShapeDtypeStruct(
            (shape.batch * shape.output_place.total_units, shape.unit, output_lanes), shape.dtype
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"),
            vmem_limit_bytes=100 * 2**20,
            disable_bounds_checks=True,
        ),
        interpret=interpret,
        name="block_sparse_attention",
    )(*tables, *inputs)
