"""Sampling: each filter against a sorted NumPy definition, the distributions, and what a token may depend on."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from tangram_jax import sampling_filters
from tangram_jax.sampling import (
    FULL,
    GREEDY,
    Variant,
    init_sampler,
    last_tokens,
    mark_output,
    mark_prompt,
    needed_variant,
    row_params,
    sample,
    seed_key,
    set_row,
)
from tests.core.sampler import V, gaussian, jit_sample, roll, rows_of

jit_threshold = jax.jit(sampling_filters.keep_threshold)
jit_probs = jax.jit(sampling_filters.relative_probs)


def kept_bounds(probs, top_k, top_p, min_p, slack=1e-5):
    """By sorting, in float64: (tokens that must be kept, tokens that may be); only top-p's rounding is between."""
    p = probs.astype(np.float64)
    kept = (p > 0) & (p >= min_p)
    if 0 < top_k < len(p):
        kept &= p >= np.sort(p)[-top_k]
    p = np.where(kept, p, 0)
    order = np.argsort(-p, kind="stable")
    above = np.concatenate([[0.0], np.cumsum(p[order])[:-1]])
    first_equal = np.searchsorted(-p[order], -p[order], side="left")  # ties are all kept
    beats = np.empty_like(p)
    beats[order] = above[first_equal]
    if top_p >= 1:
        return kept, kept
    return [kept & ((beats < top_p * p.sum() * f) | (p == 1)) for f in (1 - slack, 1 + slack)]


shares = st.floats(0.0, 1.0, allow_subnormal=False)


@settings(max_examples=150)
@given(
    vocab=st.sampled_from([5, 128, 3000]),
    scale=st.sampled_from([0.01, 0.5, 3.0, 30.0]),
    step=st.sampled_from([0.0, 0.125, 2.0]),
    seed=st.integers(0, 2**32 - 1),
    rows=st.lists(
        st.tuples(
            st.one_of(st.just(0), st.integers(1, 100), st.integers(1, 4000)),
            st.one_of(st.just(1.0), shares, st.floats(0.95, 1.0)),
            st.one_of(st.just(0.0), shares),
        ),
        min_size=4,
        max_size=4,
    ),
)
def test_kept_tokens_are_those_of_the_sorted_definition(vocab, scale, step, seed, rows):
    """With a step the logits are multiples of it, so that many are equal (as those of bfloat16 models are)."""
    logits = gaussian(seed, 4, vocab, scale=scale)
    if step:
        logits = np.round(logits / step).astype(np.float32) * np.float32(step)
    probs = jit_probs(logits, jnp.ones(4))
    top_k, top_p, min_p = (np.array(x) for x in zip(*rows, strict=True))
    lowest = jit_threshold(probs, top_k.astype(np.int32), top_p.astype(np.float32), min_p.astype(np.float32))
    probs = np.asarray(probs)
    kept = (probs >= np.asarray(lowest)[:, None]) & (probs > 0)
    for row in range(4):
        must, may = kept_bounds(probs[row], top_k[row], np.float32(top_p[row]), np.float32(min_p[row]))
        assert (kept[row] >= must).all()
        assert (kept[row] <= may).all()
        assert kept[row].any()


def test_filters_worked_example():
    probs = jnp.array([[0.25, 1.0, 0.5, 0.125, 0.0625, 0.5]])  # sums to 2.4375

    def kept(top_k=0, top_p=1.0, min_p=0.0):
        lowest = jit_threshold(probs, *(jnp.array([x]) for x in (top_k, top_p, min_p)))
        return np.flatnonzero(np.asarray(probs[0] >= lowest[0])).tolist()

    assert kept() == [0, 1, 2, 3, 4, 5]
    assert kept(top_k=1) == [1]
    assert kept(top_k=2) == [1, 2, 5]  # a tie at the border is kept whole
    assert kept(top_k=3) == [1, 2, 5]
    assert kept(top_k=4) == [0, 1, 2, 5]
    assert kept(top_k=100) == [0, 1, 2, 3, 4, 5]
    assert kept(min_p=0.25) == [0, 1, 2, 5]
    assert kept(top_p=0.4) == [1]  # 1 / 2.4375 = 0.41
    assert kept(top_p=0.42) == [1, 2, 5]
    assert kept(top_p=0.0) == [1]
    assert kept(top_k=4, top_p=0.85) == [1, 2, 5]  # 2 / 2.25 = 0.89 of what top-k left over
    assert kept(top_p=0.85) == [0, 1, 2, 5]  # but 0.82 of everything
    assert kept(min_p=0.5, top_p=0.45) == [1]  # 1 / 2


