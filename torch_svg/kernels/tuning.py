"""Block sizes of the kernels, by chip, head_dim and grid.

Entries of ``tuned_blocks`` come from the compiler's schedule. A grid without one takes the sizes of the nearest entry
for its chip, head_dim and frames, fitted to the grid; where there is none, a rule.
"""

from __future__ import annotations

import functools
import math
import os
from dataclasses import dataclass

from ..grid import TokenGrid
from ..worktable import Blocks
from . import tuned_blocks

# what kernels are built for where no chip is named and none is known
DEFAULT_CHIP = "v6e"

# a granule that is too small feeds the matrix unit badly, one that is too large cuts the band coarsely
_GRANULE_ROWS = 384
_LEAST_GRANULE_ROWS = 160
# the matrix unit takes keys in tiles of this many rows
_KEY_TILE = 256


@dataclass(frozen=True)
class Limits:
    """Most rows of a query block, a mask-free body and an edge body.

    Larger blocks feed the matrix unit better and repeat less. The instruction memory limits them, since bodies are
    straight-line code, and a chip with a smaller matrix unit needs more instructions for the same block.
    """

    query: int
    full: int
    edge: int
    # what a query block costs beside its pairs, as rows: read off v6e schedules of 2016 and 3024 rows
    per_block: int = 110


_LIMITS = {"v6e": Limits(3100, 2100, 1700), "v4": Limits(700, 700, 400)}
_SMALL_UNIT_LIMITS = Limits(1100, 1100, 700)
# an online softmax needs half as much code again
_ONLINE_LIMITS = {"v6e": Limits(2100, 2100, 1400, 300)}


def limits_of(chip: str) -> Limits:
    """Bounds of a chip's blocks; what is not known is taken for a chip with a small matrix unit."""
    return _LIMITS.get(chip, _SMALL_UNIT_LIMITS)


def blocks_for(grid: TokenGrid, head_dim: int = 128, chip: str | None = None) -> Blocks:
    """Block sizes for a grid; see ``choose``."""
    return choose(grid, head_dim, chip or chip_here())[0]


@functools.lru_cache(maxsize=256)
def choose(grid: TokenGrid, head_dim: int, chip: str) -> tuple[Blocks, str]:
    """Block sizes and where they come from.

    Args:
        grid: The token grid.
        head_dim: Channels of a head.
        chip: "v6e", "v5e", "v5p", "v4", ...

    Returns:
        The sizes, and "tuned", "nearest: ..." or "rule".
    """
    table = tuned_blocks.TABLE
    exact = table.get((chip, head_dim, grid.frames, grid.tokens_per_frame))
    if exact:
        return Blocks(*exact), "tuned"
    # other frames make other granules: sizes of 21 frames gave a kernel of five times the code at 33
    near = [key for key in table if key[:3] == (chip, head_dim, grid.frames)]
    if not near:
        return rule(grid, chip), "rule"

    def distance(key):
        return abs(math.log(key[3] / grid.tokens_per_frame))

    key = min(near, key=distance)
    return _fitted(table[key], key[2], grid, limits_of(chip)), f"nearest: {key[2]} frames of {key[3]} tokens"


def chip_here() -> str:
    """The chip that a TPU VM says it has, else the default: kernels are also built where there is no TPU."""
    name = os.environ.get("TPU_ACCELERATOR_TYPE", "").split("-")[0]
    return {"v5litepod": "v5e"}.get(name, name) or DEFAULT_CHIP


def _fitted(sizes: tuple, frames: int, grid: TokenGrid, limits: Limits = _LIMITS["v6e"]) -> Blocks:
    """The sizes of another grid's entry, kept in rows as nearly as this grid allows, within the rule's limits: a tuned
    kernel may fill the instruction memory to the brim, and this grid's has more code where its frames are padded."""
    unit, query, fulls, edge = sizes
    own_unit = _unit(grid, unit * frames)
    granules = -(-grid.tokens_per_frame // own_unit)
    own_query = min(granules, max(1, round(query * unit * frames / (own_unit * grid.frames))))
    rows = own_unit * grid.frames
    most, most_edge = max(1, limits.full // rows), max(1, limits.edge // rows)
    scaled = {min(most, max(1, round(full * own_query / query))) for full in (query, *fulls)}
    own_edge = min(own_query, most_edge, max(1, round(edge * own_query / query)))
    return Blocks(
        own_unit,
        own_query,
        tuple(sorted(scaled | {1}, reverse=True)),
        own_edge if edge and granules > 4 * own_query else 0,
    )


def online_blocks_for(grid: TokenGrid, chip: str | None = None) -> Blocks:
    """Block sizes for a kernel with an online softmax throughout."""
    return rule(grid, chip or chip_here(), online=True)


@functools.lru_cache(maxsize=256)
def rule(grid: TokenGrid, chip: str = DEFAULT_CHIP, online: bool = False) -> Blocks:
    """Block sizes where nothing was tuned."""
    limits = limits_of(chip)
    if online:
        limits = _ONLINE_LIMITS.get(chip, limits)
    unit = _unit(grid)
    granules = math.ceil(grid.tokens_per_frame / unit)
    rows = unit * grid.frames
    query = _query_granules(granules, rows, limits)
    full = min(_full_granules(rows, limits), granules)
    edge = max(1, limits.edge // rows) if granules > 3 * query else 0
    return Blocks(unit, query, tuple(sorted({full, max(1, full // 2), max(1, full // 4), 1}, reverse=True)), edge)


@functools.lru_cache(maxsize=256)
def small_blocks_for(grid: TokenGrid) -> Blocks:
    """Block sizes for ordinary operations on a CPU: little to skip over, one granule at a time."""
    return Blocks(_unit(grid, 320), 1, (1,))


def _query_granules(granules: int, rows: int, limits: Limits) -> int:
    """Granules of a query block: large, and few rows computed twice by a last block that is moved back."""

    def cost(size):
        return math.ceil(granules / size) * size * (1 + limits.per_block / (size * rows))

    return min(range(1, min(granules, max(1, limits.query // rows)) + 1), key=cost)


def _full_granules(rows: int, limits: Limits) -> int:
    """Granules of the largest mask-free body: many rows, that nearly fill their last tile of keys."""

    def cost(size):
        # the scores' product pays by rows and the values' by tiles; a body has some latency of its own
        tiles = math.ceil(size * rows / _KEY_TILE) * _KEY_TILE
        return (2 * size * rows + tiles + 3 * limits.per_block) / (size * rows)

    return min(range(1, max(1, limits.full // rows) + 1), key=cost)


def _unit(grid: TokenGrid, granule_rows: int = _GRANULE_ROWS) -> int:
    """Rows of a frame per granule: enough for a granule of good size, without much padding of the frame."""
    places = grid.tokens_per_frame
    least = math.ceil(places / 16) * 16
    units = range(16, max(16, granule_rows // grid.frames) + 1, 16)
    best = max(unit for unit in units if least % unit == 0)
    if best * grid.frames < _LEAST_GRANULE_ROWS:
        best = max(unit for unit in units if math.ceil(places / unit) * unit <= max(least, 1.02 * places))
    return best
