"""The ruler: compiles for chips that are not here, and reads schedules and HLO. Nothing is executed on a TPU."""

import functools
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
from jax import lax  # noqa: E402
from jax.experimental import pallas as pl  # noqa: E402
from jax.experimental.pallas import tpu as pltpu  # noqa: E402

from torch_svg import aot, hlo  # noqa: E402
from torch_svg.kernel_scalars import hlo_shape, kernel_scalars  # noqa: E402
from torch_svg.scalar_values import DataDependentBranch  # noqa: E402
from torch_svg.schedule import UnknownScheduleFormat, read_overlays, read_schedule, read_schedules, read_units  # noqa: E402
from torch_svg.schedule_walk import walk  # noqa: E402

needs_libtpu = pytest.mark.skipif(aot.available() is not None, reason=str(aot.available()))
aot_test = [pytest.mark.aot, needs_libtpu]
HEADS, BLOCKS, ROWS = 3, 4, 256


def _toy_kernel(counts, flags, x_ref, out_ref, total_ref, *, fallback):
    """Work that depends on a table, on flags and, if asked for, on data."""
    block = pl.program_id(1)
    total_ref[...] = jnp.zeros_like(total_ref)

    def visit(index, carry):
        total_ref[...] += lax.dot_general(x_ref[...], x_ref[...], (((1,), (1,)), ((), ()))) * index.astype(jnp.float32)
        return carry

    lax.fori_loop(0, counts[block], visit, 0)

    @pl.when(flags[pl.program_id(0)] == 1)
    def _():
        total_ref[...] = jnp.exp2(total_ref[...])

    if fallback:

        @pl.when(jnp.max(total_ref[...]) > 1e6)
        def _():
            total_ref[...] = jnp.tanh(total_ref[...])

    out_ref[...] = total_ref[...]


def toy(x, flags, *, counts, fallback=False):
    square = pl.BlockSpec((None, ROWS, ROWS), lambda head, block, *_: (head, block, 0))
    return pl.pallas_call(
        functools.partial(_toy_kernel, fallback=fallback),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(HEADS, BLOCKS),
            in_specs=[square],
            out_specs=square,
            scratch_shapes=[pltpu.VMEM((ROWS, ROWS), jnp.float32)],
        ),
        out_shape=jax.ShapeDtypeStruct(x.shape, jnp.float32),
        name="toy",
    )(np.asarray(counts, np.int32), flags, x)


X = jax.ShapeDtypeStruct((HEADS, BLOCKS * ROWS, ROWS), jnp.float32)
FLAGS = np.array([1, 0, 1], np.int32)


@pytest.fixture(scope="module")
def compiled_toy():
    return aot.compile_function(toy, X, FLAGS, schedule=True, counts=(1, 2, 3, 4), fallback=True)


