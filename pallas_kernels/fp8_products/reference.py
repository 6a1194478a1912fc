"""The products with FP8 weights as XLA operations, on any backend."""

import jax
import jax.numpy as jnp

from pallas_kernels.fp8_products.packing import Fp8Weights, unpack
from pallas_kernels.fp8_products.tokens import Fp8Tokens, in_depth
from pallas_kernels.gates import Gate, in_halves


def fp8_products_reference(
    x: jax.Array | Fp8Tokens, weights: Fp8Weights, *, gate: Gate | None = None
) -> jax.Array:
    """See `fp8_products`; x may have any float dtype, and the result of tokens in FP8 is float32."""
    if gate:
        return in_halves(fp8_products_reference(x, weights), gate)
    if isinstance(x, Fp8Tokens):
        x = x.cut()
        sums = fp8_products_reference(in_depth(x.codes).astype(jnp.float32), weights)
        return sums * x.scales[:, None]
    codes = unpack(weights.codes).astype(x.dtype)
    sums = jnp.matmul(x, codes, preferred_element_type=jnp.float32)
    return (sums * weights.scales).astype(x.dtype)
