"""Rank correlation, coverage and intervals, by hand and against SciPy."""

import numpy as np
import pytest
from scipy import stats

from calibrate.stability import measure_stability, spearman
from tangram_jax.profile import BudgetProfile


def test_spearman_equals_scipy_with_ties():
    rng = np.random.default_rng(0)
    for _ in range(20):
        a, b = rng.integers(0, 6, (2, 5, 4))
        assert spearman(a, b) == pytest.approx(stats.spearmanr(a.ravel(), b.ravel()).statistic)
    assert np.isnan(spearman(np.ones(4), np.arange(4)))


def test_coverage_and_overflow_by_hand():
    profile = BudgetProfile(budgets=np.array([[0.5, 0.2]]), retention=0.4)
    ratios = np.array([[[0.5, 0.2]], [[0.4, 0.1]]], np.float32)
    heldout = np.array([[[0.5, 0.2]], [[0.7, 0.2]], [[0.6, 0.3]], [[0.1, 0.0]]], np.float32)
    stability = measure_stability(profile, ratios, heldout)
    assert stability.covered.value == pytest.approx(5 / 8)  # an equal need is covered
    assert stability.overflow.value == pytest.approx(0.4 / 2.6, rel=1e-5)
    assert stability.halves == stability.heldout.value == stability.heldout_single.value == pytest.approx(1)
    assert stability.covered.low <= stability.covered.value <= stability.covered.high
    assert "0.625 [" in str(stability.covered)


def test_a_stable_and_an_unstable_ranking():
    rng = np.random.default_rng(1)
    heads = rng.uniform(0.1, 0.9, (1, 8, 4))
    stable = np.clip(heads + rng.normal(0, 0.03, (40, 8, 4)), 0, 1).astype(np.float32)
    noise = rng.uniform(0.1, 0.9, (40, 8, 4)).astype(np.float32)
    for ratios, low, high in ((stable, 0.95, 1.0), (noise, -0.6, 0.6)):
        profile = BudgetProfile.from_ratios(ratios[:30], 0.5)
        found = measure_stability(profile, ratios[:30], ratios[30:])
        assert low <= found.halves <= high and low <= found.heldout.value <= high
    assert measure_stability(profile, noise, noise) == measure_stability(profile, noise, noise)


def test_the_interval_of_a_correlation_holds_the_true_one():
    """That of means over many samples more; a bootstrap's lay below its own value four times of five here."""
    rng = np.random.default_rng(2)
    heads = 0.5 + rng.normal(0, 0.05, (10, 9))
    holds = 0
    for _ in range(60):
        ratios, heldout = (np.float32(heads + rng.normal(0, 0.15, (n, 10, 9))) for n in (20, 20))
        found = measure_stability(
            BudgetProfile.from_ratios(np.clip(ratios, 0, 1), 0.5), ratios, heldout
        ).heldout
        assert found.low <= found.value <= found.high
        expected = np.mean(
            [spearman(ratios.mean(0), (heads + rng.normal(0, 0.15, (20, 10, 9))).mean(0)) for _ in range(100)]
        )
        holds += found.low <= expected <= found.high
    assert holds >= 54


def test_without_heldout_samples():
    profile = BudgetProfile.uniform(2, 2, 0.5)
    found = measure_stability(profile, np.full((1, 2, 2), 0.5, np.float32), None)
    assert found.heldout is None and np.isnan(found.halves)


def test_one_sample_has_no_interval():
    shares = np.random.default_rng(0).uniform(0.1, 0.9, (4, 3, 3)).astype(np.float32)
    found = measure_stability(BudgetProfile.from_ratios(shares[:3], 0.5), shares[:3], shares[3:])
    for each in (found.heldout, found.heldout_single, found.covered, found.overflow):
        assert str(each) == f"{each.value:.3f}"


def test_heads_that_are_all_equal_have_no_ranking():
    ones = np.ones((6, 2, 2), np.float32)
    found = measure_stability(BudgetProfile.from_ratios(ones[:3], 1.0), ones[:3], ones[3:])
    assert str(found.heldout) == str(found.heldout_single) == "not defined"
    assert str(found.covered) == "1.000 [1.000, 1.000]"
