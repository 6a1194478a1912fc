"""Programs are compiled once, before the first request."""

import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from serve.compiling import MOST_THREADS, Program, compile_all, threads_for
from serve.runner import COMPILE_EVENT


@pytest.fixture
def compilations():
    """Grows by one entry for everything that is compiled, in any thread."""
    seen: list[float] = []

    def listener(event: str, duration_secs: float, **_) -> None:
        if event == COMPILE_EVENT:
            seen.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listener)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listener)


def programs_of(function, sizes) -> list[Program]:
    return [Program(f"size {n}", function, lambda n=n: (jnp.zeros(n),), {"power": 2}) for n in sizes]


def test_calls_find_what_was_compiled(compilations):
    f = jax.jit(lambda x, power: (x**power).sum() + 11, static_argnames="power")
    g = jax.jit(lambda x, power: (x**power).max() - 12, static_argnames="power")
    programs = [*programs_of(f, (3, 5)), *programs_of(g, (3,))]
    arguments = [p.arguments() for p in programs]  # making them compiles too
    compilations.clear()
    names = list(compile_all(programs, {(f,): 2, (g,): 1}))
    assert names == 2 * ["size 3", "size 5", "size 3"]
    assert len(compilations) == 3
    for program, args in zip(programs, arguments, strict=True):
        program.function(*args, **program.static)
    assert len(compilations) == 3


class Stub:
    """A function whose programs do what they are told when they are compiled."""

    def __init__(self) -> None:
        self.begun: list[str] = []

    def program(self, name: str, compile=lambda: None) -> Program:
        def run() -> None:
            self.begun.append(name)
            compile()

        return Program(name, self, lambda: (run,), {})

    def trace(self, run) -> SimpleNamespace:
        return SimpleNamespace(lower=lambda: SimpleNamespace(compile=run))


def test_a_program_that_fails_is_raised_before_the_rest_is_traced():
    stub = Stub()

    def fail() -> None:
        raise MemoryError("too large")

    traced = []
    programs = [stub.program("first", fail), *(stub.program(str(n)) for n in range(50))]
    with pytest.raises(MemoryError, match="too large"):
        for name in compile_all(programs, {(stub,): 1}):
            traced.append(name)
            time.sleep(0.01)
    assert len(traced) < 50


def test_what_cannot_be_traced_cancels_what_waits():
    stub, other, go = Stub(), Stub(), threading.Event()

    def wrong() -> tuple:
        threading.Timer(0.1, go.set).start()
        raise ValueError("no such shape")

    programs = [
        stub.program("one", lambda: go.wait(10)),
        *(stub.program(f"waits {n}") for n in range(5)),
        other.program("two", lambda: go.wait(10)),
        *(other.program(f"waits {n}") for n in range(5)),
        Program("wrong", stub, wrong, {}),
    ]
    with pytest.raises(ValueError, match="no such shape"):
        list(compile_all(programs, {(stub,): 1, (other,): 1}))
    assert (stub.begun, other.begun) == (["one"], ["two"])


def test_what_others_trace_comes_as_soon_as_they_have():
    stub, elsewhere = Stub(), {name: Future() for name in "abc"}
    elsewhere["b"].set_result(None)
    names = compile_all([stub.program(name) for name in "abcde"], {(stub,): 1}, elsewhere)
    assert [next(names), next(names)] == ["b", "d"]
    elsewhere["c"].set_result(None)
    assert [next(names), next(names), next(names)] == ["c", "e", "a"]
    threading.Timer(0.3, elsewhere["a"].set_result, [None]).start()
    rest = list(names)
    assert rest[-5:] == [*"bdcea"] and {*rest[:-5]} == {
        "a"
    }  # as often as something was compiled meanwhile, and then
    assert stub.begun == [*"bdcea"]


def test_what_fails_while_others_trace_is_raised_at_once():
    stub, go = Stub(), threading.Event()

    def fail() -> None:
        go.wait(60)
        raise MemoryError("too large")

    names = compile_all([stub.program("a"), stub.program("b", fail)], {(stub,): 1}, {"a": Future()})
    assert [next(names), next(names)] == ["b", "a"]
    go.set()
    with pytest.raises(MemoryError, match="too large"):
        list(names)


def test_functions_share_threads():
    stubs, running, most = (Stub(), Stub()), set(), 0

    def run(name: str) -> None:
        nonlocal most
        running.add(name)
        most = max(most, len(running))
        time.sleep(0.01)
        running.discard(name)

    programs = [
        stub.program(name, lambda name=name: run(name))
        for stub, name in zip(stubs * 3, "abcdef", strict=True)
    ]
    assert list(compile_all(programs, {stubs: 1})) == [*"abcdef"] * 2
    assert most == 1


def test_threads_are_bounded():
    assert threads_for(1e-9) == 1
    assert threads_for(1e9) == MOST_THREADS
