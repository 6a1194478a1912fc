"""The processes that speak HTTP for an engine: started beside it, watched, replaced where one ends, and ended with it."""

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

from serve import wire
from serve.caller import Caller
from serve.grammar_cache import GrammarCache
from serve.metrics import MULTIPROCESS
from serve.request import EngineProtocol

MODULE = "serve.http_process"
_FAST_SECONDS = 10.0  # a process that lives no longer is not replaced: the next one would do no better
_LATE_SECONDS = 5.0  # after which one that was told to end is killed, beside what running responses may take

log = logging.getLogger("tangram.server")


class _Process:
    """One, from its start; it imports what it needs while the engine is made, then waits."""

    def __init__(self, listener: socket.socket, counts: str | None) -> None:
        self.end, theirs = socket.socketpair()
        # JAX is imported there, too, and leaves the GPU alone.
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "JAX_PLATFORMS": "cpu",
        }
        if counts:
            environment[MULTIPROCESS] = counts
        with theirs:
            fds = listener.fileno(), theirs.fileno()
            command = [sys.executable, "-m", MODULE, *map(str, fds)]
            # In a group of its own: a Ctrl-C is for the engine's process, which tells the others.
            self.popen = subprocess.Popen(
                command, pass_fds=fds, env=environment, stdin=subprocess.DEVNULL, process_group=0
            )

    def set_up(self, setup: wire.Setup) -> None:
        """Blocks until it is ready to begin. Raises ValueError for what the model lacks, OSError if it has ended."""
        try:
            wire.send(self.end, setup)
            fault = wire.receive(self.end)
        except EOFError:
            status = self.popen.wait()
            raise OSError(f"the process that is to speak HTTP has ended with status {status}") from None
        if fault:
            raise ValueError(fault)

    def signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.popen.send_signal(number)


class HttpProcesses:
    """A number of them, for one listener, which must not listen yet."""

    def __init__(self, listener: socket.socket, count: int) -> None:
        self._listener = listener
        # Each counts what it has served, and any of them is asked for all of it.
        self._counts = tempfile.mkdtemp(prefix="tangram-metrics-") if count > 1 else None
        self._processes = [self._start() for _ in range(count)]
        self._stopping = False
        self.failed = False

    def _start(self) -> _Process:
        return _Process(self._listener, self._counts)

    @property
    def pids(self) -> tuple[int, ...]:
        """Of those that there are now."""
        return tuple(process.popen.pid for process in self._processes)

    def set_up(self, setup: wire.Setup) -> None:
        """Say what they need to know. Raises ValueError for what the model's tokenizer lacks, OSError if one has ended."""
        self._setup = setup
        for process in self._processes:
            process.set_up(setup)

    def run(self, engine: EngineProtocol, on_ready: Callable[[], None] = lambda: None) -> None:
        """Serve until a signal; returns when no process is left. `on_ready` is called when signals are heard."""
        try:
            asyncio.run(self._run(engine, on_ready))
        finally:
            self.close()

    def close(self) -> None:
        """End what is left, at once."""
        self._signal(signal.SIGKILL)
        for process in self._processes:
            process.popen.wait()
        if self._counts:
            shutil.rmtree(self._counts, ignore_errors=True)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Tell them to end: no new requests, running ones get time. A second SIGINT ends them at once."""
        if not self._stopping:
            self._stopping, number = True, signal.SIGTERM
            timeout = self._setup.server.get("shutdown_timeout", 0) + _LATE_SECONDS
            self._loop.call_later(timeout, self._signal, signal.SIGKILL)
        self._signal(number)

    def stop_soon(self) -> None:
        """The same from any thread."""
        with contextlib.suppress(RuntimeError):  # it has stopped
            self._loop.call_soon_threadsafe(self.stop)

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            process.signal(number)

    async def _run(self, engine: EngineProtocol, on_ready: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.add_signal_handler(number, self.stop, number)
        grammars = GrammarCache(self._setup.tokenizer, engine.vocab_size, engine.eos_token_ids)
        on_ready()
        try:
            async with asyncio.TaskGroup() as group:
                for place in range(len(self._processes)):
                    group.create_task(self._keep(place, lambda: Caller(engine, grammars)))
        finally:
            grammars.close()

    async def _keep(self, place: int, caller: Callable[[], Caller]) -> None:
        """One process at a time, until they are to stop."""
        while True:
            process, began = self._processes[place], time.monotonic()
            with contextlib.suppress(EOFError):
                wire.send(process.end, None)
                await caller().serve(process.end)
            status = await asyncio.to_thread(process.popen.wait)
            if self._stopping:
                return
            which = f"The HTTP process {process.popen.pid} has ended with status {status}"
            if time.monotonic() < began + _FAST_SECONDS:
                log.critical("%s: it ended as soon as it began: the server stops", which)
                self.failed = True
                self.stop()
                return
            log.error("%s: another takes its place", which)
            self._processes[place] = process = self._start()
            with contextlib.suppress(OSError):  # seen above
                await asyncio.to_thread(process.set_up, self._setup)
            if self._stopping:
                process.signal(signal.SIGTERM)
