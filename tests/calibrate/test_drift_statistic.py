"""The alarm's statistic: against numbers by hand, against all choices there are, and its rate of false alarms."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calibrate.drift import CHOICES, calibrated_budgets, excess, grouped, heldout_overflow, judge, overflow

values = st.lists(st.integers(0, 40).map(float), min_size=3, max_size=7)


def test_overflow_by_hand():
    group_of = np.array([[0, 0], [1, 2]])
    has = grouped(np.array([[0.25, 0.5], [0.1, 1.0]]), group_of)
    np.testing.assert_array_equal(has, [[0.5, 0.5], [0.1, 1.0]])
    wants = np.array([[0.75, 0.25], [0.3, 0.7]])
    np.testing.assert_allclose(excess(wants, has), [[0.25, 0], [0.2, 0]])
    assert overflow(wants, has) == pytest.approx(0.45 / 2.0)
    assert overflow(np.stack([wants, has]), has).tolist() == [pytest.approx(0.225), 0.0]
    assert overflow(has.astype(np.float32) + 1e-7, has) == 0.0  # rounding is no overflow


def test_calibration_samples_are_held_out_of_their_own_budgets():
    """Two that are alike and one that is not: with budgets from all three, wide as they are, none would overflow."""
    ratios = np.array([[[0.5, 0.5]], [[0.5, 0.5]], [[0.9, 0.1]]])
    group_of = np.array([[0, 1]])
    assert (overflow(ratios, calibrated_budgets(ratios, 2.0, group_of)) == 0).all()
    np.testing.assert_allclose(heldout_overflow(ratios, 2.0, group_of), [0, 0, 0.4], atol=1e-9)
    # Of one group both have what the first has: 0.7 + 2 * 0.2 of the others, at most 1.
    np.testing.assert_allclose(heldout_overflow(ratios, 0.0, np.array([[0, 0]])), [0, 0, 0.4], atol=1e-9)


@settings(max_examples=40, deadline=None)
@given(values, values, st.sampled_from([0.05, 0.2, 0.5]))
def test_random_choices_decide_as_all_choices_do(calibration, live, level):
    pool, count = np.array([*calibration, *live]), len(live)
    sums = [sum(c) for c in itertools.combinations(pool, count)]
    exact = np.mean([s >= sum(live) for s in sums])
    slack = 5 * np.sqrt(level * (1 - level) / CHOICES)  # of a share that is estimated
    if abs(exact - level) > slack:
        assert judge(np.array(calibration), live, level).alarm == (exact < level)


@settings(max_examples=40, deadline=None)
@given(values, values, st.data())
def test_more_overflow_never_ends_an_alarm(calibration, live, data):
    order = data.draw(st.permutations(range(len(live))))
    at, more = data.draw(st.integers(0, len(live) - 1)), data.draw(st.floats(0, 100))
    before = judge(np.array(calibration), live, 0.2)
    assert judge(np.array(calibration), [live[i] for i in order], 0.2).statistic == before.statistic
    raised = [x + more * (i == at) for i, x in enumerate(live)]
    assert judge(np.array(calibration), raised, 0.2).alarm >= before.alarm
    assert not judge(np.array(calibration), [min(calibration)] * len(live), 0.2).alarm


@pytest.mark.parametrize("shape", ["normal", "mostly zero"])
def test_rate_of_false_alarms_is_at_most_the_level(shape):
    rng = np.random.default_rng(0)

    def draw(count):
        skewed = rng.exponential(size=count) ** 3 * (rng.random(count) < 0.1)
        return rng.normal(5, 1, count) if shape == "normal" else skewed

    rate = np.mean([judge(draw(30), draw(8), 0.05).alarm for _ in range(400)])
    assert rate <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / 400)
    assert np.mean([judge(draw(30), draw(8) + 3, 0.05).alarm for _ in range(50)]) > 0.8


def test_what_cannot_be_judged():
    with pytest.raises(ValueError, match="need a value"):
        judge(np.zeros(3), [])
    with pytest.raises(ValueError, match="at least"):
        judge(np.zeros(3), [1.0], 1e-5)
    assert not judge(np.zeros(30), np.zeros(8)).alarm
