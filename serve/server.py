"""Runs an application under uvicorn until a signal: no new requests, running ones get time, then the rest is cut."""

import asyncio
import contextlib
import errno
import logging
import socket

import uvicorn
from fastapi import FastAPI

from serve.args import ConfigError
from serve.connections import Connection, drop_stalled
from serve.generation import Draining

_CUT_SECONDS = 2  # for the last error events to reach their clients
_LAST_SECONDS = 0.1  # the same where nothing else is waited for
_FILES = 65536  # open at once

_log = logging.getLogger("uvicorn.error")


def bind(host: str, port: int) -> socket.socket:
    """A socket of that address (port 0: any free one) for `Server.run`; connections are refused until it listens.

    Raises ConfigError.
    """
    try:
        # The least family: IPv4 for a name that has both.
        family, kind, protocol, _, address = min(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        with contextlib.ExitStack() as on_error:
            listener = on_error.enter_context(socket.socket(family, kind, protocol))
            # The port of a server that has just ended is free, that of one which listens is not.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            drop_stalled(listener)
            listener.bind(address)
            on_error.pop_all()
            return listener
    except (OSError, UnicodeError) as error:  # UnicodeError: a name that cannot be one
        taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        advice = (
            "another --port, or stop the server that uses this one" if taken else "another --host or --port"
        )
        raise ConfigError(f"--host {host} --port {port}: {error}: write {advice}") from error


def allow_files() -> None:
    """Let this process open more files: each connection is one, and beyond the usual 1024 they would be closed unheard."""
    with contextlib.suppress(ImportError, ValueError, OSError):  # not every system lets go of its limits
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = _FILES if hard == resource.RLIM_INFINITY else min(_FILES, hard)
        if soft != resource.RLIM_INFINITY and soft < most:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def url_of(listener: socket.socket) -> str:
    """Where a server of this socket is found."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """uvicorn, except that responses which outlast the shutdown timeout end with an error instead of a broken pipe."""

    def __init__(self, config: uvicorn.Config, draining: Draining, shutdown_timeout: float) -> None:
        super().__init__(config)
        self._draining = draining
        self._shutdown_timeout = shutdown_timeout

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._draining.started = True
        cut = asyncio.get_running_loop().call_later(self._shutdown_timeout, self._draining.interrupt)
        try:
            await super().shutdown(sockets)
        finally:
            cut.cancel()
            if self.force_exit:
                await self._leave_at_once()

    async def _leave_at_once(self) -> None:
        """After a second SIGINT: what still runs hears of it, and what is then cancelled is no fault to be logged."""
        self._draining.interrupt()
        await asyncio.sleep(_LAST_SECONDS)
        _log.disabled = True

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """See uvicorn."""
        try:
            super().run(sockets)
        finally:
            _log.disabled = False


def make_server(
    app: FastAPI, *, host: str, port: int, log_level: str = "info", shutdown_timeout: int = 15
) -> Server:
    """A server for an application of `create_app`, not started yet: call `run()`, which binds unless it is given sockets.

    On SIGINT or SIGTERM it stops listening, gives running responses `shutdown_timeout` seconds, ends the rest with
    an error, and then ends the application's lifespan. A second SIGINT stops it at once.
    """
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        log_level=log_level,
        timeout_graceful_shutdown=shutdown_timeout + _CUT_SECONDS,
        timeout_keep_alive=30,
        backlog=2048,
        http=Connection,
        ws="none",
        server_header=False,
    )
    return Server(config, app.state.serving.draining, shutdown_timeout)
