"""Rows of requests that come at once: what each is to have waits, and is given to many of them by one program.

A program takes a third of a millisecond to dispatch, and each row needs two or three before its first step. How long one
runs grows with its rows, empty places too: so there are three.
"""

from collections.abc import Iterator
from itertools import batched
from typing import Any

import numpy as np

from tangram_jax import cache as tables
from tangram_jax.cache import Cache
from tangram_jax.plan import CachePlan

SIZES = (1, 4, 16)  # rows of the programs, ascending


def batches(waiting: dict[int, Any], no_row: int) -> Iterator[tuple[np.ndarray, list[Any]]]:
    """(rows i32[one of SIZES], what each is to have) of all; empty places have `no_row`, and what the first has."""
    for part in batched(waiting.items(), SIZES[-1]):
        rows, given = [row for row, _ in part], [what for _, what in part]
        empty = next(size for size in SIZES if size >= len(part)) - len(part)
        yield np.array(rows + [no_row] * empty, np.int32), given + given[:1] * empty


class NewRows:
    """Budgets and pages that rows of the cache wait for.

    Whoever does anything else with the cache gives them first. So all that changes is that budgets, of rows that were empty,
    come before others' pages.
    """

    def __init__(self, plan: CachePlan, num_rows: int) -> None:
        self._plan, self._num_rows = plan, num_rows
        self._budgets: dict[int, np.ndarray] = {}
        self._pages: dict[int, tuple[int, int]] = {}  # (tokens, tail)

    def __bool__(self) -> bool:
        return bool(self._budgets or self._pages)

    def __contains__(self, row: int) -> bool:
        """Whether the row waits for pages."""
        return row in self._pages

    def set_budgets(self, row: int, budgets: np.ndarray) -> None:
        """Of an empty row."""
        self._budgets[row] = budgets

    def reserve(self, row: int, tokens: int, tail: int) -> None:
        """Of a row that does not wait for pages yet."""
        self._pages[row] = tokens, tail

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
        for size in SIZES:
            rows, nothing = np.full(size, self._num_rows, np.int32), np.zeros(size, np.int32)
            cache = tables.set_budgets(self._plan, cache, rows, np.tile(self._plan.group_ppm, (size, 1)))
            cache = tables.reserve(self._plan, cache, rows, nothing, nothing)
        return cache
