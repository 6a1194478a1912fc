"""`python -m serve` as a process of its own: how it begins and ends."""

import contextlib
import errno
import io
import logging
import re
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest
from rich.console import Console

from serve.args import ConfigError
from serve.listener import bind
from serve.logs import log_handler

# The real program around the scripted engine: nothing is loaded or compiled.
PROGRAM = """
import socket
import sys
import threading
from types import SimpleNamespace
import jax
import serve.__main__ as program
from models.testing import tiny_tokenizer
from serve.request import TokenOutput
from tests.serve.fake_engine import FakeEngine, Script

class Engine(FakeEngine):
    failed = False
    def start(self, progress): pass
    def stop(self): self.close()
    def submit(self, request, on_output, on_token=None):  # a prompt of one token costs it its device
        if len(request.prompt_ids) > 1:
            return super().submit(request, on_output, on_token)
        self.failed = True
        on_output(TokenOutput(finish_reason="error", error="lost"))
        threading.Thread(target=self.on_failure).start()

model = SimpleNamespace(name="tiny", tokenizer=tiny_tokenizer())
built = SimpleNamespace(engine=Engine(Script([10])), model=model, summary="a scripted engine", sampling_defaults={})
program.build = lambda config, programs: built
"""
MAIN = "program.leave(program.main())"


@contextlib.contextmanager
def program(
    host: str = "127.0.0.1", changes: str = "", *flags: str
) -> Iterator[tuple[subprocess.Popen, str]]:
    """The running program and its address, as it says it once it is ready."""
    command = [sys.executable, "-c", PROGRAM + changes + MAIN, "--host", host, "--port", "0", *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            said = next(filter(None, (re.search(r"Ready .*(http://\S+)", line) for line in process.stderr)))
            yield process, said[1]
        finally:
            process.kill()


def ended(changes: str, port: int = 0) -> tuple[int, str]:
    """Exit status and errors of the program with some of its parts changed."""
    command = [sys.executable, "-c", PROGRAM + changes + "\n" + MAIN, "--port", str(port)]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=60)
    return done.returncode, done.stderr


@pytest.fixture
def taken() -> Iterator[socket.socket]:
    """A socket on a port of its own, which does not listen yet."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", 0))
        yield other


@pytest.mark.parametrize(
    ("host", "number"),
    [
        ("127.0.0.1", signal.SIGINT),
        pytest.param("localhost", signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param("::1", signal.SIGTERM, marks=pytest.mark.slow),
    ],
)
def test_it_serves_where_it_says_until_a_signal_ends_it_without_a_traceback(
    host: str, number: signal.Signals
) -> None:
    if host == "::1":
        try:
            bind(host, 0).close()
        except ConfigError:
            pytest.skip("this machine has no IPv6")
    with program(host) as (process, address):
        assert address.startswith("http://[::1]:" if host == "::1" else "http://127.0.0.1:")
        assert httpx.get(f"{address}/health", trust_env=False).status_code == 200
        process.send_signal(number)
        _, errors = process.communicate(timeout=30)
    assert "Traceback" not in errors
    assert process.returncode == 0


def test_a_signal_that_comes_as_soon_as_it_is_ready_is_not_lost() -> None:
    early = """
import signal
url_of = program.url_of
def signalled(listener):  # it is about to say where it serves
    signal.raise_signal(signal.SIGTERM)
    return url_of(listener)
program.url_of = signalled
"""
    status, errors = ended(early)
    assert status == 0
    assert "Traceback" not in errors


def test_a_signal_ends_it_without_waiting_for_what_cleans_up() -> None:
    """JAX takes seconds to take its programs apart, on top of --shutdown-timeout."""
    with program(changes="import atexit, time\natexit.register(time.sleep, 300)\n") as (process, _):
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
    assert process.returncode == 0


def test_it_takes_more_connections_than_the_usual_limit_of_open_files() -> None:
    """Those beyond it were closed without an answer."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if 0 <= hard < 400:
        pytest.skip("this machine allows no more")
    fewer = f"import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (100, {hard}))\n"
    with program(changes=fewer) as (_, address), contextlib.ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(socket.create_connection(("127.0.0.1", httpx.URL(address).port or 0)))
        assert httpx.get(f"{address}/health", trust_env=False).status_code == 200


