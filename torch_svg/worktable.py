"""Work tables: which blocks of keys a block of queries visits, and with which body of the kernel.

The video lies in memory as ``[frames, rows per frame]``, each frame padded to whole units of ``unit`` rows. A granule
is ``unit * frames`` consecutive positions of a head's own order: for a spatial head that many consecutive rows, for a
temporal head the strided block ``[frames, unit]``. Both are the same amount of work, so one kernel serves both.

In either order a query keeps one interval of keys, ``low .. high``, and perhaps a sink, so the kernel needs no
arithmetic on frames and places: the intervals are data, and the table says where they cut a granule. Numpy only.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import numpy as np

from .grid import TokenGrid
from .pattern import Pattern, Plan

# bodies of the kernel, as numbered in an item
PARTIAL, TAIL, FIRST_FULL = 0, 1, 2

# a granule on its own, masked on both sides, costs about as much as so many of an edge body (v6e schedules: 6)
_PARTIAL_COST = 4
# columns of queries that an edge body leaves out come in whole tiles of the matrix unit
_COLUMN_TILE = 256
_LANES = 128


@dataclass(frozen=True)
class Blocks:
    """Sizes that a kernel is built with.

    Args:
        unit: Rows of a frame that stay together, a multiple of 16 (one bf16 tile).
        query_granules: Granules in a query block.
        full_granules: Granules of the mask-free bodies, descending, the last one 1.
        edge_granules: Granules of a body for the slanted edge of a band; 0 for none.
        rounded: Round granules that the band cuts in or out instead of masking them (inexact).
    """

    unit: int
    query_granules: int
    full_granules: tuple[int, ...]
    edge_granules: int = 0
    rounded: bool = False

    def __post_init__(self):
        if self.unit < 1 or self.unit % 16:
            raise ValueError(f"unit must be a positive multiple of 16 rows, got {self.unit}")
        if self.query_granules < 1 or self.edge_granules < 0:
            raise ValueError(f"a query block needs at least one granule, got {self}")
        if (
            not self.full_granules
            or self.full_granules[-1] != 1
            or list(self.full_granules) != sorted(set(self.full_granules), reverse=True)
        ):
            raise ValueError(f"full_granules must descend to 1, got {self.full_granules}")


@dataclass(frozen=True)
class Layout:
    """The video as the kernel sees it: whole units per frame. Text is no part of it: every query sees all of it."""

    grid: TokenGrid
    unit: int

    @property
    def frames(self) -> int:
        return self.grid.frames

    @property
    def frame_rows(self) -> int:
        return -(-self.grid.tokens_per_frame // self.unit) * self.unit

    @property
    def granule_rows(self) -> int:
        return self.unit * self.frames

    @property
    def granules(self) -> int:
        """Granules of the video."""
        return self.frame_rows // self.unit

    @property
    def rows(self) -> int:
        return self.frames * self.frame_rows

    @property
    def sink_tail_rows(self) -> int:
        """Rows of frame 0 in its last granule where frame 0 does not end with one, else 0."""
        return self.frame_rows % self.granule_rows


@dataclass(frozen=True)
class Item:
    """One visit: ``granules`` granules from ``start`` on, done by ``body``."""

    start: int
    granules: int
    body: int
    # granules are consecutive memory rows even in a temporal head
    spatial: bool = False
    # of an edge body that has more granules: these are its last ones, not its first
    at_end: bool = False
    # from this item on, keys of frame 0 are no longer seen (they were the sink)
    ends_sink: bool = False


@dataclass(frozen=True)
class Edge:
    """A body for granules that one side of the band cuts.

    Args:
        first: Its first granule, counted from where a pattern's edge begins.
        columns: Per granule the [first, last) query columns that it computes.
        whole: Per granule the [first, last) columns that see all of it, whatever the block and pattern: no mask there.
    """

    first: int
    columns: tuple[tuple[int, int], ...]
    whole: tuple[tuple[int, int], ...]


@dataclass(frozen=True, eq=False)
class WorkTable:
    """The work of a plan.

    ``items[offsets[pattern, block] : offsets[pattern, block] + counts[pattern, block]]`` are the visits of a query
    block, encoded by ``encode``; identical lists are stored once.
    """

    plan: Plan
    blocks: Blocks
    layout: Layout
    items: np.ndarray
    offsets: np.ndarray
    counts: np.ndarray
    # the bodies of either edge of the band
    left_edges: tuple[Edge, ...]
    right_edges: tuple[Edge, ...]

    @property
    def query_blocks(self) -> int:
        return self.counts.shape[1]

    @property
    def query_rows(self) -> int:
        return self.blocks.query_granules * self.layout.granule_rows

    @property
    def first_edge(self) -> int:
        return FIRST_FULL + len(self.blocks.full_granules)

    @property
    def tail_rows(self) -> int:
        """Rows that the tail body computes."""
        return tail_granules(self.layout, self.blocks) * self.layout.granule_rows + self.layout.sink_tail_rows

    @property
    def bodies(self) -> frozenset[int]:
        """The bodies that any item uses."""
        return frozenset(decode(item).body for item in self.items)

    @property
    def item_granules(self) -> int:
        """Granules of fast memory that the largest item needs."""
        return max(self.body_granules(decode(item)) for item in self.items)

    @property
    def clipped(self) -> bool:
        """Whether any item has fewer granules than its edge body, which then hides the others."""
        return any(item.granules < self.body_granules(item) for item in map(decode, self.items))

    def body_granules(self, item: Item) -> int:
        """Granules that an item's body computes, hidden ones included."""
        return len(self.edge(item.body).columns) if item.body >= self.first_edge else item.granules

    @property
    def starts(self) -> list[int]:
        return [self.block_start(block) for block in range(self.query_blocks)]

    def block_start(self, block: int) -> int:
        """First granule of a query block; the last block is moved back to end with the video."""
        return min(block * self.blocks.query_granules, self.layout.granules - self.blocks.query_granules)

    def items_of(self, pattern: int, block: int) -> list[Item]:
        offset = self.offsets[pattern, block]
        return [decode(item) for item in self.items[offset : offset + self.counts[pattern, block]]]

    def edge(self, body: int) -> Edge:
        return (self.left_edges + self.right_edges)[body - self.first_edge]

    def pairs_of(self, item: Item) -> int:
        """Query-key pairs that an item's body computes, kept or not."""
        rows = self.layout.granule_rows
        if item.body == TAIL:
            return self.tail_rows * self.query_rows
        if item.body >= self.first_edge:
            return sum(stop - start for start, stop in self.edge(item.body).columns) * rows
        return item.granules * rows * self.query_rows

    def executions(self, pattern: int) -> dict[str, int]:
        """How often a head of this pattern runs each body; ``partial`` counts granules, the others items."""
        count: dict[str, int] = {}
        for block in range(self.query_blocks):
            for item in self.items_of(pattern, block):
                name = self.body_name(item.body)
                count[name] = count.get(name, 0) + (item.granules if item.body == PARTIAL else 1)
        return count

    def body_name(self, body: int) -> str:
        if body < FIRST_FULL:
            return ("partial", "tail")[body]
        if body < self.first_edge:
            return f"full_{self.blocks.full_granules[body - FIRST_FULL]}"
        edge = body - self.first_edge
        lefts = len(self.left_edges)
        return f"left_{edge}" if edge < lefts else f"right_{edge - lefts}"


