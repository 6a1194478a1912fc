"""RMS normalisation in XLA operations, beside the kernel that makes FP8 of its results."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def rms_norm(
    x: Float[Array, "*T E"],
    weight: Float[Array, "*H E"],
    eps: float,
    offset: float = 0.0,
    *,
    hold: bool = False,
) -> Float[Array, "*T E"]:
    """RMS normalisation of the last axis in float32, times `weight + offset`; the result has the dtype of `x`.

    `hold`: the sums are held in memory, so that all else can join what reads the norms, which fusions of XLA's would
    rather have in a kernel with their sums.
    """
    x_f32, weight = x.astype(jnp.float32), weight.astype(jnp.float32)
    squares = jnp.sum(jnp.square(x_f32), axis=-1, keepdims=True)
    if hold:
        squares = jax.lax.optimization_barrier(squares)
    inverse_rms = jax.lax.rsqrt(squares / x.shape[-1] + eps)
    # Added here and not to the stored weights: 1 + w in bfloat16 would lose most of a small w.
    return ((x_f32 * inverse_rms) * (weight + offset if offset else weight)).astype(x.dtype)
