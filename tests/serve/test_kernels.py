"""Kernels that one process compiles for others."""

import contextlib
import inspect
import os
import socket
import subprocess
import sys
import threading
from concurrent.futures import wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.mosaic.gpu import core, dialect
from jax.experimental.pallas import mosaic_gpu as plgpu

from serve import kernels, tracers, wire
from serve.program_store import compiled_are_kept, keep_compiled

ORDINARY = inspect.unwrap(dialect.get_or_set_dump_options)


def scaled(x: jax.Array, factor: float) -> jax.Array:
    def scale(x_ref: Any, out: Any) -> None:
        out[...] = x_ref[...] * factor

    return plgpu.kernel(scale, out_type=x, grid=(1,), grid_names=("i",))(x)


def lower(factor: float) -> None:
    jax.jit(lambda x: scaled(x, factor) + 1).trace(jnp.zeros(128)).lower(lowering_platforms=("cuda",))


def test_equal_kernels_have_equal_texts(monkeypatch):
    monkeypatch.setattr(core, "KNOWN_KERNELS", {})
    monkeypatch.setattr(dialect, "get_or_set_dump_options", ORDINARY)
    lower(2), lower(2)
    assert len(kernels.lowered()) == 2
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTX", "1")
    kernels.give_equal_names.__wrapped__()
    assert dialect.get_or_set_dump_options is ORDINARY
    monkeypatch.delenv("MOSAIC_GPU_DUMP_PTX")
    kernels.give_equal_names.__wrapped__()
    lower(2), lower(2)
    assert len(kernels.lowered()) == 3
    lower(3)
    assert len(kernels.lowered()) == 4
    assert all(kernel.text == core.KNOWN_KERNELS[kernel.hash] for kernel in kernels.lowered())


def test_one_that_cannot_be_compiled_is_left_to_its_step(caplog):
    caplog.set_level("DEBUG", "tangram.engine")
    kernels.Kernel(b"\x0a", b"no kernel").compile()  # nor does a CPU know what it is
    assert "Kernel 0a is left to its step" in caplog.text


LOADED: list[bytes] = []
MAY_LOAD = threading.Event()


class Recorded(kernels.Kernel):
    def compile(self) -> None:
        MAY_LOAD.wait(20)
        LOADED.append(self.hash)


def test_they_are_loaded_once_and_before_their_steps_are_compiled():
    LOADED.clear(), MAY_LOAD.clear()
    work = tracers._Work(None, {"a": None, "b": None})  # whose steps they are, the processes below do not ask
    with contextlib.ExitStack() as closing:
        for number in range(2):
            ours, theirs = socket.socketpair()
            closing.enter_context(theirs)
            threading.Thread(target=work.drive, args=(ours,), daemon=True).start()
            assert [wire.receive(theirs), wire.receive(theirs)] == [None, None]
            wire.send(theirs, (None, [], [Recorded(b"shared", b""), Recorded(b"%d" % number, b"")]))
        assert not wait(work.done.values(), timeout=0.2).done
        MAY_LOAD.set()
        assert not wait(work.done.values(), timeout=20).not_done
    assert sorted(LOADED) == [b"0", b"1", b"shared"]


def test_they_are_compiled_ahead_where_jax_keeps_them(tmp_path, monkeypatch):
    for kept, directory, enabled in (
        (True, tmp_path, True),
        (False, tmp_path, False),
        (False, tmp_path / "nowhere", True),
        (False, None, True),
    ):
        settings = {"jax_compilation_cache_dir": directory, "jax_enable_compilation_cache": enabled}
        monkeypatch.setattr(jax, "config", SimpleNamespace(**settings))
        assert compiled_are_kept() == kept


def test_none_is_loaded_once_the_start_has_ended():
    LOADED.clear(), MAY_LOAD.set()
    work = tracers._Work(None, {})
    work.ended.set()
    work._load_once(Recorded(b"late", b""))
    assert not LOADED


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
        process = subprocess.run([*command, what], env=environment, capture_output=True, text=True)
        assert process.returncode == 0, process.stderr
        compiled.append(process.stderr.count("compiled Mosaic GPU kernel"))
    assert compiled == [1, 0]


def main(cache: str, what: str) -> None:
    keep_compiled(Path(cache))
    kernels.give_equal_names()
    x = jnp.arange(128.0)
    run = jax.jit(lambda x: scaled(x, 2) + 1)
    run.lower(x)
    (kernel,) = kernels.lowered()
    kernel.compile()
    if what == "run":
        np.testing.assert_array_equal(run(x), 2 * np.arange(128) + 1)


if __name__ == "__main__":
    main(*sys.argv[1:])
