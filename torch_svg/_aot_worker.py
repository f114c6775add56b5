"""Compiles one HLO module for a TPU that is not there. Run by `torch_svg.aot` as a script, in a process of its own.

    python _aot_worker.py JOB

JOB is a folder with `job.json` (topology, devices, partitions, shardings) and `module.pb` (a serialised HLO module
proto). The worker writes `result.json` and, when the compile succeeds, `optimized.txt` (the optimised HLO). It
imports jax but not torch_svg, so that a compile neither pays for torch nor meets a TPU runtime that torch_xla has
already loaded.
"""

import json
import sys
import time
from pathlib import Path


def lift_parameter_shardings(mlir_bytes):
    """Give every parameter whose only sharding is a @Sharding call on it that sharding as an argument attribute.

    torch_xla annotates placeholders that way; without the lift XLA would replicate the parameter and reshard it
    inside.
    """
    from jax._src.interpreters import mlir
    from jaxlib.mlir import ir

    with mlir.make_ir_context():
        module = ir.Module.parse(mlir_bytes)
        main = next(op for op in module.body.operations if op.attributes["sym_name"].value == "main")
        wanted = {}
        for op in main.regions[0].blocks[0].operations:
            is_call = op.operation.name in ("stablehlo.custom_call", "mhlo.custom_call")
            if is_call and ir.StringAttr(op.attributes["call_target_name"]).value == "Sharding":
                source = op.operands[0]
                if isinstance(source.owner, ir.Block):
                    wanted[ir.BlockArgument(source).arg_number] = op.attributes["mhlo.sharding"]
        has_attributes = "arg_attrs" in main.attributes
        old = list(main.arg_attrs) if has_attributes else [ir.DictAttr.get({}) for _ in main.arguments]
        new = []
        for index, attributes in enumerate(old):
            named = {entry.name: entry.attr for entry in attributes}
            if index in wanted:
                named.setdefault("mhlo.sharding", wanted[index])
            new.append(ir.DictAttr.get(named))
        main.attributes["arg_attrs"] = ir.ArrayAttr.get(new)
        return mlir.module_to_bytecode(module)


def compile_options(devices, partitions):
    import numpy as np
    from jax._src import compiler

    assignment = np.array([[device.id for device in devices]])
    options = compiler.get_compile_options(
        num_replicas=1,
        num_partitions=partitions,
        device_assignment=assignment,
        use_spmd_partitioning=partitions > 1,
    )
    # torch_xla writes GSPMD shardings
    options.executable_build_options.use_shardy_partitioner = False
    if partitions > 1:
        options.executable_build_options.allow_spmd_sharding_propagation_to_output = [True]
    return options


def run(job_folder):
    job = json.loads((job_folder / "job.json").read_text())
    from jax._src.lib import _jax, xla_client
    from jax.experimental import topologies

    partitions = job["partitions"]
    devices = topologies.get_topology_desc(platform="tpu", topology_name=job["topology"]).devices[:partitions]
    if len(devices) < partitions:
        raise ValueError(f"topology {job['topology']} has {len(devices)} devices, {partitions} were asked for")
    computation = xla_client.XlaComputation((job_folder / "module.pb").read_bytes())
    module = xla_client._xla.mlir.xla_computation_to_mlir_module(computation)
    module = module.encode() if isinstance(module, str) else module
    if partitions > 1:
        module = lift_parameter_shardings(module)
    start = time.perf_counter()
    executable = devices[0].client.compile(
        module, _jax.DeviceList(tuple(devices)), compile_options(devices, partitions)
    )
    seconds = time.perf_counter() - start
    stats = executable.get_compiled_memory_stats()
    (job_folder / "optimized.txt").write_text("\n\n".join(m.to_string() for m in executable.hlo_modules()))
    return {
        "device_kind": devices[0].device_kind,
        "compile_seconds": seconds,
        "memory": {
            "arguments": stats.argument_size_in_bytes,
            "outputs": stats.output_size_in_bytes,
            "temporaries": stats.temp_size_in_bytes,
            "aliased": stats.alias_size_in_bytes,
            "code": stats.generated_code_size_in_bytes,
        },
    }


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    try:
        result = run(folder)
    except Exception as error:
        # whatever libtpu says is the answer to the caller's question: hand it over whole
        result = {"error": f"{type(error).__name__}: {error}"}
    (folder / "result.json").write_text(json.dumps(result))
