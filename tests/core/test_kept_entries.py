"""Which entries chunks leave in the pages: found by their keys, which layer 0 has as a dense forward pass has them."""

import jax.numpy as jnp
import numpy as np
import pytest

import tangram_jax as tj
from models.attention import dense_attend
from models.transformer import forward
from tests.core.stepping import (
    CONFIG,
    PARAMS,
    ROW,
    SLOTS,
    decode_step,
    entries_of,
    new_cache,
    plan_of,
    prefill,
    random_tokens,
)


def true_keys(tokens) -> np.ndarray:
    """Keys f32[L * K, T, D] of a dense forward pass. Only layer 0's are those of a compressed run too."""
    kept = []

    def attend(state, layer, q, k, v):
        kept.append(k)
        return dense_attend(jnp.arange(len(tokens)))(state, layer, q, k, v)

    forward(PARAMS, CONFIG, tokens, jnp.arange(len(tokens)), attend, ())
    return np.concatenate([np.asarray(k).swapaxes(0, 1) for k in kept])


def kept_positions(entries, keys) -> list[int]:
    """Which of `keys` [T, D] the `entries` [n, D] are."""
    distance = np.abs(entries[:, None] - keys[None]).max(-1)
    assert distance.min(1).max(initial=0) < 1e-4
    return distance.argmin(1).tolist()


@pytest.mark.parametrize("cluster", ["layer", pytest.param("model", marks=pytest.mark.slow)])
def test_each_head_keeps_sinks_window_and_its_own_best(cluster):
    plan = plan_of("ragged", 2, 8, cluster, min_entries=12)
    tokens = random_tokens(90)
    cache = tj.reserve(plan, new_cache(plan), ROW, np.int32(90), np.int32(0))
    _, cache = prefill(plan, cache, tokens, 30)
    keys = true_keys(tokens)
    chosen = []
    for head in range(CONFIG.num_kv_heads):
        kept = kept_positions(entries_of(plan, cache, 1, head), keys[head])
        group = plan.group_of.reshape(-1)[head]
        assert len(set(kept)) == plan.lengths(90)[group]
        assert kept[-8:] == list(range(82, 90))
        assert set(kept) >= set(range(4))
        chosen.append((group, frozenset(kept)))
    same_group = [sets for sets in chosen if [g for g, _ in chosen].count(sets[0]) > 1]
    assert len({s for _, s in same_group}) > 1 or cluster == "model"


def test_streaming_keeps_sinks_and_the_most_recent_across_chunks():
    """A scorer whose choice is known: with one chunk's worth of lock at a time nothing else may survive."""
    plan = plan_of("0.25", 2, 8)
    tokens = random_tokens(64)
    cache = tj.reserve(plan, new_cache(plan), ROW, np.int32(64), np.int32(0))
    _, cache = prefill(plan, cache, tokens, 64, scorer=tj.get_scorer("streaming_llm"))
    kept = kept_positions(entries_of(plan, cache, 1, 0), true_keys(tokens)[0])
    assert sorted(kept) == [*range(4), *range(52, 64)]


def test_a_tail_is_compressed_under_the_same_budgets_with_the_next_turn():
    plan = plan_of("ragged", 2, 8, min_entries=12)
    cache = tj.reserve(plan, new_cache(plan), ROW, np.int32(100), np.int32(10))
    tokens = random_tokens(100)
    _, cache = prefill(plan, cache, tokens[:50], 50)
    for token in tokens[50:60]:
        _, cache = decode_step(
            PARAMS, CONFIG, plan, cache, rows=np.array([1], np.int32), tokens=np.array([token], np.int32)
        )
    assert (int(cache.tokens[1]), int(cache.tail[1])) == (50, 10)
    _, cache = prefill(plan, cache, tokens[60:], 40)
    assert (int(cache.tokens[1]), int(cache.tail[1])) == (100, 0)
    keys = true_keys(tokens)
    for head in range(CONFIG.num_kv_heads):
        kept = kept_positions(entries_of(plan, cache, 1, head), keys[head])
        assert len(set(kept)) == plan.lengths(100)[plan.group_of.reshape(-1)[head]]
        assert kept[-8:] == list(range(92, 100))


def test_a_whole_tail_and_a_whole_chunk_are_kept_wherever_in_a_page_they_begin():
    """130 candidates, the first at the end of a page of 8, reach into 18 pages; in 17 the newest would have no place."""
    plan = plan_of("1.0", 2, 8)
    tokens = random_tokens(15 + 32 + SLOTS)
    cache = tj.reserve(plan, new_cache(plan), ROW, np.int32(len(tokens)), np.int32(0))
    _, cache = prefill(plan, cache, tokens[:15], 15)
    for token in tokens[15:47]:
        _, cache = decode_step(PARAMS, CONFIG, plan, cache, rows=np.array([1], np.int32), tokens=token[None])
    assert (int(plan.locked(15)[0]), int(cache.tail[1]), cache.layout.max_tail) == (7, 32, 32)
    _, cache = prefill(plan, cache, tokens[47:], SLOTS)
    kept = kept_positions(entries_of(plan, cache, 1, 0), true_keys(tokens)[0])
    assert sorted(kept) == list(range(15 + 32 + SLOTS))
