"""Rows that callers name twice, change under what they hold, or take from a cache of another plan."""

import jax
import numpy as np
import pytest

import tangram_jax as tj
from tests.core.stepping import CONFIG, PARAMS, ROW, SNAPKV, dense_logits, new_cache, plan_of, random_tokens
from tests.core.test_misuse import chunk_of, same, with_rows


def run(plan, cache, chunk, decode=None):
    return tj.step(PARAMS, CONFIG, plan, SNAPKV, cache, chunk, decode)


@pytest.mark.parametrize(
    ("chunk", "decode"),
    [
        (None, tj.Decode(np.array([0, 0]), np.array([3, 4]))),
        (None, tj.Decode(np.array([0, 0]), np.array([[3, 4], [5, 6]]))),
        ([chunk_of(0, [3, 4], 2), chunk_of(0, [5], 1)], None),
        (tj.Packed.of([0, 0], [np.array([3]), np.array([4])], 16), None),
        (chunk_of(0, [3], 1), tj.Decode(np.array([0]), np.array([4]))),
    ],
    ids=["decode", "drafts", "chunks", "packed", "chunk and decode"],
)
def test_a_row_that_is_there_twice(chunk, decode):
    """Both parts would write to the same places, and the row be wrong from then on."""
    plan = plan_of("1.0", 2, 8)
    with pytest.raises(ValueError, match="row 0 is there twice: run one part"):
        run(plan, with_rows(plan, 0, 1), chunk, decode)


def test_empty_slots_and_chunks_are_none_however_many():
    plan = plan_of("1.0", 2, 8)
    cache = with_rows(plan, 0)
    chunks = [chunk_of(0, [3], 0), chunk_of(0, [4], 0), chunk_of(7, [4], 1)]
    _, cache = run(plan, cache, chunks, tj.Decode(np.array([-1, 9, 9, 0]), np.array([3, 4, 5, 6])))
    assert cache.tail.tolist() == [1, 0, 0]


def test_budgets_of_a_row_that_holds_something_stay():
    """Its lengths would change under what it holds: entries that nobody wrote would be read."""
    profile = tj.BudgetProfile.uniform(CONFIG.num_layers, CONFIG.num_kv_heads, 0.3)
    plan = tj.CachePlan.build(profile, 2, 8, max_retention=1.0)
    cache = with_rows(plan, 0)
    kept, own = jax.tree.map(np.asarray, cache), plan.budgets_at(1.0)
    cache = tj.set_budgets(plan, cache, np.int32(0), own)
    same(cache, kept)
    cache = tj.set_budgets(plan, cache, np.array([0, ROW]), np.array([own, own]))
    assert cache.budgets[0].tolist() == kept.budgets[0].tolist()
    assert cache.budgets[ROW].tolist() == own.tolist()


def test_a_row_is_trimmed_to_what_it_holds_at_most():
    """With less it would be read as before once it has pages again, whoever's entries they hold."""
    plan = plan_of("1.0", 2, 8)
    tokens = random_tokens(21)
    cache = with_rows(plan, 0)
    cache = tj.trim(plan, cache, np.int32(0), np.int32(0), np.int32(0))
    assert int(cache.num_pages - cache.num_free) == plan.pages(20, 0)
    cache = tj.reserve(plan, cache, ROW, np.int32(20), np.int32(0))
    cache = tj.reserve(plan, cache, np.int32(0), np.int32(20), np.int32(3))
    logits, _ = run(plan, cache, None, tj.Decode(np.array([0]), tokens[20:]))
    np.testing.assert_allclose(logits[0], dense_logits(CONFIG, tokens)[-1], atol=2e-4)


def test_plans_whose_pages_alone_are_alike():
    """What lies in a page is another head's."""
    ratios = np.array([[[0.2, 0.8, 0.2, 0.8]]], np.float32).repeat(CONFIG.num_layers, axis=1)
    ragged = tj.BudgetProfile.from_ratios(ratios, retention=0.5, alpha=0.0)
    full = tj.BudgetProfile.uniform(CONFIG.num_layers, CONFIG.num_kv_heads, 1.0)
    plan = tj.CachePlan.build(full, 2, 8)
    for other in (
        tj.CachePlan.build(full, 2, 8, scaled=ragged, max_retention=1.0),
        tj.CachePlan.build(full, 2, 8, window=16),
        tj.CachePlan.build(full, 2, 8, sinks=0),
    ):
        cache = new_cache(plan)
        for change in (
            lambda cache, other=other: run(other, cache, chunk_of(0, [3], 1)),
            lambda cache, other=other: tj.rollback(other, cache, ROW, np.int32(1)),
            lambda cache, other=other: tj.reserve(other, cache, ROW, np.int32(1), np.int32(0)),
        ):
            with pytest.raises(ValueError, match="the cache is of another plan"):
                change(cache)
    alike = tj.CachePlan.build(full, 2, 8)
    tj.release(alike, new_cache(plan), ROW)


def test_several_rows_where_one_is_wanted():
    plan, rows = plan_of("1.0", 2, 8), np.array([0, 1])
    with pytest.raises(ValueError, match=r"rows \[2\]: give one at a time, as a number"):
        tj.fork(plan, new_cache(plan), ROW, rows)
