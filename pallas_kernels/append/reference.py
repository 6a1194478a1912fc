"""Appending a token in plain XLA: any backend, any shape; the definition that the kernel is held to."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import byte_pages


def append_reference(
    pool: jax.Array,
    new: Sequence[jax.Array],
    *,
    lengths: jax.Array,
    rows: jax.Array,
    table: jax.Array,
    first: np.ndarray,
    capacity: np.ndarray,
    heads: np.ndarray,
) -> jax.Array:
    """See `pallas_kernels.append.append`."""
    size, num_pages = byte_pages.page_size(pool), pool.shape[0]
    index = lengths // size
    inside = index < capacity
    rows = jnp.where(rows < 0, table.shape[0], rows)  # an empty slot, not counted from the end
    table = table.at[rows].get(mode="fill", fill_value=-1)
    number = jnp.take_along_axis(table, jnp.where(inside, first + index, 0), axis=1)  # [B, M]
    there = inside & (number >= 0)
    at = jnp.where(there, number, num_pages).T[None, :, None]  # [1, M, 1, B]
    stacked = jnp.stack([jnp.stack([x[:, :, which] for x in new]) for which in (-2, -1)])  # [2, L, B, K, D]
    by_head = stacked.swapaxes(2, 3)
    by_head = by_head.reshape(2, -1, *by_head.shape[3:])[:, np.maximum(heads, 0)]  # [2, M, Hp, B, D]
    # Every leading dimension is indexed: a window over some of them would make XLA transpose, and so copy, the pool.
    which, column = np.ogrid[:2, : heads.shape[1]]
    slot = (lengths % size).T[None, :, None]
    columns = at, which[..., None, None], column[:, None, :, None]
    if not byte_pages.is_bytes(pool.dtype):
        return pool.at[*columns, slot].set(by_head.astype(pool.dtype), mode="drop")
    values, scales = byte_pages.quantise(by_head)
    pool = pool.at[*columns, byte_pages.scale_rows(pool) + slot].set(values, mode="drop")
    return pool.at[*columns, *byte_pages.scale_at(pool, slot)].set(scales, mode="drop")
