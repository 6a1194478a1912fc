"""Runs an application under uvicorn until a signal: no new requests, running ones get time, then the rest is cut."""

import asyncio
import socket

import uvicorn
from fastapi import FastAPI

from serve.generation import Draining

_CUT_SECONDS = 2  # for the last error events to reach their clients


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


def make_server(
    app: FastAPI, *, host: str, port: int, log_level: str = "info", shutdown_timeout: int = 15
) -> Server:
    """A server for an application of `create_app`, not started yet: call `run()`.

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
        ws="none",
        server_header=False,
    )
    return Server(config, app.state.serving.draining, shutdown_timeout)
