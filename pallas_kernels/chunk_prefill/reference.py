"""Chunk prefill attention in plain XLA: any backend, any shape; the definition that the kernel is held to."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import byte_pages
from pallas_kernels.chunk_prefill.plan import ChunkPlan


def chunk_prefill_reference(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pool: jax.Array,
    plan: ChunkPlan,
    *,
    scale: float,
    soft_cap: float | None = None,
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.chunk_prefill.chunk_prefill`; float32 arithmetic, [B, K, T, G, S] scores in memory.

    Rows of no request give 0 and -inf.
    """
    tokens = q.shape[0]
    page = byte_pages.page_size(pool)
    length, offset, column = (plan.of_layer("heads")[..., c] for c in range(3))
    batch, heads = length.shape
    num_pages = plan.table.size // batch  # what one head may hold at most
    at = jnp.arange(num_pages)
    pages = plan.table[jnp.minimum(offset[..., None] + at, plan.table.size - 1)]  # [B, K, pages]
    pages = jnp.where(at < -(-length[..., None] // page), pages, 0)
    kv = byte_pages.entries(pool[pages, :, column[..., None]], jnp.float32)  # [B, K, pages, 2, P, D]
    kv = jnp.moveaxis(kv, 3, 0).reshape(2, batch, heads, num_pages * page, -1)
    q32, k32, v32 = (x.astype(jnp.float32) for x in (q, k, v))
    row, key = np.arange(tokens), np.arange(len(k))
    starts, sizes, behind, key_starts = (
        x[:, None] for x in (plan.starts, plan.sizes, plan.behind, plan.key_starts)
    )
    inside = (row >= starts) & (row < starts + sizes)  # [B, T]
    own = (key >= key_starts) & (key < key_starts + behind + sizes)  # [B, keys]
    distance = (row - starts + behind)[:, :, None] - (key - key_starts)[:, None]
    seen = distance >= 0
    if plan.window is not None:
        seen &= distance < plan.window
    chunk_mask = jnp.asarray(inside[:, :, None] & own[:, None, :] & seen)  # [B, T, keys]
    history_mask = (jnp.arange(num_pages * page) < length[..., None])[:, :, None] & inside[:, None, :, None]

    def logits(keys: jax.Array, mask: jax.Array) -> jax.Array:
        """[B, K, S, D], [B, K, T, S] -> [B, T, K, G, S]"""
        x = jnp.einsum("tkgd,bksd->btkgs", q32, keys, precision="highest") * scale
        if soft_cap is not None:
            x = soft_cap * jnp.tanh(x / soft_cap)
        return jnp.where(mask.swapaxes(1, 2)[:, :, :, None], x, -jnp.inf)

    own_mask = jnp.broadcast_to(chunk_mask[:, None], (batch, heads, tokens, len(k)))
    own_keys, own_values = (
        jnp.broadcast_to(x.swapaxes(0, 1), (batch, heads, len(k), x.shape[-1])) for x in (k32, v32)
    )
    x = jnp.concatenate([logits(kv[0], history_mask), logits(own_keys, own_mask)], axis=-1)
    lse = jax.nn.logsumexp(x, axis=-1)  # [B, T, K, G]; -inf where the row is not the request's
    weights = jnp.exp(x - jnp.where(jnp.isneginf(lse), 0.0, lse)[..., None])
    values = jnp.concatenate([kv[1], own_values], axis=2)
    out = jnp.einsum("btkgs,bksd->tkgd", weights, values, precision="highest")
    return out.astype(q.dtype), lse.max(0)
