"""The socket on which a server listens."""

import contextlib
import errno
import socket

from serve.args import ConfigError
from serve.connections import drop_stalled

_FILES = 65536  # open at once


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
