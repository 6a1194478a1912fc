"""Changes of rows that come at once: each waits, and many rows' are made by one program.

A program takes a third of a millisecond to dispatch, and a row needs two or three changes before its first step, and for
each tail that is compressed. How long one runs grows with its rows, empty places too: so there are three, and three more
that only take pages, which is what rows need most.
"""

from collections.abc import Iterator
from functools import partial
from itertools import batched, zip_longest
from typing import Any, Literal

import jax
import numpy as np

from tangram_jax import cache as tables
from tangram_jax.cache import Cache
from tangram_jax.offload import set_counts
from tangram_jax.plan import CachePlan

SIZES = (1, 4, 16)  # rows of the programs, ascending
Kind = Literal["releases", "budgets", "trims", "rollbacks", "counts", "pages"]
BEFORE_PAGES: tuple[Kind, ...] = ("trims", "rollbacks", "counts")


def size_for(rows: int) -> int:
    """The least of SIZES that holds so many."""
    return next(size for size in SIZES if size >= rows)


def batches(waiting: dict[int, Any], no_row: int) -> Iterator[tuple[np.ndarray, list[Any]]]:
    """(rows i32[one of SIZES], what each is to have) of all; empty places have `no_row`, and what the first has."""
    for part in batched(waiting.items(), SIZES[-1]):
        rows, given = [row for row, _ in part], [what for _, what in part]
        empty = size_for(len(part)) - len(part)
        yield np.array(rows + [no_row] * empty, np.int32), given + given[:1] * empty


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def change(plan: CachePlan, cache: Cache, changes: jax.Array) -> Cache:
    """Make `changes` i32[4, N, 3], of N rows of each of BEFORE_PAGES and then pages: the row, and what it is to have.

    Or i32[1, N, 3], of pages alone.
    """
    *before, pages = (kind.T for kind in changes)
    if before:
        trims, rollbacks, counts = before
        cache = tables.trim(plan, cache, *trims)
        cache = tables.rollback(plan, cache, *rollbacks[:2])
        cache = set_counts(cache, *counts)
    return tables.reserve(plan, cache, *pages)


class RowChanges:
    """What rows of the cache wait for: their end, budgets, pages to give back, tokens to forget, other counts, more pages.

    Whoever takes pages makes them first, and a step if they are `pressing`. They are made kind by kind, so that pages are
    given back before others are taken: a row's own come in that order, or are made before the next one waits.
    """

    def __init__(self, plan: CachePlan, num_rows: int) -> None:
        self._plan, self._num_rows = plan, num_rows
        kinds: tuple[Kind, ...] = ("releases", "budgets", *BEFORE_PAGES, "pages")
        self._waiting: dict[Kind, dict[int, Any]] = {kind: {} for kind in kinds}

    @property
    def pressing(self) -> bool:
        """Whether the next step needs them: pages are given back in time if that is before others are taken."""
        return any(rows for kind, rows in self._waiting.items() if kind not in ("releases", "trims"))

    def wait(self, kind: Kind, row: int, what: Any) -> bool:
        """Whether the change waits now. False where those of its row that do have to be made before it.

        `what`: budgets i32[M] of an empty row; how many tokens are forgotten; else (tokens, tail).
        """
        kinds = list(self._waiting)
        if any(row in self._waiting[later] for later in kinds[kinds.index(kind) :]):
            return False
        self._waiting[kind][row] = what
        return True

    def release(self, row: int) -> None:
        """The row is empty from now on, whatever it waited for."""
        for rows in self._waiting.values():
            rows.pop(row, None)
        self._waiting["releases"][row] = None

    def clear(self) -> None:
        for rows in self._waiting.values():
            rows.clear()

    def make(self, cache: Cache) -> Cache:
        """Nothing waits any more."""
        waiting, self._waiting = self._waiting, {kind: {} for kind in self._waiting}
        for rows, _ in batches(waiting["releases"], self._num_rows):
            cache = tables.release(self._plan, cache, rows)
        for rows, own in batches(waiting["budgets"], self._num_rows):
            cache = tables.set_budgets(self._plan, cache, rows, np.array(own, np.int32))
        pages = [*batched(waiting["pages"].items(), SIZES[-1])]
        before = [*zip_longest(*(batched(waiting[kind].items(), SIZES[-1]) for kind in BEFORE_PAGES))]
        for i, parts in enumerate(before, 1):
            # Pages are taken by the last one.
            taken = [pages.pop(0)] if pages and i == len(before) else [None]
            cache = change(self._plan, cache, self._array([*parts, *taken]))
        for part in pages:
            cache = change(self._plan, cache, self._array([part]))
        return cache

    def _array(self, kinds: list[Any]) -> np.ndarray:
        """i32[kinds, one of SIZES, 3] of (row, what it is to have) of each kind, or of None."""
        parts = [part or () for part in kinds]
        out = np.zeros((len(parts), size_for(max(map(len, parts))), 3), np.int32)
        out[:, :, 0] = self._num_rows
        for i, part in enumerate(parts):
            for j, (row, what) in enumerate(part):
                out[i, j, 0], out[i, j, 1:] = row, what
        return out

    def warm_up(self, cache: Cache) -> Cache:
        """Run all programs once, on no row."""
        for size in SIZES:
            rows = np.full(size, self._num_rows, np.int32)
            own = np.array([self._plan.group_ppm] * size, np.int32)
            cache = tables.release(self._plan, cache, rows)
            cache = tables.set_budgets(self._plan, cache, rows, own)
            for kinds in (1, 1 + len(BEFORE_PAGES)):
                nothing = np.full((kinds, size, 3), self._num_rows, np.int32)
                cache = change(self._plan, cache, nothing)
        return cache
