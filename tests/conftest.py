"""What every test shares: a machine without a TPU is told so before torch_xla and jax look for one."""

import glob
import os

import pytest

HAS_TPU = bool(glob.glob("/dev/accel*") + glob.glob("/dev/vfio/[0-9]*"))

if not HAS_TPU:
    os.environ.setdefault("PJRT_DEVICE", "CPU")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    # libtpu is installed for ahead-of-time compiles: several at once, and no metadata server to ask
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
# two workers share two cores, and every model here is tiny
os.environ.setdefault("OMP_NUM_THREADS", "1")
# nothing in the tests comes from a hub
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture
def xla_device():
    """The XLA device: the TPU where there is one, else the CPU."""
    torch_xla = pytest.importorskip("torch_xla")
    return torch_xla.device()
