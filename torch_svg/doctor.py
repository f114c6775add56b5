"""Examines an installation: versions against the tested ones, the device, what is wrong and what mends it."""

import glob
import importlib.metadata
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import asdict, dataclass, field

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from .bridge import TESTED_VERSIONS, installed_version

PACKAGES = ("torch", "torch_xla", "jax", "jaxlib", "libtpu", "diffusers", "transformers", "accelerate")
# ranges of those that need no exact version, for a source tree that is not installed
RANGES = {"diffusers": ">=0.41,<0.43", "transformers": ">=5.0,<6", "accelerate": ">=1.0"}
PROBE_SECONDS = 300


@dataclass(frozen=True)
class Package:
    """One package: what is installed (None if nothing), what was tested, and whether the two agree."""

    name: str
    found: str | None
    tested: str
    fits: bool


@dataclass(frozen=True)
class Fault:
    """Something that is wrong, and the shell command that mends it."""

    problem: str
    command: str


@dataclass
class Diagnosis:
    """All that `diagnose` finds. `device` has "type", "count" and "kernel" (whether a Pallas kernel ran)."""

    python: str
    packages: list[Package]
    device: dict
    tpu_chips: int
    patches: list[dict]
    faults: list[Fault] = field(default_factory=list)

    def as_dict(self):
        return asdict(self)


def diagnose():
    """Examine this installation and its device.

    The device is tried in a process of its own, since a TPU runtime that does not fit may end the one that loads it.

    Returns:
        Diagnosis: with an empty list of faults when everything is as tested.
    """
    chips = tpu_chips()
    packages = [_examine(name) for name in PACKAGES]
    faults = _package_faults(packages, chips)
    missing = [package.name for package in packages if package.found is None and package.name != "libtpu"]
    device = {"error": f"not tried without {', '.join(missing)}"} if missing else try_device()
    if "error" in device and not missing:
        # on a TPU another process is the usual reason; the list shows which
        command = "sudo lsof -w /dev/accel* /dev/vfio/*" if chips else "unset PJRT_DEVICE TPU_LIBRARY_PATH"
        faults.append(Fault(f"the device does not work: {device['error']}", command))
    elif chips and device.get("type") == "CPU":
        faults.append(Fault(f"{chips} TPU chips are here, but PJRT_DEVICE=CPU hides them", "export PJRT_DEVICE=TPU"))
    elif device.get("kernel") is False:
        faults.append(Fault("a Pallas kernel gives wrong numbers", _install("libtpu", _tested()["libtpu"])))
    return Diagnosis(sys.version.split()[0], packages, device, chips, _patches(), faults)


def tpu_chips():
    """How many TPU chips this machine shows."""
    return len(glob.glob("/dev/accel[0-9]*")) or len(glob.glob("/dev/vfio/[0-9]*"))


def try_device():
    """Run a kernel through the bridge in a fresh process: what `report_device` says, or {"error": ...}."""
    command = [sys.executable, "-c", "from torch_svg.doctor import report_device; report_device()"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_SECONDS)
    except subprocess.TimeoutExpired:
        return {"error": f"no answer in {PROBE_SECONDS} s; another process may hold the TPU"}
    lines = done.stdout.strip().splitlines()
    if done.returncode == 0 and lines:
        return json.loads(lines[-1])
    reasons = [line for line in done.stderr.strip().splitlines() if line.strip()]
    return {"error": reasons[-1].strip() if reasons else f"the process ended with {done.returncode}"}


def report_device():
    """Print, as one line of JSON, the XLA device and whether a Pallas kernel runs on it."""
    import torch

    from . import bridge

    platform = bridge.platform()
    import torch_xla

    x = torch.arange(8 * 128, dtype=torch.float32).reshape(8, 128)
    out = bridge.call(_add_one, x.to(torch_xla.device()), interpret=platform == "cpu")
    print(
        json.dumps(
            {
                "type": platform.upper(),
                "count": torch_xla.runtime.global_runtime_device_count(),
                "kernel": bool(torch.equal(out.cpu(), x + 1)),
            }
        )
    )


def _add_one(x, *, interpret):
    import jax
    from jax.experimental import pallas as pl

    def kernel(source, target):
        target[...] = source[...] + 1

    return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=interpret)(x)


def _tested():
    """The tested versions of each package: what our own requirements say, exact or a range."""
    tested = {name: f"=={exact}" for name, exact in TESTED_VERSIONS.items()} | RANGES
    try:
        requirements = importlib.metadata.requires("torch_svg") or []
    except importlib.metadata.PackageNotFoundError:
        requirements = []
    for requirement in map(Requirement, requirements):
        name = re.sub(r"[-.]+", "_", requirement.name)
        if name in tested and requirement.specifier:
            tested[name] = str(requirement.specifier)
    return tested


def _examine(name):
    tested = _tested()[name]
    found = installed_version(name)
    # a local label such as +cpu names a build, not another version
    fits = found is not None and SpecifierSet(tested).contains(found.split("+")[0], prereleases=True)
    return Package(name, found, tested, fits)


def _package_faults(packages, chips):
    faults = []
    for package in packages:
        # without a TPU libtpu only compiles ahead of time
        if package.fits or (package.name == "libtpu" and package.found is None and not chips):
            continue
        found = f"{package.found} is installed" if package.found else "is not installed"
        problem = f"{package.name} {found}, tested was {package.tested}"
        faults.append(Fault(problem, _install(package.name, package.tested)))
    if installed_version("torchax"):
        faults.append(
            Fault(
                "torchax is installed: it changes torch for the whole process, and diffusers then takes the device for "
                '"jax"',
                "python -m pip uninstall -y torchax",
            )
        )
    library = os.environ.get("TPU_LIBRARY_PATH")
    if library and not os.path.isfile(library):
        faults.append(Fault(f"TPU_LIBRARY_PATH={library} is not a file", "unset TPU_LIBRARY_PATH"))
    return faults


def _install(name, tested):
    return f"python -m pip install {shlex.quote(name + tested)}"


def _patches():
    try:
        from .patches import list_patches
    except ImportError as error:
        return [{"name": "torch_svg.patches", "what": f"does not import: {error}", "fits": False}]
    listed = []
    for patch in list_patches():
        try:
            patch.check_versions()
            fits = True
        except NotImplementedError:
            fits = False
        about = {"name": patch.name, "what": patch.what, "versions": patch.versions, "upstream": patch.upstream}
        listed.append({**about, "delete_when": patch.delete_when, "fits": fits})
    return listed
