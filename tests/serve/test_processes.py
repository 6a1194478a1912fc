"""`python -m serve` and its processes of HTTP: what becomes of the others when one of them ends."""

import contextlib
import json
import os
import signal
import socket
import time
from collections import Counter
from pathlib import Path
from types import MappingProxyType

import httpx
import pytest

from tests.serve.http_server import wait_until
from tests.serve.test_main import ended as program_ended
from tests.serve.test_main import program

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are found in /proc")

SLOWLY = "built.engine.script = Script([10], cycle=True, delay=0.02)\n"
REPLACED_AT_ONCE = "import serve.processes\nserve.processes._FAST_SECONDS = 0\n"
LONG = MappingProxyType({"prompt": "hi", "max_tokens": 400, "stream": True})


def children(pid: int) -> set[int]:
    """Processes whose parent that is, but for those that have ended."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
        except OSError:  # it has just ended
            continue
        if int(parent) == pid and state != "Z":
            found.add(int(path.parent.name))
    return found


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def counted(address: str) -> float:
    """Completions that all processes have answered, as any of them says."""
    lines = httpx.get(f"{address}/metrics", trust_env=False).text.splitlines()
    return sum(
        float(line.split()[-1])
        for line in lines
        if line.startswith("tangram:http_responses_total") and "/v1/completions" in line
    )


def test_several_share_the_requests_and_their_counts_and_one_that_ends_is_replaced() -> None:
    with program("127.0.0.1", REPLACED_AT_ONCE, "--api-server-count", "2") as (process, address):
        before = children(process.pid)
        assert len(before) == 2

        def ask(times: int) -> None:
            for _ in range(times):  # each by a connection of its own
                answer = httpx.post(f"{address}/v1/completions", json={"prompt": "hi"}, trust_env=False)
                assert answer.status_code == 200

        ask(20)
        assert counted(address) == 20
        victim = min(before)
        os.kill(victim, signal.SIGKILL)
        assert process.stderr is not None
        ended = f"The HTTP process {victim} has ended with status -9"
        assert any(ended in line for line in process.stderr)
        assert any("takes its place" in line for line in process.stderr)
        assert len(children(process.pid) - before) == 1
        ask(20)
        assert counted(address) == 40
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
    assert process.returncode == 0


def test_a_stream_in_another_process_goes_on_and_ends_with_an_error_at_the_end() -> None:
    changes = REPLACED_AT_ONCE + SLOWLY
    flags = "--api-server-count", "2", "--shutdown-timeout", "0"
    with program("127.0.0.1", changes, *flags) as (process, address):
        url = f"{address}/v1/completions"
        with httpx.stream("POST", url, json=dict(LONG), trust_env=False) as stream:
            lines = filter(None, stream.iter_lines())
            next(lines)
            first = serving_of(address, children(process.pid))
            (other,) = children(process.pid) - {first}
            os.kill(other, signal.SIGKILL)
            wait_until(lambda: not lives(other))
            for _ in range(20):
                next(lines)
            process.send_signal(signal.SIGINT)
            *_, error, done = lines
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "unavailable"
        assert done == "data: [DONE]"
        process.communicate(timeout=30)
    assert process.returncode == 0


def serving_of(address: str, pids: set[int]) -> int:
    """The process that has a connection to this one."""
    port = f":{httpx.URL(address).port:04X}"
    inodes = {
        fields[9]
        for fields in map(str.split, Path("/proc/self/net/tcp").read_text().splitlines()[1:])
        if fields[1].endswith(port) and fields[3] == "01"  # established
    }
    found = Counter(
        pid
        for pid in pids
        for fd in Path(f"/proc/{pid}/fd").iterdir()
        if fd.readlink().name.removeprefix("socket:[").removesuffix("]") in inodes
    )
    ((pid, _),) = found.most_common(1)
    return pid


def refused(address: str) -> bool:
    """Whether new connections are; other ones are not waited for."""
    try:
        socket.create_connection(("127.0.0.1", httpx.URL(address).port or 0), timeout=5).close()
    except ConnectionRefusedError:
        return True
    return False


@pytest.mark.slow
def test_where_none_can_be_started_the_others_go_on() -> None:
    changes = """
import serve.processes
serve.processes._FAST_SECONDS = 0.3
set_up = program.HttpProcesses.set_up
def set_up_once(self, setup):
    set_up(self, setup)
    serve.processes.MODULE = "no.such.module"
