"""Products of some dozens of tokens with 16-bit weights, at the pace at which the memory gives the weights."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import support
from pallas_kernels.dense_products.reference import dense_products_reference
from pallas_kernels.dense_products.tuning import MOST_TOKENS, MULTIPLE, TUNING, Tuning, takes, tuning_for
from pallas_kernels.gates import Gate

__all__ = [
    "MOST_TOKENS",
    "MULTIPLE",
    "Tuning",
    "check_supported",
    "dense_products",
    "dense_products_reference",
    "takes",
    "tuning_for",
]


def check_supported(
    x: jax.Array | jax.ShapeDtypeStruct,
    weights: jax.Array | jax.ShapeDtypeStruct,
    *,
    device: jax.Device | None = None,
) -> None:
    """Raises NotImplementedError, naming the feature, where `dense_products` has no kernel for tokens and weights of these
    shapes and dtypes."""
    if x.dtype not in (jnp.bfloat16, jnp.float16) or weights.dtype != x.dtype:
        raise NotImplementedError(
            f"tokens of {x.dtype} and weights of {weights.dtype}: the kernel takes bfloat16 or float16 for both"
        )
    if x.shape[0] % MULTIPLE or x.shape[0] > MOST_TOKENS:
        raise NotImplementedError(
            f"{x.shape[0]} tokens: the kernel takes multiples of {MULTIPLE} up to {MOST_TOKENS}"
        )
    support.check_device(device, TUNING)


def dense_products(
    x: jax.Array,
    weights: jax.Array,
    *,
    gate: Gate | None = None,
    tuning: Tuning | None = None,
    interpret: Any = None,
) -> jax.Array:
    """Tokens x [T, depth] times weights [depth, columns]: [T, columns], from sums in float32.

    Args:
      x: bfloat16 or float16, as the weights; T a multiple of 8 up to MOST_TOKENS.
      gate: the first half of the columns, rounded to that dtype, are gates of the others: [T, columns / 2].
      tuning: by default `tuning_for` these shapes.

    Raises:
      NotImplementedError: for what `check_supported` says, and for shapes that `tuning_for` has nothing for;
        `dense_products_reference` takes the same tokens, weights and gate.
      ValueError: for weights that `tuning` cannot cut.
    """
    from pallas_kernels.dense_products.mosaic_gpu import dense_products_mosaic_gpu

    if interpret is None:
        check_supported(x, weights)
    tuning = tuning or tuning_for(len(x), *weights.shape, gated=gate is not None)
    if tuning is None:
        raise NotImplementedError(
            f"{len(x)} tokens times weights {weights.shape}: there is no tuning for these"
        )
    return dense_products_mosaic_gpu(x, weights, gate=gate, tuning=tuning, interpret=interpret)
