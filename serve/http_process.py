"""A process of HTTP: the application before an engine in another process, which starts it (`serve.processes`).

  python -m serve.http_process FD_OF_THE_LISTENER FD_OF_THE_SOCKET

So the interpreter that plans the engine's steps sends no tokens to clients. It ends with the engine's process.
"""

import asyncio
import contextlib
import gc
import os
import signal
import socket
import sys

from rich.console import Console

from serve import wire
from serve.api import create_app
from serve.logs import begin_logging
from serve.remote import RemoteEngine
from serve.server import Server, make_server


def prepared(setup: wire.Setup) -> tuple[RemoteEngine, Server]:
    """Raises ValueError for what the model's tokenizer lacks."""
    engine = RemoteEngine(setup.facts)
    app = create_app(
        engine,
        setup.tokenizer,
        setup.model_names,
        grammars=engine,
        spellings=engine.spellings if setup.several else None,
        engine_pid=os.getppid(),
        **setup.app,
    )
    return engine, make_server(app, log_level=setup.log_level, **setup.server)


async def run(engine: RemoteEngine, server: Server, end: socket.socket, listener: socket.socket) -> None:
    async with engine.connected(end, on_gone=lambda: os._exit(1)):
        await server.serve(sockets=[listener])


def main() -> None:
    listener_fd, end_fd = map(int, sys.argv[1:])
    end = socket.socket(fileno=end_fd)
    # The engine's process may have ended, and uvicorn raises signals again.
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        setup = wire.receive(end)
        begin_logging(Console(stderr=True), setup.log_level)
        try:
            engine, server = prepared(setup)
        except ValueError as error:
            wire.send(end, str(error))
            return
        wire.send(end, None)
        gc.collect()
        gc.freeze()
        wire.receive(end)  # from here on requests may come
        signal.signal(signal.SIGTERM, lambda *_: setattr(server, "should_exit", True))
        with socket.socket(fileno=listener_fd) as listener:
            asyncio.run(run(engine, server, end, listener), loop_factory=server.config.get_loop_factory())


if __name__ == "__main__":
    main()
    sys.stderr.flush()
    os._exit(0)
