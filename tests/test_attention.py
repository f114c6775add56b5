"""The front door: which implementation runs where, what the custom ops promise, and what they refuse."""

import pytest
import torch
from numerics import assert_close

from torch_svg import attention
from torch_svg.grid import TokenGrid
from torch_svg.kernels.reference import reference_attention, reference_dense
from torch_svg.pattern import sparse_plan
from torch_svg.routing import probe_errors, sample_rows

GRID = TokenGrid(3, 5, 7, text_tokens=6)
PLAN = sparse_plan(GRID, 0.5)


def tensors(batch=2, heads=2, head_dim=16, tokens=GRID.tokens):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(batch, tokens, heads, head_dim, generator=generator) for _ in range(3)]


KINDS = torch.tensor([[0, 1], [2, 0]])
LENGTHS = torch.tensor([6, 2])


@pytest.mark.parametrize("implementation", [None, "xla", "pallas_interpret"])
def test_every_implementation_equals_the_reference(implementation, xla_device):
    query, key, value = tensors()
    expected = reference_attention(query, key, value, KINDS, LENGTHS, plan=PLAN)
    actual = attention.sparse_video_attention(
        *(x.to(xla_device) for x in (query, key, value, KINDS, LENGTHS)), plan=PLAN, implementation=implementation
    ).cpu()
    for row, length in enumerate(LENGTHS):
        # rows of padded text mean nothing
        rows = GRID.video_tokens + int(length)
        assert_close(f"row {row}", actual[row, :rows], expected[row, :rows], 1e-5)
    dense = attention.dense_attention(
        query[:, :40].to(xla_device), key.to(xla_device), value.to(xla_device), (LENGTHS + 20).to(xla_device),
        implementation=implementation,
    ).cpu()
    assert_close("dense", dense, reference_dense(query[:, :40], key, value, LENGTHS + 20), 1e-5)


def test_the_probe_kernel_equals_the_probe(xla_device):
    query, key, value = tensors()
    rows = sample_rows(GRID, 20)
    expected = probe_errors(query, key, value, LENGTHS, plan=PLAN, rows=rows, scale=0.25)
    actual = attention.probe_patterns(
        *(x.to(xla_device) for x in (query, key, value, LENGTHS)), plan=PLAN, rows=rows, scale=0.25,
        implementation="pallas_interpret",
    ).cpu()
    assert_close("probe errors", actual, expected, 1e-4)


def test_the_device_chooses_and_a_name_that_cannot_run_is_refused(xla_device):
    choose = attention.choose_implementation
    assert choose(torch.device("cpu")) == "reference"
    assert choose(torch.device("xla")) == "xla"
    with pytest.raises(ValueError, match="XLA device"):
        choose(torch.device("cpu"), "pallas")
    with pytest.raises(ValueError, match="needs a TPU"):
        choose(torch.device("xla"), "pallas")
    with pytest.raises(ValueError, match="must be None or one of"):
        choose(torch.device("cpu"), "cuda")
    from torch_svg import bridge

    with bridge.lowering_for("tpu"):
        assert choose(torch.device("xla")) == "pallas"
        with pytest.raises(ValueError, match="XLA:CPU"):
            choose(torch.device("xla"), "pallas_interpret")


def test_custom_ops_keep_their_promises():
    query, key, value = tensors()
    name = attention.plan_name(PLAN)
    torch.library.opcheck(
        torch.ops.torch_svg.sparse_attention,
        (query, key, value, KINDS.int(), None, name, 0.25, "reference"),
        test_utils=("test_schema", "test_faketensor"),
    )
    torch.library.opcheck(
        torch.ops.torch_svg.dense_attention,
        (query, key, value, None, 0.25, "reference"),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_meta_tensors_and_compile():
    query, key, value = (x.to("meta") for x in tensors())
    out = attention.sparse_video_attention(query, key, value, KINDS.to("meta"), plan=PLAN)
    assert out.shape == query.shape and out.device.type == "meta"

    name = attention.plan_name(PLAN)

    @torch.compile(backend="eager", fullgraph=True)
    def compiled(query, key, value, kinds):
        return torch.ops.torch_svg.sparse_attention(
            query, key, value, kinds, None, name, 0.25, "reference"
        )

    query, key, value = tensors()
    expected = torch.ops.torch_svg.sparse_attention(query, key, value, KINDS.int(), None, name, 0.25, "reference")
    assert torch.equal(compiled(query, key, value, KINDS.int()), expected)


def test_openxla_compiles_the_op_in_one_graph(xla_device):
    query, key, value = tensors()
    name = attention.plan_name(PLAN)

    def attend(query, key, value, kinds):
        scaled = query * 2
        return torch.ops.torch_svg.sparse_attention(scaled, key, value, kinds, None, name, 0.25, "xla") + 1

    compiled = torch.compile(attend, backend="openxla", fullgraph=True)
    with torch.no_grad():
        out = compiled(*(x.to(xla_device) for x in (query, key, value, KINDS.int()))).cpu()
    expected = reference_attention(query * 2, key, value, KINDS, plan=PLAN, scale=0.25) + 1
    assert_close("output", out, expected, 1e-5)


def test_shapes_that_do_not_fit_are_refused():
    query, key, value = tensors()
    with pytest.raises(ValueError, match="one shape"):
        attention.sparse_video_attention(query, key[:, :5], value, KINDS, plan=PLAN)
    with pytest.raises(ValueError, match="111"):
        attention.sparse_video_attention(query[:, :9], key[:, :9], value[:, :9], KINDS, plan=PLAN)
    with pytest.raises(ValueError, match=r"kinds must be \(batch, heads\)"):
        attention.sparse_video_attention(query, key, value, KINDS[:1], plan=PLAN)
    with pytest.raises(ValueError, match="integers"):
        attention.sparse_video_attention(query, key, value, KINDS.float(), plan=PLAN)
    with pytest.raises(ValueError, match="dense attention needs"):
        attention.dense_attention(query, key[..., :4], value)


def test_gradients_flow_through_the_reference():
    query, key, value = (x.requires_grad_() for x in tensors())
    attention.sparse_video_attention(query, key, value, KINDS, plan=PLAN).square().sum().backward()
    assert all(torch.isfinite(x.grad).all() and x.grad.abs().sum() > 0 for x in (query, key, value))
