"""Appending one token's keys and values of all layers to a paged cache, in place."""

from collections.abc import Sequence

import jax
import numpy as np

from pallas_kernels.append.reference import append_reference
from pallas_kernels.support import check_pages

__all__ = ["append", "append_reference", "check_supported"]


def append(
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
    """Writes entry lengths[b, m] of every group m of every request b. The pool is changed in place where it is donated.

    Args:
      pool: [num_pages, 2, Hp, P, D]. Or uint8: pages of bytes (`pallas_kernels.byte_pages`), which have more rows than P and
        are written with their scales; `new` is not of bytes.
      new: of each layer [B, K, 2 or more, D]; the last two rows of a head are the key and value to write. So the array that
        attention read (queries, key and value of each head) serves as it is, and layers need no stacking.
      lengths: i32[B, M], entries of each group before.
      rows: i32[B] of the table; a number of no row is an empty slot, and dropped.
      table: i32[rows, R] flat rows of page numbers, negative where there is no page: such entries are dropped.
      first: i32[M] position of each group in a flat row.
      capacity: i32[M] pages that a group has room for in a flat row; entries beyond are dropped.
      heads: i32[M, Hp], layer * K + KV head of each column; negative where a column is empty (anything is written there).

    Raises:
      NotImplementedError: naming what no kernel supports; `append_reference` takes the same arguments.
    """
    check_supported(pool, new)
    from pallas_kernels.append.mosaic_gpu import append_mosaic_gpu

    return append_mosaic_gpu(
        pool, new, lengths=lengths, rows=rows, table=table, first=first, capacity=capacity, heads=heads
    )


def check_supported(pool: jax.Array, new: Sequence[jax.Array], *, device: jax.Device | None = None) -> None:
    """Raises NotImplementedError, naming the feature, where `append` has no kernel."""
    check_pages(pool, new[0].dtype, device=device)
