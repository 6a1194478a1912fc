"""Writing kept entries and window scores in plain XLA: the definitions that the kernels are held to."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np


def write_pages_reference(
    pool: jax.Array,
    keys: Sequence[jax.Array],
    values: Sequence[jax.Array],
    tail: jax.Array,
    *,
    source: jax.Array,
    pages: jax.Array,
    heads: np.ndarray,
    chunk: int,
) -> jax.Array:
    """See `pallas_kernels.keep.write_pages`."""
    num_groups, columns, size = heads.shape[0], heads.shape[1], pool.shape[3]
    stacked = jnp.stack([jnp.stack([x[:chunk] for x in xs]) for xs in (keys, values)])  # [2, L, T, K, D]
    by_head = stacked.swapaxes(2, 3)
    by_head = by_head.reshape(2, -1, *by_head.shape[3:])[:, np.maximum(heads, 0)]  # [2, M, Hp, T, D]
    kv = jnp.concatenate([tail, by_head.astype(tail.dtype)], axis=3)
    group, column = np.ogrid[:num_groups, :columns]
    fresh = kv[:, group[..., None], column[..., None], jnp.maximum(source, 0)]  # [2, M, Hp, J * P, D]
    fresh = fresh.reshape(*fresh.shape[:3], -1, size, fresh.shape[-1]).transpose(1, 3, 0, 2, 4, 5)
    # Only a group's first page holds entries that stay.
    stays = (source[:, :, :size] < 0)[:, None, :, :, None]  # [M, 1, Hp, P, 1]
    old = pool[jnp.maximum(pages[:, 0], 0)]
    fresh = fresh.at[:, 0].set(jnp.where(stays, old, fresh[:, 0]))
    target = jnp.where(pages >= 0, pages, pool.shape[0])
    return pool.at[target].set(fresh.astype(pool.dtype), mode="drop")


def window_sums_reference(
    q: jax.Array,
    keys: jax.Array,
    tail: jax.Array,
    lse: jax.Array,
    *,
    place: np.ndarray,
    layer: jax.Array,
    unlocked: jax.Array,
    count: jax.Array,
    window: int,
    scale: float,
    power: int,
    soft_cap: float | None = None,
) -> jax.Array:
    """See `pallas_kernels.keep.window_sums`; float32 arithmetic."""
    kv_heads, capacity = keys.shape[1], tail.shape[3]
    group, column = jnp.asarray(place)[layer].T
    k = jnp.concatenate([tail[0, group, column], keys.swapaxes(0, 1)], axis=1).astype(
        jnp.float32
    )  # [K, C, D]
    rows = jnp.maximum(count - window, 0) + jnp.arange(window)

    def by_head(x: jax.Array) -> jax.Array:  # [T, N, ...] -> [K, G, window, ...]
        x = x[jnp.minimum(rows, x.shape[0] - 1)]
        return jnp.moveaxis(x.reshape(window, kv_heads, -1, *x.shape[2:]), 0, 2)

    logits = jnp.einsum("kgwd,kcd->kgwc", by_head(q).astype(jnp.float32), k, precision="highest") * scale
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    c = jnp.arange(k.shape[1])
    there = (c >= capacity - unlocked[group][:, None]) & (c < capacity + count)  # [K, C]
    seen = (c - capacity <= rows[:, None]) & (rows < count)[:, None] & there[:, None, None]
    return jnp.where(seen, jnp.exp(logits - by_head(lse)[..., None]) ** power, 0.0).sum(axis=(1, 2))
