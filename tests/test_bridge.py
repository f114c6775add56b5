import functools
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from torch_svg import bridge

pytest.importorskip("torch_xla")
pytest.importorskip("jax")


def add_scaled(x, y, *, scale):
    return x + y * scale


def sum_and_parts(x, bias, *, scale):
    shifted = x if bias is None else x + bias
    return {"sum": shifted.sum() * scale, "parts": (shifted[:1], shifted[1:]), "nothing": None}


def doubling_kernel(x, *, interpret=False):
    """A Pallas kernel between ordinary JAX ops."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import pallas as pl

    def body(source, target):
        target[...] = jnp.exp2(source[...])

    block = pl.BlockSpec((128, 128), lambda i: (i, 0))
    kernel = pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(x.shape[0] // 128,),
        in_specs=[block],
        out_specs=block,
        interpret=interpret,
    )
    return kernel(x + 1) - 1


def run_python(code, **environment):
    """Run code in a fresh interpreter; a value of None removes that variable."""
    merged = {k: v for k, v in {**os.environ, **environment}.items() if v is not None}
    return subprocess.run([sys.executable, "-c", code], env=merged, capture_output=True, text=True, timeout=300)


def relative_rms(actual, expected):
    return ((actual - expected).norm() / expected.norm()).item()


def test_a_jax_function_runs_on_xla_tensors(xla_device):
    x, y = torch.randn(5, 7), torch.randn(5, 7)
    out = bridge.call(add_scaled, x.to(xla_device), y.to(xla_device), scale=3.0)
    assert out.device.type == "xla"
    torch.testing.assert_close(out.cpu(), x + 3 * y)


def test_outputs_keep_their_structure_and_none_passes(xla_device):
    x = torch.randn(4, 3)
    out = bridge.call(sum_and_parts, x.to(xla_device), None, scale=2.0)
    assert set(out) == {"sum", "parts", "nothing"} and out["nothing"] is None
    torch.testing.assert_close(out["sum"].cpu(), x.sum() * 2)
    torch.testing.assert_close(torch.cat([part.cpu() for part in out["parts"]]), x)
    with_bias = bridge.call(sum_and_parts, x.to(xla_device), torch.ones(3).to(xla_device), scale=2.0)
    torch.testing.assert_close(with_bias["sum"].cpu(), (x + 1).sum() * 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int32, torch.uint8, torch.bool])
def test_narrow_dtypes_pass(xla_device, dtype):
    x = torch.tensor([0, 1, 1]).to(dtype)
    out = bridge.call(lambda x: x | x if dtype == torch.bool else x + x, x.to(xla_device))
    expected = x | x if dtype == torch.bool else x + x
    assert out.dtype == dtype
    assert torch.equal(out.cpu(), expected)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.complex64])
def test_wide_dtypes_are_refused_with_the_argument_named(xla_device, dtype):
    good, bad = torch.ones(3).to(xla_device), torch.ones(3).to(dtype).to(xla_device)
    with pytest.raises(ValueError, match=rf"argument 1 has dtype {dtype}, expected one of float32.*cast it"):
        bridge.call(add_scaled, good, bad, scale=1.0)


def test_a_tensor_that_is_not_on_xla_is_refused(xla_device):
    x = torch.ones(3)
    bridge.call(add_scaled, x.to(xla_device), x.to(xla_device), scale=1.0)
    with pytest.raises(ValueError, match="argument 1 is on cpu, expected an XLA device"):
        bridge.call(add_scaled, x.to(xla_device), x, scale=1.0)


def test_traced_once_per_shape_dtype_and_static_argument(xla_device):
    traced = []

    def counting(x, *, scale):
        traced.append((x.shape, scale))
        return x * scale

    x = torch.ones(4).to(xla_device)
    for _ in range(3):
        bridge.call(counting, x, scale=2.0)
    assert len(traced) == 1
    bridge.call(counting, x, scale=3.0)
    bridge.call(counting, x.to(torch.bfloat16), scale=3.0)
    bridge.call(counting, torch.ones(5).to(xla_device), scale=3.0)
    assert len(traced) == 4


def test_a_cached_call_costs_microseconds(xla_device):
    x = torch.ones(4).to(xla_device)
    bridge.call(add_scaled, x, x, scale=1.0)
    best = float("inf")
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(100):
            bridge.call(add_scaled, x, x, scale=1.0)
        best = min(best, (time.perf_counter() - start) / 100)
    # 7 us on an idle core, 130 ms if it traced again
    assert best < 200e-6, f"{best * 1e6:.0f} us a cached call"


def test_an_interpreted_pallas_kernel_runs_on_xla_cpu(xla_device):
    if bridge.platform() != "cpu":
        pytest.skip("interpreted kernels are for the CPU")
    x = torch.randn(256, 128)
    out = bridge.call(doubling_kernel, x.to(xla_device), interpret=True).cpu()
    error = relative_rms(out, torch.exp2(x + 1) - 1)
    assert error < 1e-6, f"output: relative RMS {error}"


def test_works_inside_a_custom_op_under_torch_compile(xla_device):
    @torch.library.custom_op("torch_svg_test::add_scaled", mutates_args=())
    def op(x: torch.Tensor, y: torch.Tensor, scale: float) -> torch.Tensor:
        return bridge.call(add_scaled, x, y, scale=scale)

    @op.register_fake
    def _(x, y, scale):
        return torch.empty_like(x)

    x, y = torch.randn(3, 4), torch.randn(3, 4)
    compiled = torch.compile(lambda x, y: op(x * 2, y, 0.5) + 1, backend="openxla", fullgraph=True)
    torch.testing.assert_close(compiled(x.to(xla_device), y.to(xla_device)).cpu(), x * 2 + y * 0.5 + 1)


def test_lowering_for_tpu_puts_the_mosaic_kernel_into_the_lazy_graph(xla_device):
    import torch_xla

    x = torch.zeros(256, 128).to(xla_device)
    with bridge.lowering_for("tpu"):
        assert bridge.platform() == "tpu"
        out = bridge.call(doubling_kernel, x)
    assert "tpu_custom_call" in torch_xla._XLAC._get_xla_tensors_hlo([out])
    assert bridge.platform() == torch_xla.runtime.device_type().lower()


def test_lowering_for_an_unknown_platform_is_refused():
    with pytest.raises(ValueError, match="got 'gpu'"), bridge.lowering_for("gpu"):
        pass


def test_kernels_under_manual_sharding_in_an_spmd_session():
    code = """
