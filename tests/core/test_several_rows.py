"""Operations on several rows at once: the same, bit for bit, as on one after the other."""

from functools import partial

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tangram_jax as tj
from models.testing import tiny_config
from tangram_jax import sampling
from tangram_jax.offload import set_counts

CONFIG = tiny_config(num_layers=2, sliding_window=12, sliding_layers=(0,))
RATIOS = np.random.default_rng(0).uniform(0.1, 0.9, (1, 1, CONFIG.num_kv_heads)).astype(np.float32)
ROWS, MAX_TAIL, VOCABULARY = 6, 8, 50
PLAN = tj.CachePlan.build(
    tj.BudgetProfile.from_ratios(RATIOS, retention=0.5, alpha=0.0),
    1,
    4,
    window=8,
    max_retention=1.0,
    sliding=tj.SlidingLayers.of(CONFIG, MAX_TAIL),
)
OWN = np.stack([PLAN.budgets_at(share) for share in (0.1, 0.3, 0.5, 0.7, 0.9, 1.0)])


def same(one, other):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(a, b)


def new_cache(pages: int) -> tj.Cache:
    return tj.init_cache(PLAN, CONFIG, num_pages=pages, max_requests=ROWS, max_tokens=96, max_tail=MAX_TAIL)


@settings(max_examples=25)
@given(
    rows=st.permutations([*range(ROWS), ROWS, -1]),
    tokens=st.lists(st.integers(0, 96), min_size=ROWS + 2, max_size=ROWS + 2),
    tail=st.lists(st.integers(0, MAX_TAIL), min_size=ROWS + 2, max_size=ROWS + 2),
    pages=st.sampled_from([1, 40, 130, 400]),  # programs are compiled for each
    held=st.integers(0, 40),
)
def test_reserve(rows, tokens, tail, pages, held):
    """Also where some own pages, others are no rows, and the pages are too few: then none behind the first gets any."""
    cache = tj.set_budgets(PLAN, new_cache(pages), np.arange(ROWS), OWN)
    cache = jax.tree.map(np.asarray, tj.reserve(PLAN, cache, rows[0], held, 0))
    rows, tokens, tail = (np.array(x, np.int32) for x in (rows, tokens, tail))
    at_once = tj.reserve(PLAN, jax.tree.map(jax.numpy.asarray, cache), rows, tokens, tail)
    one = jax.tree.map(jax.numpy.asarray, cache)
    for row, *counts in zip(rows, tokens, tail, strict=True):
        free = int(one.num_free)
        one = tj.reserve(PLAN, one, row, *counts)
        if 0 <= row < ROWS and int(one.num_free) == free:
            owned = (np.asarray(one.table[row]) >= 0).sum()
            if owned < PLAN.group_pages(*map(int, counts), OWN[row]).sum():
                break  # the first that found too few
    same(at_once, one)


@settings(max_examples=25)
@given(
    rows=st.permutations([*range(ROWS), ROWS, -1]),
    tokens=st.lists(st.integers(0, 96), min_size=ROWS + 2, max_size=ROWS + 2),
    tail=st.lists(st.integers(0, MAX_TAIL), min_size=ROWS + 2, max_size=ROWS + 2),
    held=st.lists(st.integers(0, 60), min_size=ROWS, max_size=ROWS),
)
def test_trim(rows, tokens, tail, held):
    """Also of rows that hold more than they are to keep pages for, and of no rows."""
    cache = tj.set_budgets(PLAN, new_cache(900), np.arange(ROWS), OWN)
    cache = tj.reserve(PLAN, cache, np.arange(ROWS), np.full(ROWS, 80), np.full(ROWS, MAX_TAIL))
    cache = set_counts(cache, np.arange(ROWS), np.array(held, np.int32), np.full(ROWS, 3, np.int32))
    rows, tokens, tail = (np.array(x, np.int32) for x in (rows, tokens, tail))
    one = jax.tree.map(jax.numpy.copy, cache)
    at_once = tj.trim(PLAN, cache, rows, tokens, tail)
    for row, *counts in zip(rows, tokens, tail, strict=True):
        one = tj.trim(PLAN, one, row, *counts)
    same(at_once, one)


def test_set_budgets():
    rows = np.array([4, ROWS, 1, -1, 0], np.int32)
    at_once = tj.set_budgets(PLAN, new_cache(9), rows, OWN[:5])
    one = new_cache(9)
    for row, budgets in zip(rows, OWN, strict=False):
        one = tj.set_budgets(PLAN, one, row, budgets)
    same(at_once, one)
    assert (np.asarray(one.budgets)[[4, 1, 0]] == OWN[[0, 2, 4]]).all()


@pytest.mark.parametrize("shape", [(2, PLAN.num_groups), (PLAN.num_groups,), (3, PLAN.num_groups + 1)])
def test_each_row_wants_budgets_of_its_own(shape):
    with pytest.raises(ValueError, match="parts per million"):
        tj.set_budgets(PLAN, new_cache(9), np.arange(3), np.zeros(shape, np.int32))


def test_set_row():
    make = partial(sampling.init_sampler, 4, VOCABULARY)
    params = [
        sampling.row_params(seed=n, temperature=0.1 * n, logit_bias={n: 1.0}, last_token=n) for n in range(4)
    ]
    rows = np.array([3, 4, 0, -1], np.int32)
    marked = sampling.mark_prompt(make(), np.int32(3), np.arange(5, dtype=np.int32), np.int32(5))
    at_once = sampling.set_row(marked, rows, sampling.RowParams.several(params))
    one = make()
    for row, of_row in zip(rows, params, strict=True):
        one = sampling.set_row(one, row, of_row)
    same(at_once, one)
    assert one.last_token.tolist() == [2, 0, 0, 0]
