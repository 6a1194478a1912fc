"""Attention sinks: a logit in the softmax that has no value."""

import jax.numpy as jnp
import numpy as np

from models.attention import masked_attention
from models.sinks import with_sinks


def test_sinks_are_an_entry_without_value():
    """Added afterwards, in the softmax, and as one more entry: all the same."""
    rng = np.random.default_rng(0)
    heads, group, tokens, head_dim = 2, 3, 5, 4
    q = rng.standard_normal((tokens, heads * group, head_dim)).astype(np.float32)
    k, v = rng.standard_normal((2, tokens, heads, head_dim)).astype(np.float32)
    sinks = rng.standard_normal((heads, group)).astype(np.float32)
    mask = np.tril(np.ones((tokens, tokens), bool))
    mask[3] = False  # sees the sink alone

    scores = np.einsum("tkgd,skd->tkgs", q.reshape(tokens, heads, group, head_dim), k) * head_dim**-0.5
    scores = np.where(mask[:, None, None], scores, -np.inf)
    given = np.broadcast_to(sinks[..., None], (tokens, heads, group, 1))
    weights = np.exp(np.concatenate([scores, given], axis=-1))
    weights = (weights / weights.sum(-1, keepdims=True))[..., :-1]
    want = np.einsum("tkgs,skd->tkgd", weights, v).reshape(q.shape)

    got = masked_attention(*map(jnp.asarray, (q, k, v, mask)), sinks=jnp.asarray(sinks))
    np.testing.assert_allclose(got, want, atol=1e-6)
    seen = np.delete(np.arange(tokens), 3)  # without sinks nothing comes of nothing
    without = masked_attention(*map(jnp.asarray, (q[seen], k, v, mask[seen])))
    lse = np.log(np.exp(scores[seen]).sum(-1))
    out, total = with_sinks(without.reshape(-1, heads, group, head_dim), jnp.asarray(lse), jnp.asarray(sinks))
    np.testing.assert_allclose(out.reshape(-1, heads * group, head_dim), want[seen], atol=1e-6)
    np.testing.assert_allclose(total, np.log(np.exp(lse) + np.exp(sinks)), atol=1e-6)
