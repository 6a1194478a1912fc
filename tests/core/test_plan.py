"""The static layout: exact lengths, clustering, pages, and the paper's split map."""

from fractions import Fraction
from math import ceil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tangram_jax as tj
from tangram_jax.grouping import heads_per_page_for, most_heads_per_page
from tangram_jax.plan import MAX_TOKENS, kept_entries


def profile(budgets) -> tj.BudgetProfile:
    return tj.BudgetProfile.from_ratios(np.asarray(budgets, np.float32)[None], retention=0.5, alpha=0.0)


def test_ceiling_is_not_off_by_one():
    plan = tj.CachePlan.build(
        tj.BudgetProfile.uniform(1, 1, 0.07), heads_per_page=1, page_size=1, min_entries=0
    )
    assert plan.lengths(100).tolist() == [7]
    assert plan.pages(100) == 7


def test_budgets_are_the_nearest_parts_per_million():
    """0.9 in float32 is a little less than 0.9: cut, it would lose an entry of a million."""
    plan = tj.CachePlan.build(tj.BudgetProfile.uniform(1, 1, 0.9), heads_per_page=1)
    assert plan.group_ppm.tolist() == plan.lengths(MAX_TOKENS).tolist() == [900_000]


@given(ppm=st.integers(0, 1_000_000), tokens=st.integers(0, MAX_TOKENS), least=st.integers(0, 300))
def test_kept_entries_is_exact_in_32_bits(ppm, tokens, least):
    want = min(tokens, max(ceil(Fraction(ppm, 1_000_000) * tokens), least))
    assert kept_entries(np.array([ppm], np.int32), np.array([tokens], np.int32), least)[0] == want
    with np.errstate(over="raise"):  # what JAX computes, too
        assert kept_entries(np.int32(ppm), np.int32(tokens), np.int32(least)) == want


def test_budgets_of_a_cache_count_as_the_plan_s():
    """Arrays of JAX of 32 bits, with numbers of tokens that are not; traced, too."""
    plan = tj.CachePlan.build(tj.BudgetProfile.uniform(2, 3, 0.9), heads_per_page=1)
    want, budgets = plan.lengths(70_000), jax.numpy.asarray(plan.group_ppm)
    for found in (plan.lengths(70_000, budgets), jax.jit(lambda b: plan.lengths(70_000, b))(budgets)):
        assert found.dtype == want.dtype
        np.testing.assert_array_equal(found, want)
    assert plan.pages(70_000, 3, budgets) == plan.pages(70_000, 3)


@given(st.integers(0, MAX_TOKENS - 1), st.integers(0, 2**32 - 1))
def test_lengths_grow_by_at_most_one_a_token(tokens, seed):
    budgets = np.random.default_rng(seed).uniform(0, 1, (3, 4))
    plan = tj.CachePlan.build(profile(budgets), heads_per_page=2, min_entries=40)
    for law in (plan.lengths, plan.locked):
        step = law(tokens + 1) - law(tokens)
        assert step.min() >= 0
        assert step.max() <= 1


def test_lengths_are_the_same_on_host_and_device():
    plan = tj.CachePlan.build(profile(np.random.default_rng(0).uniform(0, 1, (4, 8))), min_entries=3)
    tokens = np.array([0, 1, 2, 63, 64, 1000, 131_072, MAX_TOKENS], np.int32)
    on_device = jax.jit(plan.lengths)(jnp.asarray(tokens))
    assert on_device.dtype == jnp.int32
    np.testing.assert_array_equal(on_device, plan.lengths(tokens))
    assert plan.lengths(7).dtype == np.int32
    np.testing.assert_array_equal(plan.lengths(tokens.tolist()), plan.lengths(tokens))
    assert plan.entries([7, 64]) == plan.entries(7) + plan.entries(64)


@pytest.mark.parametrize("tokens", [3.0, np.float32(3), [1.5, 2], jnp.ones(2), True, "3", None])
def test_tokens_that_cannot_be_counted(tokens):
    """Of fractions of a token there were fractions of entries."""
    plan = tj.CachePlan.build(tj.BudgetProfile.uniform(1, 4, 0.5))
    for count in (plan.lengths, plan.locked, plan.pages, plan.shared_pages, plan.entries):
        with pytest.raises(TypeError, match=r"tokens are (whole )?numbers, got "):
            count(tokens)
    with pytest.raises(TypeError, match="tokens are whole numbers, got float32: write an array of int32"):
        jax.jit(plan.lengths)(3.0)


