"""What a server that ends does with what it was asked."""

import json
import socket
import threading
import time

import httpx
import pytest

from tests.serve.http_server import serving, wait_until

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize("stream", [False, True])
def test_shutdown_cuts_what_takes_too_long(stream):
    answers = []
    with serving() as served:
        engine = served.engine
        served.script("x", finish="none")

        def ask() -> None:
            body = CHAT | {"stream": stream}
            answers.append(
                httpx.post(f"{served.url}/v1/chat/completions", json=body, timeout=20, trust_env=False)
            )

        client = threading.Thread(target=ask)
        client.start()
        wait_until(lambda: engine.live == 1)
        start = time.monotonic()
    # The generation hangs: after the timeout of 1 s it ends with an error.
    client.join(timeout=20)
    assert 0.9 < time.monotonic() - start < 5
    assert engine.live == 0
    (answer,) = answers
    if stream:
        assert answer.status_code == 200
        *_, error, done, _ = answer.text.split("\n\n")
        assert ("shutting down" in json.loads(error.removeprefix("data: "))["error"]["message"], done) == (
            True,
            "data: [DONE]",
        )
    else:
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")


@pytest.mark.parametrize("path", [pytest.param("/v1/completions", marks=pytest.mark.slow), "/v1/messages"])
def test_shutdown_answers_whose_body_is_still_on_its_way(path, capsys):
    """It was a 500 and a traceback for each of them."""
    with serving() as served:
        client = socket.create_connection(("127.0.0.1", httpx.URL(served.url).port or 0))
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        client.sendall(head.encode() + b'Content-Length: 99\r\n\r\n{"prompt":')
        time.sleep(0.2)
    with client:
        answer = client.makefile().read()
    assert answer.startswith("HTTP/1.1 503")
    assert "shutting down" in answer and ("overloaded_error" in answer) == (path == "/v1/messages")
    assert "Traceback" not in capsys.readouterr().err


def test_shutdown_cuts_streams_that_nobody_reads_without_a_traceback(capsys):
    body = {"prompt": "a", "stream": True}
    with serving() as served:
        # Its last event gets stuck like those before.
        served.app.state.serving.draining.interrupt = lambda: None
        served.script("x", finish="none")
        with (
            pytest.raises(httpx.RemoteProtocolError),
            served.http.stream("POST", "/v1/completions", json=body) as answer,
        ):
            served.stop()
            answer.read()
    errors = capsys.readouterr().err
    assert "Cancel 1 running task(s)" in errors and "Traceback" not in errors


def test_a_second_signal_ends_what_runs_at_once_without_a_traceback(capsys):
    with serving() as served:
        served.script("x", finish="none")
        body = {"prompt": "a", "stream": True}
        with served.http.stream("POST", "/v1/completions", json=body) as answer:
            served.stop()
            time.sleep(0.2)
            served.server.force_exit = True
            assert "shutting down" in answer.read().decode()
    assert "Traceback" not in capsys.readouterr().err


def test_shutdown_lets_short_responses_finish():
    answers = []
    with serving() as served:
        served.script("hello", delay=0.1)
        client = threading.Thread(
            target=lambda: answers.append(served.post("/v1/completions", {"prompt": "a"}))
        )
        client.start()
        wait_until(lambda: served.engine.live == 1)
        served.app.state.serving.draining.started = True
        assert served.post("/v1/completions", {"prompt": "a"}).status_code == 503
        client.join(timeout=20)
    assert answers[0].json()["choices"][0]["text"] == "hello"
