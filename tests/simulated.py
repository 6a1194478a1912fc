"""Runs a function of a test module in a process with several simulated devices."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def on_simulated_devices(file: str, function: str, devices: int = 4) -> None:
    """Calls `function` of the module in `file` there; fails with what it printed if it raises."""
    module = ".".join(Path(file).relative_to(ROOT).with_suffix("").parts)
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
    environment["PYTHONPATH"] = str(ROOT)
    code = f"import {module} as t; t.{function}(); print('agree')"
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert result.stdout.strip().endswith("agree"), result.stderr[-4000:]
