"""Products of tokens with FP8 weights: half the bytes of bfloat16 ones, made bfloat16 in registers.

Many tokens may be in FP8 too: the tensor cores then multiply codes, twice as many a second.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import support
from pallas_kernels.fp8_products.packing import TILE, Fp8Weights, pack, packed_shape, quantise, random, unpack
from pallas_kernels.fp8_products.reference import fp8_products_reference
from pallas_kernels.fp8_products.tokens import (
    MOST_NORMED,
    Fp8Tokens,
    normed_tokens_reference,
    quantise_tokens_reference,
)
from pallas_kernels.fp8_products.tuning import LEAST_NARROW, LEAST_TOKENS, TUNING, Tuning, tuning_for
from pallas_kernels.gates import Gate, in_halves

__all__ = [
    "LEAST_NARROW",
    "LEAST_TOKENS",
    "MOST_NORMED",
    "TILE",
    "Fp8Tokens",
    "Fp8Weights",
    "Tuning",
    "check_supported",
    "fp8_products",
    "fp8_products_reference",
    "normed_tokens",
    "normed_tokens_reference",
    "pack",
    "packed_shape",
    "quantise",
    "quantise_tokens",
    "quantise_tokens_reference",
    "random",
    "tuning_for",
    "unpack",
]


def check_supported(dtype: jax.typing.DTypeLike, *, device: jax.Device | None = None) -> None:
    """Raises NotImplementedError, naming the feature, where `fp8_products` has no kernel for tokens of this dtype."""
    if dtype != jnp.bfloat16:
        raise NotImplementedError(f"tokens of {jnp.dtype(dtype)} for FP8 weights: the kernel takes bfloat16")
    support.check_device(device, TUNING)


def quantise_tokens(x: jax.Array, *, interpret: Any = None) -> Fp8Tokens:
    """Tokens x bf16[T, depth] in FP8, each with a scale of its own by which its largest number is the largest there is.

    `depth`: a multiple of 16. What is not finite stays alone in its token.

    Raises NotImplementedError for what `check_supported` says; `quantise_tokens_reference` gives the same codes.
    """
    from pallas_kernels.fp8_products.tokens_gpu import quantise_tokens_mosaic_gpu

    if interpret is None:
        check_supported(x.dtype)
    return quantise_tokens_mosaic_gpu(x, interpret=interpret)


def normed_tokens(
    x: jax.Array,
    weight: jax.Array,
    *,
    added: jax.Array | None = None,
    eps: float,
    offset: float = 0.0,
    interpret: Any = None,
) -> tuple[jax.Array, Fp8Tokens]:
    """(x + added bf16[T, depth], the RMS norm of that sum in FP8), as of `norms.rms_norm` and `quantise_tokens`.

    Sum and norm are rounded to bfloat16; the norm is written nowhere. The squares are added up in another order than XLA's.

    Args:
      x: bf16[T, depth], the depth a multiple of 16 up to MOST_NORMED.
      weight: bf16[depth].
      added: bf16[T, depth], or None for nothing.

    Raises NotImplementedError for what `check_supported` says; `normed_tokens_reference` takes the same arguments.
    """
    from pallas_kernels.fp8_products.tokens_gpu import normed_tokens_mosaic_gpu

    if interpret is None:
        check_supported(x.dtype)
    return normed_tokens_mosaic_gpu(x, weight, added, eps=eps, offset=offset, interpret=interpret)


def fp8_products(
    x: jax.Array | Fp8Tokens,
    weights: Fp8Weights,
    *,
    gate: Gate | None = None,
    tuning: Tuning | None = None,
    interpret: Any = None,
) -> jax.Array:
    """Tokens x bf16[T, depth], or in FP8, times weights [depth, columns]: bf16[T, columns], from sums in float32.

    The sums of codes times codes are the tensor cores', which keep fewer bits of each step (0.2 to 0.3% of a result).

    `gate`: the first half of the columns, rounded to bfloat16, are gates of the others: bf16[T, columns / 2].
    `tuning`: by default the device's record for so many tokens.

    Raises NotImplementedError for what `check_supported` says; `fp8_products_reference` takes the same arguments.
    """
    from pallas_kernels.fp8_products.mosaic_gpu import fp8_products_mosaic_gpu

    narrow = isinstance(x, Fp8Tokens)
    tokens, dtype = (x.count, jnp.bfloat16) if isinstance(x, Fp8Tokens) else (len(x), x.dtype)
    if interpret is None:
        check_supported(dtype)
    tuning = (tuning or tuning_for(tokens, *weights.codes.shape[:2], narrow=narrow)).for_tokens(tokens)
    if gate and not tuning.gates(weights.codes.shape[0]):
        return in_halves(fp8_products_mosaic_gpu(x, weights, tuning=tuning, interpret=interpret), gate)
    return fp8_products_mosaic_gpu(x, weights, tuning=tuning, gate=gate, interpret=interpret)
