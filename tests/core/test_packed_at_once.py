"""Attention and scores of packed chunks by one call for all, the kernels' references in their places, as by one for each."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tangram_jax as tj
from models.testing import random_params, tiny_config, tiny_gpt_oss_config
from pallas_kernels import chunk_prefill, gaussian
from tangram_jax import gpu_attention

SIZE = 64
SNAPKV, GAUSSIAN = (tj.get_scorer(name) for name in ("snapkv", "expected_attention"))
CASES = {
    "windows": (jnp.float32, tiny_config(num_layers=2, sliding_window=20, sliding_layers=(0,)), GAUSSIAN),
    "sinks, bytes": (jnp.uint8, tiny_gpt_oss_config(), SNAPKV),
}


@pytest.fixture
def at_once(monkeypatch):
    """How many calls each traced step has had."""
    calls = []

    def reference(q, k, v, pool, plan, **options):
        calls.append(len(plan.starts))
        out, lse = chunk_prefill.chunk_prefill_reference(q, k, v, pool, plan, **options)
        nobody = jnp.isneginf(lse)  # what the kernel does not write
        return jnp.where(nobody[..., None], jnp.nan, out), jnp.where(nobody, jnp.nan, lse)

    def scores(*args, **options):
        calls.append("scores")
        return gaussian.gaussian_logits_reference(*args, **options)

    def patch():
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        monkeypatch.setattr(gpu_attention, "_why_no_kernel", lambda *_: None)
        monkeypatch.setattr(gpu_attention.chunk_prefill, "chunk_prefill", reference)
        monkeypatch.setattr(gaussian, "gaussian_logits", scores)
        return calls

    return patch


@pytest.mark.parametrize("name", ["windows", pytest.param("sinks, bytes", marks=pytest.mark.slow)])
def test_one_call_for_all_is_as_one_for_each(name, at_once):
    dtype, config, scorer = CASES[name]
    params, rng = random_params(config, 0), np.random.default_rng(0)
    profile = tj.BudgetProfile.uniform(len(config.full_layers), config.num_kv_heads, 0.5)
    plan = tj.CachePlan.build(profile, 2, 8, window=8, sliding=tj.SlidingLayers.of(config, 24))

    def run():  # traced anew each time
        return jax.jit(lambda *given: tj.step(params, config, plan, scorer, *given))

    cache = tj.init_cache(
        plan, config, num_pages=900, max_requests=4, max_tokens=256, max_tail=24, dtype=dtype
    )
    before, first = {1: 0, 3: 130}, run()  # none, more than a window or a ring
    for row, count in before.items():
        cache = tj.reserve(plan, cache, np.int32(row), np.int32(count + 40), np.int32(1))
        if count:
            text = rng.integers(8, config.vocab_size, 144).astype(np.int32)
            _, cache = first(cache, tj.Chunk(np.int32(row), text, np.int32(count)), None)
    texts = [rng.integers(8, config.vocab_size, n).astype(np.int32) for n in (31, 6, 13)]
    packed = tj.Packed.of([3, 9, 1], texts, SIZE)  # one is left out
    want, one = run()(cache, packed, None)
    calls = at_once()
    got, other = run()(cache, packed, None)
    compressed = 0 if dtype == jnp.uint8 else len(config.full_layers)
    assert calls.count(len(texts)) == len(config.sliding_layers) + compressed
    assert calls.count("scores") == (len(config.full_layers) if scorer is GAUSSIAN else 0)
    real, atol = np.array([0, 2]), 0.2 if dtype == jnp.uint8 else 2e-4
    np.testing.assert_allclose(got[real], want[real], atol=atol)
    tokens = tj.Decode(np.array([3, 1], np.int32), np.array([9, 10], np.int32))
    np.testing.assert_allclose(*(run()(cache, None, tokens)[0] for cache in (one, other)), atol=atol)
