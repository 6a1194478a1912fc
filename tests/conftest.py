"""Tests marked `gpu` need what the kernels need: a Hopper GPU."""

import os

# The interpreter of GPU kernels runs each warpgroup in XLA's thread pool, where one that waits for another holds a thread:
# with as many threads as cores, three warpgroups on two cores can wait for each other for good.
os.environ.setdefault("NPROC", "8")

import jax
import pytest


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is None:
        return
    device = jax.devices()[0]
    if device.platform != "gpu" or device.compute_capability != "9.0":
        pytest.skip("needs a Hopper GPU")
