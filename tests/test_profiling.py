"""The probe kernel, interpreted, against the probe in torch."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from tests.numerics import assert_close
from torch_svg import routing
from torch_svg.grid import TokenGrid
from torch_svg.kernels.profiling import kept_places, probe_errors
from torch_svg.pattern import Pattern, Plan, keep, sparse_plan


def arrays(grid, batch, heads, head_dim, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((batch, grid.tokens, heads, head_dim), dtype=np.float32) for _ in range(3)]


@pytest.mark.parametrize("sink", ["none", "first_frame", "svg"])
def test_kept_places_are_the_masks(sink):
    grid = TokenGrid(5, 7, 9)
    plan = Plan(grid, (Pattern("spatial", 70, sink), Pattern("spatial", None), Pattern("temporal", 61, sink)))
    rows = routing.sample_rows(grid, 16)
    kept = kept_places(plan, rows, 128)
    place = np.arange(grid.tokens_per_frame)
    for group, index in enumerate((0, 2)):
        mask = keep(plan.patterns[index], grid, rows, np.arange(grid.tokens))
        for column in range(16):
            first, last, below = (kept[:, row, group * 16 + column, None] for row in range(3))
            seen = ((place >= first) & (place <= last)) | (place < below)
            np.testing.assert_array_equal(seen.reshape(-1), mask[column])


@pytest.mark.parametrize(
    "grid,head_dim,heads,text_lengths",
    [
        (TokenGrid(3, 10, 10), 128, 2, None),
        (TokenGrid(4, 5, 9, 7), 64, 3, [7, 2]),
        (TokenGrid(3, 6, 8, 30, True), 40, 2, None),
    ],
    ids=str,
)
def test_equals_the_probe_in_torch(grid, head_dim, heads, text_lengths):
    plan = sparse_plan(grid, 0.6)
    rows = routing.sample_rows(grid, 24)
    inputs = arrays(grid, 2, heads, head_dim)
    lengths = None if text_lengths is None else np.asarray(text_lengths, np.int32)
    got = probe_errors(*map(jnp.asarray, inputs), lengths, plan=plan, rows=rows, interpret=True)
    want = routing.probe_errors(
        *map(torch.from_numpy, inputs),
        None if lengths is None else torch.from_numpy(lengths),
        plan=plan,
        rows=rows,
        scale=head_dim**-0.5,
    )
    assert_close("errors", got, want, 1e-4)
    assert (np.asarray(got)[..., 2] == 0).all()


def test_bf16_chooses_the_same_kinds():
    grid = TokenGrid(4, 8, 8)
    plan = sparse_plan(grid, 0.5)
    rows = routing.sample_rows(grid, 16)
    inputs = arrays(grid, 1, 2, 64, seed=3)
    # head 0 looks at its own place, head 1 at its own frame
    place, frame = np.arange(grid.tokens) % 64, np.arange(grid.tokens) // 64
    rng = np.random.default_rng(4)
    for head, label in enumerate((place, frame)):
        code = rng.standard_normal((label.max() + 1, 64)).astype(np.float32) * 3
        inputs[0][0, :, head] = inputs[1][0, :, head] = code[label]
    errors = probe_errors(*(jnp.asarray(x, jnp.bfloat16) for x in inputs), plan=plan, rows=rows, interpret=True)
    kinds = routing.choose_kinds(torch.from_numpy(np.array(errors)), plan)
    assert kinds.tolist() == [[1, 0]]


@pytest.mark.parametrize("rows", [(), (5000,), tuple(range(129))])
def test_rows_that_are_not_video_queries_are_refused(rows):
    grid = TokenGrid(3, 10, 10)
    inputs = map(jnp.asarray, arrays(grid, 1, 1, 64))
    with pytest.raises(ValueError, match="memory rows of video tokens"):
        probe_errors(*inputs, plan=sparse_plan(grid, 0.6), rows=rows, interpret=True)
