"""Rows with a retention of their own, beside rows under the plan's budgets."""

from functools import partial

import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tangram_jax as tj
from models.attention import dense_attend
from models.testing import random_params, tiny_config
from models.transformer import forward

CONFIG = tiny_config(num_layers=2)
PARAMS = random_params(CONFIG, 0)
RATIOS = np.random.default_rng(0).uniform(0.1, 0.9, (2, CONFIG.num_kv_heads)).astype(np.float32)
PROFILE = tj.BudgetProfile.from_ratios(RATIOS[None], retention=0.5, alpha=0.0)
SCORER = tj.get_scorer("snapkv")
CHUNK = 32
PPM = 1_000_000

fractions = st.floats(0.01, 1.0)


def build(profile: tj.BudgetProfile, **options) -> tj.CachePlan:
    return tj.CachePlan.build(profile, 1, 8, window=8, **options)


@given(hnp.arrays(np.float32, (2, 6), elements=st.floats(0, 1, width=32)), fractions, fractions)
def test_budgets_grow_with_the_retention_and_each_layer_keeps_it(ratios, low, high):
    low, high = sorted((low, high))
    profile = tj.BudgetProfile.from_ratios(ratios[None], retention=0.5, alpha=0.0)
    plan = tj.CachePlan.build(profile, 1, cluster="layer", max_retention=high)
    less, more = plan.budgets_at(low), plan.budgets_at(high)
    assert (less <= more).all()
    assert (more <= plan.most_ppm).all()
    assert (plan.group_ppm <= plan.most_ppm).all()
    np.testing.assert_allclose(less.reshape(2, 6).mean(1), low * PPM, atol=2)
    same = build(profile, max_retention=1.0).budgets_at(1.0)
    assert (same == PPM).all()


def test_heads_of_a_page_share_the_largest_budget():
    plan = tj.CachePlan.build(PROFILE, 2, cluster="model", max_retention=1.0)
    heads = tj.BudgetProfile(budgets=RATIOS, retention=0.3).normalized().budgets
    for group, budget in enumerate(plan.budgets_at(0.3)):
        assert budget == pytest.approx(heads[plan.group_of == group].max() * PPM, abs=1)


def test_full_kv_by_default_and_less_on_demand_by_the_calibrated_heads():
    full = tj.BudgetProfile.uniform(2, CONFIG.num_kv_heads, 1.0)
    plan = tj.CachePlan.build(full, 2, scaled=PROFILE, max_retention=1.0)
    assert (plan.group_ppm == PPM).all()
    as_calibrated = tj.CachePlan.build(PROFILE, 2)
    np.testing.assert_array_equal(plan.group_of, as_calibrated.group_of)
    assert plan.budgets_at(1.0) is plan.budgets_at(None) is plan.group_ppm
    assert np.ptp(plan.budgets_at(0.5)) > PPM / 10


@pytest.mark.parametrize("retention", [0.0, -0.1, 0.51, float("nan")])
def test_out_of_range(retention):
    with pytest.raises(ValueError, match=r"out of range: at most 0\.5"):
        build(PROFILE, max_retention=0.5).budgets_at(retention)
    message = "rows have no retention of their own: build the plan with max_retention="
    with pytest.raises(ValueError, match=message):
        build(PROFILE).budgets_at(retention)


def test_what_cannot_be_built():
    with pytest.raises(ValueError, match="max_retention is a kept fraction"):
        build(PROFILE, max_retention=1.5)
    with pytest.raises(ValueError, match=r"the one to be scaled \(1, 2\)"):
        build(PROFILE, scaled=tj.BudgetProfile.uniform(1, 2, 0.5))
    with pytest.raises(ValueError, match=r"the one to be scaled \(4, 2\)"):  # as many heads, of other layers
        build(PROFILE, scaled=tj.BudgetProfile.uniform(4, 2, 0.5))


def test_rows_of_one_step_are_each_compressed_as_by_a_plan_of_their_own():
    """Prefill and decode: logits as under a plan built for that retention, and at 1.0 as by dense attention."""
    plan = build(PROFILE, max_retention=1.0)
    tokens = np.random.default_rng(1).integers(8, CONFIG.vocab_size, 90).astype(np.int32)
    chunk = jax.jit(partial(tj.prefill_chunk, PARAMS, CONFIG), static_argnums=0, static_argnames="scorer")
    decode = jax.jit(partial(tj.decode_step, PARAMS, CONFIG), static_argnums=0)

    def run(plan, own):
        """Logits of each chunk's end and of 6 decode steps [9, rows, V], of rows with budgets of their `own`."""
        cache = tj.init_cache(plan, CONFIG, num_pages=400, max_requests=3, max_tokens=128, max_tail=16)
        logits = []
        for row, retention in own.items():
            if retention:
                budgets = plan.budgets_at(retention)
                cache = tj.set_budgets(plan, cache, np.int32(row), budgets)
            cache = tj.reserve(plan, cache, np.int32(row), np.int32(len(tokens)), np.int32(6))
            for start in range(0, 84, 28):
                part = np.pad(tokens[start : start + 28], (0, CHUNK - 28))
                out, cache = chunk(
                    plan, cache, scorer=SCORER, row=np.int32(row), tokens=part, count=np.int32(28)
                )
                logits.append(out)
        ends = jnp.stack(logits).reshape(len(own), 3, -1).swapaxes(0, 1)
        rows, steps = np.array(list(own), np.int32), []
        for token in tokens[84:90]:
            out, cache = decode(plan, cache, rows=rows, tokens=np.full(len(rows), token))
            steps.append(out)
        assert cache.num_free == 400 - sum(
            plan.group_pages(90, 6, plan.budgets_at(r)).sum() for r in own.values()
        )
        return np.concatenate([ends, np.stack(steps)])

    together = run(plan, {0: None, 1: 0.2, 2: 1.0})
    at_a_fifth = tj.BudgetProfile(budgets=RATIOS, retention=0.2).normalized()
    np.testing.assert_allclose(together[:, 1], run(build(at_a_fifth), {1: None})[:, 0], atol=1e-4)
    positions = jnp.arange(90)
    dense = forward(PARAMS, CONFIG, tokens, positions, dense_attend(positions), ())[0]
    np.testing.assert_allclose(together[:, 2], dense[np.r_[27, 55, 83, 84:90]], atol=1e-4)
    assert np.abs(together[-1, 1] - together[-1, 2]).max() > 1e-2