def test_a_message_in_a_file_is_one_line():
    console = Console(file=io.StringIO(), width=40)
    record = logging.makeLogRecord({"msg": "word " * 60, "levelname": "WARNING"})
    log_handler(console).handle(record)
    (line,) = console.file.getvalue().splitlines()
    assert line.endswith("WARNING " + "word " * 60)


def test_a_port_in_use_is_found_before_anything_is_loaded(taken: socket.socket) -> None:
    taken.listen()
    port = taken.getsockname()[1]
    status, errors = ended("program.build = None", port)
    assert status == 2
    assert f"Cannot serve: --host 127.0.0.1 --port {port}: " in errors
    assert "write another --port, or stop the server" in errors
    assert "Traceback" not in errors


def test_a_cache_that_cannot_be_made_is_named(tmp_path, monkeypatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TANGRAM_CACHE", str(tmp_path / "file" / "cache"))
    status, errors = ended("program.build = None")
    assert status == 2
    said = "".join(errors.split())  # lines are broken anywhere, for the path may be long
    assert "file/cachecannotbemade" in said and "setTANGRAM_CACHE" in said
    assert "Traceback" not in errors


def test_a_cache_in_a_home_that_nobody_knows_is_named(monkeypatch) -> None:
    monkeypatch.setenv("TANGRAM_CACHE", "~no-such-user/cache")
    status, errors = ended("program.build = None")
    assert status == 2
    assert "Cannot serve: the cache ~no-such-user/cache is nowhere" in errors
    assert "Set TANGRAM_CACHE to a directory, without ~" in errors
    assert "Traceback" not in errors


def test_connections_are_refused_until_it_is_ready(taken: socket.socket) -> None:
    port = taken.getsockname()[1]
    taken.close()
    tries = f"Engine.start = lambda *_: sys.exit(socket.socket().connect_ex(('127.0.0.1', {port})))"
    assert ended(tries, port)[0] == errno.ECONNREFUSED


def test_of_two_that_load_for_one_port_the_later_one_ends(taken: socket.socket) -> None:
    """Both bind it: neither listens yet."""
    port = taken.getsockname()[1]
    other = f"""
def start(self, progress):
    global other
    other = socket.socket()
    other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    other.bind(("127.0.0.1", {port}))
    other.listen()
Engine.start = start
"""
    status, errors = ended(other, port)
    assert status == 2
    assert "Cannot serve: [Errno 98] Address already in use" in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize("part", [pytest.param("program.build", marks=pytest.mark.slow), "Engine.start"])
def test_a_pool_beyond_the_memory_is_a_fault_of_the_configuration(part: str) -> None:
    status, errors = ended(f"{part} = lambda *_, **__: jax.numpy.zeros(2**50).block_until_ready()")
    assert status == 2
    assert "Cannot serve: RESOURCE_EXHAUSTED: Out of memory" in errors
    for flag in ("--num-pages", "--kv-cache-memory", "--gpu-memory-utilization"):
        assert flag in errors
    assert "Traceback" not in errors


def test_a_parser_that_does_not_fit_the_model_is_named_before_anything_is_compiled() -> None:
    status, errors = ended("Engine.start = None\nsys.argv += ['--reasoning-parser', 'harmony']")
    assert status == 2
    assert "Cannot serve: the tokenizer of this model lacks special tokens" in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize("part", ["program.build", pytest.param("Engine.start", marks=pytest.mark.slow)])
def test_interrupted_before_it_serves_it_leaves_quietly(part: str) -> None:
    # Ignored where the tests were started in the background of a shell.
    heard = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    status, errors = ended(f"{heard}{part} = lambda *_, **__: signal.raise_signal(signal.SIGINT)")
    assert status == 130
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    "error",
    ["jax.errors.JaxRuntimeError('INTERNAL')", pytest.param("ValueError('a bug')", marks=pytest.mark.slow)],
)
def test_other_errors_while_compiling_are_seen(error: str) -> None:
    status, errors = ended(f"def start(self, progress): raise {error}\nEngine.start = start")
    assert status == 1
    assert "Traceback" in errors


def test_an_engine_that_lost_its_device_ends_it_with_status_1() -> None:
    with program() as (process, address):
        answer = httpx.post(f"{address}/v1/completions", json={"prompt": [5]}, trust_env=False)
        _, errors = process.communicate(timeout=30)
    assert answer.status_code == 500
    assert "Traceback" not in errors
    assert process.returncode == 1
