"""Processes that trace a model's steps side by side and leave them in the store: tracing holds Python's lock. They compile
the steps' kernels, too (see `serve.kernels`).

  python -m serve.tracers FD_OF_THE_SOCKET        one of them

For a GPU a step takes up to six seconds to trace and lower, whatever its layers: mostly Mosaic's lowering of each kernel. A
first start has some twenty of them. What a process fails to leave there the engine's own traces and compiles.
"""

import contextlib
import ctypes
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from functools import partial
from logging.handlers import QueueHandler
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import jax

from models.config import ModelConfig
from serve import wire
from serve.buckets import Shape
from serve.compiling import threads_for
from serve.kernels import Kernel, lowered
from serve.program_store import ProgramStore, compiled_are_kept
from serve.step_program import like_step, step_program
from tangram_jax.plan import CachePlan
from tangram_jax.scorers import Scorer
from tangram_jax.sharding import TensorParallel

MODULE = "serve.tracers"
MOST = 4  # each has a gigabyte, and a context on the GPU
SECONDS = 180.0  # that a program and its kernels may take, with the start of their process
_LAST_SECONDS = 5.0  # that a process may take to end
_PR_SET_PDEATHSIG = 1  # of Linux

log = logging.getLogger("tangram.engine")


class Task(NamedTuple):
    """A program to trace."""

    arguments: tuple[Any, ...]  # of jax.ShapeDtypeStruct
    shape: Shape
    path: Path  # where it is to be found


class Steps(NamedTuple):
    """Whose steps they are: what a process is told first."""

    directory: Path
    config: ModelConfig
    plan: CachePlan
    scorer: Scorer
    devices: int
    settings: Mapping[str, Any]  # of JAX, which are part of a program's name

    def store(self) -> ProgramStore:
        return ProgramStore(self.directory, self.config, self.plan, self.scorer, self.devices)

    def tracer(self) -> Callable[[Task], list[Kernel]]:
        """What traces them in a process that has just begun. It returns the kernels that it has compiled for a program.

        Raises RuntimeError for what would be kept under another name, as where there is no memory left on the GPU for JAX.
        """
        for name, value in self.settings.items():
            if jax.config.values.get(name) != value:
                jax.config.update(name, value)
        several = self.devices > 1
        parallel = TensorParallel.of(self.config, self.plan, self.devices) if several else None
        store = self.store()
        run = store.keep("step", step_program(self.config, self.plan, self.scorer, parallel), like_step)
        told: set[bytes] = set()  # hashes of kernels

        def trace(task: Task) -> list[Kernel]:
            if store.path_for("step", task.arguments, {"shape": task.shape}) != task.path:
                raise RuntimeError(f"on {jax.devices()} it would be another program")
            jax.eval_shape(partial(run, shape=task.shape), *task.arguments)
            new = [kernel for kernel in lowered() if kernel.hash not in told] if compiled_are_kept() else []
            for kernel in new:
                kernel.compile()
                told.add(kernel.hash)
            return new

        return trace


def most_processes(platform: str) -> int:
    """How many are worth their start: on a CPU none, where a step takes a second to trace."""
    return min(MOST, threads_for(1 / 4)) if platform == "gpu" else 0


@contextlib.contextmanager
def tracing(steps: Steps, tasks: Mapping[str, Task], processes: int) -> Iterator[Mapping[str, Future[None]]]:
    """Trace them by name, in their order. Done are those that no process has to do with any more, however that ended.

    At the end of the context the processes are killed. What they warn of is logged here, once.
    """
    work = _Work(steps, tasks)
    threads: list[threading.Thread] = []
    with contextlib.ExitStack() as ending:
        ending.callback(_join, threads)  # one may be loading a kernel
        for _ in range(min(processes, len(tasks))):
            try:
                end = ending.enter_context(_process())
            except OSError as error:
                work.one_fewer(error)
                break
            threads.append(threading.Thread(target=work.drive, args=(end,), daemon=True))
            threads[-1].start()
        ending.callback(work.ended.set)
        threading.Thread(target=work.give_up, args=(threads,), daemon=True).start()
        yield work.done


