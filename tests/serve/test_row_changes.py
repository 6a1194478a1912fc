"""Rows that come at once: few programs, and what each row gets is as if it had got it at once."""

from collections import Counter
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest

import tangram_jax as tj
from models.testing import tiny_config
from serve import row_changes
from serve.pages import PageBook
from serve.request import GenerationRequest, SamplingParams
from serve.row_changes import SIZES, RowChanges, batches
from serve.row_sampler import RowSampler
from serve.sequence import RowState, Sequence
from tangram_jax import cache as tables
from tangram_jax import sampling
from tangram_jax.cache import NO_PAGE
from tangram_jax.offload import set_counts
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


def waiting(changes):
    """The kinds of changes that wait."""
    return [kind for kind, rows in changes._waiting.items() if rows]


def counted(module, name, calls):
    """Calls of a module's function are counted in `calls`."""
    function = getattr(module, name)

    def call(*given):
        calls[name] += 1
        return function(*given)

    return mock.patch.object(module, name, call)


@pytest.mark.parametrize("count", [0, 1, 2, 4, 5, 16, 17, 35])
def test_everything_in_batches(count):
    waiting = {row: str(row) for row in range(count)}
    seen = {}
    for rows, given in batches(waiting, 99):
        assert len(rows) in SIZES
        assert len(rows) == len(given) <= 4 * max(1, (rows != 99).sum())
        seen |= {row: what for row, what in zip(rows.tolist(), given, strict=True) if row != 99}
    assert seen == waiting


AT_ONCE = {
    "budgets": lambda cache, row, own: tables.set_budgets(PLAN, cache, row, own),
    "trims": lambda cache, row, held: tables.trim(PLAN, cache, row, *held),
    "rollbacks": lambda cache, row, count: tables.rollback(PLAN, cache, row, count),
    "counts": lambda cache, row, counts: set_counts(cache, row, *counts),
    "pages": lambda cache, row, held: tables.reserve(PLAN, cache, row, *held),
}


class Both:
    """Changes that wait, and the same made at once."""

    def __init__(self) -> None:
        self.changes, self.waits, self.at_once = RowChanges(PLAN, ROWS), new_cache(), new_cache()

    def change(self, kind, row, what):
        if not self.changes.wait(kind, row, what):
            self.waits = self.changes.make(self.waits)
            assert self.changes.wait(kind, row, what)
        self.at_once = AT_ONCE[kind](self.at_once, np.int32(row), what)

    def release(self, row):
        self.changes.release(row)
        self.at_once = tables.release(PLAN, self.at_once, np.int32(row))


