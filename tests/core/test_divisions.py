"""Ways to divide a decode step's work among a GPU's CTAs: chosen with the plan, and the same result whichever it is."""

import functools
import re
from dataclasses import replace

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType

import tangram_jax as tj
from benchmarks.gpu_program import as_on_hopper
from models.testing import random_params, tiny_config
from pallas_kernels import ragged_decode
from pallas_kernels.ragged_decode import plan as kernel_plan
from pallas_kernels.ragged_decode.mosaic_gpu import ragged_decode_mosaic_gpu
from tangram_jax import step_layers
from tangram_jax.plan import CLUSTERS, DIVISIONS

SHAPE = {"hidden_size": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64}
FULL = tiny_config(num_layers=1, **SHAPE)
WINDOWS = tiny_config(num_layers=2, sliding_layers=(0,), sliding_window=40, **SHAPE)


def plan_of(config, division="equal", **options) -> tj.CachePlan:
    budgets = np.linspace(0.2, 0.9, len(config.full_layers) * config.num_kv_heads, dtype=np.float32)
    profile = tj.BudgetProfile.from_ratios(
        budgets.reshape(1, -1, config.num_kv_heads), retention=0.5, alpha=0.0
    )
    sliding = tj.SlidingLayers.of(config, 32)
    return tj.CachePlan.build(profile, 1, 16, sliding=sliding, division=division, **options)


def test_worked_examples_of_a_plan_s_split_map():
    budgets = np.array([[0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8]], np.float32)
    profile = tj.BudgetProfile.from_ratios(budgets[None], retention=0.5, alpha=0.0)
    plan = tj.CachePlan.build(profile, 4)
    assert plan.split_map(120).tolist() == [[10] * 4 + [20] * 4]
    # Algorithm 1 for whole groups, of what their heads hold, gives each as many as its four heads have.
    assert tj.split_map(plan.group_budgets[plan.group_of], 120, 4).tolist() == [[40, 80]]
    assert tj.CachePlan.build(profile, 1).split_map(36).tolist() == [[1, 2, 3, 4, 5, 6, 7, 8]]


@given(
    seed=st.integers(0, 2**32 - 1),
    shape=st.tuples(st.integers(1, 4), st.integers(1, 9)),
    heads_per_page=st.integers(1, 4),
    cluster=st.sampled_from(CLUSTERS),
    num_ctas=st.integers(1, 400),
)
def test_split_maps_of_clustered_groups(seed, shape, heads_per_page, cluster, num_ctas):
    budgets = np.random.default_rng(seed).uniform(0, 1, (1, *shape)).astype(np.float32)
    profile = tj.BudgetProfile.from_ratios(budgets, retention=0.5, alpha=0.0)
    plan = tj.CachePlan.build(profile, heads_per_page, cluster=cluster)
    got = plan.split_map(num_ctas)
    held = plan.group_budgets[plan.group_of].astype(np.float64)
    assert got.dtype == np.int32 and got.shape == shape and got.min() >= 1
    np.testing.assert_allclose(got, np.maximum(held / held.sum(1, keepdims=True) * num_ctas, 1), atol=0.5001)
    for layer in range(shape[0]):
        for group in plan.group_of[layer]:
            assert len(set(got[layer, plan.group_of[layer] == group])) == 1


def test_what_each_division_asks_of_the_kernel():
    plans = {division: plan_of(FULL, division) for division in DIVISIONS}
    assert plan_of(FULL).division == "equal"
    assert plans["equal"].splits(9) is None and plans["equal"].splits(9, rings=True) is None
    assert plans["uniform"].splits(9) == plans["uniform"].splits(9, rings=True) == 4
    assert plans["split_map"].splits(9).tolist() == plans["split_map"].split_map(9).tolist() == [[2, 7]]
    assert plans["split_map"].splits(9, rings=True) == 4  # rings hold equally many entries
    assert plans["uniform"].splits(1) == 1
    with pytest.raises(ValueError, match="division must be one of equal, split_map, uniform; got 'even'"):
        plan_of(FULL, "even")


