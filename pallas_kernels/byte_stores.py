"""Entries of 16-bit floats into pages of bytes, quantised between the load and the store (`byte_pages`)."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, math, vector

from pallas_kernels import byte_pages
from pallas_kernels import row_loads as ops

VECTOR = 8  # elements of a thread: 16 bytes of floats


def store_rows(
    count: int,
    head_dim: int,
    dtype: Any,
    arguments: Sequence[Any],
    source: Callable[..., tuple[ir.Value, ir.Value]],
    target: Callable[..., tuple[ir.Value, ir.Value, ir.Value, ir.Value]],
) -> None:
    """Writes `count` entries of one CTA, all of them loaded before the first is stored.

    Args:
      arguments: Refs in global memory and scalars, as for `row_loads.load_vectors`.
      source: of (row i64, *arguments) the pointer and element offset of an entry of `dtype` [head_dim].
      target: of the same whether the entry is written (i1), the pool's pointer, and the offsets of the entry and its scale.
    """
    lanes = head_dim // VECTOR  # that share an entry, in one warp
    types = tuple(plgpu.RefType() if ops.is_ref(x) else ops.SCALAR for x in arguments)

    @plgpu.inline_mgpu(arg_types=types)
    def run(_: Any, *arguments: Any) -> None:
        i64 = ir.IntegerType.get_signless(64)
        element = mgpu_utils.dtype_to_ir_type(dtype)
        given = [ops.as_operand(x) for x in arguments]
        thread = arith.extui(i64, mgpu_utils.thread_idx())
        thread = arith.remui(thread, ops.constant(ops.WARPGROUP))
        own, lane = arith.divui(thread, ops.constant(lanes)), arith.remui(thread, ops.constant(lanes))
        at_once = ops.WARPGROUP // lanes
        loaded = []
        for first in range(0, count, at_once):
            row = arith.addi(own, ops.constant(first))
            inside = arith.cmpi(arith.CmpIPredicate.ult, row, ops.constant(count))
            row = arith.minui(row, ops.constant(count - 1))
            pointer, offset = source(row, *given)
            at = mgpu_utils.getelementptr(pointer, [ops.muladd((offset, 1), (lane, VECTOR))], element)
            bits = llvm.load(ir.VectorType.get((VECTOR,), element), at, alignment=2 * VECTOR)
            loaded.append((row, inside, bits))
        for row, inside, bits in loaded:
            packed, scale = _quantise(bits, lanes)
            there, pointer, entry, beside = target(row, *given)
            there = arith.andi(there, inside)
            byte = ir.IntegerType.get_signless(8)
            with mgpu_utils.when(there):
                at = mgpu_utils.getelementptr(pointer, [ops.muladd((entry, 1), (lane, VECTOR))], byte)
                llvm.store(packed, at, alignment=VECTOR)
            first_lane = arith.cmpi(arith.CmpIPredicate.eq, lane, ops.constant(0))
            with mgpu_utils.when(arith.andi(there, first_lane)):
                llvm.store(arith.trunci(byte, scale), mgpu_utils.getelementptr(pointer, [beside], byte))

    run(*arguments)


def store_plainly(column: Any, entry: Any, row: Any) -> None:
    """The same of one entry [D] for the interpreter, or its copy where the pool is not of bytes; `column` of a page."""
    if not byte_pages.is_bytes(column.dtype):
        column.at[entry][...] = row
        return
    values, scale = byte_pages.quantise(row)
    column.at[byte_pages.scale_rows(column) + entry][...] = values
    column.at[*byte_pages.scale_at(column, entry)][...] = scale


def _quantise(bits: ir.Value, lanes: int) -> tuple[ir.Value, ir.Value]:
    """This thread's eight elements of an entry: (their bytes as i8[8], the entry's scale byte as i32)."""
    f32, i32 = ir.F32Type.get(), ir.IntegerType.get_signless(32)

    def f(value: float) -> ir.Value:
        return mgpu_utils.c(float(value), f32)

    def c(value: int) -> ir.Value:
        return mgpu_utils.c(value, i32)

    elements = [
        arith.extf(f32, vector.extract(bits, dynamic_position=[], static_position=[n])) for n in range(VECTOR)
    ]
    largest = f(0)
    for x in elements:
        largest = arith.maximumf(largest, math.absf(x))
    distance = 1
    while distance < lanes:
        largest = arith.maximumf(largest, mgpu_utils.shfl_bfly(largest, distance))
        distance *= 2
    up = arith.addi(arith.bitcast(i32, largest), c((1 << byte_pages.SHIFT) - 1))
    scale = arith.subi(arith.shrui(up, c(byte_pages.SHIFT)), c(byte_pages.OFFSET))
    scale = arith.minsi(arith.maxsi(scale, c(0)), c(255))
    held = arith.bitcast(f32, arith.shli(arith.addi(scale, c(byte_pages.OFFSET)), c(byte_pages.SHIFT)))
    # Exactly rounded, unlike the division that Mosaic makes: the same bytes as everywhere else.
    inverse = mgpu_utils.inline_ptx("div.rn.f32 $0, $1, $2;", f(byte_pages.STEPS), held, result_types=f32)
    words = []
    for first in range(0, VECTOR, 4):
        word = c(0)
        for n in range(4):
            x = arith.mulf(elements[first + n], inverse)
            x = arith.minimumf(arith.maximumf(x, f(-byte_pages.STEPS)), f(byte_pages.STEPS))
            whole = arith.bitcast(i32, arith.addf(x, f(byte_pages.ROUND + byte_pages.ZERO)))
            word = arith.ori(word, arith.shli(arith.andi(whole, c(255)), c(8 * n)))
        words.append(word)
    return vector.from_elements(ir.VectorType.get((2,), i32), words), scale
