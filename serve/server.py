"""Runs an application under uvicorn until a signal: no new requests, running ones get time, then the rest is cut."""

import uvicorn
from fastapi import FastAPI


def make_server(
    app: FastAPI, *, host: str, port: int, log_level: str = "info", shutdown_timeout: int = 15
) -> uvicorn.Server:
    """A server that is not started yet.

    On SIGINT or SIGTERM it stops listening, waits `shutdown_timeout` seconds for responses to end, cancels the rest
    (their requests are aborted in the engine) and then ends the application's lifespan.
    """
    return uvicorn.Server(
        uvicorn.Config(
            app,
            host=host,
            port=port,
            log_level=log_level,
            timeout_graceful_shutdown=shutdown_timeout,
            timeout_keep_alive=30,
            backlog=2048,
            ws="none",
            server_header=False,
        )
    )
