"""JAX functions on torch_xla tensors.

A JAX function (a Pallas kernel with the ops around it) is traced and lowered once per shape, its HLO becomes a
torch_xla computation, and every later call only appends that computation to the lazy graph. torchax is not used:
importing it changes torch for the whole process.

Neither torch_xla nor jax is imported before the first use. torch_xla comes first, since the TPU belongs to whoever
opens it first; jax only traces here and never opens a device.
"""

import base64
import contextlib
import functools
import importlib
import io
import os
import re
import sys
import threading
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch
from packaging.version import Version

# what this bridge was tested with; docs/install.md tells why they belong together
TESTED_VERSIONS = {"torch": "2.9.0", "torch_xla": "2.9.0", "jax": "0.7.1", "jaxlib": "0.7.1", "libtpu": "0.0.21"}

# every libtpu from OLDEST_LIBTPU on reads this version of the Mosaic IR. jax 0.7.1 writes version 8, which libtpu
# 0.0.21, the one that torch_xla 2.9.0 pins, refuses: https://github.com/pytorch/xla/issues/9614
MOSAIC_VERSION = 7
OLDEST_LIBTPU = "0.0.20"

# bool and the narrow integers pass; 64-bit types do not, since jax would silently narrow them
_JAX_DTYPES = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.int32: "int32",
    torch.int16: "int16",
    torch.int8: "int8",
    torch.uint8: "uint8",
    torch.bool: "bool",
}

_platform_override: ContextVar[str | None] = ContextVar("torch_svg_platform", default=None)
_computations: dict = {}
_lock = threading.Lock()


def call(function, *tensors, platform=None, **static):
    """Call a JAX function on torch_xla tensors, as one node of the lazy graph.

    Args:
        function: a JAX function of arrays and keyword-only static arguments. It is part of the cache's key, so it must
            be long-lived: a module-level function, or a closure that the caller caches. A closure made anew for every
            call would be traced anew for every call.
        tensors (torch.Tensor or None): XLA tensors of at most 32 bits an element; None is handed on as None.
        platform ("tpu", "cpu" or None): what to lower for; None takes `platform()`.
        static: hashable keyword arguments of the function, fixed at tracing.

    Returns:
        The function's outputs as XLA tensors, in its own structure (one tensor, a tuple, a dict, ...). They carry no
        gradient.

    Raises:
        ImportError: torch_xla or jax is missing or does not fit.
        ValueError: a tensor is not on an XLA device, or has a 64-bit or otherwise unserved dtype.
    """
    key = (
        function,
        platform or _platform_override.get(),
        tuple(None if tensor is None else (tensor.shape, tensor.dtype, tensor.device) for tensor in tensors),
        tuple(static.items()),
    )
    computation = _computations.get(key)
    if computation is None:
        with _lock:
            computation = _computations.get(key)
            if computation is None:
                computation = _computations[key] = _build(function, tensors, key[1], static)
    run, unflatten = computation
    return unflatten(run([tensor for tensor in tensors if tensor is not None]))


def lower(function, *avals, platform, **static):
    """Trace and lower a JAX function without opening a device or touching torch_xla.

    Args:
        function: a JAX function, as for `call`.
        avals (jax.ShapeDtypeStruct or None): the arguments' shapes and dtypes.
        platform ("tpu" or "cpu"): what to lower for. Mosaic kernels are written in the version that libtpu reads.
        static: keyword arguments of the function.

    Returns:
        The `jax.stages.Lowered`: `.compiler_ir("hlo")` has the HLO, `.out_info` the outputs' structure.
    """
    jax = _import_jax()
    if platform == "tpu":
        _check_libtpu()
    with _without_shardy(jax), _without_tpu_queries():
        jitted = jax.jit(functools.partial(function, **static), keep_unused=True)
        lowered = jitted.trace(*avals).lower(lowering_platforms=(platform,))
        if platform == "tpu":
            downgrade_mosaic(lowered.compiler_ir())
    return lowered


