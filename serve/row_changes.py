"""Changes of rows that come at once: each waits, and many rows' are made by one program.

A program takes a third of a millisecond to dispatch, and a row needs two or three before its first step, and for each tail
that is compressed. How long one runs grows with its rows, empty places too: so there are three.
"""

from collections.abc import Callable, Iterator
from itertools import batched
from typing import Any, Literal

import numpy as np

from tangram_jax import cache as tables
from tangram_jax.cache import Cache
from tangram_jax.offload import set_counts
from tangram_jax.plan import CachePlan

SIZES = (1, 4, 16)  # rows of the programs, ascending
Kind = Literal["budgets", "trims", "rollbacks", "counts", "pages"]


def batches(waiting: dict[int, Any], no_row: int) -> Iterator[tuple[np.ndarray, list[Any]]]:
    """(rows i32[one of SIZES], what each is to have) of all; empty places have `no_row`, and what the first has."""
    for part in batched(waiting.items(), SIZES[-1]):
        rows, given = [row for row, _ in part], [what for _, what in part]
        empty = next(size for size in SIZES if size >= len(part)) - len(part)
        yield np.array(rows + [no_row] * empty, np.int32), given + given[:1] * empty


class RowChanges:
    """What rows of the cache wait for: budgets, pages to give back, tokens to forget, other counts, pages to have.

    Whoever does anything else with the cache makes them first. They are made kind by kind, so that pages are given back
    before others are taken: a row's own come in that order, or are made before the next one waits.
    """

    def __init__(self, plan: CachePlan, num_rows: int) -> None:
        self._num_rows = num_rows
        self._waiting: dict[Kind, dict[int, Any]] = {
            kind: {} for kind in ("budgets", "trims", "rollbacks", "counts", "pages")
        }
        # Of rows i32[N] and what each is to have i32[N, ...].
        self._programs: dict[Kind, Callable[[Cache, np.ndarray, np.ndarray], Cache]] = {
            "budgets": lambda cache, rows, own: tables.set_budgets(plan, cache, rows, own),
            "trims": lambda cache, rows, held: tables.trim(plan, cache, rows, *held.T),
            "rollbacks": lambda cache, rows, count: tables.rollback(plan, cache, rows, count),
            "counts": lambda cache, rows, counts: set_counts(cache, rows, *counts.T),
            "pages": lambda cache, rows, held: tables.reserve(plan, cache, rows, *held.T),
        }
        none: np.ndarray = np.zeros(2, np.int32)
        self._examples: dict[Kind, Any] = dict.fromkeys(self._waiting, none)
        self._examples |= {"budgets": plan.group_ppm, "rollbacks": np.int32(0)}

    def __bool__(self) -> bool:
        return any(self._waiting.values())

    def wait(self, kind: Kind, row: int, what: Any) -> bool:
        """Whether the change waits now. False where those of its row that do have to be made before it.

        `what`: budgets i32[M] of an empty row; how many tokens are forgotten; else (tokens, tail).
        """
        kinds = list(self._waiting)
        if any(row in self._waiting[later] for later in kinds[kinds.index(kind) :]):
            return False
        self._waiting[kind][row] = what
        return True

    def clear(self) -> None:
        for rows in self._waiting.values():
            rows.clear()

    def make(self, cache: Cache) -> Cache:
        """Nothing waits any more."""
        for kind, waiting in self._waiting.items():
            rows_of, self._waiting[kind] = waiting, {}
            for rows, what in batches(rows_of, self._num_rows):
                cache = self._programs[kind](cache, rows, np.array(what, np.int32))
        return cache

    def warm_up(self, cache: Cache) -> Cache:
        """Run all programs once, on no row."""
        for size in SIZES:
            rows = np.full(size, self._num_rows, np.int32)
            for kind, program in self._programs.items():
                cache = program(cache, rows, np.array([self._examples[kind]] * size, np.int32))
        return cache
