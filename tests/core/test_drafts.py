"""Drafts verified in one step: the same logits and the same cache as their tokens one by one."""

from functools import cache as memo
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tangram_jax as tj
from models.logits import AttentionLogits
from models.testing import (
    random_params,
    tiny_config,
    tiny_gemma2_config,
    tiny_gemma_config,
    tiny_gpt_oss_config,
)
from tangram_jax.drafts import _among_themselves

WINDOW = {"num_layers": 2, "sliding_layers": (0,), "sliding_window": 24}
CONFIGS = {
    "llama": tiny_config(num_layers=2),
    "gemma": tiny_gemma_config(**WINDOW),
    "gemma2": tiny_gemma2_config(**WINDOW),
    "gpt_oss": tiny_gpt_oss_config(**WINDOW),
}
SNAPKV = tj.get_scorer("snapkv")
TAIL = 16
PROMPTS = (33, 70, 5)  # tokens in rows 0, 1, 2


@partial(jax.jit, static_argnums=(1, 2))
def run(params, config, plan, cache, chunk, decode):
    return tj.step(params, config, plan, SNAPKV, cache, chunk, decode)


@memo
def plan_of(config) -> tj.CachePlan:
    heads = (len(config.full_layers), config.num_kv_heads)
    ratios = np.random.default_rng(0).uniform(0.1, 0.9, (1, *heads)).astype(np.float32)
    profile = tj.BudgetProfile.from_ratios(ratios, retention=0.5, alpha=0.0)
    sliding = tj.SlidingLayers.of(config, TAIL)
    return tj.CachePlan.build(profile, 2, 8, "layer", window=8, sliding=sliding)


def filled(config, plan, dtype=jnp.float32) -> tuple[dict, tj.Cache]:
    """Parameters, and a cache with a prompt in each row."""
    params = random_params(config, 0)
    cache = tj.init_cache(
        plan, config, num_pages=400, max_requests=3, max_tokens=128, max_tail=TAIL, dtype=dtype
    )
    for row, length in enumerate(PROMPTS):
        cache = tj.reserve(plan, cache, np.int32(row), np.int32(length), np.int32(TAIL))
        tokens = np.zeros(max(PROMPTS), np.int32)
        tokens[:length] = np.random.default_rng(row).integers(8, config.vocab_size, length)
        _, cache = run(params, config, plan, cache, tj.Chunk(np.int32(row), tokens, np.int32(length)), None)
    return params, cache


def one_by_one(params, config, plan, cache, tokens, counts):
    """Logits [rows, S, V] of the first counts[row] of `tokens` [rows, S] and the cache after them."""
    logits = []
    for at in range(tokens.shape[1]):
        rows = np.where(at < counts, np.arange(len(tokens)), 99).astype(np.int32)
        out, cache = run(params, config, plan, cache, None, tj.Decode(rows, tokens[:, at]))
        logits.append(out)
    return np.stack(logits, 1), cache


@pytest.mark.parametrize(
    "name",
    ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma", "gemma2")), "gpt_oss"],
)
def test_drafts_equal_their_tokens_one_by_one(name):
    config = CONFIGS[name]
    plan = plan_of(config)
    params, cache = filled(config, plan)
    tokens = np.random.default_rng(9).integers(8, config.vocab_size, (3, 4)).astype(np.int32)
    counts = np.array([4, 2, 4])
    want, after = one_by_one(params, config, plan, cache, tokens, counts)
    # An empty slot between them, and rows in another order.
    slots, rows = [2, 0, 0, 1], np.array([2, 9, 0, 1], np.int32)
    decode = tj.Decode(rows, tokens[slots], counts[slots].astype(np.int32))
    got, cache = run(params, config, plan, cache, None, decode)
    got = np.asarray(got).reshape(4, 4, -1)
    for slot, row in enumerate(rows):
        if row < 3:
            np.testing.assert_allclose(got[slot, : counts[row]], want[row, : counts[row]], atol=2e-4)
    for field in ("table", "tokens", "tail"):
        np.testing.assert_array_equal(getattr(cache, field), getattr(after, field))
    np.testing.assert_allclose(cache.pool, after.pool, atol=1e-4)


