"""Rows that come at once: few programs, and what each row gets is as if it had got it at once."""

from collections import Counter
from typing import Any
from unittest import mock

import numpy as np
import pytest

import tangram_jax as tj
from models.testing import tiny_config
from serve import new_rows
from serve.new_rows import SEVERAL, NewRows, batches
from tangram_jax import cache as tables
from tests.serve.tiny_engine import RUNNING, tiny_engine, tiny_runner

CONFIG = tiny_config(num_layers=2)
RATIOS = np.random.default_rng(0).uniform(0.1, 0.9, (1, 2, CONFIG.num_kv_heads)).astype(np.float32)
PLAN = tj.CachePlan.build(
    tj.BudgetProfile.from_ratios(RATIOS, retention=0.5, alpha=0.0), 2, 4, window=8, max_retention=1.0
)
ROWS, PAGES, MAX_TOKENS, MAX_TAIL = 20, 900, 60, 8


def new_cache() -> tj.Cache:
    return tj.init_cache(
        PLAN, CONFIG, num_pages=PAGES, max_requests=ROWS, max_tokens=MAX_TOKENS, max_tail=MAX_TAIL
    )


class AtOnce:
    """What `NewRows` is to do, done at once."""

    def __init__(self) -> None:
        self.cache = new_cache()

    def set_budgets(self, row, budgets):
        self.cache = tables.set_budgets(PLAN, self.cache, row, budgets)

    def reserve(self, row, tokens, tail):
        self.cache = tables.reserve(PLAN, self.cache, row, tokens, tail)
        return True


@pytest.mark.parametrize("count", [0, 1, 2, SEVERAL, SEVERAL + 1, 2 * SEVERAL + 3])
def test_everything_in_batches(count):
    waiting = {row: str(row) for row in range(count)}
    seen = {}
    for rows, given in batches(waiting, 99):
        assert len(rows) in (1, SEVERAL)
        assert len(rows) == len(given)
        seen |= {row: what for row, what in zip(rows.tolist(), given, strict=True) if row != 99}
    assert seen == waiting


@pytest.mark.parametrize("seed", range(4))
def test_any_order(seed):
    """Rows of all lengths, with and without budgets of their own, released and taken again between."""
    random = np.random.default_rng(seed)
    waits, at_once, cache = NewRows(PLAN, ROWS), AtOnce(), new_cache()
    used: dict[int, tuple[int, int]] = {}

    def both(what, row, *given):
        nonlocal cache
        if not getattr(waits, what)(row, *given) and what == "reserve":
            cache = waits.give(cache)
            assert waits.reserve(row, *given)
        getattr(at_once, what)(np.int32(row), *given)

    for _ in range(60):
        row = int(random.integers(ROWS))
        if row in used and random.random() < 0.4:
            del used[row]
            cache = tables.release(PLAN, waits.give(cache), np.int32(row))
            at_once.cache = tables.release(PLAN, at_once.cache, np.int32(row))
            continue
        if row not in used and random.random() < 0.5:
            both("set_budgets", row, PLAN.budgets_at(float(random.uniform(0.1, 1.0))))
        used[row] = int(random.integers(1, MAX_TOKENS)), int(random.integers(MAX_TAIL))
        both("reserve", row, *used[row])
    cache, other = waits.give(cache), at_once.cache
    assert not waits
    np.testing.assert_array_equal(cache.budgets, other.budgets)
    np.testing.assert_array_equal(np.asarray(cache.table) >= 0, np.asarray(other.table) >= 0)
    assert int(cache.num_free) == int(other.num_free) > 0
    owned = np.asarray(cache.table)
    assert len(set(owned[owned >= 0].tolist())) == (owned >= 0).sum()


def test_a_crowd_costs_few_programs():
    calls: Counter[str] = Counter()

    def counted(name):
        function = getattr(tables, name)

        def call(*given):
            calls[name] += 1
            return function(*given)

        return mock.patch.object(new_rows.tables, name, call)

    waits = NewRows(PLAN, ROWS)
    for row in range(ROWS):
        waits.set_budgets(row, PLAN.budgets_at(0.2))
        assert waits.reserve(row, 10, 2)
    assert not waits.reserve(3, 11, 2)
    with counted("set_budgets"), counted("reserve"):
        cache = waits.give(new_cache())
        waits.give(cache)
    assert calls == {"set_budgets": 2, "reserve": 2}


def test_rows_that_wait_are_there_for_whoever_looks():
    """At the runner: its cache and its sampler's state, in which rows with penalties are marked at once."""
    runner = tiny_runner("ragged")
    runner.reset()
    before = int(runner.cache.num_free)
    for row in range(3):
        runner.reserve(row, 20, 4)
        runner.reserve(row, 40, 4)  # as the next tokens of a row that has not run yet
    pages = runner.plan.pages(40, 4)
    assert int(runner.cache.num_free) == before - 3 * pages
    runner.reserve(0, 60, 4)
    runner.reset()
    assert int(runner.cache.num_free) == before


def test_a_crowd_is_answered_as_one_after_the_other():
    """With retentions and penalties of their own."""
    prompts = [np.random.default_rng(n).integers(0, 100, 5 + 9 * n).tolist() for n in range(RUNNING)]
    ways: list[dict[str, Any]] = [
        {},
        {"retention": 0.2},
        {"retention": 0.6, "repetition_penalty": 1.8},
        {"temperature": 1.0, "seed": 5, "presence_penalty": 1.5},
    ]
    with tiny_engine("ragged", max_stored=0) as engine:
        alone = [engine.answer(p, **how).tokens for p, how in zip(prompts, ways, strict=True)]
        with engine.held():
            asked = [engine.ask(p, **how) for p, how in zip(prompts, ways, strict=True)]
        assert [a.wait()[0].tokens for a in asked] == alone
        engine.settle()
