"""Tests marked `gpu` need what the kernels need: a Hopper GPU. All processes of a run share what they compile.

No test is timed: what is compiled at its first call takes longer there than at any other.
"""

import atexit
import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

# The interpreter of GPU kernels runs each warpgroup in XLA's thread pool, where one that waits for another holds a thread:
# with as many threads as cores, three warpgroups on two cores can wait for each other for good.
os.environ.setdefault("NPROC", "8")

if "JAX_COMPILATION_CACHE_DIR" not in os.environ:  # the first process; workers inherit its environment
    _compiled = tempfile.mkdtemp(prefix="tangram-tests-")
    atexit.register(shutil.rmtree, _compiled, ignore_errors=True)
    os.environ |= {
        "JAX_COMPILATION_CACHE_DIR": _compiled,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.03",  # to write and read a small one takes as long
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
    }

os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")  # lowered programs need not know their lines

import absl.logging
import hypothesis
import jax
import pytest

from tests import interpreter

interpreter.install()
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

# When uvicorn sets up its logs, absl's handler closes its stream if that is not sys.stderr any more, as under `capsys`: it
# would be pytest's own.
absl.logging.get_absl_handler().python_handler.stream = sys.__stderr__

MOST_MAPPINGS = 30_000

# Tracing makes millions of objects, most of which live as long as what they are compiled to.
gc.set_threshold(10_000)


def pytest_collection_finish() -> None:
    """What is imported by now is not looked through for garbage again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def few_mappings() -> Iterator[None]:
    """Every program that XLA compiles for a CPU is some mappings of memory, of which a process may have 65,530.

    Beyond them it ends with a segmentation fault. What is forgotten is read again from the cache on disk.
    """
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and len(maps.read_bytes().splitlines()) > MOST_MAPPINGS:
        jax.clear_caches()
        gc.collect()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is None:
        return
    device = jax.devices()[0]
    if device.platform != "gpu" or device.compute_capability != "9.0":
        pytest.skip("needs a Hopper GPU")
