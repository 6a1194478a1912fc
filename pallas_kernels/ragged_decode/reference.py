"""Ragged decode attention in plain XLA: any backend, any shape; the definition that the kernels are held to."""

import jax
import jax.numpy as jnp

from pallas_kernels import byte_pages
from pallas_kernels.ragged_decode.plan import HEAD_COLUMN, HEAD_LENGTH, HEAD_OFFSET, HEAD_SKIP, DecodePlan


def ragged_decode_reference(
    q: jax.Array,
    pool: jax.Array,
    plan: DecodePlan,
    *,
    scale: float,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    has_new: bool = False,
    out_dtype: jax.typing.DTypeLike | None = None,
    max_length: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.ragged_decode.ragged_decode`; float32 arithmetic.

    `max_length` bounds the entries of one head (by default what a row of the table could hold).
    """
    batch, kv_heads, _, head_dim = q.shape
    q, new = (q[:, :, :-2], q[:, :, -2:].astype(jnp.float32)) if has_new else (q, None)
    page = byte_pages.page_size(pool)
    heads = plan.of_layer("heads").reshape(batch, kv_heads, -1)
    length, offset, column = heads[..., HEAD_LENGTH], heads[..., HEAD_OFFSET], heads[..., HEAD_COLUMN]
    flat = plan.table.reshape(-1)
    entries = plan.table.shape[-1] * page if max_length is None else max_length
    num_pages = -(-entries // page)
    at = jnp.arange(num_pages)
    pages = jnp.take(flat, jnp.minimum(offset[..., None] + at, flat.size - 1))  # [B, K, pages]
    pages = jnp.where(at < -(-length[..., None] // page), pages, 0)
    kv = byte_pages.entries(pool[pages, :, column[..., None]], jnp.float32)  # [B, K, pages, 2, P, D]
    kv = jnp.moveaxis(kv, 3, 0).reshape(2, batch, kv_heads, num_pages * page, head_dim)
    entry = jnp.arange(num_pages * page)
    visible = (entry < length[..., None]) & (entry >= heads[..., HEAD_SKIP, None])
    keys, values = kv[0], jnp.where(visible[..., None], kv[1], 0.0)
    if new is not None:
        keys = jnp.concatenate([keys, new[:, :, :1]], axis=2)
        values = jnp.concatenate([values, new[:, :, 1:]], axis=2)
        visible = jnp.pad(visible, ((0, 0), (0, 0), (0, 1)), constant_values=True)
    logits = jnp.einsum("bkgd,bktd->bkgt", q.astype(jnp.float32), keys, precision="highest") * scale
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    logits = jnp.where(visible[:, :, None], logits, -jnp.inf)
    if sinks is not None:
        sink = jnp.broadcast_to(sinks.astype(jnp.float32)[None, :, :, None], (*logits.shape[:3], 1))
        logits = jnp.concatenate([logits, sink], axis=-1)
        values = jnp.pad(values, ((0, 0), (0, 0), (0, 1), (0, 0)))
    lse = jax.nn.logsumexp(logits, axis=-1)
    weights = jnp.exp(logits - jnp.where(jnp.isneginf(lse), 0.0, lse)[..., None])
    out = jnp.einsum("bkgt,bktd->bkgd", weights, values, precision="highest")
    return out.astype(q.dtype if out_dtype is None else out_dtype), lse
