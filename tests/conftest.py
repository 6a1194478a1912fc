"""Tests marked `gpu` need what the kernels need: a Hopper GPU."""

import jax
import pytest


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is None:
        return
    device = jax.devices()[0]
    if device.platform != "gpu" or device.compute_capability != "9.0":
        pytest.skip("needs a Hopper GPU")
