"""Sampling after verified drafts equals sampling token by token, whatever was drafted."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tangram_jax import sampling
from tangram_jax.sampling import FULL, GREEDY, Variant
from tangram_jax.sampling_drafts import sample_drafts
from tangram_jax.sampling_filters import mask_words

VOCAB, ROWS, SIZE = 7, 3, 4
verify = jax.jit(sample_drafts, static_argnames="variant")
one = jax.jit(sampling.sample, static_argnames="variant")


def state_of(variant: Variant) -> sampling.SamplerState:
    """Rows whose tokens depend on those before them, where the variant allows it."""
    state = sampling.init_sampler(ROWS, VOCAB)
    options = [
        {"temperature": 0.0},
        {"temperature": 0.8, "presence_penalty": 1.5, "top_p": 0.9},
        {"temperature": 1.0, "repetition_penalty": 1.8, "min_tokens": 2, "stop_ids": (3,)},
    ]
    for row, chosen in enumerate(options):
        if variant == GREEDY:
            chosen = {"temperature": 0.0}
        params = sampling.row_params(seed=row, last_token=1, **chosen)
        state = sampling.set_row(state, np.int32(row), params)
    return state


@pytest.mark.parametrize(
    "variant",
    [GREEDY, pytest.param(FULL, marks=pytest.mark.slow), Variant(num_logprobs=3)],
    ids=["greedy", "full", "scored"],
)
@settings(max_examples=30)
@given(seed=st.integers(0, 10**6), data=st.data())
def test_as_token_by_token(variant, seed, data):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(ROWS, SIZE, VOCAB)).astype(np.float32) * 2
    counts = np.array(data.draw(st.lists(st.integers(1, SIZE), min_size=ROWS, max_size=ROWS)), np.int32)
    wrong = data.draw(st.lists(st.integers(0, SIZE), min_size=ROWS, max_size=ROWS))  # the first wrong draft

    # Token by token, every row to its end: what would be drawn if all drafts were right.
    state, drawn = state_of(variant), []
    for at in range(SIZE):
        tokens, *_, state = one(logits[:, at], state, np.arange(ROWS, dtype=np.int32), variant=variant)
        drawn.append(np.asarray(tokens))
    drafts = np.stack(drawn[:-1], 1)
    for row, at in enumerate(wrong):
        if at < SIZE - 1:
            drafts[row, at:] = (drafts[row, at:] + 1) % VOCAB
    expected = np.minimum(np.array(wrong) + 1, counts)

    # A row more, which is none.
    rows = np.array([0, 1, 2, ROWS], np.int32)
    padded = np.concatenate([logits, logits[:1]]).reshape(-1, VOCAB)
    state = state_of(variant)
    got = verify(
        padded,
        state,
        rows,
        np.concatenate([drafts, drafts[:1]]),
        np.append(counts, 1).astype(np.int32),
        variant=variant,
    )
    tokens, right, logprobs, ids, tops, after = got
    np.testing.assert_array_equal(right[:ROWS], expected)
    want = state_of(variant)
    for at in range(SIZE):
        these = np.where(at < expected, np.arange(ROWS), ROWS).astype(np.int32)
        *chosen, want = one(logits[:, at], want, these, variant=variant)
        for column, alone in zip((tokens, logprobs, ids, tops), chosen, strict=True):
            if alone is not None:
                there = these < ROWS
                np.testing.assert_allclose(column[:ROWS][there, at], np.asarray(alone)[there], rtol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, after, want)


def test_a_mask_is_of_the_first_token():
    state = state_of(FULL)
    logits = np.zeros((2 * SIZE, VOCAB), np.float32)
    logits[:, 5] = 9.0
    mask = np.full((2, mask_words(VOCAB)), 0xFFFFFFFF, np.uint32)
    mask[0, 0] = 1 << 2  # the token 2 alone
    tokens, right, *_ = verify(
        logits,
        state,
        np.array([0, 1], np.int32),
        np.full((2, SIZE - 1), 5, np.int32),
        np.array([1, SIZE], np.int32),
        mask,
        variant=Variant(num_logprobs=3),
    )
    assert (int(right[0]), int(tokens[0, 0])) == (1, 2)
    assert int(tokens[1, 0]) == 5
