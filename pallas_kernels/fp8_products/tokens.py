"""Tokens in FP8 too, for products of many tokens: e4m3 codes and a scale for each token, as they come (dynamic scales).

The tensor cores multiply codes twice as fast as bfloat16s. They take the depth in the order in which the words of packed
weights have it.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from pallas_kernels.fp8_products.packing import LARGEST
from pallas_kernels.norms import rms_norm

RUN = 16  # of the depth, within which the order differs
MOST_NORMED = 16384  # numbers of a token that a kernel has registers for
LEAST = 1e-30  # of a token's largest number: its inverse is finite


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Fp8Tokens:
    """Tokens [T, depth]; rows beyond the T are of none, so that kernels find whole blocks without a copy."""

    codes: jax.Array  # f8e4m3fn[T or more, depth], see `in_words`
    scales: jax.Array  # f32[T or more]: times the codes give the tokens
    count: int = dataclasses.field(metadata={"static": True})  # T

    def cut(self) -> "Fp8Tokens":
        """Without rows of no token."""
        return Fp8Tokens(self.codes[: self.count], self.scales[: self.count], self.count)

    def values(self) -> jax.Array:
        """f32[T, depth]: what the codes stand for."""
        held = self.cut()
        return in_depth(held.codes).astype(jnp.float32) * held.scales[:, None]


def quantise_tokens_reference(x: jax.Array) -> Fp8Tokens:
    """See `fp8_products.quantise_tokens`; x may have any float dtype."""
    x = x.astype(jnp.float32)
    scales = scales_of(x)
    return Fp8Tokens(codes_of(x, scales), scales, len(x))


def normed_tokens_reference(
    x: jax.Array, weight: jax.Array, *, added: jax.Array | None = None, eps: float, offset: float = 0.0
) -> tuple[jax.Array, Fp8Tokens]:
    """See `fp8_products.normed_tokens`; x may have any float dtype."""
    # XLA may leave out the rounding between two operations in float32; the kernel does not.
    dtype, info = x.dtype, jnp.finfo(x.dtype)
    rounded = functools.partial(jax.lax.reduce_precision, exponent_bits=info.nexp, mantissa_bits=info.nmant)
    x = x.astype(jnp.float32)
    if added is not None:
        x = rounded(x + added.astype(jnp.float32))
    return x.astype(dtype), quantise_tokens_reference(rounded(rms_norm(x, weight, eps, offset)))


def scales_of(x: jax.Array) -> jax.Array:
    """f32[T] of x f32[T, depth]."""
    return jnp.maximum(jnp.max(jnp.abs(x), axis=1), LEAST) * (1 / LARGEST)


def codes_of(x: jax.Array, scales: jax.Array) -> jax.Array:
    """f8e4m3fn[T, depth] of x f32[T, depth], in words."""
    scaled = x * (1 / scales)[:, None]
    return in_words(jnp.clip(scaled, -LARGEST, LARGEST).astype(jnp.float8_e4m3fn))


def in_words(codes: jax.Array) -> jax.Array:
    """[T, depth] in the order of the words of packed weights: 8, 0, 9, 1, 10, 2 and so on of each 16."""
    halves = codes.reshape(*codes.shape[:-1], -1, 2, RUN // 2)
    return halves[..., ::-1, :].swapaxes(-1, -2).reshape(codes.shape)


def in_depth(codes: jax.Array) -> jax.Array:
    """The inverse of `in_words`."""
    pairs = codes.reshape(*codes.shape[:-1], -1, RUN // 2, 2)
    return pairs.swapaxes(-1, -2)[..., ::-1, :].reshape(codes.shape)
