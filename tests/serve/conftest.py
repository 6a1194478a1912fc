"""The server under test, started once and reset for every test; and an engine with a tiny model."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache

import pytest

from tests.serve.fake_engine import Script
from tests.serve.harmony_template import harmony_tokenizer
from tests.serve.http_server import Served, ids, serving, wait_until
from tests.serve.thought_templates import TEMPLATES as THOUGHT_TEMPLATES
from tests.serve.thought_templates import thought_tokenizer
from tests.serve.tiny_engine import TinyEngine, tiny_engine
from tests.serve.tool_templates import tool_tokenizer


@pytest.fixture(scope="session")
def _shared() -> Iterator[Served]:
    with serving(("tiny", "org/tiny-alias")) as served:
        yield served


def _fresh(served: Served) -> Served:
    engine = served.engine
    engine.script, engine.scripts = Script(ids("hello")), {}
    engine.reject, engine.ready = None, True
    engine.wait_for_choice = {}
    engine.requests.clear()
    engine.aborted.clear()
    return served


@pytest.fixture
def served(_shared: Served) -> Iterator[Served]:
    """The shared server with a fresh script; no generation may be left running after the test."""
    yield _fresh(_shared)
    wait_until(lambda: _shared.engine.live == 0)


@pytest.fixture(scope="session")
def _tool_servers() -> Iterator[Callable[[str], Served]]:
    with ExitStack() as stack:

        def start(name: str) -> Served:
            if name == "harmony":
                tokenizer = harmony_tokenizer()
            else:
                tokenizer = (thought_tokenizer if name in THOUGHT_TEMPLATES else tool_tokenizer)(name)
            return stack.enter_context(serving(tokenizer=tokenizer, max_model_len=4096))

        yield cache(start)


@pytest.fixture
def server_of(_tool_servers: Callable[[str], Served]) -> Iterator[Callable[[str], Served]]:
    """Servers as fresh as `served`, by the names of templates: of `tool_templates`, `thought_templates`, "harmony"."""
    used: list[Served] = []

    def get(name: str) -> Served:
        used.append(_fresh(_tool_servers(name)))
        return used[-1]

    yield get
    for server in used:
        wait_until(lambda server=server: server.engine.live == 0)


@pytest.fixture
def engine() -> Iterator[TinyEngine]:
    """Full KV, ample pages. At the end it must be idle, hold nothing but stored sessions, and have compiled nothing."""
    with tiny_engine() as tiny:
        yield tiny
        tiny.settle()
        tiny.forget()
