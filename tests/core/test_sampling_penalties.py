"""Penalties against their definition, logit biases, banned stop tokens, and logprobs, which none of them changes."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tangram_jax.sampling import (
    FULL,
    GREEDY,
    MAX_BIASES,
    MAX_STOP_IDS,
    _penalize,
    last_tokens,
    mark_output,
    mark_prompt,
    row_params,
    token_logprobs,
)
from tests.core.sampler import V, gaussian, jit_sample, roll, rows_of

BIASED = replace(GREEDY, biases=True)


def reference_penalties(logits, prompt, output, repetition, presence, frequency):
    """As vLLM documents them, one token at a time, in float64."""
    out = logits.astype(np.float64)
    for token in set(prompt) | set(output):
        out[token] = out[token] / repetition if out[token] > 0 else out[token] * repetition
    for token in set(output):
        out[token] -= frequency * output.count(token) + presence
    return out


@settings(max_examples=40)
@given(
    prompt=st.lists(st.integers(0, 39), max_size=60),
    output=st.lists(st.integers(0, 39), max_size=30),
    repetition=st.floats(0.25, 4.0),
    presence=st.floats(-2.0, 2.0, allow_subnormal=False),
    frequency=st.floats(-2.0, 2.0, allow_subnormal=False),
    cut=st.integers(0, 60),
)
def test_penalties(prompt, output, repetition, presence, frequency, cut):
    """Against the definition, token by token; the prompt comes in two chunks, the output is replayed."""
    vocab = 40
    params = {
        "repetition_penalty": repetition,
        "presence_penalty": presence,
        "frequency_penalty": frequency,
        "num_generated": len(output),
    }
    state = rows_of({}, params, {}, vocab=vocab)
    for mark, ids in ((mark_prompt, prompt[:cut]), (mark_prompt, prompt[cut:]), (mark_output, output)):
        padded = np.full(64, 7, np.int32)  # padding must not count
        padded[: len(ids)] = ids
        state = mark(state, 1, padded, len(ids))
    logits = gaussian(len(prompt), vocab)
    wanted = reference_penalties(logits, prompt, output, repetition, presence, frequency)
    got = _penalize(jnp.asarray(logits)[None], state.seen[1:2], state.floats[1:2])[0]
    np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-5)
    np.testing.assert_array_equal(state.seen[0], 0)
    np.testing.assert_array_equal(state.seen[2], 0)


def test_penalties_count_what_is_sampled():
    """Greedy with a frequency penalty goes through the tokens in turn; a row without penalties stays."""
    logits = np.zeros((2, V), np.float32)
    logits[:, [3, 5, 8]] = [10.0, 9.5, 9.2]
    state = rows_of({"temperature": 0, "frequency_penalty": 1.0}, {"temperature": 0}, rows=4)
    tokens, state = roll(state, jnp.asarray(logits), jnp.arange(2), 6)
    assert tokens[:, 0].tolist() == [3, 5, 8, 3, 5, 8]
    assert tokens[:, 1].tolist() == [3] * 6
    assert state.seen[0, [3, 5, 8]].tolist() == [2, 2, 2]
    assert state.num_generated.tolist() == [6, 6, 0, 0]
    assert state.last_token.tolist() == [8, 3, 0, 0]
    assert last_tokens(state, jnp.array([1, 0, 7])).tolist() == [3, 8, 0]


def test_counts_stay_apart_from_the_prompt_bit():
    """32768 repeats of one token must not reach the bit that says that it was in the prompt."""
    state = rows_of({"temperature": 0, "presence_penalty": 0.1})
    state = replace(state, seen=state.seen.at[0, 3].set(32766))
    logits = np.zeros((1, V), np.float32)
    logits[0, 3] = 10.0
    _, state = roll(state, jnp.asarray(logits), jnp.arange(1), 3)
    assert state.seen[0, 3] == 32767
    state = mark_prompt(state, 0, np.array([3, 3, 4]), 3)
    assert state.seen[0, 2:5].tolist() == [0, 32767 + 32768, 32768]
    state = mark_output(state, 0, np.array([3, 4, 4, 5]), 3)
    assert state.seen[0, 2:6].tolist() == [0, 32767 + 32768, 32770, 0]


def test_min_tokens_bans_stop_ids_until_then():
    logits = np.zeros((3, V), np.float32)
    logits[:, [2, 0, 9]] = [10.0, 9.0, 8.0]
    stops = {"temperature": 0, "stop_ids": (0, 2)}
    state = rows_of(stops | {"min_tokens": 3}, stops, stops | {"min_tokens": 3, "num_generated": 2})
    for variant in (BIASED, FULL):
        tokens, _ = roll(state, jnp.asarray(logits), jnp.arange(3), 5, variant)
        assert np.asarray(tokens).T.tolist() == [[9, 9, 9, 2, 2], [2] * 5, [9, 2, 2, 2, 2]]
    random = rows_of(stops | {"min_tokens": 50, "temperature": 1.0})
    tokens, _ = roll(random, jnp.asarray(logits[:1]), jnp.arange(1), 50)
    assert not {0, 2} & set(tokens[:, 0].tolist())
    with pytest.raises(ValueError, match=f"at most {MAX_STOP_IDS}"):
        row_params(seed=0, min_tokens=1, stop_ids=range(MAX_STOP_IDS + 1))
    row_params(seed=0, stop_ids=range(MAX_STOP_IDS + 1))  # nothing to ban: any number


def test_logit_bias_is_added_before_penalties():
    """A biased token wins until its penalty, which divides the biased logit; the other rows stay as they are."""
    logits = np.zeros((3, V), np.float32)
    logits[:, [3, 5]] = [2.0, 1.0]
    plain = {"temperature": 0}
    biased = plain | {"logit_bias": {5: 2.5, V - 1: -100.0}}
    state = rows_of(biased, plain, biased | {"repetition_penalty": 2.0})
    for variant, last in ((BIASED, [5, 5, 5]), (FULL, [5, 3, 5])):
        tokens, _ = roll(state, jnp.asarray(logits), jnp.arange(3), 3, variant)
        assert np.asarray(tokens).T.tolist() == [[5, 5, 5], [3, 3, 3], last]


def test_logit_bias_of_the_most_tokens_and_of_all_that_may_follow():
    most = dict.fromkeys(range(MAX_BIASES), -100.0)
    logits = gaussian(4, 1, MAX_BIASES + 2)
    state = rows_of({"temperature": 1.0, "logit_bias": most}, vocab=MAX_BIASES + 2)
    tokens, state = roll(state, jnp.asarray(logits), jnp.arange(1), 40)
    assert set(tokens[:, 0].tolist()) == {MAX_BIASES, MAX_BIASES + 1}
    with pytest.raises(ValueError, match=f"at most {MAX_BIASES}"):
        row_params(seed=0, logit_bias=most | {MAX_BIASES: 1.0})


def test_a_banned_stop_id_stays_banned_whatever_its_bias():
    state = rows_of({"temperature": 0, "stop_ids": (2,), "min_tokens": 2, "logit_bias": {2: 100.0}})
    tokens, _ = roll(state, jnp.zeros((1, V)), jnp.arange(1), 3)
    assert tokens[:, 0].tolist() == [0, 0, 2]


def test_logprobs_are_of_the_raw_logits():
    logits = gaussian(6, 3, V)
    state = rows_of(*[{"temperature": 0.3, "top_k": 2, "presence_penalty": 2.0, "logit_bias": {7: 3}}] * 3)
    tokens, logprobs, top_ids, top, _ = jit_sample(
        logits, state, np.arange(3, dtype=np.int32), variant=replace(FULL, num_logprobs=5)
    )
    wanted = logits - np.log(np.exp(logits.astype(np.float64)).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(logprobs, wanted[np.arange(3), tokens], atol=1e-5)
    np.testing.assert_array_equal(top_ids, np.argsort(-logits, axis=1)[:, :5])
    np.testing.assert_allclose(top, -np.sort(-wanted, axis=1)[:, :5], atol=1e-5)


def test_logprobs_of_a_prompt_sum_to_one():
    logits = gaussian(7, 10, V)
    following = np.random.default_rng(0).integers(0, V, 10).astype(np.int32)
    chosen, top_ids, top = token_logprobs(jnp.asarray(logits), following, V)
    np.testing.assert_allclose(np.exp(top).sum(axis=1), 1.0, rtol=1e-5)
    for row in range(10):
        assert sorted(top_ids[row].tolist()) == list(range(V))
        np.testing.assert_array_equal(chosen[row], top[row][top_ids[row] == following[row]][0])
    chosen_only, none_ids, none = token_logprobs(jnp.asarray(logits), following, 0)
    np.testing.assert_array_equal(chosen_only, chosen)
    assert none_ids.shape == none.shape == (10, 0)
    *_, ids, logprob, _ = jit_sample(logits[:1], rows_of({}), np.zeros(1, np.int32), variant=FULL)
    assert ids is None
    assert logprob is None


def test_ids_of_no_token_are_dropped():
    logits = gaussian(2, 1, V)
    ids = {-1: 100.0, V: 100.0, 10**12: 100.0, 3: 100.0}
    state = rows_of({"temperature": 0.0, "logit_bias": ids, "min_tokens": 2, "stop_ids": [-1, 3 - V, 10**12]})
    assert jit_sample(logits, state, np.zeros(1, np.int32), variant=BIASED)[0].tolist() == [3]


def test_tokens_are_marked_in_one_row():
    state = mark_prompt(rows_of({}), 0, [1, 2, 3], 2)
    assert np.flatnonzero(state.seen[0]).tolist() == [1, 2]
    for mark in (mark_prompt, mark_output):
        with pytest.raises(ValueError, match="give one at a time"):
            mark(rows_of({}, {}), np.array([0, 1]), np.array([1]), 1)
