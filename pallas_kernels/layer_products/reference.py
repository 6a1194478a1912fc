"""The same products as XLA operations, on any backend."""

import jax
import jax.numpy as jnp

from pallas_kernels.dense_products.reference import dense_products_reference
from pallas_kernels.gates import Gate
from pallas_kernels.norms import rms_norm


def layer_products_reference(
    attended: jax.Array,
    x: jax.Array,
    w_out: jax.Array,
    norm: jax.Array,
    w_gate_up: jax.Array,
    w_down: jax.Array,
    counters: jax.Array | None = None,
    *,
    gate: Gate = "silu",
    eps: float,
    offset: float = 0.0,
) -> jax.Array:
    """See `layer_products`; the arrays may have any float dtype."""
    del counters
    x = x + dense_products_reference(attended, w_out)
    h = dense_products_reference(rms_norm(x, norm, eps, offset), w_gate_up, gate=gate)
    return x + jnp.asarray(dense_products_reference(h, w_down), x.dtype)
