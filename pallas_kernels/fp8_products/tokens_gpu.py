"""Tokens into FP8 in one kernel: a warp reads a token twice, for its largest number and for its codes.

XLA takes three kernels, since it neither keeps what a reduction has read nor stores bytes in another order at the pace of
the memory. And it would pad in kernels of its own: rows up to whole tiles of the products' kernel are the last token again,
and its scale stands for those of a whole block.
"""

import functools
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels import row_loads as ops
from pallas_kernels.fp8_products.tokens import LARGEST, LEAST, RUN, Fp8Tokens, codes_of, scales_of
from pallas_kernels.fp8_products.tuning import LEAST_TOKENS, MOST_TOKENS
from pallas_kernels.left_operand import constant as bits

WARPS = 4  # of a CTA, a token each
LANES = 32
AT_ONCE = 4  # runs of a thread whose loads are under way together

# Four codes of a thread's: those of two numbers side by side, and of the two that are eight after them.
ENCODE = """{
.reg .b32 a, b, c, d; .reg .f32 p, q, r, s; .reg .b16 low, high;
shl.b32 a, $1, 16; and.b32 b, $1, 0xFFFF0000; shl.b32 c, $2, 16; and.b32 d, $2, 0xFFFF0000;
mov.b32 p, a; mov.b32 q, b; mov.b32 r, c; mov.b32 s, d;
mul.f32 p, p, $3; mul.f32 q, q, $3; mul.f32 r, r, $3; mul.f32 s, s, $3;
cvt.rn.satfinite.e4m3x2.f32 low, p, r; cvt.rn.satfinite.e4m3x2.f32 high, q, s;
mov.b32 $0, {low, high};
}"""