class TestSchedule:
    pytestmark = aot_test

    def test_memory_is_what_the_shapes_say(self, compiled_toy):
        size = 4 * HEADS * BLOCKS * ROWS * ROWS
        assert size <= compiled_toy.memory.arguments < size + 2**16
        assert size <= compiled_toy.memory.outputs < size + 2**16
        assert compiled_toy.device_kind == "TPU v6 lite"
        assert compiled_toy.schedule("toy").vmem_bytes >= 4 * ROWS * ROWS
        assert compiled_toy.overlays.count == 1

    def test_regions_add_up_to_the_program(self, compiled_toy):
        schedule = compiled_toy.schedules[0]
        assert sum(region.own_bundles for region in schedule.regions) == schedule.bundles
        assert {region.kind for region in schedule.regions} == {"program", "loop", "branch"}
        assert all(count >= 0 for region in schedule.regions for count in region.own_units.values())
        assert schedule.units["MXU"] > 0
        assert schedule.units["EUP"] > 0

    def test_a_trip_more_costs_a_trip(self, compiled_toy):
        """The walk reads the tables: one more visit in one block is one more trip per head, and nothing else."""
        schedule = compiled_toy.schedules[0]
        first, second = ([np.array(counts, np.int32), FLAGS] for counts in ((1, 2, 3, 4), (1, 2, 3, 5)))
        before, after = (walk(schedule, scalars, assume=False) for scalars in (first, second))
        changed = {number for number in before.counts if before.counts[number] != after.counts[number]}
        loops = [region for region in schedule.regions if region.number in changed]
        assert [region.kind for region in loops] == ["loop"]
        assert before.counts[loops[0].number] == HEADS * (1 + 2 + 3 + 4)
        assert after.cycles - before.cycles == HEADS * loops[0].bundles

    def test_flags_decide_branches(self, compiled_toy):
        schedule = compiled_toy.schedules[0]
        counts = np.array((1, 2, 3, 4), np.int32)
        all_on, one_on, off = (
            walk(schedule, [counts, np.array(flags, np.int32)], assume=False)
            for flags in ((1, 1, 1), (0, 1, 0), (0, 0, 0))
        )
        assert all_on.cycles - off.cycles == 3 * (one_on.cycles - off.cycles) > 0
        assert off.unit_cycles["EUP"] < all_on.unit_cycles["EUP"]

    def test_an_empty_loop_is_jumped_over(self, compiled_toy):
        schedule = compiled_toy.schedules[0]
        none, some = (walk(schedule, [np.array(c, np.int32), FLAGS], assume=False) for c in ((0,) * 4, (1,) * 4))
        assert none.unit_cycles["MXU"] == 0
        assert some.unit_cycles["MXU"] > 0

    def test_data_decide_only_when_told(self, compiled_toy):
        scalars = kernel_scalars(toy, X, FLAGS, counts=(1, 2, 3, 4), fallback=True)
        with pytest.raises(DataDependentBranch, match="assume"):
            compiled_toy.predict(scalars)
        usual, unusual = (compiled_toy.predict(scalars, assume=taken) for taken in (False, True))
        assert unusual.cycles > usual.cycles
        assert usual.milliseconds == pytest.approx(usual.cycles / 1.75e6)

    def test_missing_tables_are_asked_for(self, compiled_toy):
        with pytest.raises(DataDependentBranch, match="scalar-prefetch"):
            compiled_toy.predict()

    def test_scalars_are_found_in_the_function(self):
        flags = jax.ShapeDtypeStruct((HEADS,), jnp.int32)
        (operands,) = kernel_scalars(jax.jit(toy, static_argnames="counts"), X, flags, counts=(4, 3, 2, 1)).values()
        np.testing.assert_array_equal(operands[0], [4, 3, 2, 1])
        assert operands[1] is None
        ((shapes, operands),) = kernel_scalars(toy, X, FLAGS * 2, counts=(4, 3, 2, 1)).items()
        np.testing.assert_array_equal(operands[1], [2, 0, 2])
        assert shapes == ("s32[4]", "s32[3]", hlo_shape(X))

    def test_without_a_schedule_no_prediction(self):
        compiled = aot.compile_function(toy, X, FLAGS, counts=(1, 1, 1, 1))
        assert compiled.schedules == ()
        with pytest.raises(ValueError, match="schedule=True"):
            compiled.predict()


PROGRAM = """
$region0: #{k}
  #allocation1 [shape = 'u8[512]{0}', space=smem, size = 0x200, offset = 0x0, tag = 'prefetched SMEM operand 0']
  // region range: [0, 40)
  %s1_s0 = smov 0
  $region9 (PrimaryCoreRegion): #{k} parent=0 // loop_body
    // region range: [4, 30)
    %s2_s1 = sphi %s1_s0, %s3_s2 /* phi copy */
    %s3_s2 = sadd.s32 1, %s2_s1
    %s4_s3 = sld [smem:[#allocation1 + %s2_s1]]
    $region1: #{k} parent=9 (PrimaryCoreRegion) // pred_check
      // region range: [4, 6)
      %p5_p0 = scmp.lt.s32.totalorder %s4_s3, 7
    $region2: #{k} parent=9 // pred_check_branch
      // region range: [4, 10)
      %6 = sbr.rel (%p5_p0) target bundleno = 20 (0x14), region = 4
    $region3: #{k} parent=9 // pred_region
      // region range: [10, 20)
      %v7_v0 = vadd.f32 %v6_v1, %v6_v1
    $region4: #{k} parent=9 // pred_fallthru
      // region range: [20, 20)
    $region5: #{k} parent=0 // loop_header
      // region range: [4, 26)
      %p8_p1 = scmp.ge.s32.totalorder %s3_s2, 5
    $region6: #{k} parent=0 // loop_header_branch
      // region range: [4, 30)
      %9 = sbr.rel (!%p8_p1) target bundleno = 4 (0x4), region = 9
  $region7: #{k} parent=0 // loop_exit
    // region range: [4, 30)
""".strip("\n")


