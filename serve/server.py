"""Runs an application under uvicorn until a signal: no new requests, running ones get time, then the rest is cut."""

import asyncio
import logging
import socket

import uvicorn
from fastapi import FastAPI

from serve.connections import Connection
from serve.generation import Draining

_CUT_SECONDS = 2  # for the last error events to reach their clients
_LAST_SECONDS = 0.1  # the same where nothing else is waited for

_log = logging.getLogger("uvicorn.error")


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
