"""Block sizes of the kernels, by chip, head_dim and grid."""

from __future__ import annotations

import functools

from ..grid import TokenGrid
from ..worktable import Blocks

# a granule that is too small feeds the matrix unit badly, one that is too large cuts the band coarsely
_GRANULE_ROWS = 384
_QUERY_ROWS = 2100


@functools.lru_cache(maxsize=256)
def blocks_for(grid: TokenGrid, head_dim: int = 128) -> Blocks:
    """Block sizes for a grid, by rule."""
    unit = _unit(grid)
    granules = -(-grid.tokens_per_frame // unit)
    rows = unit * grid.frames
    query = min(granules, max(1, _QUERY_ROWS // rows))
    return Blocks(unit, query, _full_sizes(query), min(query, 4) if granules > 4 * query else 0)


def _unit(grid: TokenGrid) -> int:
    """Rows of a frame per granule: enough for a granule of good size, without much padding of the frame."""
    places = grid.tokens_per_frame
    best = 16
    for unit in range(16, max(16, _GRANULE_ROWS // grid.frames) + 1, 16):
        padded = -(-places // unit) * unit
        if padded <= 1.02 * places or padded <= -(-places // 16) * 16:
            best = unit
    return best


def _full_sizes(query_granules: int) -> tuple[int, ...]:
    return tuple(sorted({query_granules, max(1, query_granules // 2), 1}, reverse=True))