def test_what_was_wrong_is_taken_back():
    config = CONFIGS["gpt_oss"]
    plan = plan_of(config)
    params, cache = filled(config, plan)
    tokens = np.random.default_rng(9).integers(8, config.vocab_size, (3, 4)).astype(np.int32)
    following = np.random.default_rng(8).integers(8, config.vocab_size, (3, 4)).astype(np.int32)
    right = np.array([2, 4, 1])  # tokens that stay
    _, want = one_by_one(params, config, plan, cache, tokens, right)
    want, _ = one_by_one(params, config, plan, want, following, np.full(3, 4))
    rows = np.arange(3, dtype=np.int32)
    _, cache = run(params, config, plan, cache, None, tj.Decode(rows, tokens))
    # A row that does not exist is left out.
    cache = tj.rollback(plan, cache, np.append(rows, 3), np.append(4 - right, 2).astype(np.int32))
    np.testing.assert_array_equal(cache.tail, right)
    got, cache = run(params, config, plan, cache, None, tj.Decode(rows, following))
    np.testing.assert_allclose(np.asarray(got).reshape(want.shape), want, atol=2e-4)


def test_beside_a_chunk_and_without_history():
    config = CONFIGS["llama"]
    plan = plan_of(config)
    params, cache = filled(config, plan)
    cache = tj.release(plan, cache, np.int32(2))
    cache = tj.reserve(plan, cache, np.int32(2), np.int32(0), np.int32(TAIL))
    cache = tj.reserve(plan, cache, np.int32(1), np.int32(90), np.int32(0))
    tokens = np.random.default_rng(9).integers(8, config.vocab_size, (2, 4)).astype(np.int32)
    chunk = tj.Chunk(np.int32(1), np.arange(20, 44, dtype=np.int32), np.int32(20))
    rows = np.array([0, 2], np.int32)  # row 2 holds nothing
    alone = [run(params, config, plan, cache, None, tj.Decode(rows, tokens))[0]]
    alone.insert(0, run(params, config, plan, cache, chunk, None)[0])
    together, cache = run(params, config, plan, cache, chunk, tj.Decode(rows, tokens))
    np.testing.assert_allclose(together, np.concatenate(alone), atol=2e-4)
    np.testing.assert_array_equal(cache.tail, [4, 0, 4])


def test_in_pages_of_bytes():
    """Tokens of one step see each other exactly, those of steps before them rounded: the logits differ by that."""
    config = CONFIGS["gpt_oss"]
    plan = plan_of(config)
    params, cache = filled(config, plan, jnp.uint8)
    tokens = np.random.default_rng(9).integers(8, config.vocab_size, (3, 4)).astype(np.int32)
    want, after = one_by_one(params, config, plan, cache, tokens, np.full(3, 4))
    got, cache = run(params, config, plan, cache, None, tj.Decode(np.arange(3, dtype=np.int32), tokens))
    got = np.asarray(got).reshape(want.shape)
    assert np.linalg.norm(got - want) < 0.02 * np.linalg.norm(want)
    np.testing.assert_allclose(got[:, 0], want[:, 0], atol=2e-4)
    np.testing.assert_array_equal(cache.tail, after.tail)


@pytest.mark.parametrize("window", [1, 2, 3, 4])
def test_drafts_see_each_other_within_a_window_that_is_shorter_than_they_are(window):
    qkv = np.random.default_rng(0).normal(size=(2, 4, 1, 3, 8)).astype(np.float32)  # one query head
    out, lse = _among_themselves(jnp.asarray(qkv), AttentionLogits(0.5, None), window)
    for row, tokens in enumerate(qkv[:, :, 0]):
        for at in range(4):
            seen = tokens[max(0, at - window + 1) : at + 1]
            weights = np.exp(0.5 * seen[:, 1] @ tokens[at, 0])
            np.testing.assert_allclose(lse[row, at, 0, 0], np.log(weights.sum()), rtol=1e-5)
            want = weights @ seen[:, 2] / weights.sum()
            np.testing.assert_allclose(out[row, at, 0, 0], want, rtol=1e-4, atol=1e-5)