def downgrade_mosaic(module, target=MOSAIC_VERSION):
    """Rewrite the Mosaic kernels of a lowered module, in place, in an IR version that older libtpus read.

    jaxlib's own serialisation pass does it, and the kernel stays what it was. (`jax.export` would also write an older
    version, but it changes the kernel: exp2 becomes exp.)

    Args:
        module: the StableHLO module of a lowered function, `lowered.compiler_ir()`.
        target (int): the newest Mosaic IR version that the reader knows.

    Returns:
        int: how many kernels were rewritten; those that are old enough already are left alone.
    """
    from jaxlib.mlir import ir

    rewritten = 0

    def visit(op):
        nonlocal rewritten
        is_call = op.name == "stablehlo.custom_call"
        if is_call and ir.StringAttr(op.attributes["call_target_name"]).value == "tpu_custom_call":
            backend_config = ir.StringAttr(op.attributes["backend_config"]).value
            older = re.sub(
                r'"body": "([^"]*)"',
                lambda match: f'"body": "{_downgrade_body(match.group(1), target)}"',
                backend_config,
                count=1,
            )
            if older != backend_config:
                op.attributes["backend_config"] = ir.StringAttr.get(older)
                rewritten += 1
        return ir.WalkResult.ADVANCE

    with module.context:
        module.operation.walk(visit)
    return rewritten


def platform():
    """The platform that `call` lowers for: "tpu" or "cpu"; what `lowering_for` says, else the XLA device in use."""
    override = _platform_override.get()
    if override is not None:
        return override
    device_type = _import_torch_xla().runtime.device_type()
    if device_type not in ("TPU", "CPU"):
        raise NotImplementedError(
            f"torch_svg serves torch_xla on TPU and CPU, got PJRT_DEVICE={device_type}; set PJRT_DEVICE=TPU or CPU"
        )
    return device_type.lower()


@contextlib.contextmanager
def lowering_for(name):
    """Within this context `call` lowers for the named platform, whatever device is there.

    With "tpu" on a machine without one, the lazy graph holds the real Mosaic kernels. It cannot run there, but it can
    be compiled ahead of time.
    """
    if name not in ("tpu", "cpu"):
        raise ValueError(f'platform must be "tpu" or "cpu", got {name!r}')
    token = _platform_override.set(name)
    try:
        yield
    finally:
        _platform_override.reset(token)


def available():
    """Whether torch_xla and a fitting jax are installed, so that `call` can work. Imports both when they are."""
    try:
        _import_torch_xla()
        _import_jax()
    except ImportError:
        return False
    return True


def clear():
    """Forget all traced functions."""
    with _lock:
        _computations.clear()


def installed_version(package):
    """The installed version of a package, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def versions():
    """Installed version of every package that has to fit the others, None where it is missing."""
    return {package: installed_version(package) for package in (*TESTED_VERSIONS, "diffusers", "transformers")}


@dataclass(frozen=True)
class Metrics:
    """Counts of torch_xla since the process started.

    Attributes:
        compiles: Graphs compiled.
        compile_seconds: Time that took.
        executions: Graphs executed.
        host_reads: Tensors read from the device.
        fallbacks: Operations that ran on the host for lack of a lowering -> how often.
    """

    compiles: int
    compile_seconds: float
    executions: int
    host_reads: int
    fallbacks: dict[str, int]


def metrics():
    """torch_xla's own counters, as `Metrics`; take the difference of two."""
    _import_torch_xla()
    debug = importlib.import_module("torch_xla.debug.metrics")

    def count(name):
        data = debug.metric_data(name)
        return 0 if data is None else data[0]

    compiling = debug.metric_data("CompileTime")
    return Metrics(
        compiles=count("CompileTime"),
        # its total is in nanoseconds
        compile_seconds=0.0 if compiling is None else compiling[1] / 1e9,
        executions=count("ExecuteTime"),
        host_reads=count("TransferFromDeviceTime"),
        fallbacks={
            name: debug.counter_value(name) for name in debug.counter_names() if name.startswith("aten::")
        },
    )


def _build(function, tensors, platform_name, static):
    _import_torch_xla()
    jax = _import_jax()
    xla_builder = importlib.import_module("torch_xla.core.xla_builder")

    avals = [None if tensor is None else _aval(jax, tensor, index) for index, tensor in enumerate(tensors)]
    lowered = lower(function, *avals, platform=platform_name or platform(), **static)
    proto = lowered.compiler_ir("hlo").as_serialized_hlo_module_proto()

    name = getattr(function, "__name__", type(function).__name__)
    run = xla_builder.xla_computation_as_func(xla_builder.computation_from_module_proto(name, proto), name)
    structure = jax.tree.structure(lowered.out_info)
    return run, functools.partial(jax.tree.unflatten, structure)


