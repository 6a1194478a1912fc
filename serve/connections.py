"""Connections whose clients let the server wait: each is an open file, of which there are only so many."""

import asyncio
import contextlib
import socket
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

_HEAD_SECONDS = 60.0  # from the connection, or the end of an answer, to the end of the next request's headers
_STALLED_SECONDS = 600.0  # in which nothing of what was sent has been taken


def drop_stalled(listener: socket.socket) -> None:
    """Its connections end where the other side is gone, or reads nothing any more, when that was noticed for long enough."""
    with contextlib.suppress(AttributeError, OSError):  # not every system has it
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(_STALLED_SECONDS * 1000))


class Connection(HttpToolsProtocol):
    """uvicorn's, except for two things.

    It ends where no request comes: that has no limit before the first one, nor within headers. And where a client leaves
    that has sent several requests at once, the one that is being answered hears of it, not the last one alone.
    """

    _late: asyncio.TimerHandle | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._unanswered: list[RequestResponseCycle] = []

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        for cycle in self._unanswered:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        super().connection_lost(exc)

    def on_headers_complete(self) -> None:
        self._stop_waiting()
        super().on_headers_complete()
        self._unanswered = [cycle for cycle in self._unanswered if not cycle.response_complete]
        self._unanswered.append(self.cycle)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete:  # else the next request is there already
            self._await_request()

    def _await_request(self) -> None:
        self._stop_waiting()
        self._late = self.loop.call_later(_HEAD_SECONDS, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._late is not None:
            self._late.cancel()
