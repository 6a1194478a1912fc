"""Gates of an MLP, as in SwiGLU and GeGLU: the first half of a matrix's columns are gates of the other half."""

from typing import Literal

import jax
import jax.numpy as jnp

Gate = Literal["silu", "gelu"]  # the latter by tanh


def opened(gates: jax.Array, gate: Gate) -> jax.Array:
    """How much each gate lets through, in XLA operations and the dtype of the gates."""
    if gate == "gelu":  # in float32, as torch computes it whatever the dtype
        return jax.nn.gelu(gates.astype(jnp.float32), approximate=True).astype(gates.dtype)
    return jax.nn.silu(gates)


def in_halves(x: jax.Array, gate: Gate) -> jax.Array:
    """[T, 2 columns] -> [T, columns], in float32 and back in the dtype of x."""
    gates, values = jnp.split(x.astype(jnp.float32), 2, axis=1)
    return (opened(gates, gate) * values).astype(x.dtype)


def gated(gates: jax.Array, values: jax.Array, gate: Gate) -> jax.Array:
    """Values let through by gates of the same shape, both float32, in operations that kernels have."""
    steep = gates
    if gate == "gelu":
        # (1 + tanh(u)) / 2 is the logistic function of 2 u.
        steep = gates * (1.5957691216057308 + 0.07135481282052773 * gates * gates)
    return gates / (1.0 + jnp.exp(-steep)) * values


def gated_sums(gates: jax.Array, values: jax.Array, gate: Gate, dtype: jax.typing.DTypeLike) -> jax.Array:
    """The same of float32 sums, rounded before as a product in `dtype` would leave them; float32."""
    gates, values = (x.astype(dtype).astype(jnp.float32) for x in (gates, values))
    return gated(gates, values, gate)
