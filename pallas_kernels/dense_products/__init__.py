"""Products of up to 128 tokens with 16-bit weights, at the pace at which the memory gives the weights."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import support
from pallas_kernels.dense_products.common import Scaled
from pallas_kernels.dense_products.reference import added_products_reference, dense_products_reference
from pallas_kernels.dense_products.tuning import (
    MOST_TOKENS,
    MULTIPLE,
    TUNING,
    Tuning,
    can_take,
    takes,
    tuning_for,
)
from pallas_kernels.gates import Gate

__all__ = [
    "MOST_TOKENS",
    "MULTIPLE",
    "Scaled",
    "Tuning",
    "added_products",
    "added_products_reference",
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
    if not can_take(x.shape[0]):
        raise NotImplementedError(
            f"{x.shape[0]} tokens: the kernel takes 1 to {MULTIPLE}, and multiples of {MULTIPLE} up to {MOST_TOKENS}"
        )
    support.check_device(device, TUNING)


def dense_products(
    x: jax.Array | Scaled,
    weights: jax.Array,
    *,
    gate: Gate | None = None,
    eps: float = 0.0,
    tuning: Tuning | None = None,
    interpret: Any = None,
) -> jax.Array:
    """Tokens x [T, depth] times weights [depth, columns]: [T, columns], from sums in float32.

    Args:
      x: bfloat16 or float16, as the weights; T up to 8, or a multiple of 8 up to MOST_TOKENS. Or what `added_products` left
        of a norm, whose factors the sums are multiplied by.
      gate: the first half of the columns, rounded to that dtype, are gates of the others: [T, columns / 2].
      eps: of that norm.
      tuning: by default `tuning_for` these shapes.

    Raises:
      NotImplementedError: for what `check_supported` says, and for shapes that `tuning_for` has nothing for;
        `dense_products_reference` takes the same tokens, weights and gate.
      ValueError: for weights that `tuning` cannot cut.
    """
    from pallas_kernels.dense_products.mosaic_gpu import dense_products_mosaic_gpu

    tokens = x.tokens if isinstance(x, Scaled) else x
    tuning = _tuning(tokens, weights, gate, tuning, interpret)
    return dense_products_mosaic_gpu(x, weights, gate=gate, eps=eps, tuning=tuning, interpret=interpret)


def added_products(
    x: jax.Array,
    weights: jax.Array,
    residual: jax.Array,
    norm: jax.Array,
    *,
    offset: float = 0.0,
    tuning: Tuning | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, Scaled]:
    """The residual [T, columns] and the product of `dense_products`, and tokens for products behind an RMS norm of that.

    Args:
      x: bfloat16: what is not yet multiplied by the norm's factors may be larger than float16 can be.
      norm: [columns], to whose weights `offset` is added.

    Raises: see `dense_products`; also ValueError for numbers that are not bfloat16.
    """
    from pallas_kernels.dense_products.mosaic_gpu import dense_products_mosaic_gpu

    if residual.dtype != jnp.bfloat16 or x.dtype != jnp.bfloat16:
        raise ValueError(
            f"tokens of {x.dtype} and a residual of {residual.dtype}: sums behind which a norm's factors come take bfloat16"
        )
    tuning = _tuning(x, weights, None, tuning, interpret)
    following = residual, norm
    return dense_products_mosaic_gpu(x, weights, following, offset=offset, tuning=tuning, interpret=interpret)


def _tuning(
    x: jax.Array, weights: jax.Array, gate: Gate | None, tuning: Tuning | None, interpret: Any
) -> Tuning:
    if interpret is None:
        check_supported(x, weights)
    tuning = tuning or tuning_for(len(x), *weights.shape, gated=gate is not None)
    if tuning is None:
        raise NotImplementedError(
            f"{len(x)} tokens times weights {weights.shape}: there is no tuning for these"
        )
    return tuning