def test_probabilities_are_relative_and_never_denormal():
    logits = np.array([[0.0, -1.0, -59.0, -61.0, -200.0, -np.inf]], np.float32)
    np.testing.assert_allclose(
        jit_probs(logits, jnp.ones(1))[0], [1, np.exp(-1), np.exp(-59), 0, 0, 0], rtol=1e-6
    )
    np.testing.assert_allclose(jit_probs(logits + 7, jnp.full(1, 4.0))[0, :2], [1, np.exp(-0.25)], rtol=1e-6)


@pytest.mark.parametrize("vocab", [1, 5, 128, 129, 1000])
def test_argmax_is_the_first_of_equals(vocab):
    x = np.round(gaussian(0, 20, vocab))
    np.testing.assert_array_equal(jax.jit(sampling_filters.argmax)(x), x.argmax(axis=1))
    np.testing.assert_array_equal(sampling_filters.argmax(jnp.full((2, vocab), -jnp.inf)), 0)


@pytest.mark.parametrize("count", [1, 3, 20, 64])
@pytest.mark.parametrize("vocab", [70, 128 * 20, 128 * 64 + 1, 128 * 70 - 5])
def test_largest_are_those_of_a_sort_and_the_first_of_equals(vocab, count):
    x = np.round(gaussian(vocab, 6, vocab, scale=1.0) * 2)
    x[1] = -np.inf
    x[2, 5:] = -np.inf
    x[3] = np.arange(vocab)
    for got, want in zip(
        jax.jit(sampling_filters.largest, static_argnums=1)(x, count), jax.lax.top_k(x, count), strict=True
    ):
        np.testing.assert_array_equal(got, want)


def chi_square_fits(counts, probs, least=5.0):
    """Whether counts agree with probabilities (p-value above 1e-3); rare outcomes are pooled."""
    assert counts[probs == 0].sum() == 0
    expected = probs / probs.sum() * counts.sum()
    rare = expected < least
    observed, wanted = list(counts[~rare]), list(expected[~rare])
    if expected[rare].sum() >= least:
        observed.append(counts[rare].sum())
        wanted.append(expected[rare].sum())
    else:
        wanted = list(np.array(wanted) * sum(observed) / sum(wanted))
    return stats.chisquare(observed, wanted).pvalue > 1e-3


@pytest.mark.parametrize("scale", [0.3, 2.0])
def test_draw_has_the_right_distribution(scale):
    probs = np.exp(gaussian(1, V, scale=scale))
    probs[::7] = 0
    n = 20_000
    keys = jax.random.split(jax.random.key(5), n)
    drawn = jax.jit(sampling_filters.draw)(jnp.broadcast_to(probs, (n, V)), keys)
    assert chi_square_fits(np.bincount(drawn, minlength=V), probs.astype(np.float64))


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        pytest.param({"temperature": 0.6, "top_k": 20}, marks=pytest.mark.slow),
        {"temperature": 1.5, "top_p": 0.8},
        {"temperature": 1.0, "min_p": 0.05, "top_k": 100, "top_p": 0.95},
        pytest.param({"temperature": 2.0, "top_k": 150, "top_p": 0.99}, marks=pytest.mark.slow),
    ],
)
def test_sampled_tokens_follow_the_filtered_distribution(params):
    rows, steps = 32, 400
    logits = gaussian(2, V, scale=2.0)
    state = rows_of(*[params] * rows)
    tokens, _ = roll(state, jnp.broadcast_to(logits, (rows, V)), jnp.arange(rows), steps)
    scaled = (logits - logits.max()) / np.float32(params["temperature"])
    probs = np.exp(scaled)
    kept, _ = kept_bounds(probs, params.get("top_k", 0), params.get("top_p", 1.0), params.get("min_p", 0.0))
    counts = np.bincount(np.ravel(tokens), minlength=V)
    assert chi_square_fits(counts, np.where(kept, probs, 0).astype(np.float64))
    for serial in np.asarray(tokens).T[:4], np.asarray(tokens)[:4]:  # over steps, over seeds: no fixed point
        assert all(len(set(x.tolist())) > 5 for x in serial)


