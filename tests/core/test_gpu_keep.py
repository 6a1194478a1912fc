"""On a Hopper GPU: a conversation whose cache is written by the kernels against the same one in XLA operations."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tangram_jax as tj
from models.testing import random_params, tiny_config
from pallas_kernels import append, gaussian, keep

pytestmark = pytest.mark.gpu

CONFIG = tiny_config(num_layers=3, hidden_size=256, num_heads=16, num_kv_heads=4, head_dim=64)
ROW = np.int32(2)


def conversation(plan, scorer: tj.scorers.Scorer) -> tuple[tj.Cache, np.ndarray]:
    """Three chunks, some tokens decoded next to other rows, and the next turn, its end next to a decode token."""
    jax.clear_caches()  # a jit of the same function finds its old trace, in which the dispatch was decided
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), random_params(CONFIG, 0))
    prefill = jax.jit(partial(tj.prefill_chunk, scorer=scorer), static_argnums=(1, 2), donate_argnums=3)
    decode = jax.jit(tj.decode_step, static_argnums=(1, 2), donate_argnums=3)
    tokens = np.random.default_rng(0).integers(8, CONFIG.vocab_size, 800).astype(np.int32)
    cache = tj.init_cache(
        plan, CONFIG, num_pages=2000, max_requests=4, max_tokens=1024, max_tail=32, dtype=jnp.bfloat16
    )
    for row in (0, ROW):
        cache = tj.reserve(plan, cache, np.int32(row), np.int32(900), np.int32(32))

    def run(cache, start, count):
        part = np.pad(tokens[start : start + count], (0, 256 - count))
        return prefill(params, CONFIG, plan, cache, row=ROW, tokens=part, count=np.int32(count))

    for start, count in ((0, 256), (256, 256), (512, 40)):
        _, cache = run(cache, start, count)
    for i in range(9):
        _, cache = decode(
            params, CONFIG, plan, cache,
            rows=np.array([ROW, 9, 0], np.int32), tokens=tokens[552 + i] + np.arange(3, dtype=np.int32),
        )  # fmt: skip
    logits, cache = run(cache, 561, 100)

    @partial(jax.jit, donate_argnums=0)
    def both(cache, part):
        decode = tj.Decode(np.array([9, 0], np.int32), tokens[:2])
        return tj.step(params, CONFIG, plan, scorer, cache, tj.Chunk(ROW, part, np.int32(90)), decode)

    logits, cache = both(cache, tokens[661:789])
    return cache, np.asarray(logits, np.float64)


def entries(cache: tj.Cache, plan: tj.CachePlan, layers: int) -> set[bytes]:
    """All keys and values of ROW in the first layers, wherever they lie in their pages. Groups hold heads of one layer."""
    first, capacity = np.asarray(cache.layout.first), np.asarray(cache.layout.capacity)
    table, pool = np.asarray(cache.table[ROW]), np.asarray(cache.pool)
    found = set()
    for group in np.unique(plan.group_of[:layers]):
        pages = table[first[group] : first[group] + capacity[group]]
        rows = pool[pages[pages >= 0]].reshape(-1, CONFIG.head_dim)
        found |= {row.tobytes() for row in rows[rows.any(axis=1)]}
    return found


@pytest.fixture
def without_kernels(monkeypatch):
    """Turns off the kernels under test, not those of attention: their last bits would change every later key."""

    def refuse(*_, **__):
        raise NotImplementedError("for this test")

    def turn_off():
        kernels = [
            (keep, "write_pages"),
            (keep, "window_sums"),
            (gaussian, "gaussian_logits"),
            (append, "append"),
        ]
        for module, name in kernels:
            monkeypatch.setattr(module, name, refuse)

    return turn_off


def plan_of(cluster: str, page_size: int) -> tj.CachePlan:
    budgets = np.random.default_rng(1).uniform(0.1, 0.9, (1, 3, 4)).astype(np.float32)
    profile = tj.BudgetProfile.from_ratios(budgets, retention=0.5, alpha=0.0)
    return tj.CachePlan.build(profile, 2, page_size, cluster)


@pytest.mark.parametrize(("cluster", "page_size"), [("layer", 64), ("model", 16)])
def test_the_pool_is_the_same_bit_for_bit(cluster, page_size, without_kernels, caplog):
    plan, scorer = plan_of(cluster, page_size), tj.get_scorer("keydiff")
    fast, fast_logits = conversation(plan, scorer)
    assert "XLA operations" not in caplog.text
    without_kernels()
    slow, slow_logits = conversation(plan, scorer)
    np.testing.assert_array_equal(fast.pool, slow.pool)
    np.testing.assert_array_equal(fast_logits, slow_logits)
    np.testing.assert_array_equal(fast.tail, slow.tail)


@pytest.mark.parametrize(("scorer", "layers"), [("snapkv", 3), ("kv_compress", 3), ("expected_attention", 1)])
def test_scores_of_the_kernel_keep_the_same_entries(scorer, layers, without_kernels, caplog):
    """Sums in another order: a few entries at the border of a budget may differ, no more.

    Expected Attention's kernels round to 16 bits at another place, so some do differ, and with them the last bits of all
    later keys, but for those of the first layer.
    """
    plan = plan_of("layer", 64)
    fast, fast_logits = conversation(plan, tj.get_scorer(scorer))
    assert "XLA operations" not in caplog.text
    without_kernels()
    slow, slow_logits = conversation(plan, tj.get_scorer(scorer))
    got, want = entries(fast, plan, layers), entries(slow, plan, layers)
    assert len(want) > 900 * layers
    assert len(got & want) > 0.97 * len(want)
    if layers == CONFIG.num_layers:
        assert np.linalg.norm(fast_logits - slow_logits) < 0.05 * np.linalg.norm(slow_logits)
