"""The package as it is installed: what lands in it, what importing it loads, and which way imports point."""

import ast
import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import torch_svg.patches

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "torch_svg"

# from the top down; a module imports from its own floor or from those below it
FLOORS = (
    # quality and density_search generate videos with a pipeline of the user's
    ("cli", "running", "doctor", "quality", "density_search", "__main__", "__init__"),
    ("processor", "forecast", "enabling", "binding", "interception", "callsite"),
    ("attention",),
    ("kernels", "routing", "distributed"),
    ("pattern", "worktable", "families", "aot"),
    ("grid", "config", "report", "bridge", "patches"),
)


def run(code):
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-c", code], cwd="/", env=clean, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_importing_the_package_loads_neither_jax_nor_torch_xla():
    run("import sys, torch_svg; assert 'jax' not in sys.modules and 'torch_xla' not in sys.modules, 'loaded'")


def test_importing_patches_touches_no_upstream():
    run("import sys, torch_svg.patches; assert 'diffusers' not in sys.modules and 'torch_xla' not in sys.modules")


def test_the_top_level_folder_is_the_subpackage_patches():
    assert Path(torch_svg.patches.__file__) == ROOT / "patches" / "__init__.py"


def test_a_build_holds_every_module_and_asset(tmp_path):
    command = [sys.executable, "setup.py", "--quiet", "egg_info", "--egg-base", tmp_path, "build_py", "--build-lib"]
    done = subprocess.run([*command, tmp_path / "lib"], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    built = {path.relative_to(tmp_path / "lib") for path in (tmp_path / "lib").rglob("*") if path.is_file()}
    sources = [*PACKAGE.rglob("*.py"), *(path for path in (PACKAGE / "assets").rglob("*") if path.is_file())]
    assert {path.relative_to(ROOT) for path in sources} <= built
    assert {Path("torch_svg/patches") / path.name for path in (ROOT / "patches").glob("*.py")} <= built


def test_the_console_script_is_installed():
    scripts = importlib.metadata.distribution("torch_svg").entry_points
    assert "torch_svg.cli:main" in [script.value for script in scripts if script.name == "torch-svg"]


def test_the_version_is_told_once():
    assert torch_svg.__version__ == importlib.metadata.version("torch_svg")


def test_pins_in_setup_and_bridge_agree():
    from torch_svg.bridge import TESTED_VERSIONS

    text = (ROOT / "setup.py").read_text()
    for name, version in TESTED_VERSIONS.items():
        assert re.search(rf'"{name}=={re.escape(version)}[";]', text), f"{name}=={version} is not pinned in setup.py"


def floor_of(name):
    for level, floor in enumerate(FLOORS):
        if name in floor:
            return level
    return None


def imported_modules(path):
    """The modules of this package that a file imports, by their first name below torch_svg."""
    depth = len(path.relative_to(PACKAGE).parts)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level == depth:
                yield from [module.split(".")[0]] if module else [alias.name for alias in node.names]
            elif module.split(".")[0] == "torch_svg":
                below = module.split(".")[1:]
                yield from below[:1] or [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            yield from (alias.name.split(".")[1] for alias in node.names if alias.name.startswith("torch_svg."))


MODULES = sorted(path for path in PACKAGE.rglob("*.py") if "assets" not in path.parts)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path):
    own = floor_of(path.relative_to(PACKAGE).parts[0].removesuffix(".py"))
    if own is None:
        pytest.skip("on no floor: a helper of its neighbours")
    for imported in imported_modules(path):
        level = floor_of(imported)
        assert level is None or level >= own, f"imports {imported} from a floor above"


@pytest.mark.parametrize("part", ["kernels", "pattern.py", "worktable.py", "grid.py"])
def test_kernels_and_patterns_know_no_model(part):
    files = [PACKAGE / part] if part.endswith(".py") else sorted((PACKAGE / part).rglob("*.py"))
    for path in files:
        names = re.findall(r"(?i)\b(wan|hunyuan|cogvideox?|mochi|ltx|allegro|diffusers)\b", path.read_text())
        assert not names, f"{path.relative_to(ROOT)} names {set(names)}"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_jax_and_torch_xla_stay_where_they_belong(path):
    """At module level jax is imported by kernels only, and torch_xla by none."""
    for node in ast.parse(path.read_text()).body:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module]
        roots = {name.split(".")[0] for name in names}
        assert "torch_xla" not in roots
        assert not roots & {"jax", "jaxlib"} or path.parent.name == "kernels"
