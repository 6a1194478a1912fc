"""Compiling many programs before the first request: traced one after another, compiled at the same time."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple


class Program(NamedTuple):
    """Something to compile."""

    name: str
    function: Any  # jitted
    arguments: Callable[[], tuple[Any, ...]]
    static: dict[str, Any]


def compile_all(programs: list[Program], threads: dict[Any, int]) -> Iterator[str]:
    """Compiles all of them, those of a function in so many threads, at least one; yields what is waited for.

    Tracing holds Python's lock, compiling does not. A call of the function with the same arguments finds what was compiled.
    """
    pools = {function: ThreadPoolExecutor(max(1, count)) for function, count in threads.items()}
    try:
        compiled = []
        for name, function, arguments, static in programs:
            yield name
            lowered = function.trace(*arguments(), **static).lower()
            compiled.append(pools[function].submit(lowered.compile))
        for program, future in zip(programs, compiled, strict=True):
            yield program.name
            future.result()
    finally:
        for pool in pools.values():
            pool.shutdown(cancel_futures=True)
