"""The embedding example runs by itself and does not reach into the server."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*options: str) -> subprocess.CompletedProcess[str]:
    script = f"import runpy, sys; sys.argv = {['calibrate_jit.py', *options]}\n"
    script += (
        "runpy.run_path('examples/calibrate_jit.py', run_name='__main__'); assert 'serve' not in sys.modules"
    )
    return subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False, timeout=300
    )


def refused(capsys, monkeypatch, *options: str) -> str:
    """What it says of options that are wrong, in this process."""
    monkeypatch.setattr(sys, "argv", ["calibrate_jit.py", *options])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / "examples/calibrate_jit.py"), run_name="__main__")
    assert end.value.code == 2
    return capsys.readouterr().err


def test_calibrate_jit_example():
    done = run("--tokens", "80", "--samples", "2")
    assert done.returncode == 0, done.stderr
    assert "kept shares (2, 4, 4), mean 0.5" in done.stdout
    assert "budgets [L, K]:" in done.stdout


def test_samples_of_too_few_tokens(capsys, monkeypatch):
    said = refused(capsys, monkeypatch, "--tokens", "36")
    assert "--tokens must be at least 37: the first 4 and last 32 are not ranked" in said
    assert run("--tokens", "37", "--samples", "1").returncode == 0


def test_samples_of_more_tokens_than_the_model_has_positions(capsys, monkeypatch):
    said = refused(capsys, monkeypatch, "--tokens", "5000")
    assert "--tokens must be at most 4096, the model's positions" in said
