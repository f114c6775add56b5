"""The probe: what it measures, and which head kind follows."""

import numpy as np
import torch
from numerics import assert_close

from torch_svg.grid import TokenGrid
from torch_svg.kernels.reference import reference_attention
from torch_svg.pattern import DENSE, SPATIAL, TEMPORAL, Pattern, Plan, sparse_plan
from torch_svg.routing import choose_kinds, probe_errors, sample_rows


def test_rows_cover_the_whole_clip_and_leave_the_random_state_alone():
    grid = TokenGrid(21, 45, 80, text_tokens=226, text_first=True)
    state = np.random.get_state()[1].copy()
    rows = np.asarray(sample_rows(grid, 64))
    assert (np.random.get_state()[1] == state).all()
    assert len(rows) == 64 and (np.diff(rows) > 0).all()
    assert rows.min() >= 226 and rows.max() < grid.tokens
    frames = (rows - 226) // 3600
    assert set(frames) == set(range(21))
    assert sample_rows(TokenGrid(1, 3, 5), 64) == tuple(range(15))


def test_errors_are_those_of_the_attention_that_runs():
    grid = TokenGrid(3, 5, 7, text_tokens=6, text_first=True)
    plan = sparse_plan(grid, 0.5)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, grid.tokens, 3, 16, generator=generator) for _ in range(3))
    lengths = torch.tensor([6, 2])
    rows = sample_rows(grid, 40)
    errors = probe_errors(query, key, value, lengths, plan=plan, rows=rows, scale=0.25)
    outputs = [
        reference_attention(query, key, value, torch.full((2, 3), kind), lengths, plan=plan, scale=0.25)
        for kind in (SPATIAL, TEMPORAL, DENSE)
    ]
    expected = torch.stack(
        [(output - outputs[DENSE])[:, list(rows)].square().mean(dim=(1, 3)) for output in outputs], dim=-1
    )
    assert_close("probe errors", errors, expected, 1e-5)
    assert (errors[..., DENSE] == 0).all()


def test_a_head_that_looks_at_its_frame_is_spatial_and_one_that_follows_a_place_is_temporal():
    grid = TokenGrid(8, 6, 6)
    plan = sparse_plan(grid, 0.3, sink="none")
    frame, place = np.divmod(np.arange(grid.tokens), grid.tokens_per_frame)
    same_frame, same_place = (torch.nn.functional.one_hot(torch.from_numpy(x)).float() * 6 for x in (frame, place))
    head_dim = max(same_frame.shape[1], same_place.shape[1])
    features = [torch.nn.functional.pad(x, (0, head_dim - x.shape[1])) for x in (same_frame, same_place)]
    query = torch.stack(features, dim=1)[None]
    value = torch.randn(1, grid.tokens, 2, head_dim, generator=torch.Generator().manual_seed(0))
    errors = probe_errors(query, query, value, plan=plan, rows=sample_rows(grid, 64), scale=1.0)
    assert choose_kinds(errors, plan).tolist() == [[SPATIAL, TEMPORAL]]


def test_kinds_skip_dense_patterns_wherever_they_stand():
    grid = TokenGrid(2, 2, 2)
    dense, sparse = Pattern("spatial", None, "none"), Pattern("spatial", 1, "none")
    errors = torch.tensor([[[0.0, 3.0, 2.0]]])
    assert choose_kinds(errors, Plan(grid, (dense, sparse, sparse))).item() == 2
    assert choose_kinds(errors[..., :1], Plan(grid, (dense,))).item() == 0
