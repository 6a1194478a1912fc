"""Chunk attention without a kernel of ours: compositions around cuDNN, for the benchmark of the kernel to compare with."""

import jax
import jax.numpy as jnp
import numpy as np

from tangram_jax import gpu_attention
from tangram_jax.gpu_attention import MaskType, cudnn_attention
from tangram_jax.pages import LayerPages


def causal(q: jax.Array, k: jax.Array, v: jax.Array, scale: float, requests: int = 1) -> jax.Array:
    """Dense causal attention of each request's chunk by cuDNN alone: q [T, K, G, D] -> the same."""
    rows = [x.reshape(requests, -1, *x.shape[1:]) for x in (_all_heads(q), k, v)]
    out = cudnn_attention(rows[0], rows[1], rows[2], scale=scale, mask_type=MaskType.CAUSAL)
    return jnp.asarray(out).reshape(q.shape)


def _all_heads(q: jax.Array) -> jax.Array:
    """[T, K * G, D]"""
    return q.reshape(len(q), -1, q.shape[-1])


def one_gather(
    q: jax.Array, k: jax.Array, v: jax.Array, pages: LayerPages, scale: float, most: int
) -> tuple[jax.Array, jax.Array]:
    """History gathered at once, in its own dtype, each KV head a row of cuDNN's batch; merged by log-sum-exp.

    q [T, K, G, D], k and v [T, K, D], the chunks of as many requests as `pages` has, of equal size; `most`: pages of the
    longest head, 0 if there is no history. Returns out in q's dtype, and lse f32[T, K, G].
    """
    batch, width = pages.table.shape
    heads, group, head_dim = q.shape[1:]
    tokens = len(q) // batch
    out, lse = cudnn_attention(
        _all_heads(q).reshape(batch, tokens, heads * group, head_dim),
        k.reshape(batch, tokens, heads, head_dim),
        v.reshape(batch, tokens, heads, head_dim),
        scale=scale,
        mask_type=MaskType.CAUSAL,
        return_residual=True,
    )
    own = (
        out.reshape(q.shape),
        lse.reshape(batch, heads, group, tokens).transpose(0, 3, 1, 2).reshape(q.shape[:-1]),
    )
    if not most:
        return own
    at = jnp.minimum(pages.first[:, None] + np.arange(most), width - 1)
    keys, values = (
        x.reshape(batch * heads, most * pages.page_size, 1, head_dim)
        for x in pages.gather(pages.table[:, at], pages.column[:, None], q.dtype)
    )
    by_head = q.reshape(batch, tokens, heads, group, head_dim).swapaxes(1, 2)
    out, lse = cudnn_attention(
        by_head.reshape(batch * heads, tokens, group, head_dim),
        keys,
        values,
        q_seqlen=jnp.full(batch * heads, tokens, jnp.int32),
        kv_seqlen=pages.lengths.reshape(-1),
        scale=scale,
        mask_type=MaskType.PADDING,
        return_residual=True,
    )
    out = out.reshape(batch, heads, tokens, group, head_dim).swapaxes(1, 2).reshape(q.shape)
    lse = lse.reshape(batch, heads, group, tokens).transpose(0, 3, 1, 2).reshape(q.shape[:-1])
    merged, total = gpu_attention.merge((own[0].astype(jnp.float32), own[1]), (out.astype(jnp.float32), lse))
    return merged.astype(q.dtype), total


def in_parts(
    q: jax.Array, k: jax.Array, v: jax.Array, pages: LayerPages, scale: float
) -> list[tuple[jax.Array, jax.Array]]:
    """What the engine falls back to, whose memory is bounded: one request after another."""
    parts = []
    for b, chunk in enumerate(np.split(np.arange(len(q)), len(pages.table))):
        of = slice(chunk[0], chunk[-1] + 1)
        own = pages._replace(table=pages.table[b : b + 1], lengths=pages.lengths[b : b + 1])
        parts.append(gpu_attention.chunk_composition(q[of], k[of], v[of], own, scale))
    return parts
