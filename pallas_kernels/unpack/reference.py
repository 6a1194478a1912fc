"""Unpacking pages of bytes in plain XLA: the definition that the kernel is held to."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import byte_pages


def unpack_pages_reference(
    pool: jax.Array,
    table: jax.Array,
    lengths: jax.Array,
    first: jax.Array | np.ndarray,
    column: jax.Array | np.ndarray,
    *,
    most: int,
    dtype: jax.typing.DTypeLike,
) -> jax.Array:
    """See `pallas_kernels.unpack.unpack_pages`; pages that a head does not have are zero."""
    page = jnp.arange(most)
    held = page * byte_pages.page_size(pool) < lengths[:, None]  # [K, most]
    at = jnp.where(held, first[:, None] + page, 0)
    number = jnp.where(held, table[at], 0)
    packed = pool[number[..., None], jnp.arange(2), column[:, None, None]]  # [K, most, 2, rows, D]
    entries = byte_pages.dequantise(*byte_pages.split(packed), dtype)
    entries = jnp.where(held[..., None, None, None], entries, 0)
    return entries.reshape(-1, 2, 1, *entries.shape[-2:])
