"""The same products as XLA operations, on any backend."""

import jax
import jax.numpy as jnp

from pallas_kernels.gates import Gate, in_halves


def dense_products_reference(x: jax.Array, weights: jax.Array, *, gate: Gate | None = None) -> jax.Array:
    """See `dense_products`; x may have any float dtype."""
    sums = jnp.matmul(x, weights, preferred_element_type=jnp.float32).astype(x.dtype)
    return in_halves(sums, gate) if gate else sums
