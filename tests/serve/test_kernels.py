"""Kernels that one process compiles for others."""

import os
import socket
import subprocess
import sys
import threading
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.mosaic.gpu import dialect
from jax.experimental.pallas import mosaic_gpu as plgpu

from serve import kernels, tracers, wire
from serve.program_store import keep_compiled


def scaled(x: jax.Array, factor: float) -> jax.Array:
    def scale(x_ref: Any, out: Any) -> None:
        out[...] = x_ref[...] * factor

    return plgpu.kernel(scale, out_type=x, grid=(1,), grid_names=("i",))(x)


def lower(factor: float) -> None:
    jax.jit(lambda x: scaled(x, factor) + 1).trace(jnp.zeros(128)).lower(lowering_platforms=("cuda",))


def test_equal_kernels_have_equal_texts(monkeypatch):
    monkeypatch.setattr(dialect, "get_or_set_dump_options", dialect.get_or_set_dump_options)  # at the end
    before = len(kernels.lowered())
    lower(2), lower(2)
    assert len(kernels.lowered()) == before + 2
    kernels.give_equal_names()
    lower(2), lower(2)
    assert len(kernels.lowered()) == before + 3
    lower(3)
    assert len(kernels.lowered()) == before + 4
    assert all(kernel.hash == key and kernel.text for key, kernel in kernels.lowered().items())


LOADED: list[bytes] = []


class Recorded(kernels.Kernel):
    def compile(self) -> None:
        LOADED.append(self.hash)


def test_they_are_loaded_before_their_step_is_compiled():
    work = tracers._Work(None, {"a": None, "b": None})  # whose steps they are, the process below does not ask
    ours, theirs = socket.socketpair()
    threading.Thread(target=work.drive, args=(ours,), daemon=True).start()
    shared = Recorded(b"shared", b"")
    with theirs:
        assert wire.receive(theirs) is None
        for name, own in (("a", Recorded(b"1", b"")), ("b", Recorded(b"2", b""))):
            assert wire.receive(theirs) is None
            assert not work.done[name].done()
            wire.send(theirs, (None, [], [own, shared]))
            wait([work.done[name]], timeout=20)
            assert own.hash in LOADED
    assert LOADED == [b"1", b"shared", b"2"]


@pytest.mark.gpu
def test_a_kernel_that_another_process_compiled_is_not_compiled_again(tmp_path):
    """What `serve.kernels` relies on: JAX's cache keeps kernels with programs, and Mosaic finds them by their text."""
    command = [sys.executable, __file__, str(tmp_path)]
    environment = os.environ | {
        "TF_CPP_MIN_LOG_LEVEL": "0",
        "TF_CPP_VMODULE": "custom_call=5",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    compiled = []
    for what in ("compile", "run"):
        process = subprocess.run(
            [*command, what], env=environment, capture_output=True, text=True, check=True
        )
        compiled.append(process.stderr.count("compiled Mosaic GPU kernel"))
    assert compiled == [1, 0]


def main(cache: str, what: str) -> None:
    keep_compiled(Path(cache))
    kernels.give_equal_names()
    x = jnp.arange(128.0)
    run = jax.jit(lambda x: scaled(x, 2) + 1)
    run.lower(x)
    (kernel,) = kernels.lowered().values()
    kernel.compile()
    if what == "run":
        np.testing.assert_array_equal(run(x), 2 * np.arange(128) + 1)


if __name__ == "__main__":
    main(*sys.argv[1:])
