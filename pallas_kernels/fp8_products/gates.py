"""Gated products: the first half of a matrix's columns are gates of the other half, as in an MLP with SwiGLU or GeGLU."""

from typing import Literal

import jax
import jax.numpy as jnp

Gate = Literal["silu", "gelu"]  # the latter by tanh


def gated(gates: jax.Array, values: jax.Array, gate: Gate) -> jax.Array:
    """Values let through by gates of the same shape, both float32, in operations that kernels have."""
    steep = gates
    if gate == "gelu":
        # (1 + tanh(u)) / 2 is the logistic function of 2 u.
        steep = gates * (1.5957691216057308 + 0.07135481282052773 * gates * gates)
    return gates / (1.0 + jnp.exp(-steep)) * values


def in_halves(x: jax.Array, gate: Gate) -> jax.Array:
    """[T, 2 columns] -> [T, columns], in the dtype of x."""
    gates, values = jnp.split(x.astype(jnp.float32), 2, axis=1)
    opened = jax.nn.silu(gates) if gate == "silu" else jax.nn.gelu(gates, approximate=True)
    return (opened * values).astype(x.dtype)
