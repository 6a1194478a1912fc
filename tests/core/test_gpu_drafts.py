"""On a Hopper GPU: drafts verified in one step against their tokens one by one, kernel and all."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tangram_jax as tj
from models.testing import random_params
from tests.core.test_gpu_step import CONFIG, GEMMA, GEMMA2, GPT_OSS, SNAPKV, relative, uniform_plan

pytestmark = pytest.mark.gpu

PROMPTS = (300, 70, 513)  # tokens in rows 0, 1, 2


def ragged_plan(config):
    heads = (1, len(config.full_layers), config.num_kv_heads)
    ratios = np.random.default_rng(0).uniform(0.1, 0.9, heads).astype(np.float32)
    profile = tj.BudgetProfile.from_ratios(ratios, retention=0.5, alpha=0.0)
    return tj.CachePlan.build(profile, 2, 64, "layer", sliding=tj.SlidingLayers.of(config, max_tail=64))


def steps(config, plan, dtype, size, prompts=PROMPTS):
    """Logits of `size` tokens of the rows at once, and one by one; what the tails are after each."""
    jax.clear_caches()
    run = jax.jit(tj.step, static_argnums=(1, 2, 3))
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), random_params(config, 0))
    cache = tj.init_cache(
        plan, config, num_pages=4096, max_requests=4, max_tokens=max(1024, *prompts), max_tail=64, dtype=dtype
    )
    for row, length in enumerate(prompts):
        cache = tj.reserve(plan, cache, np.int32(row), np.int32(length), np.int32(64))
        tokens = np.zeros(-(-max(*prompts) // 576) * 576, np.int32)
        tokens[:length] = np.random.default_rng(row).integers(8, config.vocab_size, length)
        if not length:
            continue
        _, cache = run(
            params, config, plan, SNAPKV, cache, tj.Chunk(np.int32(row), tokens, np.int32(length)), None
        )
    given = np.random.default_rng(9).integers(8, config.vocab_size, (4, size)).astype(np.int32)
    rows = np.array([2, 9, 0, 1], np.int32)  # one is none
    together, after = run(params, config, plan, SNAPKV, cache, None, tj.Decode(rows, given))
    apart = []
    for at in range(size):
        out, cache = run(params, config, plan, SNAPKV, cache, None, tj.Decode(rows, given[:, at]))
        apart.append(out)
    there = [0, 2, 3]
    together = np.asarray(together, np.float32).reshape(4, size, -1)[there]
    return together, np.stack(apart, 1)[there], after.tail, cache.tail


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("name", ["llama", "gemma", "gemma2", "gpt_oss"])
def test_drafts_as_one_by_one(name, size, caplog):
    config = {"llama": CONFIG, "gemma": GEMMA, "gemma2": GEMMA2, "gpt_oss": GPT_OSS}[name]
    plan = ragged_plan(config)
    together, apart, tail, other = steps(config, plan, jnp.bfloat16, size)
    assert "XLA operations" not in caplog.text
    np.testing.assert_array_equal(tail, other)
    assert np.isfinite(together).all()
    assert relative(together, apart) < 0.03


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.uint8], ids=["bfloat16", "bytes"])
@pytest.mark.parametrize("prompts", [(7488, 0, 70), (0, 0, 0)], ids=str)
def test_drafts_over_many_pieces_and_without_history(prompts, dtype, caplog):
    """Of an item that CTAs put together by slices, and of those that have nothing but the tokens themselves."""
    together, apart, tail, other = steps(CONFIG, uniform_plan(CONFIG, 64), dtype, 4, prompts)
    assert "Decode attention runs as XLA operations" not in caplog.text
    np.testing.assert_array_equal(tail, other)
    assert relative(together, apart) < (0.05 if dtype == jnp.uint8 else 0.03)


def test_drafts_in_pages_of_bytes():
    plan = uniform_plan(CONFIG, 64)
    together, apart, tail, other = steps(CONFIG, plan, jnp.uint8, 4)
    np.testing.assert_array_equal(tail, other)
    assert relative(together, apart) < 0.05


def test_more_queries_than_the_kernel_takes(caplog):
    """16 tokens of four query heads: attention falls back to XLA operations, and says so."""
    together, apart, *_ = steps(CONFIG, ragged_plan(CONFIG), jnp.bfloat16, 16)
    assert "64 query heads per KV head" in caplog.text
    assert relative(together, apart) < 0.03