def test_a_token_depends_on_seed_and_step_alone():
    """Not on the row, the rest of the batch, its size, padding, or what else the variant can do."""
    logits = gaussian(3, 6, V)
    params = {"temperature": 1.0, "seed": 1234}
    other = {"temperature": 0.7, "top_k": 5, "top_p": 0.5, "presence_penalty": 1.0, "seed": 9}

    def tokens_of(state, at, rows, variant):
        out = []
        for step in range(6):
            batch = gaussian(77 + step, len(rows), V)
            batch[at] = logits[step]
            tokens, *_, state = jit_sample(batch, state, np.array(rows, np.int32), variant=variant)
            out.append(int(tokens[at]))
        return out

    plain = Variant(filters=False, penalties=False)
    alone = tokens_of(rows_of(params), 0, [0], plain)
    assert len(set(alone)) > 2
    crowd = rows_of(other, other, params, other, {"temperature": 0.0}, rows=9)
    assert tokens_of(crowd, 0, [2], FULL) == alone
    assert tokens_of(crowd, 1, [4, 2, 0], FULL) == alone
    assert tokens_of(crowd, 3, [9, 1, 3, 2, 9, 0, 9, 9], replace(FULL, num_logprobs=3)) == alone
    assert tokens_of(rows_of(params | {"seed": 1235}), 0, [0], plain) != alone


def test_a_seed_draws_the_same_beside_64_bit_numbers():
    given = gaussian(8, 4, V), np.arange(4, dtype=np.int32)
    params = [{"seed": seed, "top_p": 0.9} for seed in range(4)]
    plain, *_ = jax.jit(sample)(given[0], rows_of(*params), given[1])
    with jax.enable_x64(True):
        wide, *_ = jax.jit(sample)(given[0], rows_of(*params), given[1])
    np.testing.assert_array_equal(plain, wide)
    none, *_ = sample(np.zeros((4, V), np.float32), rows_of(*params), given[1])  # of NumPy's, not compiled
    assert none.shape == (4,)


def test_seeds_are_64_bits():
    """A seed beyond 32 bits must not be cut, nor a negative one refused (OpenAI's seed is an int64)."""
    assert seed_key(5).tolist() == [0, 5]
    assert seed_key(-1).tolist() == [2**32 - 1, 2**32 - 1]
    assert seed_key(2**32 + 5).tolist() == [1, 5]
    seeds = [5, -5, 2**32 + 5, 2**63 - 1, -(2**63)]
    state = rows_of(*({"seed": s} for s in seeds))
    tokens, _ = roll(state, jnp.zeros((5, V)), jnp.arange(5), 8)
    assert len({tuple(t) for t in np.asarray(tokens).T.tolist()}) == 5
    with pytest.raises(TypeError):
        row_params(seed=1.5)  # type: ignore[arg-type]


@pytest.mark.parametrize(("logits", "rows"), [((1, V), 2), ((V,), 1), ((2, V + 1), 2)])
def test_logits_of_other_rows(logits, rows):
    with pytest.raises(ValueError, match=r"logits .* expected"):
        jit_sample(np.zeros(logits, np.float32), rows_of({}, {}), np.arange(rows), variant=FULL)


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("at", [0, V - 1, None])
def test_logits_that_are_no_numbers(at, temperature, wrong):
    """Their rows alone have no token, and the state has one that there is."""
    logits = gaussian(3, 3, V)
    logits[1, slice(None) if at is None else at] = wrong
    state = rows_of(*[{"temperature": temperature, "top_k": 5, "presence_penalty": 1.0}] * 3)
    tokens, *_, state = jit_sample(logits, state, np.arange(3), variant=FULL)
    assert (np.asarray(tokens) < 0).tolist() == [False, True, False]
    assert (state.last_token >= 0).all() and (state.last_token < V).all()


def test_greedy_rows_are_the_same_under_every_variant():
    logits = gaussian(4, 5, V)
    greedy = {"temperature": 0.0}
    state = rows_of(
        greedy, {"temperature": 1.0, "top_k": 1}, greedy | {"top_k": 7, "top_p": 0.1}, greedy, greedy
    )
    rows = np.arange(5, dtype=np.int32)
    for variant in (GREEDY, FULL, Variant(filters=False, penalties=False), replace(GREEDY, num_logprobs=0)):
        same = rows if variant in (GREEDY, FULL, replace(GREEDY, num_logprobs=0)) else np.delete(rows, 1)
        tokens, *_ = jit_sample(logits, state, rows, variant=variant)
        np.testing.assert_array_equal(tokens[same], logits.argmax(axis=1)[same])


