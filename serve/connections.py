"""Connections whose clients let the server wait: each is an open file, of which there are only so many."""

import asyncio
import contextlib
import re
import socket
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

_HEAD_SECONDS = 60.0  # from the connection, or the end of an answer, to the end of the next request's headers
_STALLED_SECONDS = 600.0  # in which nothing of what was sent has been taken
_OFFER = re.compile(rb"upgrade[ \t]*:", re.IGNORECASE)
_TELLING = 16  # bytes of a header line that show whether it is one


def drop_stalled(listener: socket.socket) -> None:
    """Its connections end where the other side is gone, or reads nothing any more, when that was noticed for long enough."""
    with contextlib.suppress(AttributeError, OSError):  # not every system has it
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(_STALLED_SECONDS * 1000))


class Head:
    """A request's head on its way to the parser, without offers of another protocol, as of HTTP/2 by Java's clients.

    A server may ignore them (RFC 9110, 7.8), but the parser would take the body for the beginning of that protocol.
    """

    def __init__(self) -> None:
        self._over = False
        self._begun = b""  # of a line that may become an offer
        # What there is of a line; None: not known yet. The first line is the request's own.
        self._passes: bool | None = True

    def passed(self, data: bytes) -> bytes:
        """Of the next bytes what the parser may have now; all that is behind the head."""
        data, self._begun = self._begun + data, b""
        begin, kept = 0, []
        while begin < len(data) and not self._over:
            end = data.find(b"\n", begin) + 1
            line = data[begin : end or None]
            if self._passes is None:
                if not end and len(line) < _TELLING:
                    self._begun = line
                    break
                self._over = line in (b"\n", b"\r\n")
                self._passes = not _OFFER.match(line)
            if self._passes:
                kept.append(line)
            if not end:
                break
            begin, self._passes = end, None
        else:
            kept.append(data[begin:])
        return b"".join(kept)


class Connection(HttpToolsProtocol):
    """uvicorn's, except for three things.

    It ends where no request comes: that has no limit before the first one, nor within headers. Where a client leaves that
    has sent several requests at once, the one that is being answered hears of it, not the last one alone. And it ignores
    offers of other protocols.
    """

    _late: asyncio.TimerHandle | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head: Head | None = Head()  # that comes next, or None within a body
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

    def data_received(self, data: bytes) -> None:
        super().data_received(data if self._head is None else self._head.passed(data))

    def on_headers_complete(self) -> None:
        self._stop_waiting()
        self._head = None
        super().on_headers_complete()
        self._unanswered = [cycle for cycle in self._unanswered if not cycle.response_complete]
        self._unanswered.append(self.cycle)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._head = Head()

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
