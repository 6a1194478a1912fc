"""Clients that offer another protocol with their requests, as Java's and `curl --http2` do: the offer is ignored."""

import time

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.connections import Head
from tests.serve.test_http_slow_clients import HEAD, connect, read_answer

OFFER = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEA\r\n"
BODY = '{"prompt": "a"}'
FIRST = b"POST /upgrade: HTTP/1.1\r\n"
OFFERS = [b"Upgrade: h2c\r\n", b"upgrade:websocket\r\n", b"UPGRADE : x\n"]
OTHERS = [b"Host: a\r\n", b"Upgrade-Insecure-Requests: 1\r\n", b"X: " + 50 * b"y" + b"\n", b"Up: 1\r\n"]


@given(
    st.lists(st.sampled_from(OFFERS + OTHERS), max_size=6),
    st.sampled_from([b"", b"abc\r\n\r\nUpgrade: z\r\n", b"Upgrade: q\r\nz"]),
    st.lists(st.integers(1, 40), min_size=1),
)
def test_a_head_however_it_is_cut_loses_its_offers_alone(lines, behind, sizes):
    sent = FIRST + b"".join(lines) + b"\r\n" + behind
    head, got, at, turn = Head(), b"", 0, 0
    while at < len(sent):
        size = sizes[turn % len(sizes)]
        got += head.passed(sent[at : at + size])
        at, turn = at + size, turn + 1
    assert got == FIRST + b"".join(line for line in lines if line not in OFFERS) + b"\r\n" + behind


def test_a_long_line_is_not_kept_back():
    head = Head()
    assert head.passed(FIRST[:4]) == FIRST[:4]  # what is no HTTP is refused at once
    assert head.passed(FIRST[4:] + b"Cookie: aaaaaaaaaaaa") == FIRST[4:] + b"Cookie: aaaaaaaaaaaa"
    assert head.passed(b"bbb") == b"bbb"


@pytest.mark.parametrize("cut", [0, len(HEAD) + 40, len(HEAD + OFFER) + 5, -len(BODY)], ids=str)
@pytest.mark.parametrize(
    "offer", [OFFER, "Connection: upgrade\r\nUpgrade: websocket\r\n"], ids=["h2c", "websocket"]
)
def test_a_body_is_read(served, offer, cut):
    """Of several requests on one connection, each in two packets."""
    served.script("hello")
    request = f"{HEAD}{offer}Content-Length: {len(BODY)}\r\n\r\n{BODY}".encode()
    with connect(served) as client:
        for _ in range(2):
            client.sendall(request[:cut])
            time.sleep(0.05)
            client.sendall(request[cut:])
            head, answer = read_answer(client)
            assert head.startswith("HTTP/1.1 200") and '"text":"hello"' in answer


def test_a_body_in_chunks_is_read(served):
    served.script("hello")
    with httpx.Client(base_url=served.url) as client:
        offer = {"connection": "Upgrade", "upgrade": "h2c", "content-type": "application/json"}
        answer = client.post(
            "/v1/completions", content=iter([BODY[:5].encode(), BODY[5:].encode()]), headers=offer
        )
        assert answer.status_code == 200, answer.text
