"""The copies between slow and fast memory of the block-sparse kernel: started early, waited for late."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..worktable import body_of, granules_of, is_at_end, is_spatial, start_of
from .kernel_shape import LANES, Inputs, KernelShape, Place, Scratch, Tables


class BlockCopies:
    """Starts and waits of one kernel's copies.

    Items and queries alternate between two slots, whatever head they belong to; a head's text stays for all of its
    query blocks, in the slot of the head's parity.
    """

    def __init__(self, shape: KernelShape, tables: Tables, inputs: Inputs, output, scratch: Scratch):
        self.shape, self.tables, self.inputs, self.output, self.at = shape, tables, inputs, output, scratch

    def _lanes_of(self, head):
        pair = lax.div(lax.rem(head, self.shape.heads), self.shape.query_heads_per_lanes)
        return pl.ds(pl.multiple_of(pair * self.shape.lanes, LANES), self.shape.lanes)

    def _batch_of(self, head):
        return lax.div(head, self.shape.heads)

    def _is_temporal(self, head):
        return self.tables.orders[self.tables.kinds[head]] == 1

    def _by_frames(self, array, place: Place, batch):
        """The video of an array as (frames, units of a frame, unit, lanes)."""
        shape = self.shape
        frames = shape.key_units
        video = pl.ds(batch * place.total_units + place.start_units, frames * shape.frame_units)
        return array.at[video].reshape(frames, shape.frame_units, *array.shape[1:])

    def _start_from_frames(self, array, place: Place, batch, unit, lanes, target, arrived) -> None:
        """Starts copying one unit of every frame to ``target`` (frames, unit, lanes)."""
        shape = self.shape
        if not shape.unit_copies:
            source = self._by_frames(array, place, batch).at[:, unit, :, lanes]
            pltpu.make_async_copy(source, target, arrived).start()
            return
        for frame in range(shape.key_units):
            first = batch * place.total_units + place.start_units + frame * shape.frame_units + unit
            pltpu.make_async_copy(array.at[first, :, lanes], target.at[frame], arrived).start()

    # --- items ---

    def skipped(self, item):
        """Granules of the item's body that are hidden before its first."""
        shape = self.shape
        if not shape.clipped:
            return 0
        body, granules = body_of(item), 0
        for number, edge in enumerate(shape.edges):
            granules = jnp.where(body == shape.first_edge + number, len(edge.columns), granules)
        return jnp.where(is_at_end(item) == 1, granules - granules_of(item), 0)

    def start_item(self, item, head, slot) -> None:
        """Starts the copies of an item's keys, values and key flags."""
        shape, inputs, at = self.shape, self.inputs, self.at
        start, granules, skipped = start_of(item), granules_of(item), self.skipped(item)
        batch, lanes = self._batch_of(head), self._lanes_of(head)
        first_unit = batch * shape.key_place.total_units + shape.key_place.start_units
        copies = [
            (inputs.key, lanes, at.key, pl.ds(0, shape.lanes), at.key_arrived),
            (inputs.value, lanes, at.value, pl.ds(0, shape.lanes), at.value_arrived),
        ]
        if shape.keys_flagged:
            copies.append((inputs.flags, pl.ds(0, LANES), at.key, pl.ds(shape.lanes, LANES), at.key_arrived))

        def copy(granule, count, in_frames):
            target = pl.ds((skipped + granule) * shape.key_units, count * shape.key_units)
            for array, lane, buffer, to, arrived in copies:
                at = buffer.at[slot, target, :, to]
                if in_frames:
                    unit = start + granule
                    self._start_from_frames(array, shape.key_place, batch, unit, lane, at, arrived.at[slot])
                    continue
                first = first_unit + (start + granule) * shape.key_units
                source = array.at[pl.ds(first, count * shape.key_units), :, lane]
                pltpu.make_async_copy(source, at, arrived.at[slot]).start()

        # the commonest sizes with as few instructions as can be
        sizes = {min(shape.full_granules[0], shape.item_granules), *(len(edge.columns) for edge in shape.edges)}

        def copy_all(in_frames):
            left = granules
            for size in sizes:
                at_once = (granules == size) & (skipped == 0)
                left = jnp.where(at_once, 0, left)

                @pl.when(at_once)
                def _(size=size):
                    for granule in range(size if in_frames else 1):
                        copy(granule, 1 if in_frames else size, in_frames)

            lax.fori_loop(0, left, lambda granule, _: (copy(granule, 1, in_frames), 0)[1], 0)

        if not shape.any_temporal:
            copy_all(False)
            return
        in_frames = self._is_temporal(head) & (is_spatial(item) == 0)
        pl.when(in_frames)(lambda: copy_all(True))
        pl.when(jnp.logical_not(in_frames))(lambda: copy_all(False))

    def wait_granules(self, granules, slot) -> None:
        """Waits for what ``start_item`` started: as many bytes, whichever way they were read."""
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

    # --- text ---

    def _text(self, head):
        shape, inputs, at = self.shape, self.inputs, self.at
        batch, lanes, slot = self._batch_of(head), self._lanes_of(head), head & 1
        pairs = [
            (inputs.text_key.at[batch, :, :, lanes], at.text_key.at[slot, :, :, pl.ds(0, shape.lanes)]),
            (inputs.text_value.at[batch, :, :, lanes], at.text_value.at[slot]),
            (inputs.text_flags.at[batch], at.text_key.at[slot, :, :, pl.ds(shape.lanes, LANES)]),
        ]
        return [pltpu.make_async_copy(source, target, at.text_arrived.at[slot]) for source, target in pairs]

    def start_text(self, head) -> None:
        for copy in self._text(head):
            copy.start()

    def wait_text(self, head) -> None:
        for copy in self._text(head):
            copy.wait()

    # --- queries and outputs ---

    def start_query(self, head, block, slot) -> None:
        """Starts the copies of a block's queries and their bounds."""
        shape, inputs, at = self.shape, self.inputs, self.at
        start, lanes, batch = self.tables.starts[block], self._lanes_of(head), self._batch_of(head)
        place = shape.query_place
        if shape.masked:
            bounds = inputs.bounds.at[self.tables.kinds[head] * shape.query_blocks + block]
            pltpu.make_async_copy(bounds, at.bounds.at[slot], at.bounds_arrived.at[slot]).start()

        def in_rows():
            first = batch * place.total_units + place.start_units + start * shape.query_units
            source = inputs.query.at[pl.ds(first, shape.query_granules * shape.query_units), :, lanes]
            pltpu.make_async_copy(source, at.query_in.at[slot], at.query_arrived.at[slot]).start()

        def in_frames():
            for granule in range(shape.query_granules):
                target = at.query_in.at[slot, pl.ds(granule * shape.query_units, shape.query_units)]
                arrived = at.query_arrived.at[slot]
                self._start_from_frames(inputs.query, place, batch, start + granule, lanes, target, arrived)

        self._either_way(head, in_rows, in_frames)

    def wait_query(self, slot) -> None:
        units = pl.ds(0, self.shape.query_granules * self.shape.query_units)
        source = self.inputs.query.at[units, :, self._lanes_of(0)]
        pltpu.make_async_copy(source, self.at.query_in.at[slot], self.at.query_arrived.at[slot]).wait()

    def wait_bounds(self, slot) -> None:
        at = self.at
        pltpu.make_async_copy(self.inputs.bounds.at[0], at.bounds.at[slot], at.bounds_arrived.at[slot]).wait()

    def start_output(self, head, block, slot) -> None:
        shape, at = self.shape, self.at
        start, batch, place = self.tables.starts[block], self._batch_of(head), shape.output_place
        head_in_row, shared = lax.rem(head, shape.heads), shape.query_heads_per_lanes
        # heads that share a tile are written apart: first all even ones, then all odd ones
        tile = lax.rem(head_in_row, shared) * -(-shape.heads // shared) + lax.div(head_in_row, shared)
        lanes = pl.ds(pl.multiple_of(tile * shape.lanes, LANES), shape.lanes)

        def in_rows():
            first = batch * place.total_units + place.start_units + start * shape.query_units
            target = self.output.at[pl.ds(first, shape.query_granules * shape.query_units), :, lanes]
            pltpu.make_async_copy(at.output.at[slot], target, at.output_left.at[slot]).start()

        def in_frames():
            # no interpreter writes through a reshaped view: one copy for each frame, which reads through one
            granules, leaving = shape.query_granules, at.output_left.at[slot]

            def copy(frame, _):
                first = batch * place.total_units + place.start_units + frame * shape.frame_units + start
                if shape.unit_copies:
                    for granule in range(granules):
                        source = at.output.at[slot, granule * shape.query_units + frame]
                        pltpu.make_async_copy(source, self.output.at[first + granule, :, lanes], leaving).start()
                    return 0
                by_granule = at.output.at[slot].reshape(granules, shape.query_units, *at.output.shape[2:])
                target = self.output.at[pl.ds(first, granules), :, lanes]
                pltpu.make_async_copy(by_granule.at[:, frame], target, leaving).start()
                return 0

            lax.fori_loop(0, shape.query_units, copy, 0)

        self._either_way(head, in_rows, in_frames)

    def wait_output(self, slot) -> None:
        units = pl.ds(0, self.shape.query_granules * self.shape.query_units)
        target = self.output.at[units, :, pl.ds(0, self.shape.lanes)]
        pltpu.make_async_copy(self.at.output.at[slot], target, self.at.output_left.at[slot]).wait()

    def _either_way(self, head, in_rows, in_frames) -> None:
        if not self.shape.any_temporal:
            in_rows()
            return
        temporal = self._is_temporal(head)
        pl.when(temporal)(in_frames)
        pl.when(jnp.logical_not(temporal))(in_rows)
