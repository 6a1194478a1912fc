"""Two decode steps of a small model, for comparing ways to make them."""

from functools import partial

import jax
import numpy as np

import tangram_jax as tj
from models.testing import random_params, tiny_config

SHAPE = {"hidden_size": 256, "intermediate_size": 512, "num_heads": 8, "num_kv_heads": 2, "head_dim": 64}
TOKENS = 24
GEMMA = {
    "qk_norm": True, "post_norms": True, "gelu": True, "norm_offset": 1.0, "sliding_window": 16, "sliding_rope_theta": 500.0
}  # fmt: skip


def random_weights(config):
    """Norms and biases that are no ones and zeros."""
    keys = iter(jax.random.split(jax.random.key(1), 200))
    return jax.tree.map(
        lambda x: x * jax.random.uniform(next(keys), x.shape, minval=0.5, maxval=1.5) + 0.01, random_params(config)
    )  # fmt: skip


def after_prompts(config, params):
    """The plan, and the cache after short prompts of two requests."""
    profile = tj.BudgetProfile.uniform(len(config.full_layers), config.num_kv_heads, 1.0)
    sliding = tj.SlidingLayers.of(config, max_tail=8)
    plan = tj.CachePlan.build(profile, 2, 16, window=8, sliding=sliding)
    cache = tj.init_cache(plan, config, num_pages=400, max_requests=3, max_tokens=TOKENS + 8, max_tail=8)
    prompt = np.arange(2 * TOKENS, dtype=np.int32) + 8
    chunk = jax.jit(tj.prefill_chunk, static_argnums=(1, 2), static_argnames="scorer")
    for row in (0, 2):
        cache = tj.reserve(plan, cache, np.int32(row), np.int32(TOKENS), np.int32(8))
        tokens = prompt[row * TOKENS // 2 :][:TOKENS]
        given = {"row": np.int32(row), "tokens": tokens, "count": np.int32(TOKENS - row)}
        _, cache = chunk(params, config, plan, cache, scorer=tj.get_scorer("snapkv"), **given)
    return plan, cache


def two_steps(config, params, plan, cache):
    """Logits of two decode steps `after_prompts`, and the cache then."""
    rows = np.array([0, 2, 3], np.int32)  # there is no row 3
    step = jax.jit(tj.decode_step, static_argnums=(1, 2))
    logits = []
    for n in range(2):
        out, cache = step(params, config, plan, cache, rows=rows, tokens=np.array([9, 10, 11], np.int32) + n)
        logits.append(np.asarray(out)[:2])
    return logits, cache


def trace_other_steps():
    """A chunk beside decode tokens, and drafts."""
    config = tiny_config(**{"num_layers": 2} | SHAPE)
    params, plan = random_params(config), tj.CachePlan.build(tj.BudgetProfile.uniform(2, 2, 1.0), 2, 16)
    cache = tj.init_cache(plan, config, num_pages=200, max_requests=3, max_tokens=64, max_tail=16)
    chunk = tj.Chunk(np.int32(0), np.arange(8, dtype=np.int32), np.int32(8))
    rows, scorer = np.array([1, 2], np.int32), tj.get_scorer("snapkv")
    for part, tokens in ((chunk, rows), (None, np.stack([rows, rows], 1))):
        run = partial(tj.step, params, config, plan, scorer, chunk=part, decode=tj.Decode(rows, tokens))
        jax.eval_shape(run, cache=cache)
