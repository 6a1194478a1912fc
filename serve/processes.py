"""The processes that speak HTTP for an engine: started beside it, watched, replaced where one ends, and ended with it."""

import asyncio
import contextlib
import dataclasses
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

from serve import wire
from serve.caller import Caller
from serve.grammar_cache import GrammarCache
from serve.metrics import MULTIPROCESS
from serve.request import EngineProtocol

MODULE = "serve.http_process"
_FAST_SECONDS = 10.0  # one that lives no longer is not replaced at once: the next one would do no better
_LOOK_SECONDS = 0.1  # between two looks at what becomes of it
_LATE_SECONDS = 5.0  # after which one that was told to end is killed, beside what running responses may take
_LAST_SECONDS = 1.0  # the same after a second SIGINT

log = logging.getLogger("tangram.server")


class _Process:
    """One, from its start; it imports what it needs while the engine is made, then waits."""

    def __init__(self, listener: socket.socket, counts: str | None) -> None:
        self._began = time.monotonic()
        self.end, theirs = socket.socketpair()
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        environment.pop(MULTIPROCESS, None)  # it may be there for others
        if counts:
            environment[MULTIPROCESS] = counts
        with theirs:
            fds = listener.fileno(), theirs.fileno()
            command = [sys.executable, "-P", "-m", MODULE, *map(str, fds)]  # -P: modules are found as here
            # In a session of its own: a Ctrl-C is for the engine's process, which tells the others.
            self.popen = subprocess.Popen(
                command, pass_fds=fds, env=environment, stdin=subprocess.DEVNULL, start_new_session=True
            )

    @property
    def is_young(self) -> bool:
        """Whether it has just been started."""
        return time.monotonic() < self._began + _FAST_SECONDS

    def set_up(self, setup: wire.Setup) -> None:
        """Say what it needs to know, while it still imports. Raises OSError if it has ended."""
        with self._raising():
            wire.send(self.end, setup)

    def await_ready(self) -> None:
        """Blocks until it can begin. Raises ValueError for what the model lacks, OSError if it has ended."""
        with self._raising():
            fault = wire.receive(self.end)
        if fault:
            raise ValueError(fault)

    @contextlib.contextmanager
    def _raising(self) -> Iterator[None]:
        try:
            yield
        except EOFError:
            status = self.popen.wait()
            raise OSError(f"the process that is to speak HTTP has ended with status {status}") from None

    def signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.popen.send_signal(number)


