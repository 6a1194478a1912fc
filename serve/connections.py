"""Connections whose clients let the server wait, or send it more than it can take: all others share its event loop."""

import asyncio
import contextlib
import re
import socket
from collections import deque
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from serve.errors import APIError

_HEAD_SECONDS = 60.0  # from the connection, or the end of an answer, to the end of the next request's headers
_STALLED_SECONDS = 600.0  # in which nothing of what was sent has been taken
_HEAD_BYTES = 65536  # of a head, of trailers, or between two pieces of a body
_HEAD_FIELDS = 100  # of a head and its trailers together
_WAITING = 16  # requests behind the one that is being answered, from which on no more are read
_PIECE = 4096  # bytes that the parser gets at a time: it cannot stop before their last request
_LINGER_SECONDS = 0.5  # how long what follows a fault is still read, so that the client sees the answer
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


class _Flow(FlowControl):
    """uvicorn resumes reading for every request that it begins or ends; here only where there is room for more."""

    def __init__(self, transport: asyncio.Transport, has_room: Callable[[], bool]) -> None:
        super().__init__(transport)
        self._has_room = has_room

    def resume_reading(self) -> None:
        if self._has_room():
            super().resume_reading()


class Connection(HttpToolsProtocol):
    """uvicorn's, except for a few things.

    It ends where no request comes: that has no limit before the first one, nor within headers. Where a client leaves that
    has sent several requests at once, the one that is being answered hears of it, not the last one alone; only so many
    are read ahead. Heads have a limit, and faults of HTTP are told in the API's form, behind the answers that are due. And
    it ignores offers of other protocols.
    """

    _late: asyncio.TimerHandle | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.url, self.headers = b"", []  # a fault may come before them
        self._head: Head | None = Head()  # that comes next, or None within a body
        self._unanswered: deque[RequestResponseCycle] = deque()
        self._unread = bytearray()  # by the parser
        self._bare = 0  # bytes since the last ones of a body, or the last request
        self._deaf = False  # after a fault

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.flow = _Flow(transport, lambda: len(self.pipeline) < _WAITING)
        self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._unread.clear()
        for cycle in self._unanswered:
            _leave(cycle)
        self._unset_keepalive_if_required()  # uvicorn's timer would hold what was reset for as long
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._deaf:
            self._unread += data
            self._read_on()

    def _read_on(self) -> None:
        """Hand what has come to the parser, as long as not too many requests wait."""
        while self._unread and len(self.pipeline) < _WAITING:
            piece = bytes(self._unread[:_PIECE])
            del self._unread[:_PIECE]
            self._bare += len(piece)
            super().data_received(piece if self._head is None else self._head.passed(piece))
            if self._bare > _HEAD_BYTES:
                self._refuse(_too_large())
        if self._unread:
            self.flow.pause_reading()

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        if len(self.headers) > _HEAD_FIELDS:
            raise _too_large()  # ends in `send_400_response`

    def on_headers_complete(self) -> None:
        self._stop_waiting()
        self._head, self._bare = None, 0
        super().on_headers_complete()
        self._unanswered.append(self.cycle)

    def on_body(self, body: bytes) -> None:
        self._bare = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._head, self._bare = Head(), 0

    def on_response_complete(self) -> None:
        self._unanswered.popleft()
        super().on_response_complete()
        if self.transport.is_closing():
            return
        self._read_on()
        self.flow.resume_reading()
        if self.cycle.response_complete and not self._deaf:  # else the next request is there already
            self._await_request()

    def send_400_response(self, msg: str) -> None:
        """What the parser does not take."""
        self._refuse(_too_large() if len(self.headers) > _HEAD_FIELDS else APIError(400, msg))

    def _refuse(self, fault: APIError) -> None:
        """Read no further. Where answers are due, the connection ends behind them, which says enough (RFC 9112, 9.3.2)."""
        if self._deaf:
            return
        self._deaf = True
        self._unread.clear()
        last = self._unanswered[-1] if self._unanswered else None
        if last and last.more_body and not last.response_started:  # the fault is in its body
            _leave(self._unanswered.pop())
            if self.pipeline:
                self.pipeline.popleft()
        if self._unanswered:
            self._unanswered[-1].keep_alive = False
        if self._unanswered or self.transport.is_closing():
            return
        answer = fault.response({"path": self.url.decode("latin-1"), "headers": self.headers})
        fields = [*self.server_state.default_headers, *answer.raw_headers, (b"connection", b"close")]
        head = STATUS_LINE[fault.status] + b"".join(b"%b: %b\r\n" % field for field in fields)
        self.transport.write(head + b"\r\n" + bytes(answer.body))
        self.flow.resume_reading()
        self._end_within(_LINGER_SECONDS)

    def _await_request(self) -> None:
        self._end_within(_HEAD_SECONDS)

    def _end_within(self, seconds: float) -> None:
        self._stop_waiting()
        self._late = self.loop.call_later(seconds, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._late is not None:
            self._late.cancel()


def _leave(cycle: RequestResponseCycle) -> None:
    """Its application hears that there is nobody to answer any more."""
    if not cycle.response_complete:
        cycle.disconnected = True
        cycle.message_event.set()


def _too_large() -> APIError:
    return APIError(
        431,
        f"The request's head is larger than the {_HEAD_BYTES} bytes or {_HEAD_FIELDS} fields that this server takes.",
        code="request_header_fields_too_large",
    )
