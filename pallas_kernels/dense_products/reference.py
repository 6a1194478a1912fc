"""The same products as XLA operations, on any backend."""

import jax
import jax.numpy as jnp

from pallas_kernels.dense_products.common import Scaled, f32
from pallas_kernels.dense_products.tuning import TOKENS, warpgroups
from pallas_kernels.gates import Gate, in_halves

PARTS = 2  # of a depth, the fewest


def dense_products_reference(
    x: jax.Array | Scaled, weights: jax.Array, *, gate: Gate | None = None, eps: float = 0.0
) -> jax.Array:
    """See `dense_products`; tokens may have any float dtype."""
    tokens = x.tokens if isinstance(x, Scaled) else x
    sums = jnp.matmul(tokens, weights, preferred_element_type=f32)
    if isinstance(x, Scaled):
        squares = x.squares.reshape(warpgroups(len(tokens)), -1, TOKENS).sum(1).reshape(-1)
        sums *= jax.lax.rsqrt(squares[: len(tokens), None] / tokens.shape[1] + eps)
    sums = sums.astype(tokens.dtype)
    return in_halves(sums, gate) if gate else sums


def added_products_reference(
    x: jax.Array, weights: jax.Array, residual: jax.Array, norm: jax.Array, *, offset: float = 0.0
) -> tuple[jax.Array, Scaled]:
    """See `added_products`; x may have any float dtype."""
    return added(dense_products_reference(x, weights), residual, norm, offset=offset)


def added(
    product: jax.Array, residual: jax.Array, norm: jax.Array, *, offset: float
) -> tuple[jax.Array, Scaled]:
    """The residual and a product [T, depth], and what products behind the norm are of."""
    total = residual + product.astype(residual.dtype)
    numbers = total.astype(f32)
    tokens = (numbers * (norm.astype(f32) + offset)).astype(total.dtype)
    count = warpgroups(len(total))
    padded = jnp.pad(numbers, ((0, count * TOKENS - len(numbers)), (0, 0)))
    squares = (padded * padded).reshape(count, TOKENS, PARTS, -1).sum(-1)
    return total, Scaled(tokens, squares.swapaxes(1, 2).reshape(-1))
