"""A real uvicorn on loopback in front of the scripted engine, and clients for it."""

import contextlib
import json
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import openai

from models.testing import tiny_tokenizer
from serve.api import create_app
from serve.listener import bind, url_of
from serve.server import Server, make_server
from tests.serve.fake_engine import FakeEngine, Script

TOKENIZER = tiny_tokenizer()
EOS = 2  # <|im_end|>


def ids(text: str) -> list[int]:
    """Token ids of the tiny tokenizer: byte + 8."""
    return [byte + 8 for byte in text.encode()]


def wait_until(condition, seconds: float = 5.0) -> None:
    """Poll until the condition holds; fails the test otherwise."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "condition did not come true in time"
        time.sleep(0.005)


@dataclass
class Served:
    """A running server, its engine, and clients for it."""

    engine: FakeEngine
    url: str
    http: httpx.Client
    openai: openai.OpenAI
    app: Any
    server: Server

    def stop(self) -> None:
        """Begin to shut down."""
        self.server.should_exit = True

    def post(self, path: str, body: Any, **kwargs: Any) -> httpx.Response:
        return self.http.post(path, json=body, **kwargs)

    def script(self, tokens: Sequence[int] | str, **options: Any) -> None:
        """What the engine answers from now on."""
        self.engine.script = Script(ids(tokens) if isinstance(tokens, str) else tokens, **options)


def named_events(served: Served, path: str, body: Any) -> list[dict[str, Any]]:
    """The events of a stream, each of which is named as its type says."""
    with served.http.stream("POST", path, json=body) as answer:
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
        blocks = "".join(answer.iter_text()).split("\n\n")
    assert blocks.pop() == ""
    found = []
    for block in blocks:
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


@contextlib.contextmanager
def serving(
    names: Sequence[str] = ("tiny",), *, tokenizer: Any = TOKENIZER, max_model_len: int = 512, **options: Any
) -> Iterator[Served]:
    """Start a server on a free port, stop it at the end."""
    engine = FakeEngine(Script(ids("hello"), finish="length"), max_model_len)
    app = create_app(engine, tokenizer, names, **options)
    listener = bind("127.0.0.1", 0)
    server = make_server(app, host="127.0.0.1", port=0, log_level="warning", shutdown_timeout=1)
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True, name="uvicorn")
    thread.start()
    try:
        wait_until(lambda: server.started, 20)
        url = url_of(listener)
        key = (options.get("api_keys") or ("none",))[0]
        with (
            httpx.Client(base_url=url, timeout=20, trust_env=False) as http,
            openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=20) as client,
        ):
            yield Served(engine, url, http, client, app, server)
    finally:
        server.should_exit = True
        thread.join(timeout=20)
        engine.close()
        assert not thread.is_alive()
