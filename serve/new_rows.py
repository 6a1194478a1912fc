"""Rows of requests that come at once: what each is to have waits, and is given to many of them by one program.

A program takes a third of a millisecond to dispatch, and each row needs two or three before its first step.
"""

from collections.abc import Iterator
from itertools import batched
from typing import Any

import numpy as np

from tangram_jax import cache as tables
from tangram_jax.cache import Cache
from tangram_jax.plan import CachePlan

SEVERAL = 16  # rows of a program for several; the other program is for one


def batches(waiting: dict[int, Any], no_row: int) -> Iterator[tuple[np.ndarray, list[Any]]]:
    """(rows i32[1 or SEVERAL], what each is to have) until all have it; empty places have the first one's and `no_row`."""
    for part in batched(waiting.items(), SEVERAL):
        rows, given = [row for row, _ in part], [what for _, what in part]
        empty = SEVERAL - len(part) if len(part) > 1 else 0
        yield np.array(rows + [no_row] * empty, np.int32), given + given[:1] * empty


class NewRows:
    """Budgets and pages that rows of the cache wait for.

    Both may come later than other rows' pages come and go: the scheduler has counted, so there is room for all at the end.
    """

    def __init__(self, plan: CachePlan, num_rows: int) -> None:
        self._plan, self._num_rows = plan, num_rows
        self._budgets: dict[int, np.ndarray] = {}
        self._pages: dict[int, tuple[int, int]] = {}  # (tokens, tail)

    def __bool__(self) -> bool:
        return bool(self._budgets or self._pages)

    def set_budgets(self, row: int, budgets: np.ndarray) -> None:
        """Of an empty row."""
        self._budgets[row] = budgets

    def reserve(self, row: int, tokens: int, tail: int) -> bool:
        """False where the row waits for pages already: it must be given those first."""
        if row in self._pages:
            return False
        self._pages[row] = tokens, tail
        return True

    def clear(self) -> None:
        self._budgets.clear()
        self._pages.clear()

    def give(self, cache: Cache) -> Cache:
        """Nothing waits any more."""
        budgets, pages = dict(self._budgets), dict(self._pages)
        self.clear()
        for rows, own in batches(budgets, self._num_rows):
            cache = tables.set_budgets(self._plan, cache, rows, np.stack(own))
        for rows, counts in batches(pages, self._num_rows):
            cache = tables.reserve(self._plan, cache, rows, *np.array(counts, np.int32).T)
        return cache

    def warm_up(self, cache: Cache) -> Cache:
        """Run all programs once, on no row."""
        for size in (1, SEVERAL):
            rows, nothing = np.full(size, self._num_rows, np.int32), np.zeros(size, np.int32)
            cache = tables.set_budgets(self._plan, cache, rows, np.tile(self._plan.group_ppm, (size, 1)))
            cache = tables.reserve(self._plan, cache, rows, nothing, nothing)
        return cache