@functools.partial(jax.jit, static_argnames="interpret")  # lowered once for all products of a depth
def quantise_tokens_mosaic_gpu(x: jax.Array, *, interpret: Any = None) -> Fp8Tokens:
    """See `fp8_products.quantise_tokens`."""
    tokens, depth = x.shape
    if depth % RUN:
        raise NotImplementedError(f"tokens of {depth} numbers in FP8: the kernel takes multiples of {RUN}")
    rows, blocks = (-(-tokens // of) * of for of in (LEAST_TOKENS, MOST_TOKENS))

    def fp8_tokens(x: Any, codes: Any, scales: Any) -> None:  # the name that profiles show
        first = lax.axis_index("cta") * WARPS
        if interpret is None:
            _quantise(x, codes, scales, first)
            return
        for row in range(WARPS):
            values = x.at[jnp.minimum(first + row, tokens - 1)][...].astype(jnp.float32)[None]
            scale = scales_of(values)
            codes.at[first + row][...] = codes_of(values, scale)[0]
            scales.at[first + row][...] = scale[0]

        if blocks > rows:

            @pl.when(first + WARPS == rows)
            def _() -> None:
                scales.at[pl.ds(rows, blocks - rows)][...] = jnp.broadcast_to(scale, blocks - rows)

    kernel = plgpu.kernel(
        fp8_tokens,
        out_type=(
            jax.ShapeDtypeStruct((rows, depth), jnp.float8_e4m3fn),
            jax.ShapeDtypeStruct((blocks,), jnp.float32),
        ),
        grid=(rows // WARPS,),
        grid_names=("cta",),
        **({} if interpret is None else {"interpret": interpret}),
    )
    codes, scales = kernel(x)
    return Fp8Tokens(codes, scales, tokens)


def _quantise(x: Any, codes: Any, scales: Any, first: Any) -> None:
    tokens, depth = x.shape
    rows, blocks = codes.shape[0], scales.shape[0]
    runs = depth // RUN

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), plgpu.RefType(), ops.SCALAR))
    def run(_: Any, *arguments: Any) -> None:
        x, codes, scales, first = (ops.as_operand(x) for x in arguments)
        i8, i16, i32, i64 = (ir.IntegerType.get_signless(bits) for bits in (8, 16, 32, 64))
        f32, element = ir.F32Type.get(), ir.BF16Type.get()
        four, pair = ir.VectorType.get((4,), i32), ir.VectorType.get((2,), i16)

        thread = arith.remui(arith.extui(i64, mgpu_utils.thread_idx()), ops.constant(ops.WARPGROUP))
        warp, lane = arith.divui(thread, ops.constant(LANES)), arith.remui(thread, ops.constant(LANES))
        # Warps beyond the last token take that one again, threads beyond the last run of 16 that run.
        row = arith.addi(first, warp)
        given = arith.minui(row, ops.constant(tokens - 1))
        source = mgpu_utils.getelementptr(ops.pointer_of(x), [ops.muladd((given, depth))], element)
        target = mgpu_utils.getelementptr(ops.pointer_of(codes), [ops.muladd((row, depth))], i8)
        groups = range(0, -(-runs // LANES), AT_ONCE)

        def offsets(group: int) -> list[ir.Value]:
            numbers = range(group, min(group + AT_ONCE, -(-runs // LANES)))
            own = [arith.addi(lane, ops.constant(n * LANES)) for n in numbers]
            own = [arith.minui(run, ops.constant(runs - 1)) for run in own]
            return [ops.muladd((run, RUN)) for run in own]

        def words(offset: ir.Value) -> list[ir.Value]:
            found = []
            for half in range(2):
                at = arith.addi(offset, ops.constant(half * RUN // 2))
                at = mgpu_utils.getelementptr(source, [at], element)
                loaded = llvm.load(four, at, alignment=16)
                found += [vector.extract(loaded, dynamic_position=[], static_position=[n]) for n in range(4)]
            return found

        # Magnitudes of floats are in the order of their bits; NaN is the largest.
        largest = mgpu_utils.bitcast(bits(0), pair)
        for group in groups:
            for word in [w for offset in offsets(group) for w in words(offset)]:
                magnitudes = mgpu_utils.bitcast(arith.andi(word, bits(0x7FFF7FFF)), pair)
                largest = arith.maxui(largest, magnitudes)
        both = mgpu_utils.bitcast(largest, i32)
        top = arith.maxui(arith.shli(both, bits(16)), arith.andi(both, bits(0xFFFF0000)))
        for distance in (1, 2, 4, 8, 16):
            top = arith.maxui(top, mgpu_utils.shfl_bfly(top, distance))
        least = mgpu_utils.c(LEAST, f32)
        top = arith.bitcast(f32, arith.maxui(top, arith.bitcast(i32, least)))
        scale = arith.mulf(top, mgpu_utils.c(1 / LARGEST, f32))
        # Exactly rounded, unlike the division that Mosaic makes.
        one = mgpu_utils.c(1.0, f32)
        factor = mgpu_utils.inline_ptx("div.rn.f32 $0, $1, $2;", one, scale, result_types=f32)

        for group in groups:
            at_once = [(offset, words(offset)) for offset in offsets(group)]
            for offset, loaded in at_once:
                encoded = [
                    mgpu_utils.inline_ptx(ENCODE, loaded[n], loaded[n + 4], factor, result_types=i32)
                    for n in range(4)
                ]
                to = mgpu_utils.getelementptr(target, [offset], i8)
                llvm.store(vector.from_elements(four, encoded), to, alignment=16)

        def store_scale(at: ir.Value) -> None:
            llvm.store(scale, mgpu_utils.getelementptr(ops.pointer_of(scales), [at], f32))

        with mgpu_utils.when(arith.cmpi(arith.CmpIPredicate.eq, lane, ops.constant(0))):
            store_scale(row)
        if blocks > rows:
            with mgpu_utils.when(arith.cmpi(arith.CmpIPredicate.eq, row, ops.constant(rows - 1))):
                for start in range(rows, blocks, LANES):
                    at = arith.addi(lane, ops.constant(start))
                    store_scale(arith.minui(at, ops.constant(blocks - 1)))

    run(x, codes, scales, first)
