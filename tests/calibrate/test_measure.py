"""Kept shares of one sample against a plain NumPy calibration, and the attention that produces the scores."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import calibrate.measure as measure
from calibrate.measure import calibrate_ratios, causal_attention_with_lse
from models.attention import dense_attend
from models.logits import AttentionLogits
from models.testing import random_params, tiny_config, tiny_gemma2_config, tiny_gpt_oss_config
from models.transformer import forward
from tangram_jax.scorers import ExpectedAttention, SnapKV, get_scorer

CONFIG = tiny_config()
PARAMS = random_params(CONFIG, 1)
METHODS = ("snapkv", "kv_compress", "expected_attention", "keydiff", "streaming_llm")


def tokens(count, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(8, 264, count), jnp.int32)


def logits_by_hand(q, k, logits):
    """[n, N, n] in float64, masked."""
    q, k = (np.asarray(x, np.float64) for x in (q, k))
    scores = np.einsum("tnd,snd->tns", q, np.repeat(k, q.shape[1] // k.shape[1], axis=1)) * logits.scale
    if logits.soft_cap is not None:
        scores = logits.soft_cap * np.tanh(scores / logits.soft_cap)
    return np.where(np.tri(len(q), dtype=bool)[:, None], scores, -np.inf)


def attention_by_hand(q, k, v, logits):
    """out[n, N, D] and lse[n, N] in float64."""
    scores = logits_by_hand(q, k, logits)
    lse = np.log(np.exp(scores).sum(axis=-1))
    v = np.repeat(np.asarray(v, np.float64), q.shape[1] // v.shape[1], axis=1)
    return np.einsum("tns,snd->tnd", np.exp(scores - lse[..., None]), v), lse


@pytest.mark.parametrize("soft_cap", [None, 0.5])
@pytest.mark.parametrize("count", [1, 16, 37])
def test_attention_and_log_sum_exp(monkeypatch, count, soft_cap):
    monkeypatch.setattr(measure, "QUERY_BLOCK", 16)  # several blocks, the last one padded
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(count, heads, 16)), jnp.float32) for heads in (8, 4, 4))
    logits = AttentionLogits(0.3, soft_cap)
    out, lse = causal_attention_with_lse.__wrapped__(q, k, v, logits=logits)
    expected_out, expected_lse = attention_by_hand(q, k, v, logits)
    np.testing.assert_allclose(out, expected_out, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5, atol=1e-5)


def snapkv_shares_by_hand(params, config, ids, retention, sinks, window):
    """Section 4.1 with SnapKV, written out; ties as documented: earlier position, then lower head."""

    @jax.jit
    def queries_and_keys(params, ids):
        layers = {}

        def attend(state, layer, q, k, v, sinks=None):
            layers[layer] = (q, k)
            return dense(state, layer, q, k, v, sinks)

        positions = jnp.arange(len(ids))
        dense = dense_attend(positions, config=config)
        forward(params, config, ids, positions, attend, ())
        return layers

    layers = queries_and_keys(params, ids)
    shares = []
    for layer in config.full_layers:
        q, k = layers[layer]
        n, heads = len(q), k.shape[1]
        weights = np.exp(logits_by_hand(q, k, AttentionLogits.of(config)))
        total = weights.sum(-1, keepdims=True)
        if config.attention_sinks:
            total += np.exp(np.asarray(params["layers"][layer]["sinks"], np.float64)).reshape(-1, 1)
        probability = weights / total
        mean = probability[-32:].mean(axis=0).reshape(heads, config.group_size, n).mean(axis=1)
        scores = np.stack([mean[:, max(0, c - 3) : c + 4].max(axis=1) for c in range(n)], axis=1)
        candidates = n - sinks - window
        ranked = sorted(
            (-scores[head, c], c, head) for head in range(heads) for c in range(sinks, n - window)
        )
        kept = [head for _, _, head in ranked[: int(np.ceil(retention * heads * candidates))]]
        shares.append(np.bincount(kept, minlength=heads) / candidates)
    return np.array(shares)


@pytest.mark.parametrize(
    ("config", "count", "retention"),
    [
        pytest.param(CONFIG, 100, 0.5, marks=pytest.mark.slow),
        (CONFIG, 64, 0.25),
        (tiny_gemma2_config(), 100, 0.5),
        (tiny_gpt_oss_config(), 100, 0.4),
    ],
    ids=["100", "64", "gemma2", "gpt-oss"],
)
def test_shares_equal_a_calibration_by_hand(config, count, retention):
    ids, params = tokens(count), PARAMS if config is CONFIG else random_params(config, 1)
    shares = calibrate_ratios(params, config, ids, get_scorer("snapkv"), retention)
    expected = snapkv_shares_by_hand(params, config, ids, retention, sinks=4, window=32)
    assert shares.shape == (len(config.full_layers), config.num_kv_heads) and shares.dtype == jnp.float32
    # A near tie may fall the other way in float32: one entry at most.
    np.testing.assert_allclose(shares, expected, atol=1.01 / (count - 36))
    assert np.std(expected) > 0.03  # heads do differ, or the test would show nothing


@pytest.mark.parametrize("method", METHODS)
def test_traceable_and_mean_is_the_retention(method):
    run = jax.jit(partial(calibrate_ratios, config=CONFIG, scorer=get_scorer(method), retention=0.3))
    shares = np.asarray(run(PARAMS, tokens=tokens(120)))
    kept = np.ceil(0.3 * CONFIG.num_kv_heads * 84)  # 101 of 336, in every layer
    np.testing.assert_allclose(shares.sum(axis=1) * 84, kept, rtol=1e-5)
    assert (shares >= 0).all() and (shares <= 1).all()


def test_equal_scores_are_shared_fairly():
    """StreamingLLM scores all heads alike: no head may win by its number (ties are broken by position first)."""
    shares = calibrate_ratios(PARAMS, CONFIG, tokens(136), get_scorer("streaming_llm"), 0.5)
    np.testing.assert_array_equal(shares, np.full((CONFIG.num_layers, CONFIG.num_kv_heads), 0.5, np.float32))


def test_retention_one_keeps_everything():
    shares = calibrate_ratios(PARAMS, CONFIG, tokens(50), get_scorer("keydiff"), 1.0)
    np.testing.assert_array_equal(shares, 1.0)


def test_the_ceiling_is_exact():
    """0.07 * 100 is 7.000000000000001 in floating point and must keep 7, not 8."""
    config = tiny_config(num_kv_heads=1, num_heads=2, num_layers=1)
    run = partial(calibrate_ratios, random_params(config), config, tokens(136), get_scorer("snapkv"))
    assert float(run(0.07)[0, 0]) == pytest.approx(0.07)


def test_queries_that_score_are_not_ranked():
    """A window of 64 queries sets 64 positions aside: 100 - 4 - 64 candidates a head are shared out."""
    scorer = get_scorer("kv_compress", window=64)
    shares = np.asarray(calibrate_ratios(PARAMS, CONFIG, tokens(100), scorer, 0.5))
    np.testing.assert_allclose(shares.sum(axis=1) * 32, 0.5 * CONFIG.num_kv_heads * 32, rtol=1e-5)
    wider = calibrate_ratios(PARAMS, CONFIG, tokens(100), scorer, 0.5, window=70)
    assert (np.asarray(wider) != shares).any()


def test_bad_input_is_named():
    with pytest.raises(ValueError, match=r"more than sinks \+ window = 36 tokens, found 36"):
        calibrate_ratios(PARAMS, CONFIG, tokens(36), get_scorer("snapkv"), 0.5)
    with pytest.raises(ValueError, match="retention is the kept fraction"):
        calibrate_ratios(PARAMS, CONFIG, tokens(64), get_scorer("snapkv"), 0.0)


def test_layers_with_a_window_are_not_measured():
    """Their attention is windowed, though: the layers after them see what it gives."""
    config = CONFIG.replace(sliding_window=9, sliding_layers=(0, 2))
    ids = tokens(80)
    shares = calibrate_ratios(PARAMS, config, ids, get_scorer("keydiff"), 0.3)
    assert shares.shape == (2, 4)
    keys = []

    def attend(state, layer, q, k, v):
        keys.append(k)
        return windowed(state, layer, q, k, v)

    windowed = dense_attend(jnp.arange(80), config=config)
    forward(PARAMS, config, ids, jnp.arange(80), attend, ())
    for share, layer in zip(shares, (1, 3), strict=True):
        unit = keys[layer] / jnp.linalg.norm(keys[layer], axis=-1, keepdims=True)
        scores = -(unit * unit.mean(axis=0) / jnp.linalg.norm(unit.mean(axis=0), axis=-1, keepdims=True)).sum(
            -1
        )
        flat = np.asarray(scores[4:-32]).reshape(-1)
        best = np.argsort(-flat, kind="stable")[: int(np.ceil(0.3 * flat.size))]
        want = np.bincount(best % 4, minlength=4) / (80 - 36)
        np.testing.assert_allclose(share, want, atol=0.03)


def test_scores_that_are_infinite_have_no_shares():
    """They came out equal, and a profile of them looked like any other."""
    scorer = ExpectedAttention(eps=3e38)
    assert np.isnan(calibrate_ratios(PARAMS, CONFIG, tokens(64), scorer, 0.3)).any()


def test_a_model_whose_layers_all_have_a_window_is_named():
    config = tiny_config(sliding_window=9, sliding_layers=(0, 1, 2, 3))
    with pytest.raises(ValueError, match="all layers of tiny have a sliding window: nothing of them is comp"):
        calibrate_ratios(PARAMS, config, tokens(64), SnapKV(), 0.3)


def test_a_list_of_tokens_is_a_sample():
    sample = tokens(60)
    shares = calibrate_ratios(PARAMS, CONFIG, sample.tolist(), get_scorer("snapkv"), 0.5)
    np.testing.assert_array_equal(shares, calibrate_ratios(PARAMS, CONFIG, sample, get_scorer("snapkv"), 0.5))


@pytest.mark.parametrize(
    ("wrong", "kind", "message"),
    [
        (
            {"tokens": np.full((2, 60), 9)},
            ValueError,
            r"tokens \[2, 60\] of a sample: expected \[n\], so run",
        ),
        ({"tokens": np.full(60, 9.5)}, TypeError, "tokens are whole numbers, got float"),
        ({"scorer": "snapkv"}, TypeError, r"'snapkv' is no scorer: write one as tangram_jax\.get_scorer"),
        ({"scorer": SnapKV}, TypeError, r"SnapKV'> is no scorer: write one as tangram_jax\.get_scorer"),
        ({"config": tiny_config(num_layers=2)}, ValueError, "not those of model tiny: 4 layers, expected 2"),
    ],
    ids=["batch", "fractions", "name", "class", "model"],
)
def test_what_is_no_sample_scorer_or_model(wrong, kind, message):
    given = {"config": CONFIG, "tokens": tokens(60), "scorer": get_scorer("snapkv"), "retention": 0.5}
    with pytest.raises(kind, match=message):
        calibrate_ratios(PARAMS, **given | wrong)