import numpy as np, torch, torch_xla, torch_xla.runtime as xr, torch_xla.distributed.spmd as xs
from torch_svg import bridge
xr.use_spmd()
mesh = xs.Mesh(np.arange(4), (4,), ("heads",))

def sharded(x, *, heads):
    import jax
    spec = jax.sharding.PartitionSpec(None, "heads")
    abstract = jax.sharding.AbstractMesh((heads,), ("heads",))
    body = lambda part: part * 2 + part.shape[1]
    return jax.shard_map(body, mesh=abstract, in_specs=spec, out_specs=spec, check_vma=False)(x)

x = torch.randn(3, 8)
device_x = xs.mark_sharding(x.to(torch_xla.device()), mesh, (None, "heads")).global_tensor
out = bridge.call(sharded, device_x, heads=4)
torch.testing.assert_close(out.cpu(), x * 2 + 2)
print("sharded over", xr.global_runtime_device_count(), torch_xla._XLAC._get_xla_sharding_spec(out))
"""
    done = run_python(code, PJRT_DEVICE="CPU", CPU_NUM_DEVICES="4")
    assert "sharded over 4 {devices=[1,4]" in done.stdout, done.stdout + done.stderr[-3000:]


def test_jax_opens_no_device_even_where_it_believes_in_a_tpu():
    """On a TPU VM jax must leave the TPU to torch_xla; JAX_FORCE_TPU_INIT makes it believe that it is on one."""
    code = """
import sys
from torch_svg import bridge
assert "jax" not in sys.modules and "torch_xla" not in sys.modules
sys.path.insert(0, "tests")
import torch, test_bridge
bridge.call(test_bridge.doubling_kernel, torch.zeros(256, 128, device="xla"), platform="tpu")
from jax._src import cloud_tpu_init, xla_bridge
assert cloud_tpu_init.running_in_cloud_tpu_vm
print("jax opened", list(xla_bridge._backends))
"""
    done = run_python(code, PJRT_DEVICE="CPU", JAX_PLATFORMS=None, JAX_FORCE_TPU_INIT="1")
    assert "jax opened ['cpu']" in done.stdout, done.stderr[-3000:]


def test_downgrade_leaves_old_kernels_alone(xla_device):
    import jax

    lowered = bridge.lower(doubling_kernel, jax.ShapeDtypeStruct((256, 128), "float32"), platform="tpu")
    assert bridge.downgrade_mosaic(lowered.compiler_ir()) == 0
    assert bridge.downgrade_mosaic(lowered.compiler_ir(), target=6) == 1


COMPILE_FOR_V6E = """
import sys
import jax
from jax._src import compiler
from jax._src.lib import _jax, xla_client
from jax.experimental import topologies

