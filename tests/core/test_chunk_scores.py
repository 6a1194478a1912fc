"""Scores by the kernels' way through the engine, their references in their place, against the scorers themselves."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tangram_jax as tj
from models.config import ModelConfig
from models.testing import random_params, tiny_config, tiny_gemma2_config, tiny_gpt_oss_config
from pallas_kernels import gaussian, keep
from tangram_jax import compress
from tangram_jax.chunk_scores import ChunkScores
from tangram_jax.scorers import ScoreInputs, SnapKV

CONFIG = tiny_config(num_layers=3, hidden_size=64, num_heads=8, num_kv_heads=4, head_dim=16)
SLOW = partial(pytest.param, marks=pytest.mark.slow)
ROW, BEFORE, CHUNK, COUNT = np.int32(1), 90, 48, 41


def scores_of(
    scorer: tj.scorers.Scorer, cluster: str, config: ModelConfig = CONFIG, start: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """(f32[M, Hp, C], which of them are of candidates): a padded chunk after a tail of 20 tokens.

    With `start` its rows stand behind so many of another chunk.
    """
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
    at = None if start is None else jnp.int32(start)
    scores = ChunkScores(plan, config, scorer, what, compress.read_tail(plan, cache, ROW, jnp.float32), at)
    for layer in range(CONFIG.num_layers):
        q, k, v = (jax.random.normal(next(keys), (CHUNK, heads, 16)) for heads in (8, 4, 4))
        lse = jax.random.uniform(next(keys), (CHUNK, 8), minval=4.0, maxval=6.0)
        scores.add(layer, *(jnp.roll(x, start or 0, axis=0) for x in (q, k, v, lse)))
    valid = np.broadcast_to(np.asarray(what.valid)[:, None], scores.result().shape)
    return np.asarray(scores.result()), valid & (plan.head_at >= 0)[..., None]


@pytest.mark.parametrize(
    ("cluster", "soft_cap", "start"),
    [
        ("layer", None, None),
        ("model", 1.5, CHUNK - COUNT),
        *(SLOW(cluster, cap, None) for cluster, cap in (("layer", 1.5), ("model", None), ("model", 1.5))),
        *(SLOW(*case, CHUNK - COUNT) for case in (("layer", 1.5), ("model", None), ("layer", None))),
    ],
)
@pytest.mark.parametrize("scorer", ["snapkv", "kv_compress", "expected_attention"])
def test_kernels_get_what_the_scorer_gets(scorer, cluster, soft_cap, start, monkeypatch):
    config = CONFIG.replace(attention_soft_cap=soft_cap)
    want, there = scores_of(tj.get_scorer(scorer), cluster, config)
    if start is not None:
        behind, _ = scores_of(tj.get_scorer(scorer), cluster, config, start)
        np.testing.assert_allclose(behind[there], want[there], rtol=1e-6)
    called = []

    def reference(function):
        def run(*args, **kwargs):
            called.append(function.__name__)
            return function(*args, **kwargs)

        return run

    monkeypatch.setattr(keep, "window_sums", reference(keep.window_sums_reference))
    monkeypatch.setattr(gaussian, "gaussian_logits", reference(gaussian.gaussian_logits_reference))
    got, _ = scores_of(tj.get_scorer(scorer), cluster, config, start)
    assert len(called) == CONFIG.num_layers
    assert there.sum() > 500
    # Expected Attention's factors have 11 bits on the kernels' way.
    rtol = 5e-3 if scorer == "expected_attention" else 1e-4
    np.testing.assert_allclose(got[there], want[there], rtol=rtol, atol=1e-6)


@dataclasses.dataclass(frozen=True)
class Listening(SnapKV):
    """Keeps what it is given."""

    heard: list[ScoreInputs] = dataclasses.field(default_factory=list, compare=False)

    def score(self, x: ScoreInputs) -> jax.Array:
        self.heard.append(x)
        return super().score(x)


@pytest.mark.parametrize(
    "config",
    [f(num_layers=2, sliding_layers=(0,)) for f in (tiny_gemma2_config, tiny_gpt_oss_config)],
    ids=lambda config: config.name,
)
def test_a_step_tells_the_scorer_what_its_queries_saw(config):
    """Its log-sum-exp counts capped logits, and sinks: the shares of all that a query saw add up to what sinks leave."""
    scorer, params = Listening(), random_params(config, 0)
    budgets = tj.BudgetProfile.uniform(len(config.full_layers), config.num_kv_heads, 0.3)
    plan = tj.CachePlan.build(budgets, 2, 8, window=8, sliding=tj.SlidingLayers.of(config, 16))
    cache = tj.init_cache(plan, config, num_pages=100, max_requests=2, max_tokens=64, max_tail=16)
    cache = tj.reserve(plan, cache, ROW, np.int32(0), np.int32(COUNT))
    tokens = np.random.default_rng(0).integers(8, config.vocab_size, CHUNK).astype(np.int32)

    @jax.jit
    def heard(params, cache):
        tj.prefill_chunk(
            params, config, plan, cache, scorer=scorer, row=ROW, tokens=tokens, count=np.int32(COUNT)
        )
        return scorer.heard

    inputs = heard(params, cache)
    assert len(inputs) == len(config.full_layers)
    for layer, x in zip(config.full_layers, inputs, strict=True):
        assert (x.scale, x.soft_cap) == (config.attention_scale, config.attention_soft_cap)
        k, q = (
            np.asarray(x.k, np.float64),
            np.asarray(x.q, np.float64).reshape(CHUNK, config.num_kv_heads, -1, 16),
        )
        logits = np.einsum("tkgd,kcd->tkgc", q, k) * config.attention_scale
        if cap := config.attention_soft_cap:
            logits = cap * np.tanh(logits / cap)
        seen = np.asarray(x.positions) <= np.asarray(x.q_positions)[:, None]  # [T, C]
        seen = seen[:, None, None] & np.asarray(x.valid)[:, None]
        lse = np.asarray(x.lse, np.float64).reshape(CHUNK, config.num_kv_heads, -1)
        share = np.where(seen, np.exp(logits - lse[..., None]), 0).sum(-1)
        if config.attention_sinks:
            share += np.exp(np.asarray(params["layers"][layer]["sinks"], np.float64) - lse)
        np.testing.assert_allclose(share[:COUNT], 1, atol=1e-5)
