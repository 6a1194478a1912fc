"""FP8 weights made bfloat16 in registers."""

from collections.abc import Iterator
from typing import Any

import jax
from jaxlib.mlir.dialects import arith

from pallas_kernels.fp8_products import packing
from pallas_kernels.left_operand import bfloat16s, constant, four_words, left_operand


def unpack(tile: jax.Ref, spare: jax.Ref | None) -> Any:
    """A packed tile i32[32, 32] as a matrix instruction's left operand: see `left_operand`."""
    return left_operand(tile, spare, lambda words: packing.unpack(words[None, None]), _pairs)


def _pairs(pointer: Any, thread: Any) -> Iterator[tuple[int, int, Any]]:
    factor, four = bfloat16s(constant(packing.FACTOR * 0x10001)), constant(4)
    for half in range(2):
        for number, word in enumerate(four_words(pointer, thread, 512 * half)):
            ready = arith.andi(word, constant(packing.READY))
            left = arith.andi(arith.shli(word, four), constant(packing.LEFT))
            right = arith.andi(arith.shrui(word, four), constant(packing.RIGHT))
            for i, bits in enumerate((ready, arith.ori(left, right))):
                yield 2 * number + i, half, arith.mulf(bfloat16s(bits), factor)
