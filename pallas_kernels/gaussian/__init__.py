"""A Gaussian model of a head's queries: its two moments, and the logits that a chunk's candidates have under it."""

import jax
import numpy as np

from pallas_kernels import support
from pallas_kernels.gaussian.reference import gaussian_logits_reference

__all__ = ["check_supported", "gaussian_logits", "gaussian_logits_reference"]


def gaussian_logits(
    q: jax.Array,
    turns: jax.Array,
    count: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    tail: jax.Array,
    *,
    place: np.ndarray,
    layer: jax.Array,
    unlocked: jax.Array,
    starts: jax.Array | np.ndarray,
    sizes: jax.Array | np.ndarray,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """Logits of the candidates of one layer for queries like those of each chunk, and the squared norms of their values.

    Of S chunks, whose tokens lie anywhere among T. A chunk's queries are turned pair by pair: (u[i], u[i + D/2]) is the pair
    of q, rotated and stretched by the complex factor whose real and imaginary part `turns` holds. A candidate's logit is
    ln E exp(scale * u . k) for normally distributed u with their mean m and covariance S: scale * m . k + scale^2 / 2 *
    k . S k.

    Args:
      q: [T, N, D] the chunks' queries, bfloat16 or float16. Rows that are left out may hold anything finite.
      turns: f16[S, R, D] of each chunk's tokens, at most R, real parts, then imaginary parts; a row of zeros leaves a query
        out, as those behind the chunk's last must.
      count: f32[S], queries that are not left out, at least 1.
      keys, values: [T, K, D] of the chunks.
      tail: [S, 2, M, Hp, W, D] keys and values of the previous tails of all layers, right-aligned.
      place: i32[L, K, 2] group and column of each head.
      layer: i32[] which of place's rows.
      unlocked: i32[S, M] entries of the tails that exist.
      starts: i32[S] where each chunk's tokens begin among T, multiples of 8.
      sizes: i32[S] how many each chunk has.
      scale: of the logits.

    Returns:
      (f32[S, N, W + R], f32[S, K, W + R]): of the tail, then of the chunk. Where no candidate exists, anything.

    Raises:
      NotImplementedError: naming what no kernel supports; `gaussian_logits_reference` takes the same arguments.
    """
    check_supported(q, keys, values, tail)
    from pallas_kernels.gaussian.logits import candidate_logits_mosaic_gpu
    from pallas_kernels.gaussian.moments import query_gaussian_mosaic_gpu

    linear, quadratic = query_gaussian_mosaic_gpu(q, turns, count, starts=starts, sizes=sizes, scale=scale)
    return candidate_logits_mosaic_gpu(
        linear, quadratic, keys, values, tail,
        place=place, layer=layer, unlocked=unlocked, starts=starts, sizes=sizes, most=turns.shape[1],
    )  # fmt: skip


def check_supported(
    q: jax.Array, keys: jax.Array, values: jax.Array, tail: jax.Array, *, device: jax.Device | None = None
) -> None:
    """Raises NotImplementedError, naming the feature, where `gaussian_logits` has no kernel."""
    support.check_candidates(q, tail, keys, values, device=device)
