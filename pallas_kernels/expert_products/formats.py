"""The formats of packed weights: how a tile of 64 columns x 64 of the depth lies in memory, and what it becomes."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jaxlib.mlir.dialects import arith

from pallas_kernels.expert_products import mxfp4
from pallas_kernels.fp8_products import device_ops, packing
from pallas_kernels.left_operand import bfloat16s, constant, four_words, left_operand, word


@dataclasses.dataclass(frozen=True)
class Format:
    """`unpack` makes of tiles i32[n, *tile] a matrix instruction's left operand in registers: see `left_operand`."""

    tile: tuple[int, int]  # of 32-bit words
    unpack: Callable[..., Any]
    most: int = 1  # tiles along the depth of one operand
    small: bool = False  # products are: see `fp8_products.device_ops.in_full`

    @property
    def bytes(self) -> int:
        """Of a tile."""
        return self.tile[0] * self.tile[1] * 4


def _unpack_mxfp4(tiles: jax.Ref, spare: jax.Ref | None, *, by_warp: bool = False) -> Any:
    return left_operand(tiles, spare, lambda words: mxfp4.unpack(words[None]), _pairs, by_warp=by_warp)


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


MXFP4 = Format((mxfp4.ROWS, mxfp4.WORDS), _unpack_mxfp4)
FP8 = Format((packing.WORDS, packing.WORDS), functools.partial(device_ops.unpack, narrow=False), small=True)
# For rows in FP8 too, which with two tiles are of 128 bytes.
FP8_NARROW = Format(FP8.tile, functools.partial(device_ops.unpack, narrow=True), most=2)
