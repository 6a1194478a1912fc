"""MXFP4 weights made bfloat16 in registers."""

from collections.abc import Iterator
from typing import Any

import jax
from jaxlib.mlir.dialects import arith

from pallas_kernels.expert_products import mxfp4
from pallas_kernels.left_operand import bfloat16s, constant, four_words, left_operand, word


def unpack(tile: jax.Ref, spare: jax.Ref | None) -> Any:
    """A packed tile i32[17, 32] as a matrix instruction's left operand: see `left_operand`."""
    return left_operand(tile, spare, lambda words: mxfp4.unpack(words[None, None]), _pairs)


def _pairs(pointer: Any, thread: Any) -> Iterator[tuple[int, int, Any]]:
    words = four_words(pointer, thread)
    # Four threads have the same rows: lane / 4 of a warp, eight of them in each.
    row = arith.addi(arith.divui(thread, constant(4)), constant((mxfp4.ROWS - 1) * mxfp4.WORDS))
    scales = word(pointer, row)
    for number, own in enumerate(words):
        block, half = divmod(number, 2)
        scale = arith.andi(arith.shrui(scales, constant(8 * number)), constant(255))
        scale = bfloat16s(arith.muli(scale, constant((1 << 7) + (1 << 23))))  # in both halves
        last = arith.muli(arith.andi(own, constant(mxfp4.LAST)), constant(mxfp4.FACTOR))
        for i, moved in enumerate([*(_rotated(own, right) for right in mxfp4.ROTATIONS), last]):
            bits = arith.andi(moved, constant(mxfp4.READY))
            yield 4 * block + i, half, arith.mulf(bfloat16s(bits), scale)


def _rotated(x: Any, right: int) -> Any:
    if not right:
        return x
    return arith.ori(arith.shrui(x, constant(right)), arith.shli(x, constant(32 - right)))
