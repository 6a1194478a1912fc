"""The host's count of pages against the cache's own functions: equal after every operation, in any order."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tangram_jax as tj
from models.testing import tiny_config
from serve.pages import Holding, PageBook
from tests.serve.loop import make_plan

PAGES, ROWS, MAX_TOKENS, MAX_TAIL = 110, 4, 60, 12
CONFIG = tiny_config(
    num_layers=4,
    num_heads=2,
    num_kv_heads=2,
    head_dim=4,
    hidden_size=8,
    sliding_window=10,
    sliding_layers=(1,),
)


@cache
def empty_cache():
    """(plan, host copy of an empty cache): six groups of budgets 0.05 to 1, and two of a sliding-window layer."""
    plan = make_plan(sliding=tj.SlidingLayers.of(CONFIG, MAX_TAIL))
    empty = tj.init_cache(
        plan, CONFIG, num_pages=PAGES, max_requests=ROWS, max_tokens=MAX_TOKENS, max_tail=MAX_TAIL
    )
    return plan, jax.tree.map(np.asarray, empty)


class Both:
    """A book and a cache that are told the same."""

    def __init__(self) -> None:
        self.plan, empty = empty_cache()
        self.cache = jax.tree.map(jnp.asarray, empty)
        self.book = PageBook(PAGES, self.plan.num_page_lists)
        self.rows: list[Holding | None] = [None] * ROWS
        self.counts = [(0, 0)] * ROWS  # tokens, tail

    def wanted(self, tokens: int, tail: int) -> np.ndarray:
        return self.plan.group_pages(tokens, tail).astype(np.int64)

    def grow(self, row: int, tokens: int, tail: int) -> None:
        holding = self.rows[row] or self.book.empty()
        before, missing = self.book.free, self.book.missing(holding, self.wanted(tokens, tail))
        if missing > before:
            with pytest.raises(RuntimeError, match="admitted too much"):
                self.book.grow(holding, self.wanted(tokens, tail))
        else:
            self.book.grow(holding, self.wanted(tokens, tail))
            self.rows[row] = holding
            assert before - self.book.free == missing
        # The device takes all or nothing too.
        self.cache = tj.reserve(self.plan, self.cache, np.int32(row), np.int32(tokens), np.int32(tail))

    def count(self, row: int, tokens: int, tail: int) -> None:
        """What a step would set: so many tokens compressed, so many since."""
        holding = self.rows[row]
        if holding is None or tokens < self.counts[row][0]:
            return
        if self.book.missing(holding, self.wanted(tokens, tail)):
            return
        self.counts[row] = tokens, tail
        self.cache = self.cache.replace(
            tokens=self.cache.tokens.at[row].set(tokens), tail=self.cache.tail.at[row].set(tail)
        )

    def trim(self, row: int, tail: int) -> None:
        holding, (tokens, held) = self.rows[row], self.counts[row]
        if holding is None:
            return
        wanted = self.wanted(tokens, max(tail, held))
        before, surplus = self.book.free, self.book.surplus(holding, wanted)
        self.book.trim(holding, wanted)
        assert self.book.free - before == surplus
        self.cache = tj.trim(
            self.plan, self.cache, np.int32(row), np.int32(tokens), np.int32(max(tail, held))
        )

    def fork(self, src: int, dst: int) -> None:
        holding = self.rows[src]
        if holding is None or self.rows[dst] is not None:
            return
        full = self.plan.shared_group_pages(self.counts[src][0])
        before, cost = self.book.free, self.book.fork_cost(holding, full)
        if cost > before:
            return
        self.rows[dst], self.counts[dst] = self.book.fork(holding, full), self.counts[src]
        assert before - self.book.free == cost
        self.cache = tj.fork(self.plan, self.cache, np.int32(src), np.int32(dst))

    def release(self, row: int) -> None:
        holding = self.rows[row]
        if holding is None:
            return
        self.book.release(holding)
        assert holding.owned.sum() == 0
        self.rows[row], self.counts[row] = None, (0, 0)
        self.cache = tj.release(self.plan, self.cache, np.int32(row))

    def check(self) -> None:
        assert self.book.free == int(self.cache.num_free)
        assert 0 <= self.book.free <= PAGES
        assert self.book.used == PAGES - self.book.free
        table, layout = np.asarray(self.cache.table), self.cache.layout
        for row, holding in enumerate(self.rows):
            owned = np.bincount(layout.group[table[row] >= 0], minlength=self.plan.num_page_lists)
            assert owned.tolist() == (holding.owned.tolist() if holding else [0] * self.plan.num_page_lists)


row = st.integers(0, ROWS - 1)
tokens, tail = st.integers(0, MAX_TOKENS - MAX_TAIL), st.integers(0, MAX_TAIL)
operation = st.one_of(
    st.tuples(st.just("grow"), row, tokens, tail),
    st.tuples(st.just("count"), row, tokens, tail),
    st.tuples(st.just("trim"), row, tail),
    st.tuples(st.just("fork"), row, row),
    st.tuples(st.just("release"), row),
)


@settings(max_examples=60, derandomize=True, database=None)
@given(st.lists(operation, min_size=10, max_size=50))
def test_the_book_says_what_the_cache_says(operations):
    both = Both()
    for name, *arguments in operations:
        getattr(both, name)(*arguments)
        both.check()
    for index in range(ROWS):
        both.release(index)
        both.check()
    assert both.book.free == PAGES


def test_a_family_of_forks_and_the_order_of_its_end():
    """Rows that share a prefix of different lengths: a page is free when its last owner lets go, in any order."""
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2]):
        both = Both()
        both.grow(0, 48, 0)
        both.count(0, 20, 0)
        both.fork(0, 1)
        both.count(0, 40, 0)
        both.fork(0, 2)
        both.fork(1, 3)
        both.check()
        assert both.book.used < 4 * both.plan.pages(48)
        for index in order:
            both.release(index)
            both.check()
        assert both.book.free == PAGES


def test_nothing_changes_when_pages_are_missing():
    book = PageBook(10, 2)
    holding = book.empty()
    book.grow(holding, np.array([4, 3]))
    with pytest.raises(RuntimeError, match="4 pages wanted, 3 free"):
        book.grow(holding, np.array([5, 6]))
    assert (book.free, holding.owned.tolist()) == (3, [4, 3])
