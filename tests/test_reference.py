"""The reference against torch's own attention with the mask written out."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.numerics import assert_close
from torch_svg.grid import TokenGrid
from torch_svg.kernels import reference
from torch_svg.kernels.reference import reference_attention, reference_dense
from torch_svg.pattern import keep, sparse_plan


def tensors(grid, batch=2, heads=3, head_dim=16, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, grid.tokens, heads, head_dim)
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype) for _ in range(3))


@pytest.mark.parametrize("chunk", [2**24, 4000])
@pytest.mark.parametrize("grid", [TokenGrid(3, 5, 6), TokenGrid(2, 4, 5, 7), TokenGrid(2, 4, 5, 7, True)])
def test_equals_scaled_dot_product_attention_under_the_mask(grid, chunk, monkeypatch):
    monkeypatch.setattr(reference, "_MAX_SCORES", chunk)
    plan = sparse_plan(grid, 0.7)
    query, key, value = tensors(grid)
    kinds = torch.tensor([[0, 1, 2], [1, 0, 1]])
    got = reference_attention(query, key, value, kinds, plan=plan, scale=0.3)
    rows = np.arange(grid.tokens)
    masks = torch.from_numpy(np.stack([keep(pattern, grid, rows, rows) for pattern in plan.patterns]))
    want = F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (query, key, value)), attn_mask=masks[kinds], scale=0.3
    ).transpose(1, 2)
    assert_close("output", got, want, 1e-6)


@pytest.mark.parametrize("text_first", [False, True])
def test_padded_text_gets_no_weight(text_first):
    grid = TokenGrid(2, 4, 5, 7, text_first)
    plan = sparse_plan(grid, 0.8)
    query, key, value = tensors(grid)
    kinds, lengths = torch.tensor([[0, 1, 2], [1, 2, 0]]), torch.tensor([3, 0])
    got = reference_attention(query, key, value, kinds, lengths, plan=plan)
    poisoned = value.clone()
    for row, length in enumerate(lengths):
        poisoned[row, grid.text_start + length : grid.text_start + 7] = 1e6
    again = reference_attention(query, key, poisoned, kinds, lengths, plan=plan)
    video = slice(grid.video_start, grid.video_start + grid.video_tokens)
    assert_close("video rows", again[:, video], got[:, video], 1e-6)


def test_dense_with_key_lengths_and_its_own_query_length():
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(2, 37, 3, 16, generator=generator)
    key, value = (torch.randn(2, 11, 3, 16, generator=generator) for _ in range(2))
    got = reference_dense(query, key, value, torch.tensor([11, 4]))
    for row, length in enumerate((11, 4)):
        want = F.scaled_dot_product_attention(
            *(x[row : row + 1].transpose(1, 2) for x in (query, key[:, :length], value[:, :length]))
        ).transpose(1, 2)
        assert_close(f"row {row}", got[row : row + 1], want, 1e-6)


def test_bf16_comes_back_as_bf16():
    grid = TokenGrid(2, 3, 4)
    query, key, value = tensors(grid, dtype=torch.bfloat16)
    assert (
        reference_attention(query, key, value, torch.zeros(2, 3), plan=sparse_plan(grid, 1.0)).dtype == torch.bfloat16
    )
