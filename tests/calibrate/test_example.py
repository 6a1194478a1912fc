"""The embedding example runs by itself and does not reach into the server."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(*options: str) -> subprocess.CompletedProcess[str]:
    script = f"import runpy, sys; sys.argv = {['calibrate_jit.py', *options]}\n"
    script += (
        "runpy.run_path('examples/calibrate_jit.py', run_name='__main__'); assert 'serve' not in sys.modules"
    )
    return subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False, timeout=300
    )


def test_calibrate_jit_example():
    done = run("--tokens", "80", "--samples", "2")
    assert done.returncode == 0, done.stderr
    assert "kept shares (2, 4, 4), mean 0.5" in done.stdout
    assert "budgets [L, K]:" in done.stdout


def test_samples_of_too_few_tokens():
    done = run("--tokens", "36")
    assert done.returncode == 2
    assert "--tokens must be at least 37: the first 4 and last 32 are not ranked" in done.stderr
    assert run("--tokens", "37", "--samples", "1").returncode == 0


def test_samples_of_more_tokens_than_the_model_has_positions():
    done = run("--tokens", "5000")
    assert done.returncode == 2
    assert "--tokens must be at most 4096, the model's positions" in done.stderr