def _units(rows):
    head = "== CAPACTIY:\n  MXU| VALU\n    2     4\n== UTILIZATION:\n"
    return head + "".join(f"{row % 3} 1\n" for row in range(rows))


class TestReading:
    def test_a_program_by_hand(self):
        schedule = read_schedule("k", PROGRAM, _units(40))
        assert [(r.kind, r.start, r.end, r.own_bundles) for r in schedule.regions] == [
            ("program", 0, 40, 14),
            ("loop", 4, 30, 16),
            ("branch", 10, 20, 10),
        ]
        done = walk(schedule, [np.array([1, 7, 9, 0, 8], np.int32)])
        assert done.counts == {9: 5, 3: 3}
        assert done.cycles == 14 + 5 * 16 + 3 * 10
        assert done.unit_cycles["VALU"] == done.cycles / 4

    @pytest.mark.parametrize(
        ("program", "units"),
        [
            (PROGRAM, _units(39)),
            (PROGRAM, _units(42)),
            (PROGRAM, "some other dump"),
            (PROGRAM.replace("pred_fallthru", "switch_case"), _units(40)),
            (PROGRAM.replace("// pred_fallthru", ""), _units(40)),
            (PROGRAM.replace("// pred_region", ""), _units(40)),
            (PROGRAM.replace("// loop_body", ""), _units(40)),
            (PROGRAM.replace("    // region range: [4, 30)\n", "", 1), _units(40)),
        ],
    )
    def test_what_is_not_understood_gives_no_number(self, program, units):
        with pytest.raises(UnknownScheduleFormat):
            read_schedule("k", program, units)

    def test_an_unknown_branch_gives_no_number(self):
        schedule = read_schedule("k", PROGRAM.replace("sbr.rel (%p5_p0)", "sbr.ind (%p5_p0)"), _units(40))
        with pytest.raises(UnknownScheduleFormat, match="branch"):
            walk(schedule, [np.zeros(5, np.int32)])

    def test_a_spilled_value_is_the_one_stored_last(self):
        """A spill slot serves unrelated values one after the other; one of them unknown does not spoil the next."""
        slot = "[smem:[#allocation7_spill]]"
        program = PROGRAM.replace(
            "      %p5_p0 =",
            f"""      %s20_s4 = scalar_lea.vmem [#allocation3]
      %21 = sst {slot} %s20_s4
      %22 = sst {slot} %s4_s3
      %s23_s5 = sld {slot}
      %p5_p0 =""",
        ).replace("%s4_s3, 7", "%s23_s5, 7")
        done = walk(read_schedule("k", program, _units(40)), [np.array([1, 7, 9, 0, 8], np.int32)])
        assert done.counts == {9: 5, 3: 3}

    @pytest.mark.parametrize(
        ("operation", "error", "message"),
        [
            ("spop %v1_v0", DataDependentBranch, "region 3"),
            ("smystery.s32 %s4_s3, 7", UnknownScheduleFormat, "smystery"),
            ("sld [smem:[%s4_s3 + $0x2]]", UnknownScheduleFormat, "sld"),
        ],
    )
    def test_a_branch_on_something_else_gives_no_number(self, operation, error, message):
        program = PROGRAM.replace("      %p5_p0 =", f"      %s20_s4 = {operation}\n      %p5_p0 =")
        schedule = read_schedule("k", program.replace("%s4_s3, 7", "%s20_s4, 7"), _units(40))
        with pytest.raises(error, match=message):
            walk(schedule, [np.zeros(5, np.int32)])

    def test_data_may_decide_branches_but_never_trips(self):
        program = PROGRAM.replace("      %p5_p0 =", "      %s20_s4 = spop %v1_v0\n      %p5_p0 =")
        on_branch = read_schedule("k", program.replace("%s4_s3, 7", "%s20_s4, 7"), _units(40))
        assert walk(on_branch, [np.zeros(5, np.int32)], assume=False).counts == {9: 5, 3: 0}
        assert walk(on_branch, [np.zeros(5, np.int32)], assume={3: True}).counts == {9: 5, 3: 5}
        on_loop = read_schedule("k", program.replace("%s3_s2, 5", "%s20_s4, 5"), _units(40))
        with pytest.raises(DataDependentBranch, match="trips"):
            walk(on_loop, [np.zeros(5, np.int32)], assume=False)

    def test_no_dump_gives_no_number(self, tmp_path):
        (tmp_path / "123-kernel-schedule.pb").write_text("")
        with pytest.raises(UnknownScheduleFormat, match=r"0\.0\.2"):
            read_schedules(tmp_path, ["kernel.1"])
        assert read_overlays(tmp_path) is None

    def test_capacities(self):
        slots, rows = read_units(_units(3))
        assert slots == {"MXU": 2, "VALU": 4}
        assert rows == [(0, 1), (1, 1), (2, 1)]

    @pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32])
    @pytest.mark.parametrize("shape", [(5, 9), (2, 11, 200)])
    def test_small_integers_share_words_of_smem(self, dtype, shape):
        """Element (row, column) of an 8 x 128 tile: rows that share a word follow each other in it."""
        from torch_svg.schedule_walk import _words

        packed = 4 // np.dtype(dtype).itemsize
        array = np.arange(np.prod(shape)).astype(dtype).reshape(shape)
        planes = array.reshape(-1, *shape[-2:])
        columns = -(-shape[-1] // 128)
        words = _words(array, len(planes) * -(-shape[-2] // 8) * columns * 1024 * 4 // packed)
        assert _words(array, 4) is None
        for (plane, row, column), value in np.ndenumerate(planes):
            tile = (plane * -(-shape[-2] // 8) + row // 8) * columns + column // 128
            word = words[tile * (1024 // packed) + row % 8 // packed * 128 + column % 128]
            bits = 32 // packed
            assert np.array(word >> bits * (row % packed) & (1 << bits) - 1).astype(dtype) == value


HLO = """
%fused_copy (p: bf16[4,8]) -> bf16[8,4] {
  %p = bf16[4,8]{1,0} parameter(0)
  ROOT %t = bf16[8,4]{1,0} transpose(%p), dimensions={1,0}
}

%fused_sum (p: f32[4,8]) -> f32[4] {
  %p.1 = f32[4,8]{1,0} parameter(0)
  ROOT %add.1 = f32[4]{0} add(%p.1, %p.1)
}

%body (state: (s32[], f32[1024,1024])) -> (s32[], f32[1024,1024]) {
  %state = (s32[], f32[1024,1024]{1,0}) parameter(0)
  ROOT %sum = f32[4]{0} fusion(%state), kind=kLoop, calls=%fused_sum, backend_config={"estimated_cycles":"10"}
}

ENTRY %main (a: bf16[4,8]) -> bf16[8,4] {
  %a = bf16[4,8]{1,0:T(8,128)(2,1)} parameter(0)
  %loop = (s32[], f32[1024,1024]{1,0}) while(%a), body=%body, backend_config={"known_trip_count":{"n":"7"}}
  %kernel.1 = bf16[4,8]{1,0} custom-call(%a), custom_call_target="tpu_custom_call", operand_layout_constraints={bf16[4,8]{1,0}, s32[3]{0}}, metadata={}
  ROOT %move = bf16[8,4]{1,0} fusion(%kernel.1), kind=kLoop, calls=%fused_copy, backend_config={"estimated_cycles":"5"}
}
"""  # noqa: E501


class TestHlo:
    def test_operations_of_a_call(self):
        found = [(op.name, op.kind, op.cycles, op.runs, op.bytes) for op in hlo.operations(HLO)]
        assert found == [
            ("sum", "compute", 10, 7, 16),
            ("kernel.1", "kernel", None, 1, 64),
            ("move", "movement", 5, 1, 64),
        ]
        assert [op.name for op in hlo.movements(HLO, least_bytes=1)] == ["move"]
        assert hlo.movements(HLO) == []
        assert hlo.kernel_operands(HLO) == {"kernel.1": ("bf16[4,8]", "s32[3]")}
        assert hlo.largest_array(HLO)[:2] == (4 * 2**20, "f32[1024,1024]")

    def test_sizes(self):
        assert hlo.array_bytes("(bf16[2,3]{1,0}, pred[5]{0}, s4[8], f8e4m3fn[7], f32[])") == 12 + 5 + 4 + 7 + 4

    def test_other_text_is_refused(self):
        with pytest.raises(ValueError, match="entry"):
            hlo.operations("no module")


def _attention(query, key, value):
    weights = jax.nn.softmax((query @ key.T).astype(jnp.float32), axis=-1)
    return (weights.astype(value.dtype) @ value).reshape(64, 16, 128).swapaxes(0, 1)


class TestCompile:
    @pytest.mark.aot
    @needs_libtpu
    def test_a_square_matrix_and_a_transpose_are_seen(self):
        array = jax.ShapeDtypeStruct((1024, 128), jnp.bfloat16)
        compiled = aot.compile_function(_attention, array, array, array)
        size, shape, _ = compiled.largest_array()
        assert shape.endswith("[1024,1024]") and size >= 2 * 2**20
        assert any(op.kind == "movement" for op in compiled.operations())
        assert compiled.predict().cycles == sum(op.cycles or 0 for op in compiled.operations()) > 0

    @pytest.mark.aot
    @needs_libtpu
    def test_too_much_memory_is_libtpus_own_message(self):
        array = jax.ShapeDtypeStruct((2**18, 2**16), jnp.float32)
        with pytest.raises(aot.CompileError, match="RESOURCE_EXHAUSTED"):
            aot.compile_function(jnp.sin, array)

    @pytest.mark.aot
    @needs_libtpu
    def test_a_pending_graph_of_torch_xla(self, xla_device):
        torch = pytest.importorskip("torch")
        if xla_device.type != "xla" or os.environ.get("PJRT_DEVICE") != "CPU":
            pytest.skip("needs a torch_xla session on CPU")
        left = torch.ones(256, 512, device=xla_device, dtype=torch.bfloat16)
        compiled = aot.compile_pending([left @ left.T])
        assert compiled.memory.outputs >= 2 * 256 * 256
        assert any("256,256" in op.shape for op in compiled.operations())

    @pytest.mark.aot
    @needs_libtpu
    @pytest.mark.slow
    @pytest.mark.parametrize("chip", ["v5e", "v5p", "v4"])
    def test_other_chips(self, chip):
        compiled = aot.compile_function(toy, X, FLAGS, chip=chip, schedule=True, counts=(1, 2, 3, 4))
        scalars = kernel_scalars(toy, X, FLAGS, counts=(1, 2, 3, 4))
        assert compiled.predict(scalars).milliseconds > 0

    @pytest.mark.aot
    @needs_libtpu
    @pytest.mark.slow
    def test_a_slice_of_four_chips(self):
        """A sharded graph needs a session of its own: SPMD cannot be switched off again."""
        script = """
import torch, torch_xla, torch_xla.runtime as xr, torch_xla.distributed.spmd as xs, numpy as np
from torch_svg import aot
xr.use_spmd()
mesh = xs.Mesh(np.arange(4), (4,), ("chips",))
left = torch.ones(1024, 512, device=torch_xla.device())
xs.mark_sharding(left, mesh, ("chips", None))
compiled = aot.compile_pending([left.sum(0)], devices=4)
print(compiled.memory.arguments, "all-reduce" in compiled.text)
"""
        environment = {**os.environ, "CPU_NUM_DEVICES": "4", "PJRT_DEVICE": "CPU"}
        done = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[-2000:]
        arguments, reduces = done.stdout.split()
        assert int(arguments) <= 1024 * 512 * 4 / 4 + 4096
        assert reduces == "True"


class TestRefusals:
    def test_unknown_chip(self):
        with pytest.raises(ValueError, match="expected one of"):
            aot.compile_module(b"", chip="v9")

    def test_unknown_slice(self):
        with pytest.raises(ValueError, match="devices=3"):
            aot.compile_module(b"", chip="v6e", devices=3)

    def test_missing_libtpu(self, monkeypatch):
        found = aot.importlib.util.find_spec

        def without_libtpu(name):
            return None if name == "libtpu" else found(name)

        monkeypatch.setattr(aot, "importlib", SimpleNamespace(util=SimpleNamespace(find_spec=without_libtpu)))
        with pytest.raises(ImportError, match="pip install libtpu"):
            aot.compile_module(b"")

    def test_a_secret_clock_gives_cycles_only(self):
        prediction = aot.Prediction(aot.CHIPS["tpu7x"], {}, 1000)
        assert prediction.cycles == 1000
        with pytest.raises(NotImplementedError, match="clock"):
            _ = prediction.milliseconds

    @pytest.mark.aot
    @needs_libtpu
    def test_garbage_is_refused(self):
        with pytest.raises(aot.CompileError, match="could not compile"):
            aot.compile_module(b"this is no module")


def test_importing_the_ruler_loads_neither_jax_nor_torch_xla():
    code = "import sys, torch_svg.aot; assert not {'jax', 'torch_xla', 'libtpu'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
