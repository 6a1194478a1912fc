"""`python -m serve` as a process of its own: how it ends."""

import contextlib
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest

from tests.serve.http_server import wait_until

# The real program around the scripted engine: nothing is loaded or compiled.
PROGRAM = """
import sys
import threading
from types import SimpleNamespace
import serve.__main__ as program
from models.testing import tiny_tokenizer
from serve.request import TokenOutput
from tests.serve.fake_engine import FakeEngine, Script

class Engine(FakeEngine):
    failed = False
    def start(self, progress): pass
    def stop(self): self.close()
    def submit(self, request, on_output):  # a prompt of one token costs it its device
        if len(request.prompt_ids) > 1:
            return super().submit(request, on_output)
        self.failed = True
        on_output(TokenOutput(finish_reason="error", error="lost"))
        threading.Thread(target=self.on_failure).start()

model = SimpleNamespace(name="tiny", tokenizer=tiny_tokenizer())
program.build = lambda config: SimpleNamespace(engine=Engine(Script([10])), model=model, summary="a scripted engine")
sys.exit(program.main())
"""


@contextlib.contextmanager
def program() -> Iterator[tuple[subprocess.Popen, str]]:
    """The running program and its address, healthy."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "--port", str(port)], stderr=subprocess.PIPE, text=True
    )

    def healthy() -> bool:
        try:
            return httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False).status_code == 200
        except httpx.TransportError:
            return False

    try:
        wait_until(healthy, 60)
        yield process, f"http://127.0.0.1:{port}"
    finally:
        process.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_without_a_traceback(number: signal.Signals) -> None:
    with program() as (process, _):
        process.send_signal(number)
        _, errors = process.communicate(timeout=30)
    assert "Traceback" not in errors
    assert process.returncode in (0, -number)


def test_an_engine_that_lost_its_device_ends_it_with_status_1() -> None:
    with program() as (process, address):
        answer = httpx.post(f"{address}/v1/completions", json={"prompt": [5]}, trust_env=False)
        _, errors = process.communicate(timeout=30)
    assert answer.status_code == 500
    assert "Traceback" not in errors
    assert process.returncode == 1
