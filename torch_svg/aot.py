"""Compile for a TPU that is not there, and read what its compiler says.

libtpu holds the whole TPU compiler and needs no TPU. On any x86 machine with libtpu installed this module compiles a
JAX function or a pending torch_xla graph for a named chip, and returns what it needs (HBM, VMEM, code) and, for
Pallas kernels, the static schedule, from which a time is predicted:

    from torch_svg import aot
    compiled = aot.compile_function(kernel, query, key, value, kinds, chip="v6e", schedule=True)
    print(compiled.memory, compiled.movements(), compiled.schedules[0])
    scalars = kernel_scalars(kernel, query, key, value, kinds)                              # kinds: a real array
    print(compiled.predict(scalars).milliseconds)

Every compile runs in a process of its own (`_aot_worker.py`). libtpu reads its flags once, when it is loaded, so a
schedule cannot be had in a process that loaded it before; a process that owns a TPU keeps it; and a compiler that
aborts takes only the worker with it. Start-up costs two seconds.

A predicted time is the bundles executed, static delays included, divided by the clock; it holds no waiting for DMA
and no instruction fetch. The memory bandwidth bounds a kernel from below too.
docs/performance.md compares such predictions with published measurements.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from torch_svg import hlo
from torch_svg.schedule import Overlays, Schedule, dump_flags, read_overlays, read_schedules
from torch_svg.schedule_walk import Walk, walk

_WORKER = Path(__file__).with_name("_aot_worker.py")


@dataclass(frozen=True)
class Chip:
    """A TPU that programs can be compiled for.

    Args:
        name: Our name.
        topologies: Number of chips -> libtpu's name of a slice with that many.
        clock_ghz: TensorCore clock: the unit in which bundles become time. None where it is not public.
        hbm_bytes: HBM of one chip.
        hbm_gb_per_second: Published bandwidth of the HBM, in 1e9 bytes a second.
    """

    name: str
    topologies: dict[int, str]
    clock_ghz: float | None
    hbm_bytes: int
    hbm_gb_per_second: int


_SLICES_2D = ((4, "2x2"), (8, "2x4"), (16, "4x4"), (32, "4x8"))
_SLICES_3D = ((4, "2x2x1"), (8, "2x2x2"), (16, "2x2x4"), (32, "2x4x4"))


def _slices(name, slices):
    return {count: f"{name}:{shape}" for count, shape in slices}


CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v6e", _slices("v6e", _SLICES_2D), 1.75, 32 * 2**30, 1640),
        Chip("v5e", _slices("v5e", _SLICES_2D), 1.5, 16 * 2**30, 819),
        Chip("v5p", _slices("v5p", _SLICES_3D), 1.75, 95 * 2**30, 2765),
        Chip("v4", _slices("v4", _SLICES_3D), 1.05, 32 * 2**30, 1228),
        Chip("tpu7x", _slices("tpu7x", _SLICES_3D), None, 192 * 2**30, 7380),
    )
}


class CompileError(RuntimeError):
    """libtpu refused the program, for its own reasons: too much HBM or VMEM, an operation that is not served, ..."""


@dataclass(frozen=True)
class Memory:
    """HBM of one chip in bytes, as the compiler planned it."""

    arguments: int
    outputs: int
    temporaries: int
    aliased: int
    code: int

    @property
    def total(self) -> int:
        return self.arguments + self.outputs + self.temporaries + self.code - self.aliased


@dataclass(frozen=True)
class Prediction:
    """A predicted time: what the schedules and XLA's own estimates add up to. Nothing in it was measured.

    Args:
        chip: What it is predicted for.
        kernels: Per kernel, what its schedule executes.
        other_cycles: XLA's estimates for the rest.
        least_cycles: Per kernel, what the HBM needs to read its operands and write its results once.
    """

    chip: Chip
    kernels: dict[str, Walk]
    other_cycles: int
    least_cycles: dict[str, int] = field(default_factory=dict)

    @property
    def cycles(self) -> int:
        return sum(map(self.kernel_cycles, self.kernels)) + self.other_cycles

    def kernel_cycles(self, name: str) -> int:
        """Cycles of one kernel: a schedule does not show that a kernel waits for memory."""
        return max(self.kernels[name].cycles, self.least_cycles.get(name, 0))

    @property
    def milliseconds(self) -> float:
        if self.chip.clock_ghz is None:
            raise NotImplementedError(f"the clock of {self.chip.name} is not public: only cycles can be predicted")
        return self.cycles / self.chip.clock_ghz / 1e6


@dataclass(frozen=True)
class Compiled:
    """A program that libtpu compiled for ``devices`` chips.

    Args:
        chip: What it was compiled for.
        devices: Chips in the slice; all figures are per chip.
        device_kind: libtpu's name of the chip.
        memory: HBM plan.
        text: The optimised HLO.
        schedules: Schedules of the Pallas kernels, empty unless ``schedule=True`` was asked for.
        overlays: How the code is cut for the instruction memory, None unless a schedule was asked for.
        compile_seconds: Wall time of the compile alone.
        libtpu: Version of libtpu.
    """

    chip: Chip
    devices: int
    device_kind: str
    memory: Memory
    text: str
    schedules: tuple[Schedule, ...]
    overlays: Overlays | None
    compile_seconds: float
    libtpu: str

    def operations(self) -> list[hlo.HloOp]:
        """What runs in one call, with XLA's `estimated_cycles` where it gives them."""
        return hlo.operations(self.text)

    def movements(self, least_bytes: int = 2**20) -> list[hlo.HloOp]:
        """Copies, transposes, gathers, pads and casts around the kernels."""
        return hlo.movements(self.text, least_bytes)

    def largest_array(self) -> tuple[int, str, str]:
        """(bytes, shape, instruction) of the largest array in HBM: an S x S matrix would show here."""
        return hlo.largest_array(self.text)

    def schedule(self, name: str = "") -> Schedule:
        """The schedule of the kernel whose name contains ``name``."""
        found = [schedule for schedule in self.schedules if name in schedule.name]
        if len(found) != 1:
            names = [schedule.name for schedule in self.schedules]
            raise ValueError(f"got {name=!r}, which fits {len(found)} of the kernels {names}, expected exactly one")
        return found[0]

    def predict(self, scalars: Sequence | dict = (), assume: bool | dict[int, bool] | None = None) -> Prediction:
        """Predicts the time of one call: every kernel's walk plus XLA's estimates for the rest.

        Args:
            scalars: Scalar-prefetch operands of the kernel, as `schedule_walk.walk` takes them; or those of all
                kernels, as `kernel_scalars` gives them.
            assume: Whether branches that hang on data are taken, as `schedule_walk.walk` has it.

        Raises:
            ValueError: Compiled without ``schedule=True``, or a kernel without a schedule.
        """
        operations = self.operations()
        names = [op.name for op in operations if op.kind == "kernel"]
        schedules, same = {schedule.name: schedule for schedule in self.schedules}, hlo.same_kernels(self.text)
        # the compiler compiles, and dumps, equal kernels once
        by_first = {same.get(name, name): schedule for name, schedule in schedules.items()}
        for name in names:
            if name not in schedules and same.get(name) in by_first:
                schedules[name] = by_first[same[name]]
        if missing := set(names) - set(schedules):
            raise ValueError(f"no schedule of {sorted(missing)}: compile with schedule=True, and kernels one by one")
        walks, shapes = {}, hlo.kernel_operands(self.text)
        for name, schedule in schedules.items():
            given = scalars.get(shapes.get(name, ()), ()) if isinstance(scalars, dict) else scalars
            walks[name] = walk(schedule, given, assume)
        other = sum((op.cycles or 0) * op.runs for op in operations if op.kind != "kernel")
        least = {}
        if self.chip.clock_ghz is not None:
            per_byte = self.chip.clock_ghz / self.chip.hbm_gb_per_second
            least = {name: math.ceil(size * per_byte) for name, size in hlo.kernel_bytes(self.text).items()}
        return Prediction(self.chip, walks, other, least)


