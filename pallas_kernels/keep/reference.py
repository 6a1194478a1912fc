"""Writing kept entries and window scores in plain XLA: the definitions that the kernels are held to."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import byte_pages


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
    (num_groups, columns), size = heads.shape, byte_pages.page_size(pool)
    stacked = jnp.stack([jnp.stack([x[:chunk] for x in xs]) for xs in (keys, values)])  # [2, L, T, K, D]
    by_head = stacked.swapaxes(2, 3)
    by_head = by_head.reshape(2, -1, *by_head.shape[3:])[:, np.maximum(heads, 0)]  # [2, M, Hp, T, D]
    kv = jnp.concatenate([tail, by_head.astype(tail.dtype)], axis=3)
    group, column = np.ogrid[:num_groups, :columns]
    old = pool[jnp.maximum(pages[:, 0], 0)]  # only a group's first page holds entries that stay
    stays = (source[:, :, :size] < 0)[:, None]  # [M, 1, Hp, P]

    def paged(new: jax.Array, old: jax.Array) -> jax.Array:
        """What makes entries [M, J, 2, Hp, P, ...], from candidates [2, M, Hp, C, ...] and old pages [M, 2, Hp, P, ...]."""
        new = new[:, group[..., None], column[..., None], jnp.maximum(source, 0)]  # [2, M, Hp, J * P, ...]
        new = jnp.moveaxis(new.reshape(*new.shape[:3], -1, size, *new.shape[4:]), (1, 3), (0, 1))
        there = stays.reshape(*stays.shape, *(1,) * (old.ndim - 4))
        return new.at[:, 0].set(jnp.where(there, old, new[:, 0]))

    if byte_pages.is_bytes(pool.dtype):
        parts = zip(byte_pages.quantise(kv), byte_pages.split(old), strict=True)
        fresh = byte_pages.join(*(paged(*part) for part in parts))
    else:
        fresh = paged(kv.astype(pool.dtype), old)
    target = jnp.where(pages >= 0, pages, pool.shape[0])
    return pool.at[target].set(fresh, mode="drop")


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
    k = jnp.concatenate([tail[0, group, column], keys.swapaxes(0, 1)], axis=1)  # [K, C, D]
    k = k.astype(jnp.float32)
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