def encode(item: Item) -> int:
    flags = item.at_end << 7 | item.spatial << 1 | item.ends_sink
    return item.start << 15 | item.granules << 8 | item.body << 2 | flags


def decode(code: int) -> Item:
    code = int(code)
    flags = (bool(read(code)) for read in (is_spatial, is_at_end, does_end_sink))
    return Item(start_of(code), granules_of(code), body_of(code), *flags)


# the fields of an encoded item: an int, or a traced scalar in a kernel
def start_of(code):
    return code >> 15


def granules_of(code):
    return code >> 8 & 127


def is_at_end(code):
    return code >> 7 & 1


def body_of(code):
    return code >> 2 & 31


def is_spatial(code):
    return code >> 1 & 1


def does_end_sink(code):
    return code & 1


def coordinate_bounds(pattern: Pattern, layout: Layout) -> tuple[np.ndarray, np.ndarray]:
    """The band of every query, as the first and last key coordinate that it keeps.

    A coordinate is a place in the head's own order of the padded video: frame-major row for a spatial head,
    ``place * frames + frame`` for a temporal one. Padded queries get the bounds of the frame's last token.

    Returns:
        Two int32 arrays (frames * frame_rows,), indexed by the query's own coordinate.
    """
    grid = layout.grid
    tokens, places, frames, padded = grid.video_tokens, grid.tokens_per_frame, grid.frames, layout.frame_rows
    coordinate = np.arange(frames * padded, dtype=np.int64)
    if pattern.half_width is None:
        return np.zeros(len(coordinate), np.int32), np.full(len(coordinate), len(coordinate), np.int32)
    if pattern.order == "temporal":
        position = np.minimum(coordinate // frames, places - 1) * frames + coordinate % frames
    else:
        position = coordinate // padded * places + np.minimum(coordinate % padded, places - 1)
    bounds = np.maximum(position - pattern.half_width, 0), np.minimum(position + pattern.half_width, tokens - 1)
    if pattern.order == "spatial":
        bounds = tuple(bound // places * padded + bound % places for bound in bounds)
    return tuple(bound.astype(np.int32) for bound in bounds)


def sink_prefix(pattern: Pattern, layout: Layout) -> int:
    """Coordinates below this are kept by every query, beside the band."""
    if pattern.half_width is None or pattern.sink == "none":
        return 0
    if pattern.order == "spatial":
        return layout.frame_rows
    return layout.grid.tokens_per_frame if pattern.sink == "svg" else 0


def has_spatial_sink(pattern: Pattern) -> bool:
    """Whether frame 0 is visited in memory order by a head that orders its other keys differently."""
    return pattern.half_width is not None and pattern.order == "temporal" and pattern.sink == "first_frame"


def block_bounds(
    pattern: Pattern, layout: Layout, query_granules: int, starts: list[int]
) -> tuple[np.ndarray, np.ndarray]:
    """``coordinate_bounds`` of the queries of every block, in the kernel's row order: two (blocks, query rows)."""
    order = granule_order(pattern, layout)
    places = np.concatenate([granule * layout.granule_rows + order for granule in range(query_granules)])
    places = np.asarray(starts)[:, None] * layout.granule_rows + places[None]
    low, high = coordinate_bounds(pattern, layout)
    return low[places], high[places]


def granule_order(pattern: Pattern, layout: Layout) -> np.ndarray:
    """(granule_rows,): the coordinate within a granule of each row, as the kernel holds it in fast memory."""
    row = np.arange(layout.granule_rows)
    return row if pattern.order == "spatial" else row % layout.unit * layout.frames + row // layout.unit


def tail_granules(layout: Layout, blocks: Blocks) -> int:
    """Whole granules of frame 0 that the tail body takes along with the rows behind them: what is left of frame 0 after
    the largest bodies, since a body costs a good part of its time whatever its size."""
    return layout.frame_rows // layout.granule_rows % blocks.full_granules[0]


@functools.lru_cache(maxsize=64)
def work_table(plan: Plan, blocks: Blocks) -> WorkTable:
    """The work table of a plan for a kernel built with ``blocks``.

    Raises:
        ValueError: A query block is larger than the video.
    """
    layout = Layout(plan.grid, blocks.unit)
    if blocks.query_granules > layout.granules:
        raise ValueError(f"a query block of {blocks.query_granules} granules exceeds the {layout.granules} of {layout}")
    starts = [
        min(start, layout.granules - blocks.query_granules)
        for start in range(0, layout.granules, blocks.query_granules)
    ]
    cuts = [_Cuts(pattern, layout, blocks, starts) for pattern in plan.patterns]
    edges: dict[str, tuple[Edge, ...]] = {"left": (), "right": ()}
    if blocks.edge_granules and not blocks.rounded:
        edges = {side: _edge_bodies(cuts, blocks, side) for side in edges}
    flat: list[int] = []
    known: dict[tuple[int, ...], int] = {}
    offsets = np.zeros((len(cuts), len(starts)), np.int32)
    counts = np.zeros_like(offsets)
    for index, cut in enumerate(cuts):
        for block in range(len(starts)):
            row = tuple(encode(item) for item in _block_items(cut, block, blocks, edges))
            if row not in known:
                known[row] = len(flat)
                flat.extend(row)
            offsets[index, block], counts[index, block] = known[row], len(row)
    return WorkTable(plan, blocks, layout, np.asarray(flat, np.int32), offsets, counts, edges["left"], edges["right"])


def tile_density(plan: Plan, blocks: Blocks, pattern: int) -> float:
    """Query-key pairs that the kernel computes for the video of one head, kept or masked, over all video pairs."""
    table = work_table(plan, blocks)
    pairs = sum(table.pairs_of(item) for block in range(table.query_blocks) for item in table.items_of(pattern, block))
    return pairs / plan.grid.video_tokens**2


class _Cuts:
    """How the bands of a pattern's query blocks cut the granules; arrays are (query blocks, granules)."""

    def __init__(self, pattern: Pattern, layout: Layout, blocks: Blocks, starts: list[int]):
        self.pattern, self.layout, self.starts = pattern, layout, starts
        self.prefix = sink_prefix(pattern, layout)
        rows = layout.granule_rows
        # bounds of the block's queries in the kernel's row order: (query blocks, query rows)
        self.low, self.high = block_bounds(pattern, layout, blocks.query_granules, starts)
        first = np.arange(layout.granules) * rows
        last = first + rows - 1
        self.in_sink, self.whole_sink = first < self.prefix, last < self.prefix
        self.band = (last >= self.low.min(1)[:, None]) & (first <= self.high.max(1)[:, None])
        # no query of the block is beyond this side of its band
        whole_low = first >= self.low.max(1)[:, None]
        whole_high = last <= self.high.min(1)[:, None]
        self.full = self.band & whole_low & whole_high | self.whole_sink
        only_low = self.band & whole_high & ~whole_low & ~self.in_sink
        only_high = self.band & whole_low & ~whole_high & ~self.in_sink
        # granules that one side of the band cuts, and where they begin relative to the query block
        self.edge = {"left": only_low, "right": only_high}
        self.edge_base = {side: self._base(cut) for side, cut in self.edge.items()}

    def _base(self, cut: np.ndarray) -> int | None:
        blocks, granules = np.nonzero(cut)
        return int((granules - np.asarray(self.starts)[blocks]).min()) if len(blocks) else None

    def kept_share(self) -> np.ndarray:
        """Share of a granule's pairs that the queries of a block keep."""
        rows = self.layout.granule_rows
        shares = np.zeros(self.band.shape)
        for granule in range(self.layout.granules):
            first, last = granule * rows, granule * rows + rows - 1
            in_band = np.minimum(self.high, last) - np.maximum(self.low, first) + 1
            shares[:, granule] = np.clip(in_band, 0, None).mean(1) / rows
        return shares

    def visible_columns(self, block: int, granule: int, side: str) -> tuple[int, int]:
        rows = self.layout.granule_rows
        if side == "left":
            seen = np.flatnonzero(self.low[block] < (granule + 1) * rows)
        else:
            seen = np.flatnonzero(self.high[block] >= granule * rows)
        stop = -(-(int(seen[-1]) + 1) // _COLUMN_TILE) * _COLUMN_TILE
        return int(seen[0]) // _COLUMN_TILE * _COLUMN_TILE, min(stop, self.low.shape[1])

    def whole_columns(self, block: int, granule: int, side: str) -> tuple[int, int]:
        """The whole lane tiles of columns, from the inner side of the band on, that see all of a granule."""
        first, rows = granule * self.layout.granule_rows, self.layout.granule_rows
        if side == "left":
            cut = np.flatnonzero(self.low[block] > first)
            return 0, int(cut[0]) // _LANES * _LANES if len(cut) else self.low.shape[1]
        cut = np.flatnonzero(self.high[block] < first + rows - 1)
        return -(-(int(cut[-1]) + 1) // _LANES) * _LANES if len(cut) else 0, self.low.shape[1]


def _edge_bodies(cuts: list[_Cuts], blocks: Blocks, side: str) -> tuple[Edge, ...]:
    """The bodies of one side, made so that they fit every pattern and query block."""
    needs: dict[int, tuple[int, int]] = {}
    for cut in cuts:
        for block, granule in np.argwhere(cut.edge[side]):
            step = int(granule) - cut.starts[block] - cut.edge_base[side]
            columns = cut.visible_columns(block, int(granule), side)
            old = needs.get(step, columns)
            needs[step] = min(old[0], columns[0]), max(old[1], columns[1])
    if not needs:
        return ()
    length = max(needs) + 1
    query_rows = cuts[0].low.shape[1]
    whole = [(0, query_rows)] * length
    # a granule of the edge in one block or pattern may be whole in another
    for cut in cuts:
        for block in np.flatnonzero(cut.edge[side].any(1)):
            begin = cut.starts[block] + cut.edge_base[side]
            for step in range(length):
                granule = begin + step
                if not 0 <= granule < len(cut.in_sink):
                    continue
                if cut.full[block, granule] and not cut.in_sink[granule]:
                    needs[step] = (0, query_rows)
                low, high = cut.whole_columns(block, granule, side)
                whole[step] = max(whole[step][0], low), min(whole[step][1], high)
    columns = [needs.get(step, (0, query_rows)) for step in range(length)]
    pieces = np.array_split(np.arange(length), -(-length // blocks.edge_granules))
    cuts_of = ((int(piece[0]), int(piece[-1]) + 1) for piece in pieces)
    return tuple(Edge(first, tuple(columns[first:stop]), tuple(whole[first:stop])) for first, stop in cuts_of)


def _block_items(cut: _Cuts, block: int, blocks: Blocks, edges: dict[str, tuple[Edge, ...]]) -> list[Item]:
    layout = cut.layout
    if cut.pattern.half_width is None:
        return _full_items(0, layout.granules, blocks)
    sink: list[Item] = []
    whole, straddling = layout.frame_rows // layout.granule_rows, layout.sink_tail_rows > 0
    with_tail = tail_granules(layout, blocks)
    if has_spatial_sink(cut.pattern):
        sink = _full_items(0, whole - with_tail if straddling else whole, blocks, spatial=True)
        if straddling:
            sink.append(Item(whole - with_tail, with_tail + 1, TAIL, spatial=True))
    full = cut.full[block].copy()
    if blocks.rounded:
        full |= cut.kept_share()[block] >= 0.5
        rest = cut.in_sink & ~full
    else:
        rest = (cut.band[block] | cut.in_sink) & ~full
    # rows of a temporal granule are not in the order of its places: a prefix that ends in one needs the mask
    if (
        cut.pattern.order == "spatial"
        and cut.prefix == layout.frame_rows
        and straddling
        and rest[whole]
        and (blocks.rounded or not cut.band[block, whole])
    ):
        full[whole - with_tail : whole] = rest[whole] = False
        sink.append(Item(whole - with_tail, with_tail + 1, TAIL))
    band: list[Item] = []
    first_body = FIRST_FULL + len(blocks.full_granules)
    for side, bodies in edges.items():
        band += _edge_items(cut, block, full, rest, bodies, side, first_body)
        first_body += len(bodies)
    # whole granules first: the running maximum settles on them
    band = [item for start, length in _runs(full) for item in _full_items(start, length, blocks)] + band
    limit = max(blocks.full_granules[0], blocks.edge_granules)
    for start, length in _runs(rest):
        band += [Item(at, min(limit, start + length - at), PARTIAL) for at in range(start, start + length, limit)]
    if has_spatial_sink(cut.pattern) and band:
        band[0] = replace(band[0], ends_sink=True)
    return sink + band


def _edge_items(cut, block, full, rest, bodies, side, first_body) -> list[Item]:
    """Edge bodies where they fit, or fit but for one end; what they cover is taken out of ``full`` and ``rest``."""
    items: list[Item] = []
    if cut.edge_base[side] is None:
        return items
    query_rows = cut.low.shape[1]
    cuttable = cut.edge[side][block] & rest
    for number, edge in enumerate(bodies):
        length = len(edge.columns)
        first = cut.starts[block] + cut.edge_base[side] + edge.first
        inside = [step for step in range(length) if 0 <= first + step < len(rest)]
        fits, wanted = np.zeros(length, bool), np.zeros(length, bool)
        for step in inside:
            granule = first + step
            unseen = not full[granule] and not rest[granule]
            whole = full[granule] and not cut.in_sink[granule] and edge.columns[step] == (0, query_rows)
            wanted[step] = cuttable[granule]
            fits[step] = wanted[step] or unseen or whole
        begin, stop = _longest_run(fits)
        # a body hides granules at one of its ends only
        if (begin and stop < length) or _PARTIAL_COST * wanted[begin:stop].sum() < length:
            continue
        full[first + begin : first + stop] = rest[first + begin : first + stop] = False
        items.append(Item(first + begin, stop - begin, first_body + number, at_end=begin > 0))
    return items


def _longest_run(flags: np.ndarray) -> tuple[int, int]:
    """[first, last) of the longest stretch of true flags; (0, 0) if there is none."""
    start, length = max(_runs(flags), key=lambda run: run[1], default=(0, 0))
    return start, start + length


def _full_items(start: int, length: int, blocks: Blocks, spatial: bool = False) -> list[Item]:
    items = []
    for number, size in enumerate(blocks.full_granules):
        while length >= size:
            items.append(Item(start, size, FIRST_FULL + number, spatial))
            start, length = start + size, length - size
    return items


def _runs(flags: np.ndarray) -> list[tuple[int, int]]:
    """(start, length) of every stretch of true flags."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], flags, [False]]).astype(np.int8)))
    return [(int(start), int(stop - start)) for start, stop in zip(edges[::2], edges[1::2], strict=True)]
