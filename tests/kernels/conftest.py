"""Races of all kernels that a test interprets, one after another: JAX keeps those of the last."""

import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks


@pytest.fixture
def raced(monkeypatch):
    """Of each kernel interpreted so far, whether a race was found; for those with `detect_races`."""
    states = []

    class Recorded(gpu_callbacks.GPURaceDetectionState):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            states.append(self)

    monkeypatch.setattr(gpu_callbacks, "GPURaceDetectionState", Recorded)
    return lambda: [state.races_found for state in states]
