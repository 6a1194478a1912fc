"""The embedding example runs by itself and does not reach into the server."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_calibrate_jit_example():
    script = "import runpy, sys; sys.argv = ['calibrate_jit.py', '--tokens', '80', '--samples', '2']\n"
    script += (
        "runpy.run_path('examples/calibrate_jit.py', run_name='__main__'); assert 'serve' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "kept shares (2, 4, 4), mean 0.5" in done.stdout
    assert "budgets [L, K]:" in done.stdout