@pytest.mark.parametrize("seed", range(4))
def test_any_order(seed):
    """Rows of all lengths, with and without budgets of their own, compressed, cut, released and taken again between."""
    random, both = np.random.default_rng(seed), Both()
    used: dict[int, tuple[int, int]] = {}
    for _ in range(90):
        row = int(random.integers(ROWS))
        if row not in used:
            if random.random() < 0.5:
                both.change("budgets", row, PLAN.budgets_at(float(random.uniform(0.1, 1.0))))
            used[row] = int(random.integers(1, MAX_TOKENS - MAX_TAIL)), int(random.integers(MAX_TAIL))
            both.change("pages", row, used[row])
            both.change("counts", row, used[row])
            continue
        tokens, tail = used[row]
        match random.integers(4):
            case 0:
                del used[row]
                both.release(row)
            case 1:
                count = int(random.integers(tail + 1))
                both.change("rollbacks", row, count)
                used[row] = tokens, tail - count
            case 2:  # as a compression
                both.change("counts", row, (tokens, 0))
                both.change("trims", row, (tokens, 0))
                used[row] = tokens, 0
            case 3:
                used[row] = tokens, MAX_TAIL - 1
                both.change("pages", row, used[row])
                both.change("counts", row, used[row])
    one, other = both.changes.make(both.waits), both.at_once
    assert not waiting(both.changes)
    for name in ("tokens", "tail", "budgets", "num_free"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    np.testing.assert_array_equal(one.table == NO_PAGE, other.table == NO_PAGE)
    owned = np.sort(np.asarray(one.table[one.table != NO_PAGE]))
    assert (np.diff(owned) > 0).all()  # nobody's twice
    np.testing.assert_array_equal(owned, np.flatnonzero(one.owners))
    assert int(one.num_free) == PAGES - len(owned)


def test_pages_are_given_back_before_others_are_taken():
    both = Both()
    both.change("pages", 0, (MAX_TOKENS - MAX_TAIL, MAX_TAIL))
    both.waits = both.changes.make(both.waits)
    both.change("pages", 1, (10, 2))
    both.change("trims", 0, (10, 2))  # of another row: it comes before
    assert waiting(both.changes) == ["trims", "pages"]
    assert not both.changes.wait("trims", 1, (10, 2))  # of the same: it would come too early
    assert both.changes.wait("counts", 0, (10, 2))
    assert not both.changes.wait("counts", 0, (10, 2))


def test_a_crowd_costs_few_programs():
    calls: Counter[str] = Counter()
    changes = RowChanges(PLAN, ROWS)
    for row in range(ROWS):
        assert changes.wait("budgets", row, PLAN.budgets_at(0.2))
        assert changes.wait("pages", row, (10, 2))
    with counted(tables, "set_budgets", calls), counted(row_changes, "change", calls):
        cache = changes.make(new_cache())
        changes.make(cache)
    assert calls == {"set_budgets": 2, "change": 2}


def test_a_compression_costs_one_program():
    """With what others give back since the last one, which does not have to be made before a step."""
    calls: Counter[str] = Counter()
    changes, cache = RowChanges(PLAN, ROWS), new_cache()
    for row in range(3):
        cache = tables.reserve(PLAN, cache, np.int32(row), 20, 4)
    assert changes.wait("trims", 1, (20, 0))
    assert waiting(changes) == ["trims"]
    assert not changes.pressing
    assert changes.wait("rollbacks", 0, 3)
    assert changes.wait("pages", 0, (24, 4))
    assert changes.wait("pages", 2, (20, 8))
    assert changes.pressing
    with counted(row_changes, "change", calls):
        changes.make(cache)
    assert calls == {"change": 1}
    assert not waiting(changes)


def test_a_crowd_takes_what_a_crowd_gives_back():
    """More of both than one program has rows for, in a pool that has no more."""
    changes, cache = RowChanges(PLAN, 40), tj.init_cache(
        PLAN, CONFIG, num_pages=20 * PLAN.pages(40, 4), max_requests=40, max_tokens=MAX_TOKENS, max_tail=MAX_TAIL
    )  # fmt: skip
    for row in range(20):
        assert changes.wait("pages", row, (40, 4))
    cache = changes.make(cache)
    assert not int(cache.num_free)
    for row in range(20):
        assert changes.wait("trims", row, (0, 0))
        assert changes.wait("pages", 20 + row, (40, 4))
    cache = changes.make(cache)
    assert not int(cache.num_free)
    owned = np.asarray(cache.table != NO_PAGE).sum(axis=1)
    assert owned.tolist() == [0] * 20 + [PLAN.pages(40, 4)] * 20


def test_a_crowd_that_ends_costs_few_programs_once_its_pages_are_wanted():
    """With one that waited for other things, and comes again at once."""
    calls: Counter[str] = Counter()
    changes, cache = RowChanges(PLAN, ROWS), new_cache()
    for row in range(ROWS):
        assert changes.wait("pages", row, (10, 2))
    cache = changes.make(cache)
    assert changes.wait("rollbacks", 3, 1)
    assert changes.wait("pages", 3, (10, 8))
    for row in range(ROWS):
        changes.release(row)
    assert waiting(changes) == ["releases"]
    assert not changes.pressing
    assert changes.wait("budgets", 3, PLAN.budgets_at(0.2))
    assert changes.wait("pages", 3, (30, 0))
    assert changes.pressing
    with counted(tables, "release", calls), counted(row_changes, "change", calls):
        cache = changes.make(cache)
    assert calls == {"release": 2, "change": 1}
    owned = int(PLAN.group_pages(30, 0, PLAN.budgets_at(0.2)).sum())
    assert int((cache.table != NO_PAGE).sum()) == owned == PAGES - int(cache.num_free)


def test_rows_that_wait_are_there_for_whoever_looks():
    """Also where a row that waits is to have others, and not after all was forgotten."""
    runner = tiny_runner("ragged")
    runner.reset()
    before = int(runner.cache.num_free)
    for row in range(3):
        runner.reserve(row, 40, 4)
        runner.reserve(row, 20, 4)  # what it owns stays
    pages = runner.plan.pages(40, 4)
    assert int(runner.cache.num_free) == before - 3 * pages
    runner.reserve(0, 60, 4)
    runner.reset()
    assert int(runner.cache.num_free) == before


def test_a_copy_takes_pages_that_are_given_back():
    """They wait until somebody takes pages, and a step is not one that does."""
    runner = tiny_runner("ragged")
    runner.reset()
    runner.reserve(0, 40, 4)
    runner.reserve(1, 40, 4)
    assert waiting(runner._changes) == ["pages"]
    held = int(runner.cache.num_free)
    runner.trim(0, 20, 0)
    runner.release(1)
    assert int(runner.cache.num_free) == held
    assert waiting(runner._changes) == ["releases", "trims"]
    runner.fork(0, 2)
    assert not waiting(runner._changes)
    assert int(runner.cache.num_free) > held
    runner.reset()


def test_samplers_that_begin_at_once():
    """Twenty rows with and without penalties, one of them begun twice, by two programs; and their marks."""
    config = tiny_config()
    begun, programs = [], Counter[str]()

    def begin(sampler, n, row, late=False):
        how = SamplingParams(
            max_tokens=9, temperature=n / 9, repetition_penalty=1 + n % 3, presence_penalty=float(n % 2)
        )
        request = GenerationRequest(request_id=str(n), prompt_ids=[n, n + 1, 7], sampling=how)
        sequence = Sequence(request, 0, lambda _: None, n, n, PLAN.group_ppm)
        sequence.state = RowState(row, PageBook(9, PLAN.num_page_lists).empty(), PLAN.group_ppm)
        if late:  # as one that was preempted
            sequence.tokens = [*sequence.tokens, 5, 5, 9]
        sampler.start(sequence)

    for at_once in (True, False):
        sampler = RowSampler(config, 24, jax.devices()[0], part=4)
        sampler.reset()
        with counted(sampling, "set_row", programs):
            begin(sampler, 1, 3)
            for n in range(20):
                begin(sampler, n, n, late=n > 15)
                if not at_once:
                    jax.block_until_ready(sampler.state)
            begun.append(jax.tree.map(np.asarray, sampler.state))
            if at_once:
                assert programs == {"set_row": 2}
    for one, other in zip(jax.tree.leaves(begun[0]), jax.tree.leaves(begun[1]), strict=True):
        np.testing.assert_array_equal(one, other)
    assert begun[0].seen[:20].any(1).sum() > 9


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