program.HttpProcesses.set_up = set_up_once
"""
    with program("127.0.0.1", changes, "--api-server-count", "2") as (process, address):
        first, last = children(process.pid)
        os.kill(first, signal.SIGKILL)
        said = process.stderr
        assert said is not None and next(line for line in said if "cannot be replaced" in line)
        for _ in range(5):
            assert httpx.get(f"{address}/health", trust_env=False).status_code == 200
        os.kill(last, signal.SIGKILL)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "HTTP processes end as soon as they begin: the server stops" in errors
    assert "Traceback" not in errors


@pytest.mark.slow
def test_one_that_ends_as_soon_as_it_begins_is_replaced_where_another_is_about_to_serve() -> None:
    changes = "import serve.processes\nserve.processes._FAST_SECONDS = 4\n"
    with program("127.0.0.1", changes, "--api-server-count", "2") as (process, address):
        said = process.stderr
        assert said is not None
        time.sleep(4)
        before = children(process.pid)
        first, last = before
        os.kill(first, signal.SIGKILL)
        next(line for line in said if "takes its place" in line)
        (young,) = children(process.pid) - before
        os.kill(last, signal.SIGKILL)
        wait_until(lambda: not lives(last))
        os.kill(young, signal.SIGKILL)  # nobody serves now
        for _ in range(2):
            next(line for line in said if "takes its place" in line)
        assert httpx.get(f"{address}/health", trust_env=False).status_code == 200
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
    assert process.returncode == 0


@pytest.mark.slow
def test_a_replacement_that_reads_nothing_holds_up_nobody() -> None:
    changes = REPLACED_AT_ONCE + "model.tokenizer.padding = 'x' * 2**22  # more than a socket takes at once\n"
    flags = "--api-server-count", "2", "--shutdown-timeout", "0"
    with program("127.0.0.1", changes, *flags) as (process, address):
        before = children(process.pid)
        os.kill(min(before), signal.SIGKILL)
        wait_until(lambda: bool(children(process.pid) - before), 10)
        (hung,) = children(process.pid) - before
        os.kill(hung, signal.SIGSTOP)
        try:
            for _ in range(3):
                assert httpx.get(f"{address}/metrics", trust_env=False, timeout=10).status_code == 200
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=30)
        finally:
            with contextlib.suppress(ProcessLookupError):  # a test that fails leaves nothing behind, either
                os.kill(hung, signal.SIGKILL)
    assert process.returncode == 0
    assert "An HTTP process does not end: it is killed" in errors
    assert "Traceback" not in errors and not lives(hung)


def test_signals_that_come_while_the_engine_ends_change_nothing() -> None:
    changes = """
def stop(self):
    print("the engine ends", file=sys.stderr, flush=True)
    threading.Event().wait(1)
Engine.stop = stop
"""
    with program("127.0.0.1", changes) as (process, _):
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        assert next(line for line in process.stderr if "the engine ends" in line)
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 0
    assert "Traceback" not in errors


def test_they_end_with_the_engines_process() -> None:
    with program() as (process, _):
        (child,) = children(process.pid)
        process.kill()
        process.wait()
        wait_until(lambda: not lives(child))


@pytest.mark.parametrize(
    ("numbers", "seconds"),
    [((signal.SIGINT, signal.SIGINT), 15), pytest.param((signal.SIGTERM,), 0, marks=pytest.mark.slow)],
)
def test_a_second_ctrl_c_does_not_wait_for_streams(numbers: tuple[signal.Signals, ...], seconds: int) -> None:
    with program("127.0.0.1", SLOWLY, "--shutdown-timeout", str(seconds)) as (process, address):
        url = f"{address}/v1/completions"
        with httpx.stream("POST", url, json=dict(LONG), trust_env=False) as stream:
            next(stream.iter_lines())
            began = time.monotonic()
            for number in numbers:
                process.send_signal(number)
                wait_until(lambda: refused(address))
            _, errors = process.communicate(timeout=30)
    assert time.monotonic() < began + 8
    assert process.returncode == 0
    assert "Traceback" not in errors


def test_one_that_ends_as_soon_as_it_begins_ends_the_server() -> None:
    """Another would do no better."""
    die = """
import os, signal
set_up = program.HttpProcesses.set_up
def doomed(self, setup):
    set_up(self, setup)
    os.kill(self.pids[0], signal.SIGKILL)
program.HttpProcesses.set_up = doomed
"""
    status, errors = program_ended(die)
    assert status == 1
    assert "HTTP processes end as soon as they begin: the server stops" in errors
    assert "Traceback" not in errors


def test_one_that_cannot_begin_is_a_fault_that_is_told() -> None:
    status, errors = program_ended("import serve.processes\nserve.processes.MODULE = 'no.such.module'\n")
    assert status == 2
    assert "Cannot serve: the process that is to speak HTTP has ended with status 1" in errors
