"""FP8 weights as the kernel reads them: e4m3 codes packed in tiles of 64 columns x 64 of the depth, a scale for each column.

A tile is 32 x 32 words of 32 bits, so that each of 128 threads finds its part of a matrix instruction's left operand in two
runs of four words side by side. A word has two pairs of values, their bits where few operations bring them to the places of
bfloat16s.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

TILE = 64  # columns, and depth
WORDS = 32  # of a tile's row, and rows
BYTES = WORDS * WORDS * 4
LARGEST = 448.0  # of e4m3

# A code (sign, four of the exponent, three of the mantissa) is ready as a bfloat16 at these bits of each half of a word,
# but for a factor that makes up for the exponents' biases:
READY = 0x87F087F0
# The other pair has what is left over: its sign and last four bits come to their places four to the left, the rest four to
# the right.
LEFT, RIGHT = 0x80F080F0, 0x07000700
FACTOR = 2.0**120
_HIGH = 0x44004400  # of both pairs, the highest bit of the exponent


class Fp8Weights(NamedTuple):
    """A matrix [depth, columns], or many: those of experts have axes [X, parts] in front."""

    codes: jax.Array  # i32[columns / 64, depth / 64, 32, 32]
    scales: jax.Array  # f32[columns]: times the codes give the weights

    @property
    def depth(self) -> int:
        """Of a matrix."""
        return self.codes.shape[-3] * TILE

    @property
    def columns(self) -> int:
        """Of a matrix."""
        return self.codes.shape[-4] * TILE


def packed_shape(depth: int, columns: int) -> tuple[int, ...]:
    """Of the codes of a matrix [depth, columns]. Raises NotImplementedError for what is no multiple of 64."""
    if columns % TILE or depth % TILE:
        raise NotImplementedError(f"FP8 weights of {depth} x {columns}: the kernel takes multiples of {TILE}")
    return (columns // TILE, depth // TILE, WORDS, WORDS)


def quantise(weights: jax.Array) -> Fp8Weights:
    """The codes nearest to float weights [depth, columns], scaled so that each column's largest is the largest there is.

    Finite weights only. Multiples of 64, see `packed_shape`.
    """
    largest = jnp.max(jnp.abs(weights.astype(jnp.float32)), axis=0)
    scales = jnp.where(largest > 0, largest / LARGEST, 1.0)
    scaled = jnp.clip(weights.astype(jnp.float32) / scales, -LARGEST, LARGEST)
    return Fp8Weights(pack(scaled.astype(jnp.float8_e4m3fn)), scales)


def pack(codes: jax.Array) -> jax.Array:
    """f8e4m3fn[depth, columns], multiples of 64 and no NaN -> i32[columns / 64, depth / 64, 32, 32]."""
    depth, columns = codes.shape
    bits = lax.bitcast_convert_type(codes, jnp.uint8)
    # Depth: tile, quarter, pair of a word, quarter of eight, one of two. Columns: tile, warp, half, row of eight.
    bits = bits.reshape(depth // TILE, 4, 2, 4, 2, columns // TILE, 4, 2, 8)
    # To tile, tile, half, then the thread (warp, row, quarter of eight), its word, pair, one of two.
    bits = bits.transpose(5, 0, 7, 6, 8, 3, 1, 2, 4).astype(jnp.uint32)
    ready, left_over = bits[..., 0, :], bits[..., 1, :]
    halves = (ready & 0x80) << 8 | (ready & 0x7F) << 4
    halves |= (left_over & 0x80) << 4 | (left_over & 0x70) << 8 | left_over & 0x0F
    words = halves[..., 0] | halves[..., 1] << 16
    return lax.bitcast_convert_type(words, jnp.int32).reshape(*packed_shape(depth, columns))


def unpack(packed: jax.Array) -> jax.Array:
    """The inverse of `pack`."""
    across, deep, _, _ = packed.shape
    words = lax.bitcast_convert_type(packed, jnp.uint32)
    ready = words & np.uint32(READY)
    left_over = words << 4 & np.uint32(LEFT) | words >> 4 & np.uint32(RIGHT)
    pairs = jnp.stack([ready, left_over], axis=-1)
    halves = jnp.stack([pairs & 0xFFFF, pairs >> 16], axis=-1)
    bits = (halves >> 8 & 0x80 | halves >> 4 & 0x7F).astype(jnp.uint8)
    # Tile, tile, half, warp, row, quarter of eight, word, pair, one of two: to the order of depth and columns.
    bits = bits.reshape(across, deep, 2, 4, 8, 4, 4, 2, 2).transpose(1, 6, 7, 5, 8, 0, 3, 2, 4)
    return lax.bitcast_convert_type(bits.reshape(deep * TILE, across * TILE), jnp.float8_e4m3fn)


def random(
    rng: np.random.Generator, depth: int, columns: int, deviation: float, matrices: tuple[int, ...] = ()
) -> Fp8Weights:
    """Weights of so many matrices with about this standard deviation; one scale for all."""
    words = rng.integers(0, 2**32, (*matrices, *packed_shape(depth, columns)), np.uint32)
    words &= np.uint32(~_HIGH & 0xFFFFFFFF)  # exponents below 8: no NaN, and at most 1.875
    values = np.square(
        [m / 512 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7) for e in range(8) for m in range(8)]
    )
    scale = deviation / np.sqrt(values.mean())
    return Fp8Weights(jnp.asarray(words.view(np.int32)), jnp.full((*matrices, columns), scale, jnp.float32))
