"""Clients that let the server wait: those that only do so are dropped, those that are slow are not."""

import gc
import socket
import struct
import time

import httpx
import pytest

from serve.connections import Connection
from tests.serve.http_server import ids, serving, wait_until

HEAD = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
GET = "GET /ping HTTP/1.1\r\nHost: x\r\n\r\n"


def connect(served, receive_bytes=None):
    client = socket.socket()
    if receive_bytes is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    client.settimeout(20)
    client.connect(("127.0.0.1", httpx.URL(served.url).port))
    return client


def read_answer(client):
    """The head and the body of one answer of a known length."""
    head, _, body = client.recv(65536).partition(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    while len(body) < length:
        body += client.recv(65536)
    return head.decode(), body.decode()


def test_nothing_is_kept_of_a_connection_that_is_reset(served):
    """Half a minute's, where clients reset many, was gigabytes."""

    def connections():
        gc.collect()
        return sum(isinstance(known, Connection) for known in gc.get_objects())

    before = connections()
    for _ in range(5):
        with connect(served) as client:
            client.sendall(GET.encode())
            read_answer(client)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    wait_until(lambda: connections() <= before)


@pytest.mark.parametrize("after", ["", GET], ids=["at once", "after an answer"])
@pytest.mark.parametrize("sent", ["", "GET /ping HTTP/1.1\r\nHost: "], ids=["nothing", "half a head"])
def test_a_connection_without_a_request_is_closed(served, monkeypatch, after, sent):
    monkeypatch.setattr("serve.connections._HEAD_SECONDS", 0.5)
    others = set(served.server.server_state.connections)
    with connect(served) as client:
        client.sendall(after.encode())
        if after:
            assert read_answer(client)[0].startswith("HTTP/1.1 200")
        start = time.monotonic()
        for char in sent:  # however often a bit more comes
            client.sendall(char.encode())
            time.sleep(0.01)
        assert client.recv(100) == b""
        assert 0.4 < time.monotonic() - start < 10
    wait_until(lambda: served.server.server_state.connections <= others)


def test_requests_may_take_longer_than_their_heads(served, monkeypatch):
    """In their bodies and in their answers, one after another and two at once."""
    monkeypatch.setattr("serve.connections._HEAD_SECONDS", 0.5)
    served.script("hello", delay=0.15)
    body = '{"prompt": "a"}'
    with connect(served) as client:
        for _ in range(2):
            client.sendall(f"{HEAD}Content-Length: {len(body)}\r\n\r\n".encode())
            time.sleep(0.7)
            client.sendall(body.encode())
            head, answer = read_answer(client)
            assert head.startswith("HTTP/1.1 200") and '"text":"hello"' in answer
        client.sendall(2 * f"{HEAD}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        for _ in range(2):
            assert '"text":"hello"' in read_answer(client)[1]


def test_a_body_may_be_slow_but_must_come(served, monkeypatch):
    monkeypatch.setattr("serve.body._READ_SECONDS", 1.5)
    monkeypatch.setattr("serve.body._LEAST_RATE", 50)
    body = '{"prompt": "' + "a" * 200 + '"}'
    with connect(served) as client:
        client.sendall(f"{HEAD}Content-Length: {len(body)}\r\n\r\n".encode())
        for at in range(0, len(body), 15):
            client.sendall(body[at : at + 15].encode())
            time.sleep(0.2)
        assert read_answer(client)[0].startswith("HTTP/1.1 200")
        client.sendall(f"{HEAD}Content-Length: {len(body)}\r\n\r\n".encode())
        client.sendall(body[:10].encode())
        start = time.monotonic()
        head, answer = read_answer(client)
        assert time.monotonic() - start > 1.5
        assert head.startswith("HTTP/1.1 408") and "a second more for every 50 bytes" in answer


@pytest.mark.parametrize("more", [0, 1, 2])
def test_a_client_that_leaves_ends_its_answer_whatever_else_it_has_sent(served, more):
    served.script(ids("x" * 400), delay=0.05)
    body = '{"prompt": "a", "max_tokens": 500}'
    with connect(served) as client:
        client.sendall((1 + more) * f"{HEAD}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        wait_until(lambda: served.engine.live == 1)
    wait_until(lambda: served.engine.live == 0, 5)
    assert served.engine.aborted == [(served.engine.requests[0].request_id, None)]


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="the system has no such limit")
def test_a_stream_that_nobody_reads_ends(monkeypatch):
    monkeypatch.setattr("serve.connections._STALLED_SECONDS", 1.0)
    with serving() as served:
        served.script(ids("x" * 400), finish="none")
        body = '{"prompt": "a", "stream": true, "max_tokens": 500}'
        with connect(served, receive_bytes=2048) as client:
            client.sendall(f"{HEAD}Content-Length: {len(body)}\r\n\r\n{body}".encode())
            wait_until(lambda: served.engine.live == 1)
            start = time.monotonic()
            wait_until(lambda: served.engine.live == 0, 20)
            assert time.monotonic() - start > 0.9
            assert served.engine.aborted == [(served.engine.requests[0].request_id, None)]
            assert not served.server.server_state.connections
