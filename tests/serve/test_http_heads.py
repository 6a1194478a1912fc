"""How much a connection may bring at once: of heads, of trailers, and of requests that wait behind another."""

import asyncio
import contextlib

import pytest
import uvicorn
from uvicorn.server import ServerState

from serve.connections import _HEAD_BYTES, _HEAD_FIELDS, _PIECE, _WAITING, Connection
from tests.serve.http_server import wait_until
from tests.serve.test_http_slow_clients import GET, HEAD, connect, read_answer

PING = b"GET /ping HTTP/1.1\r\n"
CHUNKED = f"{HEAD}Transfer-Encoding: chunked\r\n\r\n".encode()
BODY = '{"prompt": "a"}'
CHUNK = f"{len(BODY):x}\r\n{BODY}\r\n".encode()
LONG = b"x" * (_HEAD_BYTES + 2 * _PIECE)
MANY = b"a:\r\n" * (_HEAD_FIELDS + 1) + b"\r\n"
TOO_LARGE = {
    "fields": PING + MANY,
    "a field": PING + b"a: " + LONG,
    "a path": b"GET /" + LONG,
    "trailers": CHUNKED + CHUNK + b"0\r\n" + MANY,
    "a trailer": CHUNKED + CHUNK + b"0\r\na: " + LONG,
    "a chunk's extension": CHUNKED + CHUNK + b"1;" + LONG,
    "empty lines": b"\r\n" * len(LONG),
}


def read_all(client) -> bytes:
    received = b""
    while part := client.recv(65536):
        received += part
    return received


@pytest.mark.parametrize("sent", TOO_LARGE.values(), ids=TOO_LARGE)
@pytest.mark.parametrize("before", [b"", GET.encode()], ids=["first", "second"])
def test_a_head_has_a_limit(served, sent, before):
    with connect(served) as client:
        client.sendall(before)
        if before:
            assert read_answer(client)[0].startswith("HTTP/1.1 200")
        client.sendall(sent)
        head, answer = read_answer(client)
        assert head.startswith("HTTP/1.1 431 ") and "connection: close" in head
        assert '"code":"request_header_fields_too_large"' in answer
        assert f"{_HEAD_BYTES} bytes or {_HEAD_FIELDS} fields" in answer
        with contextlib.suppress(ConnectionError):  # it may be closed by now
            client.sendall(GET.encode())
            assert client.recv(100) == b""
    assert not served.engine.requests


def test_what_fits_is_taken(served):
    """Of everything nearly as much as there may be, again and again on one connection."""
    fields = b"a:\r\n" * (_HEAD_FIELDS - 1) + b"b: " + b"x" * (_HEAD_BYTES - _PIECE) + b"\r\n"
    tiny = b"".join(b"1\r\n%c\r\n" % char for char in b" " * 30_000 + BODY.encode()) + b"0\r\na:\r\n\r\n"
    with connect(served) as client:
        for _ in range(2):
            client.sendall(PING + fields + b"\r\n")
            assert read_answer(client)[0].startswith("HTTP/1.1 200")
            client.sendall(CHUNKED + tiny)
            assert '"text":"hello"' in read_answer(client)[1]


def test_a_fault_is_told_in_the_form_of_the_api(served):
    for path, form in (
        ("/v1/messages", '{"type":"error","error":'),
        ("/v1/completions", '{"error":{"message"'),
    ):
        with connect(served) as client:
            client.sendall(f"POST {path} HTTP/1.1\r\nb a d\r\n\r\n".encode())
            head, answer = read_answer(client)
            assert head.startswith("HTTP/1.1 400 ") and answer.startswith(form)


@pytest.mark.parametrize(
    "fault", [b"b a d\r\n\r\n", PING + MANY, CHUNKED + b"z\r\n", CHUNKED + b"0\r\n" + MANY]
)
def test_a_fault_behind_other_requests_leaves_their_answers_alone(served, fault):
    served.script("hello", delay=0.05)
    request = f"{HEAD}Content-Length: {len(BODY)}\r\n\r\n{BODY}".encode()
    with connect(served) as client:
        client.sendall(2 * request + fault)
        received = read_all(client)
    assert received.count(b"HTTP/1.1 ") == received.count(b'"text":"hello"') == 2
    assert len(served.engine.requests) == 2


def test_a_fault_in_a_body_ends_its_request(served):
    with connect(served) as client:
        client.sendall(CHUNKED + CHUNK)
        wait_until(lambda: any(c.cycle and c.cycle.more_body for c in served.server.server_state.connections))
        client.sendall(b"z\r\n")
        assert read_answer(client)[0].startswith("HTTP/1.1 400 ")
    assert not served.engine.requests


def test_requests_that_come_at_once_are_all_answered_in_their_order(served):
    paths = ["ping", "version"] * 300
    with connect(served) as client:
        client.sendall("".join(f"GET /{path} HTTP/1.1\r\n\r\n" for path in paths).encode())
        client.sendall(b"GET /ping HTTP/1.1\r\nConnection: close\r\n\r\n")
        answers = read_all(client).split(b"HTTP/1.1 200 OK")[1:]
    assert ["version" if b'{"version"' in answer else "ping" for answer in answers] == [*paths, "ping"]


class Wire(asyncio.Transport):
    """The other side sends as long as the server reads."""

    def __init__(self) -> None:
        super().__init__()
        self.reads, self.sent = True, b""

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True

    def write(self, data) -> None:
        self.sent += data

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        pass


def test_few_requests_wait_however_many_come():
    """All that came were parsed once, and each answer let as much come again."""
    begun, block = [], b"GET / HTTP/1.1\r\n\r\n" * 10_000

    async def app(scope, receive, send):
        answer = asyncio.Event()
        begun.append(answer)
        await answer.wait()
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    async def flood() -> int:
        config, wire = uvicorn.Config(app, log_config=None, lifespan="off"), Wire()
        connection, came = Connection(config, ServerState(), {}), 0
        connection.connection_made(wire)
        for turn in range(1, 600):
            for _ in range(3):
                if wire.reads:
                    connection.data_received(block)
                    came += 1
            await asyncio.sleep(0)
            assert len(begun) == turn
            assert len(connection.pipeline) <= _WAITING + _PIECE // 18 + 1
            assert len(connection._unanswered) == len(connection.pipeline) + 1
            begun[-1].set()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        connection.connection_lost(None)
        begun[-1].set()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert wire.sent.count(b"HTTP/1.1 204 No Content\r\n\r\n") == turn
        return came

    assert asyncio.run(flood()) == 1
