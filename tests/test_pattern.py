"""Patterns against their definition, and work tables against patterns: what is skipped must be what is dropped."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_svg.grid import TokenGrid
from torch_svg.kernels.tuning import blocks_for
from torch_svg.pattern import DENSE, Pattern, Plan, half_width_for_density, keep, pair_density, positions, sparse_plan
from torch_svg.worktable import (
    FIRST_FULL,
    PARTIAL,
    TAIL,
    Blocks,
    Item,
    block_bounds,
    decode,
    encode,
    granule_order,
    has_spatial_sink,
    sink_prefix,
    tile_density,
    work_table,
)

grids = st.builds(TokenGrid, st.integers(1, 6), st.integers(1, 9), st.integers(1, 9))
sinks = st.sampled_from(["none", "first_frame", "svg"])
orders = st.sampled_from(["spatial", "temporal"])


def slow_keep(pattern, grid, query, key):
    """One pair, written out from the paper's words."""
    query, key = query - grid.video_start, key - grid.video_start
    if not (0 <= query < grid.video_tokens and 0 <= key < grid.video_tokens) or pattern.half_width is None:
        return True
    places, frames = grid.height * grid.width, grid.frames

    def position(token):
        frame, place = token // places, token % places
        return frame * places + place if pattern.order == "spatial" else place * frames + frame

    if pattern.sink == "first_frame" and key // places == 0:
        return True
    if pattern.sink == "svg" and position(key) < places:
        return True
    return abs(position(query) - position(key)) <= pattern.half_width


@settings(max_examples=40, deadline=None)
@given(grids, orders, sinks, st.integers(0, 40), st.integers(0, 5), st.booleans())
def test_keep_is_the_definition(grid, order, sink, half_width, text, text_first):
    grid = TokenGrid(grid.frames, grid.height, grid.width, text, text_first)
    pattern = Pattern(order, half_width, sink)
    rows = np.unique(np.linspace(0, grid.tokens - 1, 15).astype(int))
    expected = [[slow_keep(pattern, grid, q, k) for k in range(grid.tokens)] for q in rows]
    np.testing.assert_array_equal(keep(pattern, grid, rows, np.arange(grid.tokens)), expected)


@settings(max_examples=60, deadline=None)
@given(grids, orders, sinks, st.integers(0, 600))
def test_pair_density_counts_the_kept_pairs(grid, order, sink, half_width):
    pattern = Pattern(order, half_width, sink)
    rows = np.arange(grid.video_tokens)
    assert pair_density(pattern, grid) == pytest.approx(keep(pattern, grid, rows, rows).mean(), abs=1e-12)


@settings(max_examples=60, deadline=None)
@given(grids, orders, sinks, st.floats(0.01, 1.0))
def test_half_width_is_the_widest_that_fits(grid, order, sink, density):
    if pair_density(Pattern(order, 0, sink), grid) > density:
        with pytest.raises(ValueError, match="raise the density"):
            half_width_for_density(grid, order, density, sink)
        return
    half_width = half_width_for_density(grid, order, density, sink)
    assert pair_density(Pattern(order, half_width, sink), grid) <= density + 1e-9
    if half_width < grid.video_tokens - 1:
        assert pair_density(Pattern(order, half_width + 1, sink), grid) > density


def test_half_width_at_720p_is_quick_and_exact():
    grid = TokenGrid(21, 45, 80)
    for pattern in sparse_plan(grid, 0.3).patterns[:DENSE]:
        assert 0.2999 < pair_density(pattern, grid) <= 0.3


@pytest.mark.parametrize("density", [0.0, -0.1, 1.01])
def test_density_outside_its_range_is_refused(density):
    with pytest.raises(ValueError, match=r"in \(0, 1\]"):
        sparse_plan(TokenGrid(3, 4, 4), density)


@pytest.mark.parametrize("wrong", [{"order": "diagonal"}, {"sink": "last_frame"}, {"half_width": -1}])
def test_pattern_refuses_what_it_does_not_know(wrong):
    with pytest.raises(ValueError, match=str(next(iter(wrong.values())))):
        Pattern(**{"order": "spatial", "half_width": 3, "sink": "none", **wrong})