def _aval(jax, tensor, index):
    if tensor.device.type != "xla":
        raise ValueError(f"argument {index} is on {tensor.device}, expected an XLA device: move it with .to('xla')")
    dtype = _JAX_DTYPES.get(tensor.dtype)
    if dtype is None:
        served = ", ".join(_JAX_DTYPES.values())
        raise ValueError(
            f"argument {index} has dtype {tensor.dtype}, expected one of {served}: cast it before the call"
        )
    return jax.ShapeDtypeStruct(tuple(tensor.shape), dtype)


@functools.cache
def _import_torch_xla():
    found = installed_version("torch_xla")
    if found is None:
        raise ImportError(_advice("torch_xla is not installed", "torch_xla"))
    try:
        import torch_xla
    except ImportError as error:
        problem = f"torch_xla {found} does not load with torch {torch.__version__} ({error})"
        raise ImportError(_advice(problem, "torch", "torch_xla")) from error
    # the TPU belongs to the first library that opens it, and that must be torch_xla
    torch_xla._XLAC._init_computation_client()
    return torch_xla


@functools.cache
def _import_jax():
    found = installed_version("jax")
    if found is None:
        raise ImportError(_advice("jax is not installed", "jax", "jaxlib"))
    # the lowering is read through jax's private modules, which change between minor versions
    if found.split(".")[:2] != TESTED_VERSIONS["jax"].split(".")[:2]:
        raise ImportError(_advice(f"jax {found} does not fit", "jax", "jaxlib"))
    try:
        import jax
    except ImportError as error:
        raise ImportError(_advice(f"jax {found} does not load ({error})", "jax", "jaxlib")) from error

    if "JAX_PLATFORMS" not in os.environ and not sys.modules["jax._src.xla_bridge"].backends_are_initialized():
        # jax would look for devices at its first trace: minutes of metadata queries where libtpu is installed without a
        # TPU, and a second client of the TPU that torch_xla holds where there is one
        jax.config.update("jax_platforms", "cpu")
    return jax


def _check_libtpu():
    # a library named by TPU_LIBRARY_PATH does not tell its version
    found = None if "TPU_LIBRARY_PATH" in os.environ else installed_version("libtpu")
    if found is not None and Version(found) < Version(OLDEST_LIBTPU):
        problem = f"libtpu {found} does not read Mosaic kernels of jax {installed_version('jax')}"
        raise ImportError(_advice(problem, "libtpu"))


def _advice(problem, *packages):
    expected = " and ".join(f"{package} {TESTED_VERSIONS[package]}" for package in packages)
    command = "pip install " + " ".join(f"'{package}=={TESTED_VERSIONS[package]}'" for package in packages)
    return f"{problem}; expected {expected}. Run: {command} (or `torch-svg doctor` to see everything)"


@contextlib.contextmanager
def _without_shardy(jax):
    # torch_xla speaks GSPMD
    before = jax.config.jax_use_shardy_partitioner
    jax.config.update("jax_use_shardy_partitioner", False)
    try:
        yield
    finally:
        jax.config.update("jax_use_shardy_partitioner", before)


@contextlib.contextmanager
def _without_tpu_queries():
    # on a TPU VM jax asks its own TPU client how old libtpu is, to write the Mosaic version that it reads. There is no
    # such client here, and downgrade_mosaic writes that version.
    from jax._src import cloud_tpu_init

    before = cloud_tpu_init.running_in_cloud_tpu_vm
    cloud_tpu_init.running_in_cloud_tpu_vm = False
    try:
        yield
    finally:
        cloud_tpu_init.running_in_cloud_tpu_vm = before


def _downgrade_body(body, target):
    """A base64 Mosaic module in IR version `target`, or as it was if that is not newer."""
    from jax._src.interpreters import mlir
    from jax._src.lib import tpu
    from jaxlib.mlir import ir
    from jaxlib.mlir.passmanager import PassManager

    context = mlir.JaxIrContext()
    context.append_dialect_registry(mlir.upstream_dialects)
    context.load_all_available_dialects()
    tpu.register_dialect(context)
    context.allow_unregistered_dialects = True
    with context, ir.Location.unknown(context):
        module = ir.Module.parse(base64.b64decode(body))
        attributes = module.operation.attributes
        if (
            "stable_mosaic.version" not in attributes
            or ir.IntegerAttr(attributes["stable_mosaic.version"]).value <= target
        ):
            return body
        for options in ("serialize=false", f"serialize=true target-version={target}"):
            PassManager.parse(f"builtin.module(mosaic-serde{{{options}}})").run(module.operation)
        bytecode = io.BytesIO()
        module.operation.write_bytecode(bytecode, desired_version=0)
        return base64.b64encode(bytecode.getvalue()).decode()
