"""What the kernels compute, of the shares of all devices."""

import jax
import jax.numpy as jnp

from pallas_kernels.norms import rms_norm


def all_reduce_reference(shares: jax.Array) -> jax.Array:
    """[N, T, columns] -> [T, columns], as `all_reduce`."""
    return _sum(shares).astype(shares.dtype)


def added_norm_reference(
    x: jax.Array, shares: jax.Array, weight: jax.Array, *, eps: float, offset: float = 0.0
) -> tuple[jax.Array, jax.Array]:
    """As `added_norm`."""
    total = (x.astype(jnp.float32) + _sum(shares)).astype(x.dtype)
    return total, rms_norm(total, weight, eps, offset)


def _sum(shares: jax.Array) -> jax.Array:
    total = shares[0].astype(jnp.float32)
    for share in shares[1:]:
        total += share.astype(jnp.float32)
    return total
