import json
import os
import subprocess
import sys

import pytest

from torch_svg import cli, doctor

WORKING_DEVICE = {"type": "CPU", "count": 1, "kernel": True}


@pytest.fixture
def healthy(monkeypatch):
    """An installation in which every package is as tested and the device works."""
    monkeypatch.setattr(doctor, "installed_version", lambda name: None if name == "torchax" else exact(name))
    monkeypatch.setattr(doctor, "try_device", lambda: dict(WORKING_DEVICE))
    monkeypatch.setattr(doctor, "tpu_chips", lambda: 0)
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)


def exact(name):
    return {"diffusers": "0.42.1", "transformers": "5.24.0", "accelerate": "1.15.0"}.get(name) or {
        **doctor.TESTED_VERSIONS
    }[name]


def pretend(monkeypatch, name, found):
    real = doctor.installed_version
    monkeypatch.setattr(doctor, "installed_version", lambda asked: found if asked == name else real(asked))


def run_doctor(capsys, *flags):
    status = cli.main(["doctor", *flags])
    return status, capsys.readouterr().out


def test_a_healthy_installation_has_no_faults(healthy, capsys):
    status, out = run_doctor(capsys)
    assert status == 0 and "all is as tested" in out and "1 x CPU, a Pallas kernel runs" in out
    assert "\x1b" not in out, "colours in a pipe"


def test_json_holds_versions_device_patches_and_faults(healthy, capsys):
    status, out = run_doctor(capsys, "--json")
    found = json.loads(out)
    assert status == 0 and found["faults"] == []
    assert {package["name"]: package["found"] for package in found["packages"]}["torch_xla"] == "2.9.0"
    assert found["device"] == WORKING_DEVICE
    assert "wan_vae_slices" in [patch["name"] for patch in found["patches"]]


@pytest.mark.parametrize(
    ("name", "found", "problem", "command"),
    [
        ("jax", "0.10.2", "jax 0.10.2 is installed, tested was ==0.7.1", "python -m pip install jax==0.7.1"),
        ("torch_xla", None, "torch_xla is not installed", "python -m pip install torch_xla==2.9.0"),
        ("diffusers", "0.30.0", "diffusers 0.30.0 is installed", "python -m pip install 'diffusers<0.43,>=0.41'"),
        ("torchax", "0.0.7", "torchax is installed", "python -m pip uninstall -y torchax"),
    ],
)
def test_each_fault_comes_with_the_command_that_mends_it(healthy, monkeypatch, capsys, name, found, problem, command):
    pretend(monkeypatch, name, found)
    status, out = run_doctor(capsys)
    assert status == 1
    assert f"wrong: {problem}" in out and f"mend: {command}" in out


def test_a_build_label_is_not_another_version(healthy, monkeypatch, capsys):
    pretend(monkeypatch, "torch", "2.9.0+cpu")
    assert run_doctor(capsys)[0] == 0


@pytest.mark.parametrize(("chips", "expected"), [(0, 0), (4, 1)])
def test_libtpu_is_asked_for_where_there_is_a_tpu(healthy, monkeypatch, capsys, chips, expected):
    pretend(monkeypatch, "libtpu", None)
    monkeypatch.setattr(doctor, "tpu_chips", lambda: chips)
    monkeypatch.setattr(doctor, "try_device", lambda: {**WORKING_DEVICE, "type": "TPU" if chips else "CPU"})
    status, out = run_doctor(capsys)
    assert status == expected
    assert ("pip install libtpu==0.0.21" in out) == bool(chips)


def test_hidden_tpu_chips_are_reported(healthy, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "tpu_chips", lambda: 4)
    status, out = run_doctor(capsys)
    assert status == 1 and "4 TPU chips are here, but PJRT_DEVICE=CPU hides them" in out


def test_a_dead_device_is_reported_with_its_reason(healthy, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "try_device", lambda: {"error": "RuntimeError: no device found"})
    status, out = run_doctor(capsys)
    assert status == 1 and "the device does not work: RuntimeError: no device found" in out


def test_the_device_is_really_tried():
    assert doctor.try_device()["kernel"] is True


def test_a_failing_trial_gives_the_last_line_of_its_error(monkeypatch):
    monkeypatch.setenv("PJRT_DEVICE", "NONSENSE")
    assert "NONSENSE" in doctor.try_device()["error"]


def test_doctor_works_without_torch_xla_and_jax():
    code = """
import importlib.metadata, sys
hidden = ("torch_xla", "jax", "jaxlib", "libtpu")
real = importlib.metadata.version
def version(name):
    if name in hidden:
        raise importlib.metadata.PackageNotFoundError(name)
    return real(name)
importlib.metadata.version = version
sys.modules.update(dict.fromkeys(hidden))
from torch_svg.cli import main
sys.exit(main(["doctor"]))
"""
    done = subprocess.run([sys.executable, "-c", code], env=os.environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, done.stderr[-2000:]
    assert "device: none: not tried without torch_xla, jax, jaxlib" in done.stdout
    assert "mend: python -m pip install torch_xla==2.9.0" in done.stdout


def test_a_terminal_gets_a_table(healthy, monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    status, out = run_doctor(capsys)
    assert status == 0 and "wan_vae_slices" in out and "─" in out


def test_a_missing_command_is_a_wrong_call(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([])
    assert ended.value.code == 2
    assert "usage: torch-svg" in capsys.readouterr().err
