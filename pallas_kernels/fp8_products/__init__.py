"""Products of tokens with FP8 weights: half the bytes of bfloat16 ones, made bfloat16 in registers."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import support
from pallas_kernels.fp8_products.packing import TILE, Fp8Weights, pack, packed_shape, quantise, random, unpack
from pallas_kernels.fp8_products.reference import fp8_products_reference
from pallas_kernels.fp8_products.tuning import LEAST_TOKENS, TUNING, Tuning, tuning_for

__all__ = [
    "LEAST_TOKENS",
    "TILE",
    "Fp8Weights",
    "Tuning",
    "check_supported",
    "fp8_products",
    "fp8_products_reference",
    "pack",
    "packed_shape",
    "quantise",
    "random",
    "tuning_for",
    "unpack",
]


def check_supported(dtype: jax.typing.DTypeLike, *, device: jax.Device | None = None) -> None:
    """Raises NotImplementedError, naming the feature, where `fp8_products` has no kernel for tokens of this dtype."""
    if dtype != jnp.bfloat16:
        raise NotImplementedError(f"tokens of {jnp.dtype(dtype)} for FP8 weights: the kernel takes bfloat16")
    support.check_device(device, TUNING)


def fp8_products(
    x: jax.Array, weights: Fp8Weights, *, tuning: Tuning | None = None, interpret: Any = None
) -> jax.Array:
    """Tokens x bf16[T, depth] times weights [depth, columns]: bf16[T, columns], from sums in float32.

    `tuning`: by default the device's record for so many tokens.

    Raises NotImplementedError for what `check_supported` says; `fp8_products_reference` takes the same arguments.
    """
    from pallas_kernels.fp8_products.mosaic_gpu import fp8_products_mosaic_gpu

    if interpret is None:
        check_supported(x.dtype)
    tuning = tuning or tuning_for(x.shape[0], *weights.codes.shape[:2])
    return fp8_products_mosaic_gpu(x, weights, tuning=tuning, interpret=interpret)
