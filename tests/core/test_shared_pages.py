"""Pages that several rows own: given back by the last of them, once."""

import itertools

import jax
import numpy as np
import pytest

import tangram_jax as tj
from tangram_jax.offload import set_counts
from tests.core.test_state_machine import PAGES, programs


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_shared_pages_are_freed_by_the_last_of_their_owners(order):
    """Of a copy of a copy. What was freed before would be taken by others and written to."""
    plan, empty, _ = programs("bytes")
    rows = np.arange(3, dtype=np.int32)
    cache = tj.reserve(plan, jax.tree.map(jax.numpy.asarray, empty), rows[0], np.int32(60), np.int32(5))
    cache = set_counts(cache, rows[0], np.int32(60), np.int32(5))
    for source in (0, 1):
        cache = tj.fork(plan, cache, rows[source], rows[source + 1])
    own = plan.pages(60, 5) - plan.shared_pages(60)
    assert (own, plan.shared_pages(60)) == (12, 25)
    free = [PAGES - 25 - 3 * own]
    for index in order:
        cache = tj.release(plan, cache, rows[index])
        free.append(int(cache.num_free))
    assert np.diff(free).tolist() == [own, own, own + 25]
    all_free(cache)


@pytest.mark.parametrize("together", [(0, 1), (2, 0), (1, 3, 2), (0, 1, 2), (2, 4, 1, 0)])
def test_pages_shared_by_rows_that_end_together_are_freed_once(together):
    """By all of their owners or some, with rows among them that own others and nothing."""
    plan, empty, _ = programs("bytes")
    cache = tj.reserve(plan, jax.tree.map(jax.numpy.asarray, empty), np.int32(0), np.int32(60), np.int32(5))
    cache = set_counts(cache, np.int32(0), np.int32(60), np.int32(5))
    for source in (0, 1):
        cache = tj.fork(plan, cache, np.int32(source), np.int32(source + 1))
    cache = tj.reserve(plan, cache, np.int32(3), np.int32(20), np.int32(0))
    at_once = tj.release(plan, jax.tree.map(jax.numpy.copy, cache), np.array([*together, 99], np.int32))
    for index in together:
        cache = tj.release(plan, cache, np.int32(index))
    for name in ("table", "owners", "num_free", "tokens", "tail", "budgets"):
        np.testing.assert_array_equal(getattr(at_once, name), getattr(cache, name))
    free = [np.sort(np.asarray(c.free)[: int(c.num_free)]) for c in (at_once, cache)]
    np.testing.assert_array_equal(*free)
    all_free(tj.release(plan, at_once, np.arange(4, dtype=np.int32)))


def all_free(cache):
    assert int(cache.num_free) == PAGES
    assert sorted(np.asarray(cache.free).tolist()) == list(range(PAGES))
    assert not cache.owners.any()
