"""Pages of bytes as pages of 16-bit floats: a chunk's queries read each entry many times, so it is unpacked once before."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import byte_pages, support
from pallas_kernels.unpack.reference import unpack_pages_reference

__all__ = ["check_supported", "unpack_pages", "unpack_pages_reference"]


def unpack_pages(
    pool: jax.Array,
    table: jax.Array,
    lengths: jax.Array,
    first: jax.Array | np.ndarray,
    column: jax.Array | np.ndarray,
    *,
    most: int,
    dtype: jax.typing.DTypeLike,
) -> jax.Array:
    """The pages of one row's heads, side by side.

    Args:
      pool: u8[num_pages, 2, Hp, rows, D], see `byte_pages`.
      table: i32[R] a flat row of page numbers.
      lengths: i32[K] entries of each head.
      first: i32[K] position of each head's group in the row; column: i32[K] of each head in its pages.
      most: pages that a head can have.
      dtype: bfloat16 or float16.

    Returns:
      [K * most, 2, 1, P, D]: page j of head k is number k * most + j. Pages that a head does not have hold anything.

    Raises:
      NotImplementedError: naming what no kernel supports; `unpack_pages_reference` takes the same arguments.
    """
    check_supported(pool, jnp.dtype(dtype))
    from pallas_kernels.unpack.mosaic_gpu import unpack_pages_mosaic_gpu

    return unpack_pages_mosaic_gpu(pool, table, lengths, first, column, most=most, dtype=dtype)


def check_supported(
    pool: jax.Array, dtype: jax.typing.DTypeLike, *, device: jax.Device | None = None
) -> None:
    """Raises NotImplementedError, naming the feature, where `unpack_pages` has no kernel."""
    if not byte_pages.is_bytes(pool.dtype):
        raise NotImplementedError(f"pool of {pool.dtype}: there is nothing to unpack")
    support.check_pages(pool, dtype, device=device)
