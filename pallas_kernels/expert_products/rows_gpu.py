"""Rows of tokens to their experts, and back: what XLA's gathers take two to eight times as long for, where tokens are many.

A warp makes one row of the result, of one row or of the weighted sum of several; each lane has 16 bytes of each at a time.
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

WARPS = 4  # of a CTA
LANES = 32
VECTOR = 8  # elements of a lane
f32 = jnp.float32


@functools.partial(jax.jit, static_argnames="interpret")  # lowered once for all layers
def rows_mosaic_gpu(
    x: jax.Array, position: jax.Array, weights: jax.Array | None = None, *, interpret: Any = None
) -> jax.Array:
    """See `expert_products.gather_rows` and `add_rows`: position i32[R, k], weights f32[R, k] or None if k is 1."""
    size, (count, at_once) = x.shape[1], position.shape
    if size % VECTOR:
        raise NotImplementedError(f"rows of {size} elements: the kernel takes multiples of {VECTOR}")

    def expert_rows(x: Any, position: Any, *weights_and_out: Any) -> None:  # the name that profiles show
        *weights, out = weights_and_out
        first = lax.axis_index("cta") * WARPS
        if interpret is None:
            _rows(x, position, weights, out, first, at_once)
            return
        for warp in range(WARPS):
            row = jnp.minimum(first + warp, count - 1)

            @pl.when(first + warp < count)
            def _(row: Any = row) -> None:
                values = [x.at[position[row, j]][...].astype(f32) for j in range(at_once)]
                for held in weights:
                    values = [value * held[row, j] for j, value in enumerate(values)]
                out.at[row][...] = sum(values[1:], values[0]).astype(out.dtype)

    kernel = plgpu.kernel(
        expert_rows,
        out_type=jax.ShapeDtypeStruct((count, size), x.dtype),
        grid=(pl.cdiv(count, WARPS),),
        grid_names=("cta",),
        **({} if interpret is None else {"interpret": interpret}),
    )
    return kernel(x, position, *([] if weights is None else [weights]))


def _rows(x: Any, position: Any, weights: list[Any], out: Any, first: Any, at_once: int) -> None:
    count, size = out.shape
    runs = size // VECTOR
    refs = [x, position, *weights, out]

    @plgpu.inline_mgpu(arg_types=(*[plgpu.RefType()] * len(refs), ops.SCALAR))
    def run(_: Any, *arguments: Any) -> None:
        x, position, *weights, out, first = (ops.as_operand(argument) for argument in arguments)
        i64, wide = ir.IntegerType.get_signless(64), ir.F32Type.get()
        element = mgpu_utils.dtype_to_ir_type(refs[0].dtype)
        vectors = [ir.VectorType.get((VECTOR,), of) for of in (element, wide)]

        thread = arith.remui(arith.extui(i64, mgpu_utils.thread_idx()), ops.constant(ops.WARPGROUP))
        warp, lane = arith.divui(thread, ops.constant(LANES)), arith.remui(thread, ops.constant(LANES))
        # Warps beyond the last row take that one again, lanes beyond the last run of a row that run.
        row = arith.minui(arith.addi(first, warp), ops.constant(count - 1))
        places = [ops.muladd((row, at_once), (ops.constant(j), 1)) for j in range(at_once)]
        sources = [
            mgpu_utils.getelementptr(
                ops.pointer_of(x), [ops.muladd((ops.load_index(position, at), size))], element
            )
            for at in places
        ]
        target = mgpu_utils.getelementptr(ops.pointer_of(out), [ops.muladd((row, size))], element)
        factors = [
            vector.broadcast(
                vectors[1], llvm.load(wide, mgpu_utils.getelementptr(ops.pointer_of(held), [at], wide))
            )
            for held in weights
            for at in places
        ]
        for start in range(0, runs, LANES):
            own = arith.minui(arith.addi(lane, ops.constant(start)), ops.constant(runs - 1))
            offset = ops.muladd((own, VECTOR))
            held = [
                llvm.load(
                    vectors[0], mgpu_utils.getelementptr(source, [offset], element), alignment=2 * VECTOR
                )
                for source in sources
            ]
            result = held[0]
            if factors:
                terms = [
                    arith.mulf(arith.extf(vectors[1], value), factor)
                    for value, factor in zip(held, factors, strict=True)
                ]
                result = arith.truncf(vectors[0], functools.reduce(arith.addf, terms))
            llvm.store(result, mgpu_utils.getelementptr(target, [offset], element), alignment=2 * VECTOR)

    run(*refs, first)
