"""Scores by the kernels' way through the engine, their references in their place, against the scorers themselves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tangram_jax as tj
from models.testing import tiny_config
from pallas_kernels import gaussian, keep
from tangram_jax import compress
from tangram_jax.chunk_scores import ChunkScores

CONFIG = tiny_config(num_layers=3, hidden_size=64, num_heads=8, num_kv_heads=4, head_dim=16)
ROW, BEFORE, CHUNK, COUNT = np.int32(1), 90, 48, 41


def scores_of(scorer: tj.scorers.Scorer, cluster: str) -> tuple[np.ndarray, np.ndarray]:
    """(f32[M, Hp, C], which of them are of candidates): a padded chunk after a tail of 20 tokens."""
    budgets = np.random.default_rng(1).uniform(0.1, 0.9, (1, 3, 4)).astype(np.float32)
    plan = tj.CachePlan.build(tj.BudgetProfile.from_ratios(budgets, retention=0.5, alpha=0.0), 2, 16, cluster)
    cache = tj.init_cache(plan, CONFIG, num_pages=200, max_requests=2, max_tokens=256, max_tail=32)
    cache = tj.reserve(plan, cache, ROW, np.int32(200), np.int32(32))
    keys = iter(jax.random.split(jax.random.key(0), 32))
    cache = cache.replace(
        pool=jax.random.normal(next(keys), cache.pool.shape),
        tokens=cache.tokens.at[ROW].set(BEFORE), tail=cache.tail.at[ROW].set(20),
    )  # fmt: skip
    what = compress.candidates(plan, cache, ROW, CHUNK, jnp.int32(COUNT))
    scores = ChunkScores(plan, CONFIG, scorer, what, compress.read_tail(plan, cache, ROW))
    for layer in range(CONFIG.num_layers):
        q, k, v = (jax.random.normal(next(keys), (CHUNK, heads, 16)) for heads in (8, 4, 4))
        scores.add(layer, q, k, v, jax.random.uniform(next(keys), (CHUNK, 8), minval=4.0, maxval=6.0))
    valid = np.broadcast_to(np.asarray(what.valid)[:, None], scores.result().shape)
    return np.asarray(scores.result()), valid & (plan.head_at >= 0)[..., None]


@pytest.mark.parametrize("cluster", ["layer", "model"])
@pytest.mark.parametrize("scorer", ["snapkv", "kv_compress", "expected_attention"])
def test_kernels_get_the_candidates_that_the_scorer_gets(scorer, cluster, monkeypatch):
    want, there = scores_of(tj.get_scorer(scorer), cluster)
    called = []

    def reference(function):
        def run(*args, **kwargs):
            called.append(function.__name__)
            return function(*args, **kwargs)

        return run

    monkeypatch.setattr(keep, "window_sums", reference(keep.window_sums_reference))
    monkeypatch.setattr(gaussian, "gaussian_logits", reference(gaussian.gaussian_logits_reference))
    got, _ = scores_of(tj.get_scorer(scorer), cluster)
    assert len(called) == CONFIG.num_layers
    assert there.sum() > 500
    # Expected Attention's factors have 11 bits on the kernels' way.
    rtol = 5e-3 if scorer == "expected_attention" else 1e-4
    np.testing.assert_allclose(got[there], want[there], rtol=rtol, atol=1e-6)
