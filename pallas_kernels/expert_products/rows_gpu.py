"""Rows of tokens for their experts: XLA's gather takes half as long again, or twice as long, where tokens are many."""

import functools
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels import row_loads as ops

WARPS = 4  # of a CTA, a row each
LANES = 32
BYTES = 16  # of a lane at once


@functools.partial(jax.jit, static_argnames="interpret")  # lowered once for all layers
def gather_rows_mosaic_gpu(x: jax.Array, rows: jax.Array, *, interpret: Any = None) -> jax.Array:
    """See `expert_products.gather_rows`."""
    (count,), size, vector = rows.shape, x.shape[1], BYTES // x.dtype.itemsize
    if size % vector:
        raise NotImplementedError(f"rows of {size} elements: the kernel takes multiples of {vector}")

    def expert_rows(x: Any, rows: Any, out: Any) -> None:  # the name that profiles show
        first = lax.axis_index("cta") * WARPS
        if interpret is None:
            _copy(x, rows, out, first)
            return
        for warp in range(WARPS):
            row = jnp.minimum(first + warp, count - 1)

            @pl.when(first + warp < count)
            def _(row: Any = row) -> None:
                out.at[row][...] = x.at[rows[row]][...]

    kernel = plgpu.kernel(
        expert_rows,
        out_type=jax.ShapeDtypeStruct((count, size), x.dtype),
        grid=(pl.cdiv(count, WARPS),),
        grid_names=("cta",),
        **({} if interpret is None else {"interpret": interpret}),
    )
    return kernel(x, rows)


def _copy(x: Any, rows: Any, out: Any, first: Any) -> None:
    count, size = out.shape
    out_dtype = jnp.dtype(out.dtype)
    vector = BYTES // out_dtype.itemsize
    runs = size // vector
    refs = [x, rows, out]

    @plgpu.inline_mgpu(arg_types=(*[plgpu.RefType()] * len(refs), ops.SCALAR))
    def run(_: Any, *arguments: Any) -> None:
        x, rows, out, first = (ops.as_operand(argument) for argument in arguments)
        element = ir.IntegerType.get_signless(8 * out_dtype.itemsize)
        held = ir.VectorType.get((vector,), element)

        i64 = ir.IntegerType.get_signless(64)
        thread = arith.remui(arith.extui(i64, mgpu_utils.thread_idx()), ops.constant(ops.WARPGROUP))
        warp, lane = arith.divui(thread, ops.constant(LANES)), arith.remui(thread, ops.constant(LANES))
        # Warps beyond the last row take that one again, lanes beyond the last run of a row that run.
        row = arith.minui(arith.addi(first, warp), ops.constant(count - 1))
        source, target = (
            mgpu_utils.getelementptr(ops.pointer_of(ref), [ops.muladd((at, size))], element)
            for ref, at in ((x, ops.load_index(rows, row)), (out, row))
        )
        for start in range(0, runs, LANES):
            own = arith.minui(arith.addi(lane, ops.constant(start)), ops.constant(runs - 1))
            offset = ops.muladd((own, vector))
            values = llvm.load(held, mgpu_utils.getelementptr(source, [offset], element), alignment=BYTES)
            llvm.store(values, mgpu_utils.getelementptr(target, [offset], element), alignment=BYTES)

    run(*refs, first)
