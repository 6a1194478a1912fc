"""Each scorer against a plain float64 NumPy implementation, with padding, tails, GQA, and its invariants.

The references loop over heads, queries and candidates, as the scorers' docstrings word the formulas.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import gaussian
from tangram_jax.scorers import (
    ExpectedAttention,
    KeyDiff,
    KVCompress,
    ScoreInputs,
    SnapKV,
    StreamingLLM,
    get_scorer,
)
from tests.one_program import in_one

D = 16
INV_FREQ = (100_000.0 ** (-np.arange(0, D, 2) / D)).astype(np.float32)
SCALE = 0.31  # not 1/sqrt(D): the scale must be taken from the inputs
ALL = [
    SnapKV(),
    KVCompress(),
    SnapKV(window=5, pool=3),
    ExpectedAttention(future=40),
    KeyDiff(),
    StreamingLLM(),
]

# chunk rows, valid rows, tail entries, KV heads, group size, first position of the chunk
CASES = {
    "first chunk": (48, 48, 0, 2, 3, 0),
    "tail and padding": (48, 41, 20, 3, 2, 300),
    "chunk shorter than the window": (48, 7, 36, 1, 4, 77),
    "one token": (16, 1, 12, 2, 1, 1000),
    "within the sinks": (16, 3, 0, 2, 2, 0),
}


def rotate(x, position):
    """RoPE, half-split, of x[..., D] at one position, in float64."""
    angle = position * INV_FREQ.astype(np.float64)
    first, second = x[..., : D // 2], x[..., D // 2 :]
    return np.concatenate(
        [first * np.cos(angle) - second * np.sin(angle), second * np.cos(angle) + first * np.sin(angle)],
        axis=-1,
    )


def capped(logits, cap):
    return logits if cap is None else cap * np.tanh(logits / cap)


def make_inputs(case, seed=0, soft_cap=None) -> ScoreInputs:
    """Random inputs; `lse` counts a made-up history, and heads differ in how many tail entries they have."""
    rows, num_valid, tail, kv_heads, group, start = CASES[case]
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(rows, kv_heads * group, D)) + rng.normal(size=(1, kv_heads * group, D))
    q = np.stack([rotate(row, start + t) for t, row in enumerate(q)])
    k = rng.normal(size=(kv_heads, tail + rows, D)) + rng.normal(size=(kv_heads, 1, D))
    v = rng.normal(size=(kv_heads, tail + rows, D))
    positions = start - tail + np.arange(tail + rows)
    valid = np.broadcast_to(
        (positions >= 0) & (positions < start + num_valid), (kv_heads, tail + rows)
    ).copy()
    for head in range(kv_heads):
        valid[head, : min(tail, 3 * head)] = False
    lse = np.zeros((rows, kv_heads * group))
    for t in range(rows):
        for n in range(kv_heads * group):
            seen = valid[n // group] & (positions <= start + t)
            logits = capped(k[n // group][seen] @ q[t, n] * SCALE, soft_cap)
            logits = np.append(logits, [0.3, 1.1])  # an entry of history and an attention sink
            lse[t, n] = np.log(np.exp(logits).sum())
    return ScoreInputs(
        q=jnp.asarray(q, jnp.float32),
        q_positions=jnp.asarray(start + np.arange(rows), jnp.int32),
        num_valid=jnp.int32(num_valid),
        lse=jnp.asarray(lse, jnp.float32),
        k=jnp.asarray(k, jnp.float32),
        v=jnp.asarray(v, jnp.float32),
        positions=jnp.asarray(positions, jnp.int32),
        valid=jnp.asarray(valid),
        inv_freq=jnp.asarray(INV_FREQ),
        scale=SCALE,
        soft_cap=soft_cap,
    )


def as_float64(x: ScoreInputs):
    return [np.asarray(a, np.float64) for a in (x.q, x.lse, x.k, x.v)]


def window_reference(x: ScoreInputs, window: int, pool: int, *, squared: bool) -> np.ndarray:
    """SnapKV: mean over the window, mean over G. KV-Compress: sums of squares. Then both take a max over neighbours."""
    q, lse, k, _ = as_float64(x)
    positions, valid, num_valid = np.asarray(x.positions), np.asarray(x.valid), int(x.num_valid)
    q_positions = np.asarray(x.q_positions)
    kv_heads, count = k.shape[:2]
    group = q.shape[1] // kv_heads
    scores = np.full((kv_heads, count), -np.inf)
    queries = range(max(0, num_valid - window), num_valid)
    for head in range(kv_heads):
        attention = np.zeros((group, count))
        for g in range(group):
            for t in queries:
                for c in np.flatnonzero(valid[head]):
                    if positions[c] <= q_positions[t]:
                        logit = capped(SCALE * q[t, head * group + g] @ k[head, c], x.soft_cap)
                        probability = np.exp(logit - lse[t, head * group + g])
                        attention[g, c] += probability**2 if squared else probability / len(queries)
        mean = attention.sum(axis=0) if squared else attention.mean(axis=0)
        for c in np.flatnonzero(valid[head]):
            near = range(max(0, c - pool // 2), min(count, c + pool // 2 + 1))
            scores[head, c] = max(mean[i] for i in near if valid[head, i])
    return scores


def expected_attention_reference(x: ScoreInputs, future: int, eps: float, skip: int) -> np.ndarray:
    q, _, k, v = as_float64(x)
    valid, num_valid, positions = np.asarray(x.valid), int(x.num_valid), np.asarray(x.q_positions)
    counted = np.asarray(x.positions) >= skip
    kv_heads, count = k.shape[:2]
    group = q.shape[1] // kv_heads
    used = [t for t in range(num_valid) if positions[t] >= skip]
    start = positions[num_valid - 1] + 1
    # Columns of the averaged rotation are the averaged images of the unit vectors.
    rotation = np.mean([rotate(np.eye(D), p).T for p in range(start, start + future)], axis=0)
    scores = np.full((kv_heads, count), -np.inf)
    for head in range(kv_heads):
        kept = np.flatnonzero(valid[head])
        probability = np.zeros(len(kept))
        for g in range(group):
            bare = np.array([rotate(q[t, head * group + g], -positions[t]) for t in used]).reshape(
                len(used), D
            )
            mean, covariance = np.zeros(D), np.zeros((D, D))
            if used:
                mean = bare.mean(axis=0)
                covariance = (bare - mean).T @ (bare - mean) / len(used)
            mean, covariance = rotation @ mean, rotation @ covariance @ rotation.T
            z = np.array(
                [
                    SCALE * mean @ k[head, c] + SCALE**2 * k[head, c] @ covariance @ k[head, c] / 2
                    for c in kept
                ]
            )
            z = capped(z, x.soft_cap)
            weight = np.exp(z - z.max()) * counted[kept]
            probability += weight / max(weight.sum(), 1e-30) / group
        scores[head, kept] = (probability + eps) * np.linalg.norm(v[head, kept], axis=-1)
    return scores


def keydiff_reference(x: ScoreInputs) -> np.ndarray:
    _, _, k, _ = as_float64(x)
    scores = np.full(k.shape[:2], -np.inf)
    for head, valid in enumerate(np.asarray(x.valid)):
        keys = k[head, valid]
        anchor = (keys / np.linalg.norm(keys, axis=1, keepdims=True)).mean(axis=0)
        scores[head, valid] = -(keys @ anchor) / np.linalg.norm(keys, axis=1) / np.linalg.norm(anchor)
    return scores


def streaming_reference(x: ScoreInputs) -> np.ndarray:
    positions = np.asarray(x.positions, np.float64)
    return np.where(np.asarray(x.valid), positions - positions[-1], -np.inf)


def reference(scorer, x):
    match scorer:
        case SnapKV():
            return window_reference(x, scorer.window, scorer.pool, squared=False)
        case KVCompress():
            return window_reference(x, scorer.window, scorer.pool, squared=True)
        case ExpectedAttention():
            return expected_attention_reference(x, scorer.future, scorer.eps, scorer.skip)
        case KeyDiff():
            return keydiff_reference(x)
        case StreamingLLM():
            return streaming_reference(x)


@functools.partial(jax.jit, static_argnums=0)
def score(scorer, x):
    return scorer.score(x)


def label(scorer) -> str:
    return scorer.name + ("" if scorer in (get_scorer(scorer.name),) else "-options")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("scorer", ALL, ids=label)
def test_scores_equal_the_reference(scorer, case):
    x = make_inputs(case)
    scores = score(scorer, x)
    assert scores.shape == x.valid.shape and scores.dtype == jnp.float32
    np.testing.assert_allclose(scores, reference(scorer, x), rtol=2e-4, atol=1e-6)


@pytest.mark.parametrize("case", ["tail and padding", "chunk shorter than the window"])
@pytest.mark.parametrize("scorer", [SnapKV(), KVCompress(), ExpectedAttention(future=40)], ids=label)
def test_scores_of_capped_logits(scorer, case):
    x = make_inputs(case, soft_cap=0.7)
    scores = np.asarray(score(scorer, x))
    np.testing.assert_allclose(scores, reference(scorer, x), rtol=2e-4, atol=1e-6)
    # Guards against a cap that changes nothing, and one that is left out of either side of s - lse.
    assert np.nanmax(np.abs(scores - score(scorer, dataclasses.replace(x, soft_cap=None)))) > 1e-3


@settings(max_examples=60)
@given(
    st.floats(1.0, 60.0),
    st.floats(-2.0, 2.0),
    st.floats(0.001, 0.5),
)
def test_expected_attention_bounds_what_capped_logits_are_expected_to_be(cap, mean, spread):
    """ln E exp(capped logit), summed up over a fine grid, is what z is for; mean and spread in units of the cap."""
    mean, spread = mean * cap, spread * cap
    logit = mean + np.linspace(-12, 12 + spread, 20_001) * spread
    terms = capped(logit, cap) - np.square((logit - mean) / spread) / 2
    want = np.log(np.exp(terms - terms.max()).mean() * (logit[-1] - logit[0]) / spread) + terms.max()
    want -= np.log(2 * np.pi) / 2
    z = capped(mean + spread**2 / 2, cap)
    assert want < z + 0.1  # the bend is hollow between -2 and 0: Jensen's inequality is off by that at most
    if spread < 0.1:
        assert want > z - 0.01 * cap


@pytest.mark.parametrize("scorer", ALL, ids=label)
def test_padding_has_no_influence(scorer):
    """Guards against padding rows leaking into window, statistics, anchor or pooling."""
    x = make_inputs("tail and padding")
    rows, hidden = jnp.arange(x.q.shape[0]) >= x.num_valid, ~x.valid[..., None]
    other = dataclasses.replace(
        x,
        q=jnp.where(rows[:, None, None], 1e4, x.q),
        lse=jnp.where(rows[:, None], -1e4, x.lse),
        k=jnp.where(hidden, 1e4, x.k),
        v=jnp.where(hidden, 1e4, x.v),
    )
    np.testing.assert_array_equal(score(scorer, other), score(scorer, x))


@pytest.mark.parametrize("scorer", ALL, ids=label)
def test_a_head_without_candidates_has_no_nan(scorer):
    x = make_inputs("tail and padding")
    x = dataclasses.replace(x, valid=x.valid.at[0].set(False), num_valid=jnp.int32(0))
    scores = np.asarray(score(scorer, x))
    assert (scores[0] == -np.inf).all()
    assert np.isfinite(scores[1:][np.asarray(x.valid)[1:]]).all()


@pytest.mark.parametrize("scorer", ALL, ids=label)
def test_zero_keys_have_no_nan(scorer):
    x = make_inputs("first chunk")
    scores = np.asarray(score(scorer, dataclasses.replace(x, k=jnp.zeros_like(x.k), v=jnp.zeros_like(x.v))))
    assert np.isfinite(scores).all()


@pytest.mark.parametrize("scorer", ALL, ids=label)
def test_the_last_query_rows_are_enough(scorer):
    """Callers may hand over only the rows that the scorer says it reads."""
    if scorer.query_rows is None:
        pytest.skip("reads every query")
    x = make_inputs("tail and padding")
    count = max(scorer.query_rows, 1)
    rows = int(x.num_valid) - count + jnp.arange(count)
    part = dataclasses.replace(
        x, q=x.q[rows], q_positions=x.q_positions[rows], lse=x.lse[rows], num_valid=jnp.int32(count)
    )
    np.testing.assert_allclose(score(scorer, part), score(scorer, x), rtol=1e-6)


@pytest.mark.parametrize("scorer", ALL, ids=label)
def test_bfloat16_inputs_and_vmap_over_layers(scorer):
    x = make_inputs("tail and padding")
    half = dataclasses.replace(x, **{n: getattr(x, n).astype(jnp.bfloat16) for n in ("q", "k", "v")})
    full = dataclasses.replace(half, **{n: getattr(half, n).astype(jnp.float32) for n in ("q", "k", "v")})
    # Expected Attention multiplies in the inputs' dtype: its covariance is rounded to 16 bits.
    rtol = 5e-3 if isinstance(scorer, ExpectedAttention) else 1e-3
    np.testing.assert_allclose(score(scorer, half), score(scorer, full), rtol=rtol, atol=1e-5)
    stacked = jax.tree.map(lambda *a: jnp.stack(a), x, make_inputs("tail and padding", seed=1))
    both = in_one(jax.vmap(scorer.score), stacked)
    for layer in range(2):
        alone = score(scorer, make_inputs("tail and padding", seed=layer))
        np.testing.assert_allclose(both[layer], alone, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        *((case, jnp.bfloat16) for case in CASES),
        ("tail and padding", jnp.float16),
        ("one token", jnp.float16),
    ],
)
def test_expected_attention_as_the_kernels_take_it(case, dtype):
    """Turned in one go, not centred before products: no further from float64 than `score` with 16-bit inputs."""
    scorer, x = ExpectedAttention(future=40), make_inputs(case)
    want = reference(scorer, x)
    x = dataclasses.replace(x, q=x.q.astype(dtype), k=x.k.astype(dtype), v=x.v.astype(dtype))
    turns, count = scorer.turns(x.q_positions, x.num_valid, x.inv_freq)
    (kv_heads, size, _), nothing = x.k.shape, jnp.zeros((1, 2, 1, len(x.k), 0, D), dtype)
    behind = size - len(x.q)
    q, turns = jnp.pad(x.q, ((0, behind), (0, 0), (0, 0))), jnp.pad(turns, ((0, behind), (0, 0)))
    z, squares = in_one(
        gaussian.gaussian_logits_reference,
        q, turns[None], count[None], x.k.swapaxes(0, 1), x.v.swapaxes(0, 1), nothing,
        place=np.array([[[0, head] for head in range(kv_heads)]]),
        layer=jnp.int32(0), unlocked=jnp.zeros((1, 1), jnp.int32), scale=x.scale,
        starts=np.array([0]), sizes=np.array([size]),
    )  # fmt: skip
    norms = jnp.sqrt(squares[0])
    scores = in_one(scorer.from_logits, z.reshape(kv_heads, -1, size), norms, x.valid, x.positions)
    np.testing.assert_array_equal(np.isneginf(scores), ~np.asarray(x.valid))
    error, usual = (np.abs(s - want)[np.asarray(x.valid)] for s in (scores, score(scorer, x)))
    assert error.max() < 1.5 * usual.max() + 1e-4


def test_snapkv_order_of_reductions():
    """Mean over G comes before the pool: pooling first would give both positions 0.5 in this example."""
    x = make_inputs("first chunk")
    kv_heads, count = x.k.shape[:2]
    q = jnp.zeros_like(x.q[:1, : kv_heads * 2])
    q = q.at[0, 0, 0].set(1.0).at[0, 1, 1].set(1.0)  # the two query heads of KV head 0 look elsewhere
    k = jnp.zeros_like(x.k).at[0, 10, 0].set(1.0).at[0, 11, 1].set(1.0)
    x = dataclasses.replace(
        x,
        q=q * 200,
        k=k,
        lse=jnp.full((1, kv_heads * 2), 200.0 * SCALE),
        q_positions=jnp.array([count]),
        num_valid=jnp.int32(1),
    )
    scores = np.asarray(score(SnapKV(window=1, pool=3), x))
    np.testing.assert_allclose(scores[0, 8:14], [0, 0.5, 0.5, 0.5, 0.5, 0], atol=1e-6)


def test_unknown_names_and_options():
    assert get_scorer("snapkv", window=16) == SnapKV(window=16)
    assert type(get_scorer("snapkv", window=np.int64(16)).window) is int
    for wrong in (16.0, None, True):
        with pytest.raises(ValueError, match=f"window must be a whole number, found {wrong}"):
            get_scorer("snapkv", window=wrong)
    with pytest.raises(ValueError, match="eps must be a number, found 'x'"):
        get_scorer("expected_attention", eps="x")
    assert get_scorer("expected-attention") == ExpectedAttention()
    assert hash(get_scorer("keydiff")) == hash(KeyDiff())
    with pytest.raises(
        ValueError, match=r"unknown scorer 'h2o', expected one of: snapkv, expected_attention"
    ):
        get_scorer("h2o")
    with pytest.raises(ValueError, match=r"snapkv does not know width; its options are: window, pool"):
        get_scorer("snapkv", width=3)
    with pytest.raises(ValueError, match="it has no options"):
        get_scorer("keydiff", eps=3)
    with pytest.raises(ValueError, match="window must be at least 1"):
        get_scorer("kv_compress", window=0)
    with pytest.raises(ValueError, match="pool must be odd"):
        get_scorer("snapkv", pool=4)
    with pytest.raises(ValueError, match="future must be at least 1"):
        get_scorer("expected_attention", future=0)
    for name, option in (
        ("expected_attention", "future"),
        ("expected_attention", "skip"),
        ("snapkv", "pool"),
    ):
        with pytest.raises(ValueError, match=rf"{option} must be at most 1048576, found 1e\+11"):
            get_scorer(name, **{option: 99999999999})
    with pytest.raises(ValueError, match=r"eps must be at most 3.40\d+e\+38, found 1e\+300"):  # as float32 is
        get_scorer("expected_attention", eps=1e300)


@pytest.mark.parametrize(("name", "want"), [("snapkv", 0.5), ("kv_compress", 2.0)])
def test_what_lies_beside_the_candidates_is_not_pooled(name, want):
    """A kernel may leave anything there: it would make the first and the last candidate the best ones."""
    scorer = get_scorer(name, pool=3)
    sums, valid = jnp.array([[9.0, 1.0, 2.0, 0.5, 9.0]]), jnp.array([[False, True, True, True, False]])
    got = scorer.from_sums(sums, jnp.int32(4), valid)
    np.testing.assert_array_equal(got, [[-np.inf, want, want, want, -np.inf]])
