import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from torch_svg import cli, doctor
from torch_svg.families import FAMILIES, UNSERVED, catalogue

ROOT = Path(__file__).parents[1]
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


# models


def run_models(capsys, *flags):
    assert cli.main(["models", *flags]) == 0
    return capsys.readouterr().out


def test_models_as_json_are_the_registry(capsys):
    entries = {entry["transformer"]: entry for entry in json.loads(run_models(capsys, "--json"))}
    served = {name: family.name for family in FAMILIES for name in family.transformers}
    assert {name: entry["family"] for name, entry in entries.items() if entry["sparse"] == "yes"} == served
    assert {name: entry["reason"] for name, entry in entries.items() if entry["sparse"] == "no"} == UNSERVED
    assert entries["CosmosTransformer3DModel"]["head_dims"] == [128]
    assert all(entry["models"] and entry["head_dims"] for entry in entries.values() if entry["sparse"] == "yes")


def test_models_in_a_pipe_are_plain_text(capsys):
    out = run_models(capsys)
    assert "\x1b" not in out and "─" not in out
    lines = {line.split()[0].rstrip(":"): line for line in out.splitlines() if line}
    for entry in catalogue():
        assert entry.transformer in lines
    table = out.split("\n\n")[0].splitlines()
    assert len(table) == 1 + len(catalogue())
    start = table[0].index("sparse")
    for line, entry in zip(table[1:], catalogue(), strict=True):
        assert line[start:].split()[0] == entry.sparse, "columns stand under each other"


def test_models_on_a_terminal_are_a_table(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    out = run_models(capsys)
    assert "─" in out and "WanVACETransformer3DModel" in out and "factorised" in out


def test_the_tables_of_the_docs_are_those_of_the_command(capsys):
    page = (ROOT / "docs/models.md").read_text()
    begin, end = "<!-- torch-svg models --markdown -->\n\n", "\n<!-- end -->"
    assert page.count(begin) == page.count(end) == 1
    assert page.split(begin)[1].split(end)[0] == run_models(capsys, "--markdown")


def test_the_models_of_the_readme_are_those_of_the_registry():
    models = "; ".join(entry.models for entry in catalogue() if entry.sparse == "yes")
    assert textwrap.fill(f"Served: {models}.", 120) in (ROOT / "README.md").read_text()