def test_worked_example_of_clustering():
    """Figure 7 of the paper: head pages [2, 1, 5, 3, 1, 1] in groups of three."""
    budgets = profile(np.array([[2, 1, 5, 3, 1, 1]]) / 5)

    def pages(heads_per_page: int, cluster: str) -> int:
        plan = tj.CachePlan.build(budgets, heads_per_page, page_size=1, cluster=cluster, min_entries=0)
        return plan.pages(5)

    assert pages(6, "adjacent") == 5  # one table for all: nothing is freed
    assert 2 * 5 - pages(3, "adjacent") == 2
    assert 2 * 5 - pages(3, "layer") == 4
    assert pages(3, "layer") == 5 + 1


@pytest.mark.parametrize("cluster", ["layer", "model", "adjacent"])
@pytest.mark.parametrize("shape", [(3, 8), (5, 3), (1, 1)])
@pytest.mark.parametrize("heads_per_page", [1, 2, 4])
def test_every_head_has_one_place(cluster, shape, heads_per_page):
    budgets = np.random.default_rng(1).uniform(0, 1, shape).astype(np.float32)
    plan = tj.CachePlan.build(profile(budgets), heads_per_page, cluster=cluster)
    places = plan.group_of * heads_per_page + plan.column_of
    assert len(np.unique(places)) == budgets.size
    assert plan.group_of.dtype == plan.column_of.dtype == np.int32
    assert plan.group_budgets.dtype == np.float32
    assert (budgets <= plan.group_budgets[plan.group_of]).all()
    heads = plan.head_at
    assert sorted(heads[heads >= 0]) == list(range(budgets.size))
    for group, members in enumerate(heads):
        members = members[members >= 0]
        assert plan.group_budgets[group] == budgets.reshape(-1)[members].max()
        if cluster != "model":
            assert len(set(members // shape[1])) == 1


def test_empty_columns_are_beside_the_smallest_budget():
    """Elsewhere a small head would share a large one's group, and a large one leave columns of its own empty."""
    plan = tj.CachePlan.build(profile([[0.5, 0.1, 0.9]]), heads_per_page=2, page_size=1, min_entries=0)
    assert plan.head_at.tolist() == [[-1, 1], [0, 2]]
    assert plan.lengths(100).tolist() == [10, 90]
    assert plan.entries(100) == 10 + 90 + 90  # an empty column holds nothing
    assert plan.entries(np.array([100, 0, 10])) == 190 + 0 + (1 + 9 + 9)
    assert plan.retention(100) == pytest.approx(190 / 300)


def test_heads_are_grouped_by_their_budgets_and_only_ties_by_what_is_scaled():
    """By the latter first, rows under the plan's budgets would hold 50 and 50 of 100 tokens here."""
    scaled = profile([[0.1, 0.8, 0.7, 0.2]])
    plan = tj.CachePlan.build(
        profile([[0.1, 0.1, 0.5, 0.5]]), 2, 1, min_entries=0, scaled=scaled, max_retention=0.5
    )
    assert plan.head_at.tolist() == [[0, 1], [3, 2]]
    assert plan.lengths(100).tolist() == [10, 50]


def test_clustering_never_needs_more_pages():
    rng = np.random.default_rng(2)
    for _ in range(20):
        budgets = profile(rng.lognormal(-1.5, 0.8, (6, 8)).clip(0, 1))
        pages = [tj.CachePlan.build(budgets, 4, 16, c).pages(4096) for c in ("model", "layer", "adjacent")]
        assert pages == sorted(pages)


def test_retention_counts_what_groups_keep_for_free():
    plan = tj.CachePlan.build(profile([[0.1, 0.5, 0.5, 0.3]]), heads_per_page=2, page_size=1)
    assert plan.lengths(1000).tolist() == [300, 500]
    assert plan.retention(1000) == pytest.approx(0.4)
    assert plan.entries(1000) == 1600


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cluster": "heads"}, "cluster must be one of layer, model, adjacent"),
        ({"heads_per_page": 0}, "heads_per_page must be"),
        ({"page_size": 1.5}, "page_size must be"),
        ({"window": 0}, "window must be"),
    ],
)
def test_bad_plans_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        tj.CachePlan.build(tj.BudgetProfile.uniform(2, 4, 0.5), **change)