def test_a_device_of_several_divides_its_own_heads():
    config = tiny_config(num_layers=1, num_kv_heads=4)
    profile = tj.BudgetProfile.from_ratios(
        np.array([[[0.2, 0.7, 0.8, 0.4]]], np.float32), retention=0.5, alpha=0.0
    )
    plan = tj.CachePlan.build(profile, 2, division="split_map")
    mesh = AbstractMesh((2,), ("tensor",), axis_types=(AxisType.Auto,))
    mine = tj.TensorParallel.of(config, plan, 2, mesh=mesh).share_plan
    assert mine.splits(12).tolist() == [[4, 8]]


def new_cache(config, plan) -> tj.Cache:
    return tj.init_cache(
        plan, config, num_pages=60, max_requests=2, max_tokens=256, max_tail=32, dtype=jnp.bfloat16
    )


def decode(config, plan) -> np.ndarray:
    """Logits of two rows that differ in length, over a cache of random entries."""
    cache = new_cache(config, plan)
    for row, tokens in enumerate((100, 30)):
        cache = tj.reserve(plan, cache, np.int32(row), np.int32(tokens), np.int32(8))
    pool = np.random.default_rng(0).standard_normal(cache.pool.shape)
    cache = replace(
        cache,
        pool=jnp.asarray(pool, jnp.bfloat16),
        tokens=jnp.array([100, 30], jnp.int32),
        tail=jnp.array([3, 0], jnp.int32),
    )
    step = jax.jit(functools.partial(tj.decode_step, model_config=config, plan=plan))
    params = random_params(config, 0, dtype=jnp.bfloat16)
    logits, _ = step(params, cache=cache, rows=np.arange(2), tokens=np.array([9, 10]))
    return np.asarray(logits)


@pytest.fixture
def interpreted(monkeypatch):
    """Decode attention by the kernel in the interpreter, on a GPU of six multiprocessors. Lists the shares of its calls."""
    shares = []

    def run(q, pool, plan, **options):
        shares.append(plan.num_shares)
        return ragged_decode_mosaic_gpu(
            q, pool, plan, **options, merge="separate", interpret=plgpu.InterpretGPUParams()
        )

    monkeypatch.setattr(ragged_decode, "check_supported", lambda *_, **__: None)
    monkeypatch.setattr(ragged_decode, "ragged_decode", run)
    for module in (kernel_plan, step_layers):
        monkeypatch.setattr(module, "num_sms", lambda: 6)
    return shares


@functools.cache
def without_kernel(config) -> np.ndarray:
    return decode(config, plan_of(config))


@pytest.mark.parametrize(
    ("config", "division", "shares"),
    [
        pytest.param(FULL, "equal", [6], marks=pytest.mark.slow),
        (WINDOWS, "split_map", [8, 6]),
        pytest.param(FULL, "uniform", [8], marks=pytest.mark.slow),
    ],
    ids=lambda x: x if isinstance(x, str) else None,
)
def test_each_division_gives_the_same_result_in_the_interpreter(config, division, shares, request):
    want = without_kernel(config)
    calls = request.getfixturevalue("interpreted")
    got = decode(config, plan_of(config, division))
    assert calls == shares
    assert np.linalg.norm(got - want) < 0.02 * np.linalg.norm(want)


@pytest.mark.slow  # on GPUs `test_gpu_step` has steps of each division
def test_a_split_map_lowers_for_a_gpu(caplog, monkeypatch):
    """A token alone has the whole GPU, though the step puts an empty slot beside it."""
    plan, splits, plan_decode = plan_of(WINDOWS, "split_map"), [], ragged_decode.plan_decode

    def noted(*args, **how):
        splits.append(how["splits"].tolist())
        return plan_decode(*args, **how)

    monkeypatch.setattr(ragged_decode, "plan_decode", noted)
    params, token = random_params(WINDOWS, 0, dtype=jnp.bfloat16), jnp.zeros(1, jnp.int32)
    with as_on_hopper():
        step = functools.partial(tj.decode_step, model_config=WINDOWS, plan=plan)
        traced = jax.jit(step).trace(params, cache=new_cache(WINDOWS, plan), rows=token, tokens=token)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    # Attention with and without a window, and appending.
    assert len(set(re.findall(r'kernel_hash = "([^"]*)"', text))) == 3
    assert splits == [[24, 108], [66]]
    assert not caplog.records  # nothing was left to XLA with a warning