def test_padding_rows_change_nothing():
    state = rows_of({}, {"presence_penalty": 1.0}, rows=4)
    before = jax.tree.map(np.asarray, state)
    rows = np.array([4, 1, -1], np.int32)
    *_, state = jit_sample(gaussian(8, 3, V), state, rows, variant=FULL)
    assert last_tokens(state, rows).tolist() == [0, int(state.last_token[1]), 0]
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(old[[0, 2, 3]], np.asarray(new)[[0, 2, 3]])
    assert state.num_generated.tolist() == [0, 1, 0, 0]
    after = jax.tree.map(np.asarray, state)
    for row in (4, -1):
        state = set_row(state, row, row_params(seed=3))
        state = mark_output(mark_prompt(state, row, np.arange(5), 5), row, np.arange(5), 5)
    state = mark_prompt(state, 1, np.array([-1, -V]), 2)
    for old, new in zip(jax.tree.leaves(after), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(old, new)


def test_set_row_forgets_the_request_before():
    state = rows_of({"presence_penalty": 1.0, "min_tokens": 9, "stop_ids": (1, 2), "logit_bias": {4: 9}})
    state = mark_prompt(state, 0, np.arange(5), 5)
    _, state = roll(state, jnp.zeros((1, V)), jnp.arange(1), 4)
    state = set_row(state, 0, row_params(seed=0, temperature=0))
    fresh = rows_of({"seed": 0, "temperature": 0})
    for old, new in zip(jax.tree.leaves(fresh), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(old, new)


def test_a_preempted_request_goes_on_as_if_nothing_happened():
    logits = jnp.asarray(gaussian(10, 1, V))
    params = {
        "temperature": 1.0,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.2,
        "top_p": 0.9,
        "seed": 5,
    }
    prompt = np.arange(50, dtype=np.int32)
    state = mark_prompt(rows_of(params), 0, prompt, 50)
    whole, _ = roll(state, logits, jnp.arange(1), 30)
    first = np.asarray(whole[:12, 0])
    state = rows_of(params | {"num_generated": 12, "last_token": int(first[-1])})
    state = mark_output(mark_prompt(state, 0, prompt, 50), 0, first, 12)
    assert last_tokens(state, jnp.arange(1)).tolist() == [first[-1]]
    rest, _ = roll(state, logits, jnp.arange(1), 18)
    np.testing.assert_array_equal(rest, whole[12:])


def test_variants():
    assert needed_variant(row_params(seed=0, temperature=0, top_p=0.5)) == GREEDY
    plain = Variant(filters=False, penalties=False, biases=False)
    assert needed_variant(row_params(seed=0)) == plain
    assert needed_variant(row_params(seed=0, top_k=-1)) == plain
    assert needed_variant(row_params(seed=0, min_p=0.1), 2) == replace(plain, filters=True, num_logprobs=2)
    biased = replace(plain, biases=True)
    assert needed_variant(row_params(seed=0, logit_bias={3: 1.0})) == biased
    assert needed_variant(row_params(seed=0, min_tokens=3, stop_ids=(1,))) == biased
    assert needed_variant(row_params(seed=0, min_tokens=3, stop_ids=(1,), num_generated=3)) == plain
    assert needed_variant(row_params(seed=0, temperature=0, repetition_penalty=1.1)) == replace(
        GREEDY, penalties=True
    )
    assert replace(GREEDY, num_logprobs=0) | FULL == replace(FULL, num_logprobs=0)
    assert FULL | GREEDY == FULL


def test_state_is_updated_in_place():
    """At 256 rows of a vocabulary of 256K a copy of the state would cost 128 MiB of traffic for every token."""
    rows, lots = 64, 50_000
    state = init_sampler(rows, lots)
    compiled = jax.jit(sample, donate_argnums=1).lower(jnp.zeros((2, lots)), state, jnp.arange(2)).compile()
    assert compiled.memory_analysis().alias_size_in_bytes >= state.seen.nbytes
    assert compiled.memory_analysis().temp_size_in_bytes < rows * lots


@pytest.mark.parametrize("top_k", [1, 63, 64, 65, 66, 199, 200, 0])
def test_as_many_tokens_are_kept_as_top_k_says_also_where_a_search_begins(top_k):
    """64 are looked at before it; for one more nothing would be left out, if that were not searched for."""
    probs = jnp.arange(200, 0, -1, dtype=jnp.float32)[None] / 200
    lowest = jit_threshold(probs, jnp.array([top_k]), jnp.ones(1), jnp.zeros(1))
    assert int((probs >= lowest[:, None]).sum()) == (top_k or 200)


def test_top_p_ends_with_the_token_that_reaches_it():
    probs = jnp.array([[1.0, 0.5, 0.25, 0.25]])
    for top_p, kept in ((0.5, 1), (0.51, 2), (0.75, 2), (0.76, 4)):
        lowest = jit_threshold(probs, jnp.zeros(1, jnp.int32), jnp.array([top_p]), jnp.zeros(1))
        assert int((probs >= lowest[:, None]).sum()) == kept
