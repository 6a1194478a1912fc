"""Imports between the packages point one way, and nothing that is installed needs what is not."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# What each package may import of ours. Models multiply experts by a kernel and lay out packed weights as it reads them.
ALLOWED = {
    "pallas_kernels": set(),
    "models": {"pallas_kernels"},
    "tangram_jax": {"models", "pallas_kernels"},
    "calibrate": {"tangram_jax", "models", "pallas_kernels"},
    "serve": {"calibrate", "tangram_jax", "models", "pallas_kernels"},
}
OURS = {path.parent.name for path in ROOT.glob("*/*.py")}


def imported(path: Path) -> set[str]:
    """Top-level names that a file imports, also within functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: write the package's name instead of dots"
            found.add(node.module or "")
    return {name.split(".")[0] for name in found}


@pytest.mark.parametrize("package", ALLOWED)
def test_imports_point_one_way(package):
    for path in (ROOT / package).rglob("*.py"):
        others = (imported(path) & OURS) - {package}
        assert others <= ALLOWED[package], path


def test_every_package_is_known():
    assert OURS - {"benchmarks", "examples", "tests"} == ALLOWED.keys()


# Parts of packages that are declared: their makers put them into one of their own.
PARTS = {"orbax": "orbax_checkpoint", "pydantic_core": "pydantic", "starlette": "fastapi"}


def test_what_is_imported_is_declared():
    """`pip install` brings it by name, not because another package happens to need it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {re.split(r"[^\w-]", name)[0].replace("-", "_") for name in project["dependencies"]}
    for path in (path for package in ALLOWED for path in (ROOT / package).rglob("*.py")):
        others = imported(path) - OURS - sys.stdlib_module_names
        assert {PARTS.get(name, name) for name in others} <= declared, path
    assert "pip" in declared  # `models.registry` runs it


def test_a_process_of_http_does_without_jax():
    """Which would be half of its memory and most of its start."""
    code = "import sys, serve.http_process, models.tokenizer; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
