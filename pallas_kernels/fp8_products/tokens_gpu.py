"""Tokens into FP8 in one kernel: a warp reads a token twice, for its largest number and for its codes.

XLA takes three kernels, since it neither keeps what a reduction has read nor stores bytes in another order at the pace of
the memory.
"""

import functools
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels import row_loads as ops
from pallas_kernels.fp8_products.tokens import LARGEST, LEAST, RUN, Fp8Tokens, codes_of, scales_of
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

    def fp8_tokens(x: Any, codes: Any, scales: Any) -> None:  # the name that profiles show
        first = lax.axis_index("cta") * WARPS
        if interpret is None:
            _quantise(x, codes, scales, first)
            return
        for warp in range(WARPS):
            row = jnp.minimum(first + warp, tokens - 1)
            values = x.at[row][...].astype(jnp.float32)[None]
            scale = scales_of(values)
            codes.at[row][...] = codes_of(values, scale)[0]
            scales.at[row][...] = scale[0]

    kernel = plgpu.kernel(
        fp8_tokens,
        out_type=(
            jax.ShapeDtypeStruct((tokens, depth), jnp.float8_e4m3fn),
            jax.ShapeDtypeStruct((tokens,), jnp.float32),
        ),
        grid=(-(-tokens // WARPS),),
        grid_names=("cta",),
        **({} if interpret is None else {"interpret": interpret}),
    )
    return Fp8Tokens(*kernel(x))


def _quantise(x: Any, codes: Any, scales: Any, first: Any) -> None:
    tokens, depth = x.shape
    runs = depth // RUN

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), plgpu.RefType(), ops.SCALAR))
    def run(_: Any, *arguments: Any) -> None:
        x, codes, scales, first = (ops.as_operand(x) for x in arguments)
        i8, i16, i32, i64 = (ir.IntegerType.get_signless(bits) for bits in (8, 16, 32, 64))
        f32, element = ir.F32Type.get(), ir.BF16Type.get()
        four, pair = ir.VectorType.get((4,), i32), ir.VectorType.get((2,), i16)

        thread = arith.remui(arith.extui(i64, mgpu_utils.thread_idx()), ops.constant(ops.WARPGROUP))
        warp, lane = arith.divui(thread, ops.constant(LANES)), arith.remui(thread, ops.constant(LANES))
        # Warps beyond the last token do that one again, threads beyond the last run of 16 that run.
        row = arith.minui(arith.addi(first, warp), ops.constant(tokens - 1))
        begin = arith.muli(row, ops.constant(depth))
        groups = range(0, -(-runs // LANES), AT_ONCE)

        def offsets(group: int) -> list[ir.Value]:
            numbers = range(group, min(group + AT_ONCE, -(-runs // LANES)))
            own = [arith.addi(lane, ops.constant(n * LANES)) for n in numbers]
            own = [arith.minui(run, ops.constant(runs - 1)) for run in own]
            return [ops.muladd((begin, 1), (run, RUN)) for run in own]

        def words(offset: ir.Value) -> list[ir.Value]:
            found = []
            for half in range(2):
                at = mgpu_utils.getelementptr(
                    ops.pointer_of(x), [arith.addi(offset, ops.constant(half * RUN // 2))], element
                )
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
            for offset, given in at_once:
                encoded = [
                    mgpu_utils.inline_ptx(ENCODE, given[n], given[n + 4], factor, result_types=i32)
                    for n in range(4)
                ]
                to = mgpu_utils.getelementptr(ops.pointer_of(codes), [offset], i8)
                llvm.store(vector.from_elements(four, encoded), to, alignment=16)
        with mgpu_utils.when(arith.cmpi(arith.CmpIPredicate.eq, lane, ops.constant(0))):
            llvm.store(scale, mgpu_utils.getelementptr(ops.pointer_of(scales), [row], f32))

    run(x, codes, scales, first)
