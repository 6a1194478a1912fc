"""MXFP4 weights as the kernel reads them: 4-bit floats, 32 along the depth with one scale, packed in tiles of 64 x 64.

A tile holds 64 columns of the weights times 64 of the depth as 17 x 32 words of 32 bits, so that each of 128 threads finds
its part of a matrix instruction's left operand in four words side by side; the last 32 words are the scales. A word has four
pairs of values, their bits where two or three operations bring them to the places of bfloat16s. (Format: OCP Microscaling
Formats 1.0, E2M1 with E8M0 scales.)
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

TILE = 64  # columns, and depth
BLOCK = 32  # values along the depth that share a scale
ROWS, WORDS = 17, 32  # of a tile
# A scale 2 ** (s - 127) times 2 ** 126, by which a bfloat16 made of an E2M1's bits is too small, is a bfloat16 up to here.
MAX_SCALE = 128

# A pair of codes is ready as two bfloat16s once its bits (sign, two of the exponent, mantissa) are these of each half:
READY = 0x81C081C0
# Three of a word's four pairs are there after a rotation to the right by as much,
ROTATIONS = (0, 3, 6)
# the last one, whose bits are those that are left (1, 0, 4 and 3), after a product: 2 ** 14 + 2 ** 8 + 2 ** 3 moves them.
LAST, FACTOR = 0x001B001B, 0x4108


def check_scales(scales: np.ndarray) -> None:
    """Raises NotImplementedError where scales, as stored (uint8), are larger than the kernel takes."""
    if scales.size and scales.max() > MAX_SCALE:
        raise NotImplementedError(
            f"an MXFP4 scale of 2 ** {int(scales.max()) - 127}: the kernel takes up to 2 ** {MAX_SCALE - 127}"
        )


def packed_shape(num_experts: int, parts: int, columns: int, depth: int) -> tuple[int, ...]:
    """Of all experts' weights [columns, depth], of `parts` such matrices each."""
    if columns % TILE or depth % TILE:
        raise NotImplementedError(
            f"MXFP4 experts of {columns} x {depth}: the kernel takes multiples of {TILE}"
        )
    return (num_experts, parts, columns // TILE, depth // TILE, ROWS, WORDS)


def random(rng: np.random.Generator, shape: tuple[int, ...], deviation: float) -> np.ndarray:
    """Packed weights i32[shape] with about this standard deviation; one scale for all."""
    words = rng.integers(0, 2**32, shape, np.uint32)
    scale = round(np.log2(deviation / np.sqrt(np.mean(np.square([0, 0.5, 1, 1.5, 2, 3, 4, 6]))))) + 127
    words[..., ROWS - 1, :] = (scale + 126) * 0x01010101
    return words.view(np.int32)


def pack(blocks: jax.Array, scales: jax.Array) -> jax.Array:
    """Weights as checkpoints have them, for the kernel.

    blocks u8[..., columns, depth / 32, 16], the first of two values in the lower half of a byte; scales u8[..., columns,
    depth / 32], at most MAX_SCALE -> i32[..., columns / 64, depth / 64, 17, 32]. Columns and depth are multiples of 64.
    """
    *outer, columns, num_blocks, _ = blocks.shape
    tiles = (columns // TILE, num_blocks // 2)
    codes = jnp.stack([blocks & 15, blocks >> 4], axis=-1)
    # Columns: tile, warp, half, row of eight. Depth: tile, block, eighth of 8, quarter of it, one of two.
    codes = codes.reshape(*outer, tiles[0], 4, 2, 8, tiles[1], 2, 4, 4, 2)
    n = len(outer)
    # To tile, tile, warp, row of eight, quarter: the thread; block, half: its word; one of two, and eighth.
    order = [n, n + 4, n + 1, n + 3, n + 7, n + 5, n + 2, n + 8, n + 6]
    codes = codes.transpose(*range(n), *order).astype(jnp.uint32)
    pairs = codes[..., 0, :] | (codes[..., 1, :] << 16)  # [..., 4]
    last = pairs[..., 3]
    words = ((last >> 2) & 0x00010001) | ((last >> 3) & 0x00010001) << 1 | (last & 0x00030003) << 3
    for i, rotation in enumerate(ROTATIONS):
        ready = (pairs[..., i] & 0x00080008) << 12 | (pairs[..., i] & 0x00070007) << 6
        words |= _rotated(ready, -rotation)
    words = words.reshape(*outer, *tiles, ROWS - 1, WORDS)
    held = scales.reshape(*outer, tiles[0], 4, 2, 8, tiles[1], 2).astype(jnp.uint32) + 126
    held = held.transpose(*range(n), n, n + 4, n + 1, n + 3, n + 5, n + 2).reshape(*outer, *tiles, WORDS, 4)
    scale_words = held[..., 0] | held[..., 1] << 8 | held[..., 2] << 16 | held[..., 3] << 24
    packed = jnp.concatenate([words, scale_words[..., None, :]], axis=-2)
    return lax.bitcast_convert_type(packed, jnp.int32)


def unpack(packed: jax.Array) -> jax.Array:
    """i32[..., columns / 64, depth / 64, 17, 32] as from `pack` -> bf16[..., depth, columns]."""
    *outer, across, deep, _, _ = packed.shape
    words = lax.bitcast_convert_type(packed, jnp.uint32)
    last = words[..., ROWS - 1, :]
    held = jnp.stack([(last >> (8 * i)) & 255 for i in range(4)], axis=-1)  # [..., 32, 4]
    factors = lax.bitcast_convert_type((held - 126) << 23, jnp.float32).reshape(
        *outer, across, deep, 4, 8, 1, 4
    )
    own = words[..., : ROWS - 1, :].reshape(*outer, across, deep, 4, 8, 4, 4)  # warp, row, quarter, word
    values = []
    for moved in (*(_rotated(own, rotation) for rotation in ROTATIONS), (own & LAST) * FACTOR):
        bits = moved & np.uint32(READY)
        pair = [_value(x) * factors for x in (bits & 0xFFFF, bits >> 16)]
        values.append(jnp.stack(pair, axis=-1).astype(jnp.bfloat16))
    # [..., across, deep, warp, row, quarter, block, half, one of two, eighth] to the order of depth and columns.
    out = jnp.stack(values, axis=-1).reshape(*outer, across, deep, 4, 8, 4, 2, 2, 2, 4)
    n = len(outer)
    order = [n + 1, n + 5, n + 8, n + 4, n + 7, n, n + 2, n + 6, n + 3]
    return out.transpose(*range(n), *order).reshape(*outer, deep * TILE, across * TILE)


def _rotated(x: jax.Array, right: int) -> jax.Array:
    right %= 32
    return (x >> right) | (x << (32 - right)) if right else x


def _value(bits: jax.Array) -> jax.Array:
    """f32: of bits that are `READY`. As bfloat16 the smallest would be denormal, which XLA's code may flush to zero."""
    exponent, mantissa, negative = (bits >> 7) & 3, (bits >> 6) & 1, bits >> 15
    quarters = jnp.where(exponent == 0, 2 * mantissa, (2 + mantissa) << exponent).astype(jnp.float32)
    return quarters * (0.25 - 0.5 * negative.astype(jnp.float32))
