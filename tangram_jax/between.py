"""What lies between the products of a layer: small kernels where the GPU and the model have them, else XLA's operations.

Without a warning: XLA takes a few microseconds more.
"""

import jax

from models import transformer
from pallas_kernels import add_norm as add_norm_kernel
from pallas_kernels import split_heads as split_heads_kernel


def add_norm(x: jax.Array, delta: jax.Array, weight: jax.Array, eps: float) -> tuple[jax.Array, jax.Array]:
    """See `models.transformer.add_norm`."""
    try:
        add_norm_kernel.check_supported(x)
    except NotImplementedError:
        return transformer.add_norm(x, delta, weight, eps)
    return add_norm_kernel.add_norm(x, delta, weight, eps)


def split_heads(qkv: jax.Array, cos: jax.Array, sin: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `models.transformer.split_heads`."""
    try:
        split_heads_kernel.check_supported(qkv)
    except NotImplementedError:
        return transformer.split_heads(qkv, cos, sin)
    return split_heads_kernel.split_heads(qkv, cos, sin)


BETWEEN = transformer.Between(add_norm, split_heads)