@pytest.mark.parametrize(
    ("heads", "devices", "want"),
    [(8, 1, 4), (6, 1, 2), (5, 1, 1), (8, 2, 4), (6, 2, 2), (4, 4, 4), (8, 8, 8)],
)
def test_pages_hold_as_many_heads_as_divide_evenly(heads, devices, want):
    """Also among the devices: each has an equal part of every page."""
    assert most_heads_per_page(heads, devices) == want
    assert heads_per_page_for(tj.BudgetProfile.uniform(2, heads, 0.5), devices=devices) == want


@pytest.mark.parametrize(
    ("budgets", "cluster", "devices", "want"),
    [
        ([0.1, 0.1, 0.11, 0.11], "layer", 1, 4),
        ([0.1, 0.3, 0.11, 0.31], "layer", 1, 2),
        ([0.1, 0.3, 0.11, 0.31], "adjacent", 1, 1),
        ([0.1, 0.2, 0.4, 0.6], "layer", 1, 1),
        ([0.1, 0.2, 0.4, 0.6], "model", 1, 4),  # each four times
        ([0.1, 0.2, 0.4, 0.6], "layer", 2, 2),  # and 4 would be worse
        ([0.1, 0.2, 0.4], "layer", 1, 1),
        ([0.0, 0.0, 0.0, 0.0], "layer", 1, 4),
    ],
)  # fmt: skip
def test_heads_share_pages_where_that_costs_little(budgets, cluster, devices, want):
    heads = profile([budgets] * 4)
    assert heads_per_page_for(heads, cluster, devices) == want
    assert devices > 1 or tj.CachePlan.build(heads, cluster=cluster).heads_per_page == want


def test_token_counts_out_of_range_are_refused():
    plan = tj.CachePlan.build(tj.BudgetProfile.uniform(2, 4, 0.5))
    for tokens in (-1, MAX_TOKENS + 1):
        with pytest.raises(ValueError, match="token count"):
            plan.lengths(tokens)


SORTED = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8]


@pytest.mark.parametrize(
    ("budgets", "ctas", "heads_per_page", "want"),
    [
        (SORTED, 108, 4, [30, 78]),
        (SORTED, 132, 4, [37, 95]),
        (SORTED, 132, 2, [11, 26, 40, 55]),
        (SORTED, 18, 1, [1, 1, 2, 2, 3, 3, 4, 4]),  # shares of 0.5, 1.5, 2.5, 3.5, or a little less in floats
        ([0.8, 0.1, 0.7, 0.2, 0.6, 0.3, 0.5, 0.4], 108, 4, [54, 54]),
        ([0.01] * 4 + [1] * 4, 16, 4, [1, 16]),
        ([0.0] * 8, 132, 4, [1, 1]),
    ],
)
def test_split_map_worked_examples(budgets, ctas, heads_per_page, want):
    got = tj.split_map(np.array([budgets]), ctas, heads_per_page)
    assert got.dtype == np.int32
    assert got.tolist() == [want]
    for scale in (1e-6, 3.0, 7e5):
        assert tj.split_map(np.array([budgets]) * scale, ctas, heads_per_page).tolist() == [want]


def test_split_map_refuses_what_it_cannot_divide():
    with pytest.raises(ValueError, match="multiple of heads_per_page=4"):
        tj.split_map(np.ones((2, 6)), 132, 4)
    for budgets in (np.full((2, 4), np.nan), np.array([[0.5, 0.5, 0.5, -0.5]])):
        with pytest.raises(ValueError, match="finite and not negative"):
            tj.split_map(budgets, 132, 4)


def test_heads_in_groups_of_none():
    with pytest.raises(ValueError, match="multiple of heads_per_page=0"):
        tj.split_map(np.ones((2, 4)), 8, 0)
