"""Which keys a query keeps: Sparse VideoGen's masks as predicates on positions.

A head orders the video's tokens either frame by frame (spatial) or place by place (temporal). In its own order every
mask is the same: a band around the diagonal, and perhaps a sink. Numpy only; nothing here has a device.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from .grid import TokenGrid

ORDERS = ("spatial", "temporal")
SINKS = ("none", "first_frame", "svg")

# head kinds of a standard plan: indices into its patterns
SPATIAL, TEMPORAL, DENSE = 0, 1, 2


@dataclass(frozen=True)
class Pattern:
    """The keys that a head keeps.

    The position of video token (frame t, place s) is ``t * tokens_per_frame + s`` in a spatial head and
    ``s * frames + t`` in a temporal head. A video key is kept when it lies within ``half_width`` positions of the
    query or belongs to the sink. Text keys are kept by every query, and text queries keep every key.

    Args:
        order: ``"spatial"`` or ``"temporal"``.
        half_width: Band half width in positions, ``None`` for a dense head.
        sink: Keys that every query keeps. ``"first_frame"``: frame 0, in either order. ``"svg"``: the first
            ``tokens_per_frame`` positions of the head's own order, as Sparse VideoGen's code does it (arXiv
            2502.01776); for a temporal head these are some places of every frame, not frame 0. ``"none"``: no sink.

    Raises:
        ValueError: An unknown order or sink, or a negative half width.
    """

    order: str
    half_width: int | None
    sink: str = "first_frame"

    def __post_init__(self):
        if self.order not in ORDERS:
            raise ValueError(f"a pattern's order must be one of {ORDERS}, got {self.order!r}")
        if self.sink not in SINKS:
            raise ValueError(f"a pattern's sink must be one of {SINKS}, got {self.sink!r}")
        if self.half_width is not None and (not isinstance(self.half_width, int) or self.half_width < 0):
            raise ValueError(f"half_width must be None or a whole number of positions >= 0, got {self.half_width!r}")


@dataclass(frozen=True)
class Plan:
    """What the heads of one attention call may compute: a grid and a short list of patterns. Static and hashable.

    A head kind is an index into ``patterns``.

    Args:
        grid: The token grid.
        patterns: At least one pattern.

    Raises:
        ValueError: There is no pattern.
    """

    grid: TokenGrid
    patterns: tuple[Pattern, ...]

    def __post_init__(self):
        if not isinstance(self.patterns, tuple) or not self.patterns:
            raise ValueError(f"a plan needs a tuple of at least one pattern, got {self.patterns!r}")


def sparse_plan(grid: TokenGrid, density: float, sink: str = "first_frame") -> Plan:
    """The standard plan: kinds ``SPATIAL``, ``TEMPORAL`` and ``DENSE``, the sparse ones at one pair density.

    Args:
        grid: The token grid.
        density: Share of the video's query-key pairs that a sparse head computes, sink included, in (0, 1].
        sink: See ``Pattern``.

    Returns:
        The plan.

    Raises:
        ValueError: The density is outside (0, 1], or the sink alone takes more.
    """
    spatial, temporal = (Pattern(order, half_width_for_density(grid, order, density, sink), sink) for order in ORDERS)
    return Plan(grid, (spatial, temporal, Pattern("spatial", None, "none")))


def positions(grid: TokenGrid, order: str) -> np.ndarray:
    """(video_tokens,) int64: the position, in a head of this order, of every video token in memory order."""
    token = np.arange(grid.video_tokens, dtype=np.int64)
    if order == "spatial":
        return token
    frame, place = np.divmod(token, grid.tokens_per_frame)
    return place * grid.frames + frame


def keep(pattern: Pattern, grid: TokenGrid, query_rows, key_rows) -> np.ndarray:
    """The definition of a mask, by brute force.

    Args:
        pattern: The pattern.
        grid: The token grid.
        query_rows, key_rows: Memory rows of the sequence, text included: integers in [0, grid.tokens).

    Returns:
        (len(query_rows), len(key_rows)) bool: whether the query keeps the key. Padded text is not known here.
    """
    query_rows = np.asarray(query_rows, dtype=np.int64)[:, None]
    key_rows = np.asarray(key_rows, dtype=np.int64)[None, :]
    if pattern.half_width is None:
        return np.ones((query_rows.shape[0], key_rows.shape[1]), dtype=bool)
    query_token, query_is_text = _video_token(grid, query_rows)
    key_token, key_is_text = _video_token(grid, key_rows)
    position = positions(grid, pattern.order)
    query_position, key_position = position[query_token], position[key_token]
    kept = np.abs(query_position - key_position) <= pattern.half_width
    if pattern.sink == "first_frame":
        kept |= key_token < grid.tokens_per_frame
    elif pattern.sink == "svg":
        kept |= key_position < grid.tokens_per_frame
    return kept | query_is_text | key_is_text


def pair_density(pattern: Pattern, grid: TokenGrid) -> float:
    """Share of the video's query-key pairs that a head of this pattern computes; exact, in closed form."""
    return _kept_pairs(pattern, grid) / grid.video_tokens**2


def half_width_for_density(grid: TokenGrid, order: str, density: float, sink: str = "first_frame") -> int:
    """The widest half width whose pair density, sink included, is at most ``density``.

    Args:
        grid: The token grid.
        order: ``"spatial"`` or ``"temporal"``.
        density: In (0, 1].
        sink: See ``Pattern``.

    Returns:
        The half width in positions.

    Raises:
        ValueError: The density is outside (0, 1], or even half width 0 is denser.
    """
    if not 0 < density <= 1:
        raise ValueError(f"density is the computed share of query-key pairs, in (0, 1], got {density!r}")
    budget = int(np.floor(density * grid.video_tokens**2 * (1 + 1e-12)))
    narrowest = _kept_pairs(Pattern(order, 0, sink), grid)
    if narrowest > budget:
        raise ValueError(
            f"density {density} is less than what the sink {sink!r} of {grid.frames} x {grid.height} x {grid.width} "
            f"takes with an empty band ({narrowest / grid.video_tokens**2:.4f}): raise the density or use sink='none'"
        )
    low, high = 0, grid.video_tokens - 1
    while low < high:
        middle = (low + high + 1) // 2
        if _kept_pairs(Pattern(order, middle, sink), grid) <= budget:
            low = middle
        else:
            high = middle - 1
    return low


@functools.lru_cache(maxsize=256)
def _kept_pairs(pattern: Pattern, grid: TokenGrid) -> int:
    tokens = grid.video_tokens
    if pattern.half_width is None:
        return tokens**2
    width = min(pattern.half_width, tokens - 1)
    band = tokens * (2 * width + 1) - width * (width + 1)
    if pattern.sink == "none":
        return band
    sink = np.arange(grid.tokens_per_frame, dtype=np.int64)
    if pattern.sink == "first_frame" and pattern.order == "temporal":
        sink = sink * grid.frames
    # pairs of a sink key that the band holds already
    shared = np.minimum(sink, width) + np.minimum(tokens - 1 - sink, width) + 1
    return band + tokens * len(sink) - int(shared.sum())


def _video_token(grid: TokenGrid, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The video token of every memory row (0 where the row is text), and whether the row is text."""
    token = rows - grid.video_start
    is_text = (token < 0) | (token >= grid.video_tokens)
    return np.where(is_text, 0, token), is_text
