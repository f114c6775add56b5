"""Rows moved by the Pallas kernel, interpreted, against numpy's indexing."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_svg.kernels.rows import move_rows


def check(given_rows, first, rows, lanes, halves=False, dtype="bfloat16"):
    x = np.random.default_rng(0).standard_normal((2, given_rows, lanes)).astype(np.float32)
    x = np.asarray(jnp.asarray(x, dtype))
    got = np.asarray(move_rows(jnp.asarray(x), first, rows, halves=halves, interpret=True))
    if halves:
        x = np.where(np.arange(lanes // 2) % 128 < 64, x[..., : lanes // 2], x[..., lanes // 2 :])
    assert got.shape == (2, rows, x.shape[2]) and got.dtype == x.dtype
    known = np.arange(rows)[(np.arange(rows) + first >= 0) & (np.arange(rows) + first < given_rows)]
    np.testing.assert_array_equal(got[:, known], x[:, known + first])
    return len(known)


@pytest.mark.parametrize(
    "given_rows,first,rows,lanes,halves,dtype",
    [
        (1300, 226, 1074, 256, False, "bfloat16"),  # a text in front is dropped
        (1074, -226, 1300, 256, True, "bfloat16"),  # room for it, and heads of 64 in pairs
        (2000, 515, 1400, 128, False, "float32"),  # more than a block
        (700, 0, 700, 512, True, "float32"),
        (90, 3, 50, 384, False, "bfloat16"),
    ],
)
def test_rows_move_and_pairs_join(given_rows, first, rows, lanes, halves, dtype):
    assert check(given_rows, first, rows, lanes, halves, dtype) > 0


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 1200), st.integers(-600, 600), st.integers(1, 1200), st.booleans())
def test_any_rows_from_anywhere(given_rows, first, rows, halves):
    check(given_rows, first, rows, 256, halves)
