"""Programs are compiled once, before the first request."""

import jax
import jax.numpy as jnp
import pytest

from serve.compiling import Program, compile_all
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
    names = list(compile_all(programs, {f: 2, g: 0}))
    assert names == 2 * ["size 3", "size 5", "size 3"]
    assert len(compilations) == 3
    for program, args in zip(programs, arguments, strict=True):
        program.function(*args, **program.static)
    assert len(compilations) == 3


def test_what_cannot_be_traced_is_raised():
    f = jax.jit(lambda x, power: jnp.sin(x) ** power, static_argnames="power")

    def wrong():
        raise ValueError("no such shape")

    programs = [*programs_of(f, range(20, 40)), Program("wrong", f, wrong, {"power": 2})]
    with pytest.raises(ValueError, match="no such shape"):
        list(compile_all(programs, {f: 1}))
