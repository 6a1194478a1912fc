"""Compiling many programs before the first request: traced one after another, compiled at the same time."""

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from types import MappingProxyType
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


def compile_all(
    programs: list[Program],
    threads: dict[tuple[Any, ...], int],
    elsewhere: Mapping[str, Future[None]] = MappingProxyType({}),
) -> Iterator[str]:
    """Compiles all of them, those of some functions in so many threads; yields the name of what is traced or waited for.

    Tracing holds Python's lock, compiling does not. A call of the function with the same arguments finds what was compiled.
    What fails is raised as soon as it is known, and nothing more is begun. `elsewhere`: of programs by name, done when other
    processes have traced them, where that takes longest: they come as soon as they are, the others in the meantime.
    """
    pools = {functions: ThreadPoolExecutor(count) for functions, count in threads.items()}
    pool_of = {function: pool for functions, pool in pools.items() for function in functions}
    compiled: list[tuple[str, Future[Any]]] = []
    try:
        left = deque(p for p in programs if p.name not in elsewhere)
        waiting = {p.name: p for p in programs if p.name in elsewhere}
        while left or waiting:
            traced = next((name for name in waiting if elsewhere[name].done()), None)
            program = waiting.pop(traced) if traced else left.popleft() if left else None
            yield program.name if program else next(iter(waiting))
            for _, future in compiled:
                if future.done():
                    future.result()
            if program:
                name, function, arguments, static = program
                lowered = function.trace(*arguments(), **static).lower()
                compiled.append((name, pool_of[function].submit(lowered.compile)))
            else:
                busy = [future for _, future in compiled if not future.done()]
                wait([*(elsewhere[name] for name in waiting), *busy], return_when=FIRST_COMPLETED)
        for name, future in compiled:
            yield name
            future.result()
    finally:
        # All of them first, so that none begins anything while another is waited for.
        for pool in pools.values():
            pool.shutdown(wait=False, cancel_futures=True)
        for pool in pools.values():
            pool.shutdown()