class HttpProcesses:
    """A number of them, for one listener, which must not listen yet."""

    def __init__(self, listener: socket.socket, count: int) -> None:
        self._listener = listener
        # Each counts what it has served, and any of them is asked for all of it.
        self._counts = (
            f"{tempfile.gettempdir()}/tangram-metrics-{os.getpid()}-{id(self):x}" if count > 1 else None
        )
        self._processes = [self._start() for _ in range(count)]
        self._callers: dict[int, Caller] = {}  # of those that serve, by their places
        self._replacing: set[int] = set()  # places for which one is being started
        self._stopping = asyncio.Event()
        self.failed = False

    def _start(self) -> _Process:
        return _Process(self._listener, self._counts)

    @property
    def pids(self) -> tuple[int, ...]:
        """Of those that there are now."""
        return tuple(process.popen.pid for process in self._processes)

    def set_up(self, setup: wire.Setup) -> None:
        """Say what they need to know. Raises ValueError for what the model's tokenizer lacks, OSError if one has ended."""
        self._setup = setup = dataclasses.replace(setup, several=len(self._processes) > 1)
        # Now: while the vocabulary is read no other thread runs.
        self._grammars = GrammarCache(setup.tokenizer, setup.facts.vocab_size, setup.facts.eos_token_ids)
        self._make_counts()
        for process in self._processes:
            process.set_up(setup)
        for process in self._processes:
            process.await_ready()

    def _make_counts(self) -> None:
        if self._counts:
            os.makedirs(self._counts, mode=0o700, exist_ok=True)  # somebody may have tidied up

    def run(
        self,
        engine: EngineProtocol,
        on_ready: Callable[[], None] = lambda: None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        """Serve until a signal; returns when no process is left.

        `on_ready` is called when signals are heard, `on_end` in a thread when nobody asks for anything any more.
        """
        try:
            asyncio.run(self._run(engine, on_ready, on_end))
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
        if self._stopping.is_set():
            if number == signal.SIGINT:
                self._loop.call_later(_LAST_SECONDS, self._signal, signal.SIGKILL)
            self._signal(number)
            return
        self._stopping.set()
        self._listener.close()  # theirs they close themselves: from now on connections are refused
        timeout = self._setup.server.get("shutdown_timeout", 0) + _LATE_SECONDS
        self._loop.call_later(timeout, self._kill_late)
        self._signal(signal.SIGTERM)

    def fail(self) -> None:
        """The engine takes no requests any more, so neither do they. From any thread."""

        def stop() -> None:
            for caller in self._callers.values():
                caller.say(wire.NotReady())
            self.stop()

        with contextlib.suppress(RuntimeError):  # they have stopped
            self._loop.call_soon_threadsafe(stop)

    def stop_soon(self) -> None:
        """`stop` from any thread."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self.stop)

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            process.signal(number)

    def _kill_late(self) -> None:
        if any(process.popen.poll() is None for process in self._processes):
            log.warning("An HTTP process does not end: it is killed")
            self._signal(signal.SIGKILL)

    async def _run(
        self, engine: EngineProtocol, on_ready: Callable[[], None], on_end: Callable[[], None]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.add_signal_handler(number, self.stop, number)
        on_ready()
        try:
            async with asyncio.TaskGroup() as group:
                for place in range(len(self._processes)):
                    group.create_task(self._keep(place, engine))
        finally:
            self._grammars.close()
        await asyncio.to_thread(on_end)

    async def _keep(self, place: int, engine: EngineProtocol) -> None:
        """One process at a time, until they are to stop."""
        while True:
            process = self._processes[place]
            await self._serve(place, engine)
            status = await asyncio.to_thread(process.popen.wait)
            if self._stopping.is_set():
                return
            log.error("The HTTP process %d has ended with status %d", process.popen.pid, status)
            if process.is_young and not await self._may_wait():
                return
            while not await self._replace(place):
                if not await self._may_wait():
                    return

    async def _serve(self, place: int, engine: EngineProtocol) -> None:
        """Do what the process asks for until it ends, or its messages cannot be read."""
        process = self._processes[place]

        def tell_others(spelled: wire.Spelled) -> None:
            for other, caller in self._callers.items():
                if other != place:
                    caller.say(spelled, dropped=True)

        try:
            wire.send(process.end, None)
            self._callers[place] = Caller(engine, self._grammars, tell_others)
            await self._callers[place].serve(process.end)
        except EOFError:
            pass
        except Exception:
            log.exception("What the HTTP process %d says cannot be understood", process.popen.pid)
            process.signal(signal.SIGKILL)
        finally:
            self._callers.pop(place, None)

    async def _may_wait(self) -> bool:
        """Wait before the next process is started, if others serve meanwhile; otherwise, or at the end, there is none."""
        while self._replacing and not self._callers and not self._stopping.is_set():
            await asyncio.sleep(_LOOK_SECONDS)  # another is about to serve, or not
        if self._stopping.is_set():
            return False
        if not self._callers:
            log.critical("HTTP processes end as soon as they begin: the server stops")
            self.failed = True
            self.stop()
            return False
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), _FAST_SECONDS)
        return not self._stopping.is_set()

    async def _replace(self, place: int) -> bool:
        """Whether another process takes the place."""
        self._replacing.add(place)
        try:
            self._make_counts()
            self._processes[place] = process = self._start()
            # In threads: it reads only once it has imported what it needs, and others are served meanwhile.
            await asyncio.to_thread(process.set_up, self._setup)
            await asyncio.to_thread(process.await_ready)
        except Exception as error:  # whatever it is, the others go on
            if not self._stopping.is_set():
                log.error("An HTTP process cannot be replaced: %s", error)
            return False
        finally:
            self._replacing.discard(place)
        log.info("The HTTP process %d takes its place", process.popen.pid)
        return True
