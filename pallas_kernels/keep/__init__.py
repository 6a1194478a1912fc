"""Scoring a chunk's candidates and writing the kept ones into the pages of a cache, in place."""

from collections.abc import Sequence

import jax
import numpy as np

from pallas_kernels import byte_pages, support
from pallas_kernels.keep.reference import window_sums_reference, write_pages_reference

__all__ = [
    "check_window_supported",
    "check_write_supported",
    "window_sums",
    "window_sums_reference",
    "write_pages",
    "write_pages_reference",
]

MAX_QUERIES = 256  # of one query head: the columns of a matrix product
SHARED_BYTES = 200 * 1024


def write_pages(
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
    """Writes whole pages of every head group from the candidates of a chunk. Changes the pool in place where it is donated.

    Candidate c of a head is entry c of its tail if c < W, else row c - W of its layer's keys and values.

    Args:
      pool: [num_pages, 2, Hp, P, D]. Or uint8: pages of bytes (`pallas_kernels.byte_pages`), which have more rows than P and
        are written with their scales; keys, values and tail are not of bytes, and entries that stay keep theirs.
      keys, values: of each layer [T or more, K, D], any of which `source` may name; neither stacked nor put together with
        the tail.
      tail: [2, M, Hp, W, D], a copy: its entries lie in pages that are written here.
      source: i32[M, Hp, J * P], the candidate for each entry of J pages; negative where an entry of the group's first page
        stays as it is.
      pages: i32[M, J] their numbers; negative: not written.
      heads: i32[M, Hp], layer * K + KV head of each column; negative where a column is empty (anything is written there).
      chunk: T.

    Raises:
      NotImplementedError: naming what no kernel supports; `write_pages_reference` takes the same arguments.
    """
    check_write_supported(pool, keys, tail)
    from pallas_kernels.keep.write import write_pages_mosaic_gpu

    return write_pages_mosaic_gpu(pool, keys, values, tail, source=source, pages=pages, heads=heads)


def check_write_supported(
    pool: jax.Array, keys: Sequence[jax.Array], tail: jax.Array, *, device: jax.Device | None = None
) -> None:
    """Raises NotImplementedError, naming the feature, where `write_pages` has no kernel."""
    support.check_pages(pool, keys[0].dtype, device=device)
    if byte_pages.page_size(pool) % 2:
        raise NotImplementedError(
            f"pages of {byte_pages.page_size(pool)}: the kernel writes even numbers of entries"
        )
    if tail.dtype != keys[0].dtype:
        raise NotImplementedError(
            f"a tail of {tail.dtype} and keys of {keys[0].dtype}: the kernel takes equal dtypes"
        )


def window_sums(
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
    """Sums over a chunk's last queries of exp(power * (logit - lse)), for every candidate of one layer.

    Args:
      q: [T, N, D] the chunk's queries after RoPE, bfloat16 or float16.
      keys: [T, K, D] its keys.
      tail: [2, M, Hp, W, D] the previous tail of all layers, right-aligned; tail[0] are the keys.
      lse: f32[T, N] natural log-sum-exp of each query's logits.
      place: i32[L, K, 2] group and column of each head.
      layer: i32[] which of place's rows.
      unlocked: i32[M] entries of the tail that exist; count: i32[] valid rows of the chunk.
      window: queries that are summed over, the last valid ones; fewer where the chunk has fewer.
      scale: positive factor of the products q . k, which gives the logits.
      power: 1 or 2.
      soft_cap: logits become soft_cap * tanh(logits / soft_cap).

    Returns:
      f32[K, W + T]: of each KV head the sum over its N // K query heads and the window; of the tail, then of the chunk. A
      candidate of the chunk is seen by itself and later queries. Where no candidate exists, anything.

    Raises:
      NotImplementedError: naming what no kernel supports; `window_sums_reference` takes the same arguments.
    """
    check_window_supported(q, keys, tail, window)
    from pallas_kernels.keep.window import window_sums_mosaic_gpu

    return window_sums_mosaic_gpu(
        q, keys, tail, lse,
        place=place, layer=layer, unlocked=unlocked, count=count,
        window=window, scale=scale, power=power, soft_cap=soft_cap,
    )  # fmt: skip


def check_window_supported(
    q: jax.Array, keys: jax.Array, tail: jax.Array, window: int, *, device: jax.Device | None = None
) -> None:
    """Raises NotImplementedError, naming the feature, where `window_sums` has no kernel."""
    chunk, heads, head_dim = q.shape
    queries, group = min(window + 8, chunk), heads // keys.shape[1]
    if queries % 8 or queries > MAX_QUERIES:
        raise NotImplementedError(
            f"a window of {window} queries in a chunk of {chunk}: the kernel takes multiples of 8 up to {MAX_QUERIES - 8}"
        )
    if (group * queries + 64) * head_dim * 2 > SHARED_BYTES:
        raise NotImplementedError(
            f"{group} x {queries} queries of dimension {head_dim}: too much shared memory"
        )
    support.check_candidates(q, tail, keys, device=device)