def available() -> str | None:
    """None when this machine can compile for TPUs, else the reason why not."""
    if importlib.util.find_spec("libtpu") is None:
        return "libtpu is not installed: pip install libtpu==0.0.21 (x86-64 Linux only; no TPU is needed)"
    if importlib.util.find_spec("jax") is None:
        return "jax is not installed: pip install jax==0.7.1 jaxlib==0.7.1"
    return None


def compile_function(function, *shapes, chip: str = "v6e", schedule: bool = False, **static) -> Compiled:
    """Compiles a JAX function for one chip.

    Args:
        function: A JAX function; Pallas kernels must not be interpreted.
        shapes: Per positional argument something with a shape and a dtype (`jax.ShapeDtypeStruct`, array), or None.
        chip: A key of `CHIPS`.
        schedule: Whether to read the kernels' schedules too.
        static: Keyword arguments of the function.

    Raises:
        ImportError: libtpu or jax is missing.
        ValueError: Unknown chip.
        CompileError: libtpu refused the program.
        UnknownScheduleFormat: This libtpu writes schedules in an unknown form.
    """
    import jax

    from torch_svg import bridge

    shapes = [None if shape is None else jax.ShapeDtypeStruct(shape.shape, shape.dtype) for shape in shapes]
    lowered = bridge.lower(function, *shapes, platform="tpu", **static)
    return compile_module(lowered.compiler_ir("hlo").as_serialized_hlo_module_proto(), chip=chip, schedule=schedule)


