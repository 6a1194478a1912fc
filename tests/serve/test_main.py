"""`python -m serve` as a process of its own: how it ends."""

import signal
import socket
import subprocess
import sys

import httpx
import pytest

from tests.serve.http_server import wait_until

# The real program around the scripted engine: nothing is loaded or compiled.
PROGRAM = """
import sys
from types import SimpleNamespace
import serve.__main__ as program
from models.testing import tiny_tokenizer
from tests.serve.fake_engine import FakeEngine, Script

class Engine(FakeEngine):
    def start(self, progress): pass
    def stop(self): self.close()

model = SimpleNamespace(name="tiny", tokenizer=tiny_tokenizer())
program.build = lambda config: SimpleNamespace(engine=Engine(Script([10])), model=model, summary="a scripted engine")
sys.exit(program.main())
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_without_a_traceback(number: signal.Signals) -> None:
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
        process.send_signal(number)
        _, errors = process.communicate(timeout=30)
    finally:
        process.kill()
    assert "Traceback" not in errors
    assert process.returncode in (0, -number)
