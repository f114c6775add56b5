"""What is static about a run of the block-sparse kernel, its operands, and its fast memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from ..worktable import FIRST_FULL, PARTIAL, Edge

LANES = 128
# rows of a unit of text
TEXT_UNIT = 16


@dataclass(frozen=True)
class Place:
    """Where the video lies in an array.

    Args:
        total_units: Units of one batch row.
        start_units: Units before the video.
    """

    total_units: int
    start_units: int = 0


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
        frame_units: Units in one frame.
        query_place, key_place, output_place: Where the video's units lie in the arrays.
        item_granules: Granules of the largest item.
        full_granules: Sizes of the mask-free bodies.
        left_edges, right_edges: The edge bodies, see ``WorkTable``.
        clipped: Whether any item has fewer granules than its edge body.
        bodies: The bodies that are used; others are not compiled.
        tail_rows: Rows that the tail body computes.
        text_units: Units of text, of 16 rows, that every query sees beside its items.
        any_temporal: Whether any pattern is temporal.
        any_prefix: Whether any pattern keeps a prefix of its coordinates beside the band.
        ends_sink: Whether any item does.
        keys_flagged: Whether the video's key flags come from memory; else they are the constants of unpadded frames.
        scale: Factor on the query, base-2 logits.
        dtype: Of query, key, value and output.
        online: Online softmax everywhere instead of a fixed offset.
        unit_copies: Copy a temporal head's units one by one: for Pallas' checking interpreter, which has no copies
            through the reshaped views that do it at once.
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
    frame_units: int
    query_place: Place
    key_place: Place
    output_place: Place
    item_granules: int
    full_granules: tuple[int, ...]
    left_edges: tuple[Edge, ...]
    right_edges: tuple[Edge, ...]
    clipped: bool
    bodies: frozenset
    tail_rows: int
    text_units: int
    any_temporal: bool
    any_prefix: bool
    ends_sink: bool
    keys_flagged: bool
    scale: float
    dtype: jnp.dtype
    online: bool
    unit_copies: bool = False

    @property
    def head_lanes(self) -> int:
        """Lanes of a tile that are one head's own."""
        return self.lanes // self.query_heads_per_lanes

    @property
    def wide_lanes(self) -> int:
        """Lanes of a key in fast memory: the head's tile and the flags."""
        return self.lanes + LANES

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
    def edges(self) -> tuple[Edge, ...]:
        """The edge bodies, in the order of their numbers."""
        return self.left_edges + self.right_edges

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
    """Arrays in slow memory: query, key, value and flags (units of all batch rows, unit, lanes), flags laid out as the
    keys; text (batch, text units, 16, lanes). What the shape has no use for is small."""

    query: object
    key: object
    value: object
    flags: object
    text_key: object
    text_value: object
    text_flags: object
    bounds: object


class Scratch(NamedTuple):
    """Fast memory of a kernel; two slots where copies overlap with work."""

    query_in: object
    query: object
    key: object
    value: object
    text_key: object
    text_value: object
    output: object
    bounds: object
    # (8, query rows): distance of the sublane's key from either end of a query's band
    from_low: object
    to_high: object
    # (8, query rows) sums and running maxima, (head lanes, query rows) weighted values, both f32
    total: object
    maximum: object
    weighted: object
    slot: object
    offset: object
    key_arrived: object
    value_arrived: object
    text_arrived: object
    query_arrived: object
    bounds_arrived: object
    output_left: object


def scratch_shapes(shape: KernelShape) -> Scratch:
    units, item_units = shape.query_granules * shape.query_units, shape.item_granules * shape.key_units
    rows, wide = shape.query_rows, shape.wide_lanes
    bound_rows = rows if shape.masked else LANES
    bound_lanes = -(-bound_rows // LANES) * LANES
    sums = (8, rows)
    return Scratch(
        query_in=pltpu.VMEM((2, units, shape.unit, shape.lanes), shape.dtype),
        query=pltpu.VMEM((rows, wide), shape.dtype),
        key=pltpu.VMEM((2, item_units, shape.unit, wide), shape.dtype),
        value=pltpu.VMEM((2, item_units, shape.unit, shape.lanes), shape.dtype),
        text_key=pltpu.VMEM((2, max(1, shape.text_units), TEXT_UNIT, shape.wide_lanes), shape.dtype),
        text_value=pltpu.VMEM((2, max(1, shape.text_units), TEXT_UNIT, shape.lanes), shape.dtype),
        output=pltpu.VMEM((2, units, shape.unit, shape.lanes), shape.dtype),
        bounds=pltpu.VMEM((2, 8, bound_lanes), jnp.int32),
        from_low=pltpu.VMEM((8, bound_rows), jnp.int32),
        to_high=pltpu.VMEM((8, bound_rows), jnp.int32),
        total=pltpu.VMEM(sums, jnp.float32),
        maximum=pltpu.VMEM(sums, jnp.float32),
        weighted=pltpu.VMEM((shape.head_lanes, rows), jnp.float32),
        slot=pltpu.SMEM((1,), jnp.int32),
        offset=pltpu.SMEM((1,), jnp.float32),
        key_arrived=pltpu.SemaphoreType.DMA((2,)),
        value_arrived=pltpu.SemaphoreType.DMA((2,)),
        text_arrived=pltpu.SemaphoreType.DMA((2,)),
        query_arrived=pltpu.SemaphoreType.DMA((2,)),
        bounds_arrived=pltpu.SemaphoreType.DMA((2,)),
        output_left=pltpu.SemaphoreType.DMA((2,)),
    )
