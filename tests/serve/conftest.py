"""The server under test: started once, reset for every test."""

from collections.abc import Iterator

import pytest

from tests.serve.fake_engine import Script
from tests.serve.http_server import Served, ids, serving, wait_until


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
