"""Attention in XLA operations over pages in any order, soft caps and sinks included, against NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.logits import AttentionLogits
from tangram_jax.attention import chunk_attention, decode_attention, window_attention
from tangram_jax.pages import LayerPages

K, G, D, PAGE = 4, 2, 8, 4
GROUP_OF, COLUMN_OF = np.array([0, 1, 1, 0]), np.array([1, 0, 1, 0], np.int32)
PAGES_OF_A_GROUP = 40
LOGITS = [AttentionLogits(0.4), AttentionLogits(0.4, 0.8)]
label = "cap {0.soft_cap}".format
rng = np.random.default_rng(0)


def draw(*shape):
    return rng.normal(size=shape).astype(np.float32)


def make_pages(lengths, skip=None):
    """(pages of the requests whose two groups hold so many entries, keys and values of each request and head)"""
    lengths = np.asarray(lengths, np.int32)
    count = lengths.shape[0] * 2 * PAGES_OF_A_GROUP
    table = rng.permutation(count).astype(np.int32).reshape(lengths.shape[0], -1)
    pool, first = 2 * draw(count, 2, 2, PAGE, D), (GROUP_OF * PAGES_OF_A_GROUP).astype(np.int32)
    pages = LayerPages(
        jnp.asarray(pool), jnp.asarray(table), jnp.asarray(lengths[:, GROUP_OF]), first, COLUMN_OF,
        None if skip is None else jnp.asarray(skip, jnp.int32),
    )  # fmt: skip
    held = [
        [
            pool[row[start : start + PAGES_OF_A_GROUP], :, column]
            .swapaxes(0, 1)
            .reshape(2, -1, D)[:, front:length]
            for start, column, length in zip(first, COLUMN_OF, lengths[b, GROUP_OF], strict=True)
        ]
        for b, (row, front) in enumerate(zip(table, skip or [0] * len(table), strict=True))
    ]
    return pages, held


def attended(q, keys, values, logits, sink=None):
    """(out [D], log-sum-exp) of one query, in float64."""
    x = np.asarray(keys, np.float64) @ q * logits.scale
    if logits.soft_cap is not None:
        x = logits.soft_cap * np.tanh(x / logits.soft_cap)
    lse = np.log(np.exp(np.append(x, [] if sink is None else sink)).sum())
    return np.exp(x - lse) @ values, lse


@pytest.mark.parametrize("with_sinks", [False, True], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("logits", LOGITS, ids=label)
def test_decode(logits, with_sinks):
    """Groups of one entry and of several blocks, a request that holds nothing, one whose window begins later."""
    pages, held = make_pages([[30, 150], [0, 0], [1, 77], [9, 8]], skip=[0, 0, 0, 5])
    qkv, sinks = draw(4, K, G + 2, D), draw(K, G)
    got = decode_attention(qkv, pages, logits, jnp.asarray(sinks) if with_sinks else None)
    for b, k, g in np.ndindex(4, K, G):
        keys, values = np.concatenate([held[b][k], qkv[b, k, -2:, None]], axis=1)
        want, _ = attended(qkv[b, k, g], keys, values, logits, sinks[k, g] if with_sinks else None)
        np.testing.assert_allclose(got[b, k, g], want, atol=2e-5)


@pytest.mark.parametrize("logits", LOGITS, ids=label)
def test_decode_of_several_tokens(logits):
    """Each sees the entries, the new tokens before it, and itself."""
    pages, held = make_pages([[30, 150], [0, 0], [9, 8]], skip=[0, 0, 5])
    qkv, sinks = draw(3, 4, K, G + 2, D), draw(K, G)
    flat = qkv.reshape(12, K, G + 2, D)
    got = decode_attention(flat, pages, logits, jnp.asarray(sinks), tokens=4).reshape(3, 4, K, G, D)
    for b, s, k, g in np.ndindex(3, 4, K, G):
        new = qkv[b, : s + 1, k, -2:].swapaxes(0, 1)
        keys, values = np.concatenate([held[b][k], new], axis=1)
        want, _ = attended(qkv[b, s, k, g], keys, values, logits, sinks[k, g])
        np.testing.assert_allclose(got[b, s, k, g], want, atol=2e-5)


@pytest.mark.parametrize("logits", LOGITS, ids=label)
def test_chunk(logits, monkeypatch):
    monkeypatch.setattr("tangram_jax.attention.QUERY_BLOCK", 8)  # several blocks
    pages, held = make_pages([[13, 150]])
    q, (k, v) = draw(19, K, G, D), draw(2, 19, K, D)
    out, lse = chunk_attention(q, k, v, pages, logits)
    for t, h, g in np.ndindex(19, K, G):
        keys, values = (
            np.concatenate([old, new[: t + 1, h]]) for old, new in zip(held[0][h], (k, v), strict=True)
        )
        want, total = attended(q[t, h, g], keys, values, logits)
        np.testing.assert_allclose(out[t, h, g], want, atol=2e-5)
        np.testing.assert_allclose(lse[t, h, g], total, atol=2e-5)


@pytest.mark.parametrize("behind", [0, 3, 6])
@pytest.mark.parametrize("logits", LOGITS, ids=label)
def test_window(logits, behind, monkeypatch):
    monkeypatch.setattr("tangram_jax.attention.QUERY_BLOCK", 8)
    window = 7
    q, (k, v) = draw(19, K, G, D), draw(2, window - 1 + 19, K, D)
    out, lse = window_attention(q, k, v, jnp.int32(behind), window, logits)
    for t, h, g in np.ndindex(19, K, G):
        seen = slice(max(behind + t - window + 1, 0), behind + t + 1)
        want, total = attended(q[t, h, g], k[seen, h], v[seen, h], logits)
        np.testing.assert_allclose(out[t, h, g], want, atol=2e-5)
        np.testing.assert_allclose(lse[t, h, g], total, atol=2e-5)


decode = jax.jit(decode_attention, static_argnums=2)


@settings(max_examples=25)
@given(st.integers(0, 40), st.integers(0, 40), st.floats(0.1, 1e4))
def test_a_cap_bounds_the_weight_of_an_entry(first, second, size):
    """However large keys and queries are, no entry has more than exp(2 cap) times the weight of another."""
    cap = 0.25
    pages, held = make_pages([[first, second]])
    qkv = draw(1, K, G + 2, D) * np.float32(size)
    values = np.array([[np.eye(D)[0]]], np.float32)
    qkv[:, :, -1] = values  # the new entry alone has this value
    pool = pages.pool.at[:, 1].set(0)
    share = decode(qkv, pages._replace(pool=pool), AttentionLogits(0.4, cap))[0, :, :, 0]
    count = np.array([[head.shape[1]] for head in held[0]])
    assert (share > 1 / (1 + count * np.exp(2 * cap)) - 1e-6).all()
    assert (share < 1 / (1 + count * np.exp(-2 * cap)) + 1e-6).all()
