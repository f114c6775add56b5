"""Block sizes of the kernels, by chip, head_dim and grid.

Entries of ``tuned_blocks`` come from the compiler's schedule. A grid without one takes the sizes of the nearest entry
for its chip and head_dim, fitted to the grid; where there is none, a rule.
"""

from __future__ import annotations

import functools
import math
import os

from ..grid import TokenGrid
from ..worktable import Blocks
from . import tuned_blocks

# what kernels are built for where no chip is named and none is known
DEFAULT_CHIP = "v6e"

# a granule that is too small feeds the matrix unit badly, one that is too large cuts the band coarsely
_GRANULE_ROWS = 384
_QUERY_ROWS = 2100


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
    near = [key for key in table if key[:2] == (chip, head_dim)]
    if not near:
        return rule(grid), "rule"

    def distance(key):
        return abs(math.log(key[2] / grid.frames)) + abs(math.log(key[3] / grid.tokens_per_frame))

    key = min(near, key=distance)
    return _fitted(table[key], key[2], grid), f"nearest: {key[2]} frames of {key[3]} tokens"


def chip_here() -> str:
    """The chip that a TPU VM says it has, else the default: kernels are also built where there is no TPU."""
    name = os.environ.get("TPU_ACCELERATOR_TYPE", "").split("-")[0]
    return {"v5litepod": "v5e"}.get(name, name) or DEFAULT_CHIP


def _fitted(sizes: tuple, frames: int, grid: TokenGrid) -> Blocks:
    """The sizes of another grid's entry, kept in rows as nearly as this grid allows."""
    unit, query, fulls, edge = sizes
    own_unit = _unit(grid, unit * frames)
    granules = -(-grid.tokens_per_frame // own_unit)
    own_query = min(granules, max(1, round(query * unit * frames / (own_unit * grid.frames))))
    scaled = {max(1, round(full * own_query / query)) for full in fulls}
    own_edge = min(own_query, max(1, round(edge * own_query / query)))
    return Blocks(
        own_unit,
        own_query,
        tuple(sorted(scaled | {own_query, 1}, reverse=True)),
        own_edge if edge and granules > 4 * own_query else 0,
    )


def rule(grid: TokenGrid) -> Blocks:
    """Block sizes where nothing was tuned."""
    unit = _unit(grid)
    granules = -(-grid.tokens_per_frame // unit)
    rows = unit * grid.frames
    query = min(granules, max(1, _QUERY_ROWS // rows))
    return Blocks(unit, query, _full_sizes(query), min(query, 4) if granules > 4 * query else 0)


def _unit(grid: TokenGrid, granule_rows: int = _GRANULE_ROWS) -> int:
    """Rows of a frame per granule: enough for a granule of good size, without much padding of the frame."""
    places = grid.tokens_per_frame
    best = 16
    for unit in range(16, max(16, granule_rows // grid.frames) + 1, 16):
        padded = -(-places // unit) * unit
        if padded <= 1.02 * places or padded <= -(-places // 16) * 16:
            best = unit
    return best


def _full_sizes(query_granules: int) -> tuple[int, ...]:
    return tuple(sorted({query_granules, max(1, query_granules // 2), 1}, reverse=True))
