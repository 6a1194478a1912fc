"""The products with FP8 weights as XLA operations, on any backend."""

import jax
import jax.numpy as jnp

from pallas_kernels.fp8_products.packing import Fp8Weights, unpack


def fp8_products_reference(x: jax.Array, weights: Fp8Weights) -> jax.Array:
    """See `fp8_products`; x may have any float dtype."""
    codes = unpack(weights.codes).astype(x.dtype)
    sums = jnp.matmul(x, codes, preferred_element_type=jnp.float32)
    return (sums * weights.scales).astype(x.dtype)
