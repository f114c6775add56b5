"""The Pallas kernel itself, interpreted, against the f32 reference; and compiled for TPUs that are not there."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.experimental.pallas import tpu as pltpu

from tests.numerics import assert_close
from torch_svg.grid import TokenGrid
from torch_svg.kernels.block_sparse import block_sparse_attention
from torch_svg.kernels.dense import dense_attention
from torch_svg.kernels.reference import reference_attention, reference_dense
from torch_svg.kernels.tuning import blocks_for
from torch_svg.pattern import DENSE, SPATIAL, TEMPORAL, Pattern, Plan, sparse_plan
from torch_svg.worktable import Blocks, work_table

TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}


def arrays(grid, batch, heads, head_dim, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((batch, grid.tokens, heads, head_dim), dtype=np.float32) for _ in range(3)]


def run(function, *arguments, **static):
    """An interpreted kernel is much code that runs once: it is not worth optimising."""
    lowered = jax.jit(functools.partial(function, **static)).lower(*arguments)
    return lowered.compile(compiler_options={"xla_backend_optimization_level": 0})(*arguments)


def reference(inputs, kinds, lengths, plan, dtype):
    # the reference sees the rounded inputs, so that only the kernel's own error counts
    rounded = [torch.from_numpy(np.array(jnp.asarray(x, dtype), np.float32)) for x in inputs]
    lengths = None if lengths is None else torch.from_numpy(lengths)
    return reference_attention(*rounded, torch.from_numpy(kinds), lengths, plan=plan).numpy()


def check(plan, kinds, head_dim, dtype="float32", lengths=None, inputs=None, blocks=None, interpret=True, **options):
    grid, kinds = plan.grid, np.asarray(kinds, np.int32)
    inputs = arrays(grid, kinds.shape[0], kinds.shape[1], head_dim) if inputs is None else inputs
    lengths = None if lengths is None else np.asarray(lengths, np.int32)
    arguments = [*(jnp.asarray(x, dtype) for x in inputs), jnp.asarray(kinds)]
    if lengths is not None:
        arguments.append(jnp.asarray(lengths))
    got = run(block_sparse_attention, *arguments, plan=plan, blocks=blocks, interpret=interpret, **options)
    assert got.dtype == jnp.dtype(dtype)
    want = reference(inputs, kinds, lengths, plan, dtype)
    for row in range(kinds.shape[0]):
        valid = np.ones(grid.tokens, bool)
        if lengths is not None:
            valid[grid.text_start + lengths[row] : grid.text_start + grid.text_tokens] = False
        assert_close(f"output of batch row {row}", got[row][valid], want[row][valid], TOLERANCE[dtype])
    assert np.isfinite(np.asarray(got, np.float32)).all()
    return got


@pytest.mark.parametrize(
    "grid,sink,head_dim,dtype,kinds",
    [
        (TokenGrid(1, 10, 10), "none", 128, "bfloat16", [[0, 1, 2]]),
        (TokenGrid(3, 20, 26), "first_frame", 128, "float32", [[0, 1, 2]]),
        (TokenGrid(3, 20, 26), "svg", 64, "bfloat16", [[2, 1, 0, 1]]),
        (TokenGrid(21, 5, 7), "first_frame", 64, "float32", [[0, 1, 2]]),
        (TokenGrid(3, 9, 13), "first_frame", 40, "bfloat16", [[0, 1], [2, 1]]),
    ],
    ids=str,
)
def test_three_kinds_in_one_call(grid, sink, head_dim, dtype, kinds):
    check(sparse_plan(grid, 0.6, sink), kinds, head_dim, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("grid", [TokenGrid(3, 32, 52), TokenGrid(13, 30, 45, 226, True)], ids=str)
def test_three_kinds_at_larger_sizes(grid):
    check(sparse_plan(grid, 0.4), [[0, 1, 2]], 64, "bfloat16")


@pytest.mark.parametrize(
    "grid,lengths",
    [
        (TokenGrid(3, 13, 11, 7), [7, 2]),
        (TokenGrid(3, 13, 11, 226, True), [226, 31]),
        (TokenGrid(2, 4, 8, 40), None),
    ],
    ids=str,
)
def test_joint_text(grid, lengths):
    batch = 1 if lengths is None else len(lengths)
    check(sparse_plan(grid, 0.7), [[SPATIAL, TEMPORAL, DENSE]] * batch, 64, "float32", lengths)


@pytest.mark.parametrize(
    "grid,lengths",
    [(TokenGrid(3, 4, 16, 32), [32, 5]), (TokenGrid(3, 4, 16, 16, True), [3, 16]), (TokenGrid(2, 2, 16, 1040), [1039])],
    ids=str,
)
def test_text_in_whole_units_is_read_where_it_lies(grid, lengths):
    # batch rows begin behind one another's text; more text than one piece of code takes goes through a loop
    blocks = Blocks(16, 2, (2, 1))
    check(sparse_plan(grid, 0.7), [[SPATIAL, TEMPORAL, DENSE]] * len(lengths), 64, lengths=lengths, blocks=blocks)


@pytest.mark.parametrize("softmax", ["auto", "online"])
def test_edge_bodies(softmax):
    plan = sparse_plan(TokenGrid(3, 26, 30), 0.4)
    blocks = Blocks(16, 6, (4, 2, 1), 3)
    table = work_table(plan, blocks)
    assert any(body >= table.first_edge for body in table.bodies)
    check(plan, [[SPATIAL, TEMPORAL]], 128, "float32", blocks=blocks, softmax=softmax)


def clipped_ends(table):
    """(kind, whether its edge body's first granules are the hidden ones) of all items that hide granules."""
    return {
        (kind, item.at_end)
        for kind in (SPATIAL, TEMPORAL)
        for block in range(table.query_blocks)
        for item in table.items_of(kind, block)
        if item.granules < table.body_granules(item)
    }


# whole frames, whose key flags are constants, and padded ones, whose flags come from memory
@pytest.mark.parametrize("grid", [TokenGrid(2, 8, 16), TokenGrid(2, 8, 17)], ids=str)
@pytest.mark.parametrize("softmax", ["auto", "online"])
def test_edge_bodies_of_which_one_end_is_hidden(grid, softmax):
    plan, blocks = sparse_plan(grid, 0.45, "none"), Blocks(16, 2, (2, 1), 3)
    assert clipped_ends(work_table(plan, blocks)) == {(k, end) for k in (SPATIAL, TEMPORAL) for end in (False, True)}
    check(plan, [[SPATIAL, TEMPORAL, DENSE, TEMPORAL]], 64, blocks=blocks, softmax=softmax)


def test_hidden_granules_do_not_keep_what_was_there():
    # the slot of a hidden granule held keys of another head, and these are no numbers
    plan, blocks = sparse_plan(TokenGrid(2, 8, 16), 0.45, "none"), Blocks(16, 2, (2, 1), 3)
    inputs = arrays(plan.grid, 1, 3, 128)
    for array in inputs[1:]:
        array[:, :, 1] = np.nan
    arguments = [jnp.asarray(x) for x in inputs] + [jnp.asarray([[SPATIAL, SPATIAL, TEMPORAL]], jnp.int32)]
    got = run(block_sparse_attention, *arguments, plan=plan, blocks=blocks, interpret=True)
    assert np.isnan(got[:, :, 1]).all() and np.isfinite(np.asarray(got)[:, :, [0, 2]]).all()


def test_batch_row_equals_its_own_run():
    grid = TokenGrid(3, 6, 8)
    plan, kinds = sparse_plan(grid, 0.6), np.asarray([[0, 1], [1, 2]], np.int32)
    inputs = arrays(grid, 2, 2, 128)
    both = check(plan, kinds, 128, inputs=inputs)
    alone = check(plan, kinds[1:], 128, inputs=[x[1:] for x in inputs])
    np.testing.assert_array_equal(np.asarray(both[1:]), np.asarray(alone))


@pytest.mark.parametrize("kind", [SPATIAL, TEMPORAL, DENSE])
def test_no_race_and_nothing_read_before_it_is_written(kind):
    # memory starts as NaN in this interpreter, and every copy is checked against every access
    plan = sparse_plan(TokenGrid(3, 8, 12), 0.6)
    params = pltpu.InterpretParams(detect_races=True, dma_execution_mode="on_wait", uninitialized_memory="nan")
    check(plan, [[kind, kind]], 128, blocks=Blocks(16, 4, (2, 1), 2), interpret=params)
    from jax._src.pallas.mosaic.interpret import races

    assert not races.races_found


def test_no_race_where_granules_are_hidden():
    plan, blocks = sparse_plan(TokenGrid(2, 8, 16), 0.45, "none"), Blocks(16, 2, (2, 1), 3)
    params = pltpu.InterpretParams(detect_races=True, dma_execution_mode="on_wait", uninitialized_memory="nan")
    check(plan, [[SPATIAL, TEMPORAL]], 128, blocks=blocks, interpret=params)
    from jax._src.pallas.mosaic.interpret import races

    assert not races.races_found


def adversarial():
    """(name, query factor, key change) that a fixed softmax offset alone would not survive."""

    def huge_key(key):
        key = key.copy()
        key[:, 77] *= 300
        return key

    def frame_0_far_below(key):
        return np.concatenate([key[:, :64] * -40, np.abs(key[:, 64:]) * 8], axis=1)

    return [
        ("ordinary", 1.0, lambda key: key),
        ("large scores", 60.0, lambda key: key * 60),
        ("one huge key", 10.0, huge_key),
        ("constant keys", 1.0, lambda key: np.ones_like(key) * 4),
        ("all scores equal", 0.0, lambda key: key),
        ("denormal", 1e-38, lambda key: key * 1e-3),
        (
            "frame 0 far below the rest",
            8.0,
            lambda key: np.concatenate([key[:, :64] * -40, np.abs(key[:, 64:]) * 8], 1),
        ),
    ]


@pytest.mark.parametrize("softmax", ["auto", "online"])
def test_adversarial_scales_are_finite_and_right(softmax):
    plan = sparse_plan(TokenGrid(3, 8, 8), 0.7)
    query, key, value = arrays(plan.grid, 1, 3, 64, seed=5)
    cases = adversarial()
    # one call: every case is a batch row
    inputs = [
        np.concatenate([np.abs(query) * factor if "below" in name else query * factor for name, factor, _ in cases]),
        np.concatenate([change(key) for _, _, change in cases]),
        np.concatenate([value] * len(cases)),
    ]
    check(plan, [[SPATIAL, TEMPORAL, DENSE]] * len(cases), 64, "float32", inputs=inputs, softmax=softmax)


@pytest.mark.parametrize(
    "queries,keys,head_dim,lengths",
    [(300, 77, 64, [77, 5]), (2500, 40, 128, None), (17, 900, 128, [900, 333])],
)
def test_dense_with_lengths_of_its_own(queries, keys, head_dim, lengths):
    rng = np.random.default_rng(0)
    query = rng.standard_normal((2, queries, 2, head_dim), dtype=np.float32)
    key, value = (rng.standard_normal((2, keys, 2, head_dim), dtype=np.float32) for _ in range(2))
    lengths = None if lengths is None else np.asarray(lengths, np.int32)
    arguments = [jnp.asarray(x) for x in (query, key, value, lengths) if x is not None]
    got = run(dense_attention, *arguments, interpret=True)
    want = reference_dense(
        *map(torch.from_numpy, (query, key, value)), None if lengths is None else torch.from_numpy(lengths)
    )
    assert_close("output", got, want, 1e-5)


def test_rounded_tables_run_and_differ_little():
    plan = sparse_plan(TokenGrid(3, 8, 16), 0.6)
    inputs = arrays(plan.grid, 1, 2, 64)
    kinds = jnp.asarray([[SPATIAL, TEMPORAL]], jnp.int32)
    exact, rounded = (
        run(
            block_sparse_attention,
            *map(jnp.asarray, inputs),
            kinds,
            plan=plan,
            blocks=Blocks(16, 2, (1,), 0, rounded),
            interpret=True,
        )
        for rounded in (False, True)
    )
    assert np.isfinite(rounded).all()
    difference = float(jnp.sqrt(jnp.mean((exact - rounded) ** 2)) / jnp.sqrt(jnp.mean(exact**2)))
    assert 1e-4 < difference < 0.7


@pytest.mark.parametrize("wrong", ["dtype", "tokens", "softmax", "head_dim"])
def test_bad_input_is_refused(wrong):
    plan = sparse_plan(TokenGrid(2, 4, 4), 1.0)
    shape = (1, 31 if wrong == "tokens" else 32, 1, 300 if wrong == "head_dim" else 64)
    x = jnp.zeros(shape, jnp.float16 if wrong == "dtype" else jnp.float32)
    expected = NotImplementedError if wrong == "head_dim" else ValueError
    with pytest.raises(expected, match={"dtype": "float16", "tokens": "31"}.get(wrong, wrong)):
        block_sparse_attention(
            x, x, x, jnp.zeros((1, 1), jnp.int32), plan=plan, softmax="fast" if wrong == "softmax" else "auto"
        )


def knob_plan(grid, knob=0.30):
    width = int(grid.video_tokens * (1 - np.sqrt(1 - knob)))
    sparse = (Pattern(order, width, "first_frame") for order in ("spatial", "temporal"))
    return Plan(grid, (*sparse, Pattern("spatial", None, "none")))


def flat_attention(query, key, value, kinds, *, heads, plan, blocks):
    shape = (*query.shape[:2], heads, -1)
    inputs = (x.reshape(shape) for x in (query, key, value))
    return block_sparse_attention(*inputs, kinds, plan=plan, blocks=blocks).reshape(query.shape)


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.parametrize("chip", ["v6e", "v5e"])
@pytest.mark.parametrize(
    "grid,heads,head_dim",
    [
        (TokenGrid(21, 45, 80), 10, 128),
        (TokenGrid(13, 30, 45, 226, True), 48, 64),
        (TokenGrid(33, 45, 80, 256), 6, 128),
    ],
    ids=["wan-720p", "cogvideox", "hunyuan-720p"],
)
def test_compiles_ahead_of_time(chip, grid, heads, head_dim):
    from torch_svg import aot

    if aot.available():
        pytest.skip(aot.available())
    array = jax.ShapeDtypeStruct((1, grid.tokens, heads * head_dim), jnp.bfloat16)
    kinds = jax.ShapeDtypeStruct((1, heads), jnp.int32)
    static = {"heads": heads, "plan": knob_plan(grid), "blocks": blocks_for(grid, head_dim, chip)}
    compiled = aot.compile_function(flat_attention, array, array, array, kinds, chip=chip, schedule=True, **static)
    bytes_of, shape, name = compiled.largest_array()
    assert bytes_of < 16 * grid.tokens * heads * 128, f"{name} {shape}: nothing may grow with tokens x tokens"
    if grid.text_tokens and grid.tokens_per_frame % 16 == 0:
        # the text's rows are written into the output where it lies; small tables may move to fast memory
        least = grid.tokens * heads * head_dim
        moved = [op for op in compiled.movements(least) if "dynamic-update-slice" not in op.name]
        assert moved == [], "the kernel reads and writes the projections' own layout"
    if not grid.text_tokens:
        assert compiled.movements() == [], "the kernel reads and writes the projections' own layout"
        assert compiled.overlays.count == 1, f"code of {compiled.overlays.bundles} bundles is cut in the loop"
