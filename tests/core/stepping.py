"""A tiny model run chunk by chunk and token by token, with few programs compiled."""

import functools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import tangram_jax as tj
from models.attention import dense_attend
from models.testing import random_params, tiny_config
from models.transformer import forward

CONFIG = tiny_config(num_layers=2)
PARAMS = random_params(CONFIG, 0)
HEADS = (CONFIG.num_layers, CONFIG.num_kv_heads)
SNAPKV = tj.get_scorer("snapkv")
ROW = np.int32(1)
SLOTS = 90  # token slots of every chunk: one program for each plan

prefill_chunk = jax.jit(
    tj.prefill_chunk, static_argnums=(1, 2), static_argnames="scorer", donate_argnames="cache"
)
decode_step = jax.jit(tj.decode_step, static_argnums=(1, 2), donate_argnames="cache")


def random_tokens(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(8, CONFIG.vocab_size, count).astype(np.int32)


@partial(jax.jit, static_argnums=0)
def dense_logits(config, tokens):
    positions = jnp.arange(len(tokens))
    return forward(PARAMS, config, tokens, positions, dense_attend(positions), ())[0]


@functools.cache
def plan_of(
    profile: str, heads_per_page: int, page_size: int, cluster: str = "layer", **options
) -> tj.CachePlan:
    """Plans are static arguments: one object for each layout keeps the number of compilations small."""
    budgets = ragged_profile() if profile == "ragged" else tj.BudgetProfile.uniform(*HEADS, float(profile))
    return tj.CachePlan.build(budgets, heads_per_page, page_size, cluster, window=8, **options)


def new_cache(plan, *, rows=3, max_tokens=160, max_tail=32) -> tj.Cache:
    return tj.init_cache(
        plan, CONFIG, num_pages=600, max_requests=rows, max_tokens=max_tokens, max_tail=max_tail
    )


def prefill(plan, cache, tokens, size, *, row=ROW, scorer=SNAPKV):
    """All of `tokens` in chunks of `size`: (logits after each chunk, cache)."""
    logits = []
    for start in range(0, len(tokens), size):
        part = tokens[start : start + size]
        padded = np.zeros(SLOTS, np.int32)
        padded[: len(part)] = part
        out, cache = prefill_chunk(
            PARAMS, CONFIG, plan, cache, scorer=scorer, row=row, tokens=padded, count=np.int32(len(part))
        )
        logits.append(out)
    return logits, cache


def ragged_profile(seed: int = 0) -> tj.BudgetProfile:
    ratios = np.random.default_rng(seed).uniform(0.1, 0.9, (1, *HEADS)).astype(np.float32)
    return tj.BudgetProfile.from_ratios(ratios, retention=0.5, alpha=0.0)


def entries_of(plan, cache, row, head) -> np.ndarray:
    """Keys f32[n, D] that `head` (layer * K + KV head) holds in `row`."""
    group, column = plan.group_of.reshape(-1)[head], plan.column_of.reshape(-1)[head]
    length = int(plan.lengths(int(cache.tokens[row]))[group] + cache.tail[row])
    first = cache.layout.first[group]
    pages = np.asarray(cache.table[row])[first : first + -(-length // plan.page_size)]
    return np.asarray(cache.pool)[pages, 0, column].reshape(-1, CONFIG.head_dim)[:length]
