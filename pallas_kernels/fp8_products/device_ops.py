"""FP8 weights as a left operand in registers: made bfloat16, or put in order."""

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jaxlib.mlir.dialects import arith

from pallas_kernels.fp8_products import packing
from pallas_kernels.fp8_products.tokens import in_words
from pallas_kernels.left_operand import bfloat16s, constant, e4m3s, four_words, left_operand


def unpack(tiles: jax.Ref, spare: jax.Ref | None, *, narrow: bool, by_warp: bool = False) -> Any:
    """Packed tiles i32[n, 32, 32] along the depth as a matrix instruction's left operand: see `left_operand`.

    bf16, of one tile, of which products are small: see `in_full`; if `narrow` f8e4m3fn, the depth in the order of
    `tokens.in_words`.
    """
    count = tiles.shape[0]

    def whole(words: jax.Array) -> jax.Array:
        codes = packing.unpack(words[None])
        return in_words(codes.T).T if narrow else codes

    if narrow:
        registers = functools.partial(_codes, count)
        return left_operand(tiles, spare, whole, registers, jnp.float8_e4m3fn, count * packing.TILE)
    return left_operand(tiles, spare, whole, _pairs, by_warp=by_warp)


def in_full(sums: jax.Array, *, interpreted: bool) -> jax.Array:
    """f32 sums of products with `unpack`ed bfloat16s.

    These lack `packing.FACTOR`, which would be an operation for each two weights. So 1 times 1 is 2 ** -120, and float32 has
    29 bits below that: matrix instructions keep numbers without an exponent, and sums as well.
    """
    return sums if interpreted else sums * packing.FACTOR


def _pairs(pointer: Any, thread: Any) -> Iterator[tuple[int, int, Any]]:
    four = constant(4)
    for half in range(2):
        for number, word in enumerate(four_words(pointer, thread, 512 * half)):
            ready = arith.andi(word, constant(packing.READY))
            left = arith.andi(arith.shli(word, four), constant(packing.LEFT))
            right = arith.andi(arith.shrui(word, four), constant(packing.RIGHT))
            for i, bits in enumerate((ready, arith.ori(left, right))):
                yield 2 * number + i, half, bfloat16s(bits)


def _codes(count: int, pointer: Any, thread: Any) -> Iterator[tuple[int, int, Any]]:
    four, eight = constant(4), constant(8)
    for tile, half in itertools.product(range(count), range(2)):
        for number, word in enumerate(four_words(pointer, thread, 1024 * tile + 512 * half)):
            # The pair that is ready as bfloat16s in the higher byte of each half, the other one in the lower byte.
            codes = arith.andi(word, constant(0x800F800F))
            codes = arith.ori(codes, arith.andi(arith.shli(word, four), constant(0x7F007F00)))
            codes = arith.ori(codes, arith.andi(arith.shrui(word, four), constant(0x00800080)))
            codes = arith.ori(codes, arith.andi(arith.shrui(word, eight), constant(0x00700070)))
            yield 4 * tile + number, half, e4m3s(codes)
