"""The server under test, started once and reset for every test; and an engine with a tiny model."""

from collections.abc import Iterator

import pytest

from tests.serve.fake_engine import Script
from tests.serve.http_server import Served, ids, serving, wait_until
from tests.serve.tiny_engine import TinyEngine, tiny_engine


@pytest.fixture(scope="session")
def _shared() -> Iterator[Served]:
    with serving(("tiny", "org/tiny-alias")) as served:
        yield served


@pytest.fixture
def served(_shared: Served) -> Iterator[Served]:
    """The shared server with a fresh script; no generation may be left running after the test."""
    engine = _shared.engine
    engine.script, engine.scripts = Script(ids("hello")), {}
    engine.reject, engine.ready = None, True
    engine.wait_for_choice = {}
    engine.requests.clear()
    engine.aborted.clear()
    yield _shared
    wait_until(lambda: engine.live == 0)


@pytest.fixture
def engine() -> Iterator[TinyEngine]:
    """Full KV, ample pages. At the end it must be idle, hold nothing but stored sessions, and have compiled nothing."""
    with tiny_engine() as tiny:
        yield tiny
        tiny.settle()
        tiny.forget()
