"""RMS normalisation in XLA operations, beside the kernel that makes FP8 of its results."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def rms_norm(
    x: Float[Array, "*T E"], weight: Float[Array, "*H E"], eps: float, offset: float = 0.0
) -> Float[Array, "*T E"]:
    """RMS normalisation of the last axis in float32, times `weight + offset`; the result has the dtype of `x`."""
    x_f32, weight = x.astype(jnp.float32), weight.astype(jnp.float32)
    inverse_rms = jax.lax.rsqrt(jnp.mean(jnp.square(x_f32), axis=-1, keepdims=True) + eps)
    # Added here and not to the stored weights: 1 + w in bfloat16 would lose most of a small w.
    return ((x_f32 * inverse_rms) * (weight + offset if offset else weight)).astype(x.dtype)