def compile_pending(tensors, chip: str = "v6e", devices: int = 1, schedule: bool = False) -> Compiled:
    """Compiles the pending lazy graph of torch_xla tensors for a slice of ``devices`` chips; nothing is executed.

    The graph is that of a PJRT_DEVICE=CPU session. With kernels in it, build it under `bridge.lowering_for("tpu")`.
    With more than one chip it must come from an SPMD session (CPU_NUM_DEVICES = devices).

    Args:
        tensors: The results that the graph computes.
        chip: A key of `CHIPS`.
        devices: Chips of the slice.
        schedule: Whether to read the kernels' schedules too.

    Raises:
        As `compile_function`.
    """
    import torch_xla

    proto = torch_xla._XLAC._get_xla_tensors_hlo_proto(list(tensors))
    return compile_module(proto, chip=chip, devices=devices, schedule=schedule)


def compile_module(proto: bytes, chip: str = "v6e", devices: int = 1, schedule: bool = False) -> Compiled:
    """Compiles a serialised HLO module proto; what `compile_function` and `compile_pending` end in."""
    if chip not in CHIPS:
        raise ValueError(f"got {chip=!r}, expected one of {sorted(CHIPS)}")
    slices = CHIPS[chip].topologies
    topology = slices[min(slices)] if devices == 1 else slices.get(devices)
    if topology is None:
        raise ValueError(f"got {devices=}, expected 1 or one of {sorted(slices)} for {chip}")
    if reason := available():
        raise ImportError(f"compiling ahead of time needs libtpu and jax: {reason}")
    with tempfile.TemporaryDirectory(prefix="torch_svg_aot_") as folder:
        return _compile(Path(folder), proto, CHIPS[chip], topology, devices, schedule)


def _compile(folder, proto, chip, topology, devices, schedule):
    (folder / "module.pb").write_bytes(proto)
    (folder / "job.json").write_text(json.dumps({"topology": topology, "partitions": devices}))
    dumps = folder / "dumps"
    dumps.mkdir()
    completed = subprocess.run(
        [sys.executable, str(_WORKER), str(folder)],
        env=_worker_environment(dumps if schedule else None),
        capture_output=True,
        text=True,
        check=False,
    )
    answer = folder / "result.json"
    if not answer.exists():
        tail = "\n".join(completed.stderr.splitlines()[-12:])
        raise CompileError(f"the compiler died with exit code {completed.returncode} on {topology}:\n{tail}")
    result = json.loads(answer.read_text())
    if "error" in result:
        raise CompileError(f"libtpu {_libtpu_version()} could not compile for {topology}: {result['error']}")
    text = (folder / "optimized.txt").read_text()
    schedules = read_schedules(dumps, hlo.kernels(text)) if schedule else {}
    return Compiled(
        chip=chip,
        devices=devices,
        device_kind=result["device_kind"],
        memory=Memory(**result["memory"]),
        text=text,
        schedules=tuple(schedules.values()),
        overlays=read_overlays(dumps) if schedule else None,
        compile_seconds=result["compile_seconds"],
        libtpu=_libtpu_version(),
    )


def _worker_environment(dumps):
    environment = dict(os.environ)
    environment.update(
        # several compiles at a time; else libtpu's lock file lets only one process in
        ALLOW_MULTIPLE_LIBTPU_LOAD="1",
        # off Google Cloud the metadata server is asked for minutes
        TPU_SKIP_MDS_QUERY="1",
        JAX_PLATFORMS="cpu",
    )
    if dumps is not None:
        flags = environment.get("LIBTPU_INIT_ARGS", "")
        environment["LIBTPU_INIT_ARGS"] = f"{flags} {dump_flags(dumps)}".strip()
    return environment


def _libtpu_version():
    try:
        return version("libtpu")
    except PackageNotFoundError:
        return "unknown"