def test_position_orders_are_permutations():
    grid = TokenGrid(3, 5, 7)
    for order in ("spatial", "temporal"):
        assert sorted(positions(grid, order)) == list(range(grid.video_tokens))


@given(st.builds(Item, st.integers(0, 60000), st.integers(1, 127), st.integers(0, 31), *[st.booleans()] * 3))
def test_items_survive_their_encoding(item):
    assert decode(encode(item)) == item and encode(item) < 2**31


def executed(table, index, block):
    """(query rows, layout rows) number of times that the kernel adds each pair, padding and text included.

    Follows the kernel's rules, not the pattern's: bodies mask one side, both sides or nothing.
    """
    layout, pattern = table.layout, table.plan.patterns[index]
    rows, unit = layout.granule_rows, layout.unit
    low, high = block_bounds(pattern, layout, table.blocks.query_granules, [table.block_start(block)])
    low, high = low[0][:, None], high[0][:, None]
    order, prefix = granule_order(pattern, layout), sink_prefix(pattern, layout)
    count = np.zeros((table.query_rows, layout.rows), int)
    sees_first_frame = True
    for item in table.items_of(index, block):
        sees_first_frame &= not item.ends_sink
        if item.ends_sink:
            assert has_spatial_sink(pattern)
        for number, granule in enumerate(range(item.start, item.start + item.granules)):
            local = np.arange(rows)
            if pattern.order == "spatial" or item.spatial:
                memory, coordinate = granule * rows + local, granule * rows + local
            else:
                frame, place = local // unit, local % unit
                memory = frame * layout.frame_rows + granule * unit + place
                coordinate = granule * rows + order
            if item.body == TAIL:
                kept = rows if number + 1 < item.granules else layout.sink_tail_rows
                count[:, memory[:kept]] += 1
            elif FIRST_FULL <= item.body < table.first_edge:
                visible = np.ones((1, rows), bool)
                if not sees_first_frame and has_spatial_sink(pattern):
                    visible = memory[None] >= layout.frame_rows
                count[:, memory] += visible
            else:
                assert not item.spatial, "a masked body needs the head's own order"
                if item.body == PARTIAL:
                    visible = ((coordinate >= low) & (coordinate <= high)) | (coordinate < prefix)
                else:
                    left = item.body - table.first_edge < len(table.left_edges)
                    visible = coordinate >= low if left else coordinate <= high
                    edge = table.edge(item.body)
                    if item.at_end:
                        number += len(edge.columns) - item.granules
                    start, stop = edge.whole[number]
                    unmasked = (np.arange(table.query_rows) >= start) & (np.arange(table.query_rows) < stop)
                    visible = visible | unmasked[:, None]
                    start, stop = edge.columns[number]
                    visible = visible & (np.arange(table.query_rows) >= start)[:, None]
                    visible &= (np.arange(table.query_rows) < stop)[:, None]
                if not sees_first_frame:
                    visible = visible & (memory >= layout.frame_rows)
                count[:, memory] += visible
    return count


def check_table(plan, blocks):
    table = work_table(plan, blocks)
    layout, grid = table.layout, plan.grid
    padded = np.full(layout.rows, -1)
    video = np.arange(layout.frames * layout.frame_rows)
    place = video % layout.frame_rows
    padded[video] = np.where(
        place < grid.tokens_per_frame,
        grid.video_start + video // layout.frame_rows * grid.tokens_per_frame + place,
        -1,
    )
    real = np.flatnonzero(padded >= 0)
    for index, pattern in enumerate(plan.patterns):
        seen_queries = set()
        for block in range(table.query_blocks):
            count = executed(table, index, block)
            local = np.concatenate(
                [
                    (table.block_start(block) + granule) * layout.granule_rows + granule_order(pattern, layout)
                    for granule in range(blocks.query_granules)
                ]
            )
            if pattern.order == "temporal":
                frame, at = local % layout.frames, local // layout.frames
                query_memory = frame * layout.frame_rows + at
            else:
                query_memory = local
            tokens = padded[query_memory]
            is_token = tokens >= 0
            seen_queries |= set(tokens[is_token].tolist())
            expected = keep(pattern, grid, tokens[is_token], padded[real])
            np.testing.assert_array_equal(count[is_token][:, real], expected, err_msg=f"{pattern} block {block}")
            assert (count[:, real].sum(1) > 0).all(), "a padded query that sees no key would divide by zero"
        assert len(seen_queries) == grid.video_tokens
    return table


