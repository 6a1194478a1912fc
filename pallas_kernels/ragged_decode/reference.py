"""Ragged decode attention in plain XLA: any backend, any shape; the definition that the kernels are held to."""

import jax
import jax.numpy as jnp

from pallas_kernels import byte_pages
from pallas_kernels.ragged_decode.plan import HEAD_COLUMN, HEAD_LENGTH, HEAD_OFFSET, HEAD_SKIP, DecodePlan
from pallas_kernels.ragged_decode.tokens import by_request, by_token


def ragged_decode_reference(
    q: jax.Array,
    pool: jax.Array,
    plan: DecodePlan,
    *,
    scale: float,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    has_new: bool = False,
    tokens: int = 1,
    out_dtype: jax.typing.DTypeLike | None = None,
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.ragged_decode.ragged_decode`; float32 arithmetic."""
    out_dtype = q.dtype if out_dtype is None else out_dtype
    q = by_request(q, tokens)
    batch, kv_heads, _, held, head_dim = q.shape
    group = held - 2 * has_new
    q, new = (x.astype(jnp.float32) for x in (q[..., :group, :], q[..., group:, :]))
    page = byte_pages.page_size(pool)
    heads = plan.of_layer("heads").reshape(batch, kv_heads, -1)
    length, offset, column = heads[..., HEAD_LENGTH], heads[..., HEAD_OFFSET], heads[..., HEAD_COLUMN]
    flat = plan.table.reshape(-1)
    num_pages = plan.table.shape[-1]  # what one head may hold at most
    at = jnp.arange(num_pages)
    pages = jnp.take(flat, jnp.minimum(offset[..., None] + at, flat.size - 1))  # [B, K, pages]
    pages = jnp.where(at < -(-length[..., None] // page), pages, 0)
    kv = byte_pages.entries(pool[pages, :, column[..., None]], jnp.float32)  # [B, K, pages, 2, P, D]
    kv = jnp.moveaxis(kv, 3, 0).reshape(2, batch, kv_heads, num_pages * page, head_dim)
    entry = jnp.arange(num_pages * page)
    visible = (entry < length[..., None]) & (entry >= heads[..., HEAD_SKIP, None])
    keys, values = kv[0], jnp.where(visible[..., None], kv[1], 0.0)
    visible = jnp.broadcast_to(visible[:, :, None], (batch, kv_heads, tokens, len(entry)))
    if has_new:
        keys = jnp.concatenate([keys, new[..., 0, :]], axis=2)
        values = jnp.concatenate([values, new[..., 1, :]], axis=2)
        causal = jnp.broadcast_to(jnp.tri(tokens, dtype=bool), (batch, kv_heads, tokens, tokens))
        visible = jnp.concatenate([visible, causal], axis=3)
    logits = jnp.einsum("bksgd,bktd->bksgt", q, keys, precision="highest") * scale
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    logits = jnp.where(visible[:, :, :, None], logits, -jnp.inf)
    if sinks is not None:
        sink = sinks.astype(jnp.float32)[None, :, None, :, None]
        sink = jnp.broadcast_to(sink, (*logits.shape[:4], 1))
        logits = jnp.concatenate([logits, sink], axis=-1)
        values = jnp.pad(values, ((0, 0), (0, 0), (0, 1), (0, 0)))
    lse = jax.nn.logsumexp(logits, axis=-1)
    weights = jnp.exp(logits - jnp.where(jnp.isneginf(lse), 0.0, lse)[..., None])
    out = jnp.einsum("bksgt,bktd->bksgd", weights, values, precision="highest")
    return by_token(out.astype(out_dtype)), by_token(lse)
