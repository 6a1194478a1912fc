"""Compiling many programs before the first request: traced one after another, compiled at the same time."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

MOST_THREADS = 8  # every program that compiles takes memory, up to a gigabyte


class Program(NamedTuple):
    """Something to compile."""

    name: str
    function: Any  # jitted
    arguments: Callable[[], tuple[Any, ...]]
    static: dict[str, Any]


def threads_for(share: float) -> int:
    """That share of this process's cores, at least one thread and at most MOST_THREADS."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(MOST_THREADS, int(cores * share)))


def compile_all(programs: list[Program], threads: dict[tuple[Any, ...], int]) -> Iterator[str]:
    """Compiles all of them, those of some functions in so many threads; yields the name of what is traced or waited for.

    Tracing holds Python's lock, compiling does not. A call of the function with the same arguments finds what was compiled.
    What fails is raised as soon as it is known, and nothing more is begun.
    """
    pools = {functions: ThreadPoolExecutor(count) for functions, count in threads.items()}
    pool_of = {function: pool for functions, pool in pools.items() for function in functions}
    compiled: list[Future[Any]] = []
    try:
        for name, function, arguments, static in programs:
            yield name
            for future in compiled:
                if future.done():
                    future.result()
            lowered = function.trace(*arguments(), **static).lower()
            compiled.append(pool_of[function].submit(lowered.compile))
        for program, future in zip(programs, compiled, strict=True):
            yield program.name
            future.result()
    finally:
        # All of them first, so that none begins anything while another is waited for.
        for pool in pools.values():
            pool.shutdown(wait=False, cancel_futures=True)
        for pool in pools.values():
            pool.shutdown()
