"""Masks of what a grammar allows: nothing else is ever sampled, and rows without one do not notice."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from tangram_jax.sampling import FULL, token_logprobs
from tangram_jax.sampling_filters import mask_words, restrict
from tests.core.sampler import V, gaussian, jit_sample, roll, rows_of

SCORED = replace(FULL, num_logprobs=5)
ALL = np.full(mask_words(V), 0xFFFFFFFF, np.uint32)


def bits(ids) -> np.ndarray:
    """u32[mask_words(V)]"""
    mask = np.zeros(mask_words(V), np.uint32)
    for i in ids:
        mask[i // 32] |= np.uint32(1) << np.uint32(i % 32)
    return mask


def sampled(params, logits, allowed, steps=40):
    """Tokens of one row that is masked in every step."""
    state, out = rows_of(params), []
    for _ in range(steps):
        tokens, *_, state = jit_sample(
            logits[None], state, np.zeros(1, np.int32), bits(allowed)[None], variant=SCORED
        )
        out.append(int(tokens[0]))
    return out


def test_restrict_keeps_what_the_bits_say():
    assert V % 32, "the last word must have bits that stand for no token"
    logits = gaussian(0, 3, V)
    logits[1, 5] = -np.inf
    mask = np.stack([bits([0, 31, 32, V - 1]), bits([5]), ALL])
    out = np.asarray(restrict(logits, mask))
    for row, allowed in enumerate(([0, 31, 32, V - 1], [5], range(V))):
        kept = np.flatnonzero(out[row] > -np.inf)
        assert kept.tolist() == list(allowed)
    np.testing.assert_array_equal(out[2], logits[2])
    assert np.isfinite(out[1, 5])


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 5.0, "top_k": 3},
        {"temperature": 1.0, "top_p": 0.01},
        {"temperature": 1.0, "min_p": 0.9},
        {"temperature": 1.0, "presence_penalty": 2.0, "repetition_penalty": 5.0},
        {"temperature": 0.0, "logit_bias": dict.fromkeys(range(100, 200), 100.0)},
        {"temperature": 1.0, "logit_bias": dict.fromkeys(range(100, 200), 100.0)},
    ],
    ids=str,
)
def test_masked_tokens_are_never_sampled(params):
    logits = gaussian(1, V)
    worst = np.argsort(logits)[:40]  # what would never come by itself
    allowed = [int(i) for i in worst if not 100 <= i < 200][:20]
    tokens = sampled(params, logits, allowed)
    assert set(tokens) <= set(allowed)
    if params["temperature"] >= 1 and "top_p" not in params:
        assert len(set(tokens)) > 1
    free, _ = roll(rows_of(params), logits[None], np.arange(1), 40)
    assert not set(np.asarray(free)[:, 0].tolist()) & set(allowed)


def test_the_best_allowed_token_is_the_greedy_one():
    logits = gaussian(2, V)
    allowed = [3, 64, 95, 299]
    best = max(allowed, key=lambda i: logits[i])
    assert sampled({"temperature": 0.0}, logits, allowed, 2) == [best, best]


@pytest.mark.parametrize("temperature", [0.0, 1.0, 100.0])
def test_a_mask_wins_over_a_ban(temperature):
    """min_tokens forbids 7 and 9: they come all the same where nothing else may, and do not where something else may."""
    params = {"temperature": temperature, "min_tokens": 99, "stop_ids": (7, 9)}
    logits = gaussian(3, V)
    assert set(sampled(params, logits, [7, 9])) <= {7, 9}
    assert set(sampled(params, logits, [7, 9, 200])) == {200}


def test_a_mask_follows_the_probabilities_of_what_it_leaves():
    logits = np.zeros((7, V), np.float32)
    logits[:, [10, 20]] = np.log([3.0, 1.0])
    state, mask, tens = rows_of(*[{}] * 6, rows=6), np.stack([bits([10, 20])] * 7), 0
    for _ in range(300):
        tokens, *_, state = jit_sample(logits, state, np.arange(7, dtype=np.int32), mask, variant=SCORED)
        assert set(np.asarray(tokens[:6]).tolist()) <= {10, 20}
        tens += int((np.asarray(tokens[:6]) == 10).sum())
    assert 0.71 < tens / 1800 < 0.79  # 3 / 4; a deviation is 0.01


def test_rows_without_a_mask_are_the_same_to_the_last_bit():
    """Tokens, log-probabilities and the state after them, in a batch where other rows are masked."""
    each = [
        {"temperature": 0.0},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 30},
        {"temperature": 1.3, "min_p": 0.02, "frequency_penalty": 0.7, "repetition_penalty": 1.2},
        {"temperature": 1.0, "logit_bias": {4: 3.0}, "min_tokens": 50, "stop_ids": (1, 2, 3)},
        {"temperature": 1.0},
        {"temperature": 0.0},
    ]
    rows = np.array([0, 1, 2, 3, 4, 5, 99], np.int32)
    mask = np.stack([*[ALL] * 4, bits([8]), bits([8, 9]), ALL])
    plain, masked = rows_of(*each), rows_of(*each)
    for step in range(12):
        logits = gaussian(100 + step, len(rows), V)
        want = jit_sample(logits, plain, rows, variant=SCORED)
        got = jit_sample(logits, masked, rows, mask, variant=SCORED)
        for a, b in zip(want[:4], got[:4], strict=True):
            np.testing.assert_array_equal(np.asarray(a)[:4], np.asarray(b)[:4])
        plain, masked = want[4], got[4]
        for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(masked), strict=True):
            np.testing.assert_array_equal(np.asarray(a)[:4], np.asarray(b)[:4])
        assert np.asarray(got[0])[4] == 8
        assert int(np.asarray(got[0])[5]) in (8, 9)


def test_log_probabilities_are_those_without_the_mask():
    logits = gaussian(6, 1, V)
    state = rows_of({"temperature": 0.0})
    tokens, logprobs, top_ids, tops, _ = jit_sample(
        logits, state, np.zeros(1, np.int32), bits([17])[None], variant=SCORED
    )
    assert tokens.tolist() == [17]
    want = token_logprobs(logits, np.array([17]), 5)
    for a, b in zip((logprobs, top_ids, tops), want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    assert 17 not in top_ids[0].tolist()


@pytest.mark.parametrize(
    "wrong", [np.ones((1, V), bool), ALL[None, 1:], np.stack([ALL] * 2), ALL[None].view(np.int32)]
)
def test_what_is_no_mask_of_bits(wrong):
    with pytest.raises(ValueError, match=f"expected bits, uint32.1, {len(ALL)}"):
        jit_sample(gaussian(1, 1, V), rows_of({}), np.zeros(1, np.int32), wrong, variant=SCORED)
