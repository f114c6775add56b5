"""The XLA implementation walks the work table and must equal the reference (XLA:CPU)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from tests.numerics import assert_close
from torch_svg.grid import TokenGrid
from torch_svg.kernels.reference import reference_attention, reference_dense
from torch_svg.kernels.xla import chunked_dense_attention, work_table_attention
from torch_svg.pattern import Pattern, Plan, sparse_plan
from torch_svg.worktable import Blocks


def arrays(*shape, seed=0, count=3):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape, dtype=np.float32) for _ in range(count)]


def compare(plan, kinds, lengths=None, head_dim=16, blocks=None, tolerance=1e-5, dtype=np.float32):
    kinds = np.asarray(kinds, np.int32)
    grid = plan.grid
    query, key, value = arrays(kinds.shape[0], grid.tokens, kinds.shape[1], head_dim)
    lengths = None if lengths is None else np.asarray(lengths, np.int32)
    inputs = [jnp.asarray(x, dtype) for x in (query, key, value)]
    got = jax.jit(work_table_attention, static_argnames=("plan", "blocks"))(
        *inputs, kinds, lengths, plan=plan, blocks=blocks
    )
    want = reference_attention(
        *(torch.from_numpy(x) for x in (query, key, value)),
        torch.from_numpy(kinds),
        None if lengths is None else torch.from_numpy(lengths),
        plan=plan,
    )
    assert got.dtype == inputs[0].dtype
    assert_close("output", got, want, tolerance)


GRIDS = [
    TokenGrid(1, 10, 10),
    TokenGrid(3, 20, 26),
    TokenGrid(21, 5, 7),
    TokenGrid(3, 13, 11, 7),
    TokenGrid(3, 13, 11, 226, True),
    TokenGrid(5, 9, 16, 226),
]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("sink", ["none", "first_frame", "svg"])
def test_three_kinds_in_one_call(grid, sink):
    density = 0.5 if grid.frames > 2 or sink == "none" else 1.0
    compare(sparse_plan(grid, density, sink), [[0, 1, 2], [1, 0, 1]])


def test_edge_bodies_and_small_blocks():
    grid = TokenGrid(3, 26, 64)
    compare(sparse_plan(grid, 0.4, "first_frame"), [[0, 1, 2]], blocks=Blocks(16, 8, (5, 2, 1), 3))
    compare(sparse_plan(grid, 0.3, "none"), [[0, 1]], blocks=Blocks(32, 4, (4, 2, 1), 3))


def test_patterns_of_several_widths():
    grid = TokenGrid(4, 12, 16)
    plan = Plan(grid, tuple(Pattern(order, width, "svg") for order in ("spatial", "temporal") for width in (40, 333)))
    compare(plan, [[0, 1, 2, 3]], blocks=Blocks(16, 3, (2, 1), 2))


@pytest.mark.parametrize("text_first", [False, True])
def test_padded_text_is_not_seen(text_first):
    grid = TokenGrid(3, 6, 7, 30, text_first)
    plan = sparse_plan(grid, 0.6)
    query, key, value = arrays(2, grid.tokens, 3, 16)
    kinds, lengths = np.asarray([[0, 1, 2], [2, 1, 0]], np.int32), np.asarray([30, 4], np.int32)
    poisoned = value.copy()
    poisoned[1, grid.text_start + 4 : grid.text_start + 30] = np.nan
    got = work_table_attention(query, key, np.nan_to_num(poisoned, nan=1e6), kinds, lengths, plan=plan)
    want = reference_attention(*map(torch.from_numpy, (query, key, value, kinds, lengths)), plan=plan)
    rows = np.r_[grid.video_start : grid.video_start + grid.video_tokens, grid.text_start : grid.text_start + 4]
    assert_close("valid rows", got[:, rows], want[:, rows], 1e-5)


def test_bf16_in_and_out():
    compare(sparse_plan(TokenGrid(3, 8, 9), 0.6), [[0, 1, 2]], dtype=jnp.bfloat16, tolerance=1e-2)


@pytest.mark.parametrize("queries,keys", [(37, 11), (2500, 1100), (5, 5)])
@pytest.mark.parametrize("with_lengths", [False, True])
def test_dense(queries, keys, with_lengths, monkeypatch):
    from torch_svg.kernels import xla

    monkeypatch.setattr(xla, "_MAX_SCORES", 2**18)
    (query,) = arrays(2, queries, 3, 16, count=1)
    key, value = arrays(2, keys, 3, 16, seed=1, count=2)
    lengths = np.asarray([keys, 3], np.int32) if with_lengths else None
    got = chunked_dense_attention(query, key, value, lengths)
    want = reference_dense(
        *map(torch.from_numpy, (query, key, value)), None if lengths is None else torch.from_numpy(lengths)
    )
    assert_close("output", got, want, 1e-5)


def test_memory_is_linear_in_tokens():
    grid = TokenGrid(9, 32, 32, 50)
    plan = sparse_plan(grid, 0.4)
    shape = jax.ShapeDtypeStruct((1, grid.tokens, 2, 16), jnp.float32)
    compiled = (
        jax.jit(work_table_attention, static_argnames="plan")
        .lower(shape, shape, shape, jax.ShapeDtypeStruct((1, 2), jnp.int32), plan=plan)
        .compile()
    )
    assert compiled.memory_analysis().temp_size_in_bytes < grid.tokens**2 * 4 / 4


def test_a_sequence_that_is_not_the_grid_is_refused():
    plan = sparse_plan(TokenGrid(3, 4, 4), 0.9)
    query, key, value = arrays(1, 47, 1, 16)
    with pytest.raises(ValueError, match="47 tokens"):
        work_table_attention(query, key, value, np.zeros((1, 1), np.int32), plan=plan)