def _join(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join(_LAST_SECONDS)


class _Work:
    """What there is to trace, for threads that have a process each do it."""

    def __init__(self, steps: Steps, tasks: Mapping[str, Task]) -> None:
        self._steps = steps
        self._left: SimpleQueue[tuple[str, Task]] = SimpleQueue()
        for item in tasks.items():
            self._left.put(item)
        self._said: dict[tuple[str, str], logging.LogRecord] = {}
        self._kernels: set[bytes] = set()  # hashes of those that this process has
        self._loading = threading.Lock()
        self.done: dict[str, Future[None]] = {name: Future() for name in tasks}
        self.ended = threading.Event()  # nobody wants it any more

    def drive(self, end: socket.socket) -> None:
        """Have a process do what is left, one after another, until one fails. Then it ends: it holds memory of the GPU."""
        with end:
            try:
                wire.send(end, self._steps)
                while True:
                    try:
                        name, task = self._left.get_nowait()
                    except Empty:
                        return
                    try:
                        wire.send(end, task)
                        fault, warnings, kernels = wire.receive(end)
                        for record in warnings:
                            self._log_once(record)
                        for kernel in kernels:
                            self._load_once(kernel)
                    finally:
                        self.done[name].set_result(None)
                    if fault:
                        raise RuntimeError(fault)
            except Exception as error:  # whatever it says, or cannot be told
                self.one_fewer(error)

    def one_fewer(self, error: Exception) -> None:
        if not self.ended.is_set():
            log.info("One process fewer traces steps, so that this start takes longer: %r", error)

    def give_up(self, threads: list[threading.Thread]) -> None:
        """Where all have ended, or none could be started, nobody does what is left."""
        for thread in threads:
            thread.join()
        for future in self.done.values():
            if not future.done():
                future.set_result(None)

    def _load_once(self, kernel: Kernel) -> None:
        with self._loading:
            if kernel.hash not in self._kernels and not self.ended.is_set():
                self._kernels.add(kernel.hash)
                kernel.compile()

    def _log_once(self, record: logging.LogRecord) -> None:
        logger = logging.getLogger(record.name)
        first = self._said.setdefault((record.name, record.getMessage()), record) is record
        if first and logger.isEnabledFor(record.levelno):
            logger.handle(record)


@contextlib.contextmanager
def _process() -> Iterator[socket.socket]:
    """This side of the socket to a new one. Raises OSError where it cannot be started."""
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            environment = os.environ | {
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # it computes next to nothing
            }
            command = [sys.executable, "-P", "-m", MODULE, str(theirs.fileno())]
            popen = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        ours.settimeout(SECONDS)
        try:
            yield ours
        finally:
            popen.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # one that a driver holds
                popen.wait(_LAST_SECONDS)


def main() -> None:
    # It ends with the process that started it, stopped or not.
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    end = socket.socket(fileno=int(sys.argv[1]))
    said: SimpleQueue[logging.LogRecord] = SimpleQueue()
    logging.basicConfig(format="%(message)s", handlers=[QueueHandler(said)])
    trace: Callable[[Task], list[Kernel]] | None = None
    with contextlib.suppress(EOFError):
        while True:
            fault: str | None = None
            kernels: list[Kernel] = []
            try:
                trace = trace or wire.receive(end).tracer()
                kernels = trace(task := wire.receive(end))
                if not task.path.exists():
                    fault = f"{task.path} could not be written"
            except EOFError:
                raise
            except Exception as error:  # the engine's process finds it as well, if it matters
                fault = repr(error)
            wire.send(end, (fault, [said.get() for _ in range(said.qsize())], kernels))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    main()
    os._exit(0)
