"""What every family computes: dense as its default processors do, and sparse as its mask says, on CPU and XLA:CPU."""

import pytest
import torch
from family_cases import SPARSE, make_case, on_cpu_and_xla, put_on, run, sparse_config
from numerics import assert_close

from torch_svg.pattern import keep


@pytest.mark.parametrize(("name", "device"), on_cpu_and_xla())
def test_density_one_equals_the_default_processor(name, device):
    make, inputs, grid, _ = make_case(name)
    expected = run(make(), inputs)
    transformer = make()
    processor = put_on(transformer, SPARSE.replace(density=1.0))
    assert_close("output", run(transformer, inputs, device), expected, 1e-5)
    assert processor.report().grid == grid


@pytest.mark.parametrize(("name", "device"), on_cpu_and_xla())
def test_the_default_config_stays_dense_here_and_equals_the_default_processor(name, device):
    make, inputs, *_ = make_case(name)
    expected = run(make(), inputs)
    transformer = make()
    put_on(transformer)
    assert_close("output", run(transformer, inputs, device), expected, 1e-5)


@pytest.mark.parametrize(("name", "device"), on_cpu_and_xla())
def test_sparse_equals_the_familys_mask_through_the_default_processor(name, device, monkeypatch):
    make, inputs, sides, leading = make_case(name)
    config = sparse_config(sides)
    transformer = make()
    processor = put_on(transformer, config)
    sparse = run(transformer, inputs, device)
    plan, report = processor.record.plan, processor.report()
    assert config.density - 0.1 < report.sparse_pair_density <= config.density and report.kinds.max() <= 1
    # kinds of every batch row and head, in the order in which the layers ran
    kinds = iter([row for layer in processor.record.forwards[-1].kinds.values() for row in layer.cpu().long()])
    grid = plan.grid
    start = leading or grid.video_start
    rows = range(grid.video_start, grid.video_start + grid.video_tokens)
    masks = torch.stack([torch.from_numpy(keep(pattern, grid, rows, rows)) for pattern in plan.patterns])

    # the masks go in where the default processors meet torch, so neither work table nor wrapper takes part
    attention = torch.nn.functional.scaled_dot_product_attention

    def masked(query, key, value, attn_mask=None, **kwargs):
        tokens, missing = key.shape[2], key.shape[2] - query.shape[2]
        # the queries may be the generated tokens alone
        if missing in (0, start) and query.shape[2] >= grid.video_tokens:
            mask = torch.ones(*query.shape[:2], tokens, tokens, dtype=torch.bool)
            end = start + grid.video_tokens
            mask[:, :, start:end, start:end] = masks[torch.stack([next(kinds) for _ in query])]
            mask = mask[:, :, missing:]
            attn_mask = mask if attn_mask is None else mask & attn_mask
        return attention(query, key, value, attn_mask=attn_mask, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", masked)
    expected = run(make(), inputs)
    assert next(kinds, None) is None
    assert_close("output", sparse, expected, 1e-4)