@settings(max_examples=60, deadline=None)
@given(
    st.builds(
        TokenGrid, st.integers(1, 5), st.integers(1, 14), st.integers(1, 14), st.sampled_from([0, 7, 40]), st.booleans()
    ),
    st.lists(st.tuples(orders, st.integers(0, 900), sinks), min_size=1, max_size=3),
    st.integers(1, 4),
    st.sampled_from([(1,), (2, 1), (4, 3, 1)]),
    st.integers(0, 3),
)
def test_table_computes_exactly_the_kept_pairs(grid, patterns, query_granules, full, edge):
    granules = -(-grid.tokens_per_frame // 16)
    plan = Plan(grid, (*(Pattern(*pattern) for pattern in patterns), Pattern("spatial", None, "none")))
    check_table(plan, Blocks(16, min(query_granules, granules), full, edge))


@settings(max_examples=40, deadline=None)
@given(
    st.integers(2, 5), st.integers(2, 12), sinks, st.integers(0, 900), st.integers(1, 3),
    st.sampled_from([(1,), (3, 1), (4, 2, 1)]), st.integers(0, 2),
)  # fmt: skip
def test_table_of_whole_frames_that_end_within_a_granule(frames, units, sink, half_width, query_granules, full, edge):
    # frame 0 of unpadded frames, in either order: the tail body once took a temporal head's prefix for frame 0
    grid = TokenGrid(frames, units, 16)
    plan = Plan(grid, tuple(Pattern(order, half_width, sink) for order in ("spatial", "temporal")))
    check_table(plan, Blocks(16, min(query_granules, units), full, edge))


@pytest.mark.parametrize("grid", [TokenGrid(3, 20, 26), TokenGrid(5, 32, 32, 7), TokenGrid(4, 30, 45, 226, True)])
def test_table_of_a_larger_grid_uses_edges_and_stays_exact(grid):
    plan = sparse_plan(grid, 0.5)
    table = check_table(plan, Blocks(16, 4, (4, 2, 1), 3))
    assert any(body >= table.first_edge for body in table.bodies)


@settings(max_examples=25, deadline=None)
@given(st.builds(TokenGrid, st.integers(1, 33), st.integers(1, 30), st.integers(1, 30)), st.floats(0.45, 1.0), sinks)
def test_chosen_blocks_fit_any_grid(grid, density, sink):
    try:
        plan = sparse_plan(grid, density, sink)
    except ValueError:
        plan = sparse_plan(grid, 1.0, sink)
    table = work_table(plan, blocks_for(grid))
    assert (table.counts > 0).all()


def test_tile_density_is_close_to_the_pair_density_at_720p():
    grid = TokenGrid(21, 45, 80)
    plan = sparse_plan(grid, 0.34)
    for index in range(DENSE):
        share = tile_density(plan, Blocks(16, 6, (6, 3, 1), 4), index)
        assert pair_density(plan.patterns[index], grid) <= share < 0.37
    assert tile_density(plan, Blocks(16, 9, (7, 3, 1), 5), DENSE) == 1.0


def test_rounded_table_has_no_masked_body_and_keeps_the_budget():
    grid = TokenGrid(21, 45, 80)
    plan = sparse_plan(grid, 0.34)
    blocks = Blocks(16, 6, (6, 3, 1), 4, rounded=True)
    table = work_table(plan, blocks)
    assert all(body in (TAIL, *range(FIRST_FULL, table.first_edge)) for body in table.bodies)
    for index in range(DENSE):
        assert tile_density(plan, blocks, index) == pytest.approx(0.34, abs=0.025)