device = topologies.get_topology_desc(platform="tpu", topology_name="v6e:2x2").devices[0]
print(device.client.platform_version)
computation = xla_client.XlaComputation(open(sys.argv[1], "rb").read())
module = xla_client._xla.mlir.xla_computation_to_mlir_module(computation)
options = compiler.get_compile_options(num_replicas=1, num_partitions=1, device_assignment=[[device.id]])
device.client.compile(module.encode() if isinstance(module, str) else module, _jax.DeviceList((device,)), options)
print("compiled")
"""


@functools.cache
def libtpu_library(release):
    """The libtpu.so of a release: the installed one, or one fetched once into .cache/."""
    if bridge.installed_version("libtpu") == release:
        import libtpu

        return libtpu.get_library_path()
    folder = Path(__file__).parents[1] / ".cache" / f"libtpu-{release}"
    if not (folder / "libtpu" / "libtpu.so").exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
        fetched = subprocess.run([*pip, f"libtpu=={release}"], capture_output=True, text=True, timeout=600)
        if fetched.returncode:
            pytest.skip(f"libtpu {release} cannot be fetched: {fetched.stderr.strip().splitlines()[-1:]}")
    return str(folder / "libtpu" / "libtpu.so")


def compile_for_v6e(lowered, release, folder):
    """Compile a lowered function with a release of libtpu, in a process of its own, since a process loads only one."""
    proto = folder / "module.pb"
    proto.write_bytes(lowered.compiler_ir("hlo").as_serialized_hlo_module_proto())
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "TPU_LIBRARY_PATH": libtpu_library(release)}
    command = [sys.executable, "-c", COMPILE_FOR_V6E, str(proto)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.aot
@pytest.mark.parametrize(("release", "built"), [("0.0.21", "Aug 15 2025"), ("0.0.23.1", "Oct 8 2025")])
def test_kernels_compile_with_the_pinned_libtpu_and_a_newer_one(tmp_path, release, built):
    import jax

    from torch_svg.grid import TokenGrid
    from torch_svg.kernels.block_sparse import block_sparse_attention
    from torch_svg.pattern import sparse_plan

    grid = TokenGrid(frames=3, height=16, width=16, text_tokens=7)
    array = jax.ShapeDtypeStruct((1, grid.tokens, 3, 128), "bfloat16")
    kinds = jax.ShapeDtypeStruct((1, 3), "int32")
    plan = sparse_plan(grid, density=0.5)
    lowered = bridge.lower(block_sparse_attention, array, array, array, kinds, platform="tpu", plan=plan)
    done = compile_for_v6e(lowered, release, tmp_path)
    assert f"Built on {built}" in done.stdout and "compiled" in done.stdout, done.stdout + done.stderr[-3000:]


@pytest.mark.aot
def test_the_pinned_libtpu_refuses_what_the_pinned_jax_writes_itself(tmp_path):
    """Why the bridge rewrites kernels. When this fails, the rewriting can go."""
    import jax

    traced = jax.jit(doubling_kernel).trace(jax.ShapeDtypeStruct((256, 128), "float32"))
    done = compile_for_v6e(traced.lower(lowering_platforms=("tpu",)), "0.0.21", tmp_path)
    assert "Unsupported version: expected <= 7 but got 8" in done.stderr


def test_versions_name_what_is_installed():
    found = bridge.versions()
    assert found["torch"] == torch.__version__.split("+")[0]
    assert set(bridge.TESTED_VERSIONS) <= set(found)


def test_a_libtpu_that_cannot_read_our_kernels_is_refused_before_the_first_step(monkeypatch, xla_device):
    real = bridge.installed_version
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    monkeypatch.setattr(bridge, "installed_version", lambda name: "0.0.17" if name == "libtpu" else real(name))
    x = torch.zeros(384, 128).to(xla_device)
    with pytest.raises(
        ImportError, match=r"libtpu 0\.0\.17 does not read Mosaic kernels of jax 0\.7\.1; expected libtpu 0"
    ):
        bridge.call(doubling_kernel, x, platform="tpu")


def hide(monkeypatch, package, found):
    real = bridge.installed_version
    monkeypatch.setattr(bridge, "installed_version", lambda name: found if name == package else real(name))
    bridge._import_torch_xla.cache_clear()
    bridge._import_jax.cache_clear()


@pytest.mark.parametrize(
    ("package", "found", "message"),
    [
        (
            "torch_xla",
            None,
            r"torch_xla is not installed; expected torch_xla 2\.9\.0\. Run: pip install 'torch_xla==2\.9",
        ),
        (
            "jax",
            None,
            r"jax is not installed; expected jax 0\.7\.1 and jaxlib 0\.7\.1\. Run: pip install 'jax==0\.7\.1'",
        ),
        ("jax", "0.10.2", r"jax 0\.10\.2 does not fit; expected jax 0\.7\.1"),
    ],
)
def test_missing_or_ill_fitting_packages_give_got_expected_and_command(
    monkeypatch, xla_device, package, found, message
):
    hide(monkeypatch, package, found)
    assert not bridge.available()
    with pytest.raises(ImportError, match=message):
        bridge.call(lambda x: x, torch.ones(1).to(xla_device))
    monkeypatch.undo()
    bridge._import_torch_xla.cache_clear()
    bridge._import_jax.cache_clear()
    assert bridge.available()
