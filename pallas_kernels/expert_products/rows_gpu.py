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
from jaxlib.mlir.dialects import arith, llvm, memref

from pallas_kernels import row_loads as ops

WARPS = 4  # of a CTA, a row each
LANES = 32
BYTES = 16  # of a lane at once
AT_ONCE = 12  # of these, loads under way


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
    count = out.shape[0]

    @plgpu.inline_mgpu(arg_types=(*[plgpu.RefType()] * 3, ops.SCALAR))
    def run(_: Any, *arguments: Any) -> None:
        x_, rows, out_, first = (ops.as_operand(argument) for argument in arguments)
        # Warps beyond the last row take that one again.
        row = arith.minui(arith.addi(first, _thread()[0]), ops.constant(count - 1))
        _copy_vectors(x_, ops.load_index(rows, row), out_, row, x.shape[1], x.dtype)

    run(x, rows, out, first)


def copy_row(x: Any, places: Any, out: Any, first: Any, each: int, *, interpreted: bool) -> None:
    """A warp's row of x [T, E] to `out` [M, E]: pair number p from `first` on is token p // each's, and goes to `places`[p].

    Pairs beyond the last one, and those with a negative place, are not copied.
    """
    pairs = places.shape[0]
    if interpreted:
        for pair in (first + warp for warp in range(WARPS)):
            place = places[jnp.minimum(pair, pairs - 1)]

            @pl.when((pair < pairs) & (place >= 0))
            def _(pair: Any = pair, place: Any = place) -> None:
                out.at[place][...] = x.at[lax.div(pair, jnp.int32(each))][...]

        return

    @plgpu.inline_mgpu(arg_types=(*[plgpu.RefType()] * 3, ops.SCALAR))
    def run(_: Any, *arguments: Any) -> None:
        x_, places, out_, first = (ops.as_operand(argument) for argument in arguments)
        pair = arith.addi(first, _thread()[0])
        there = arith.cmpi(arith.CmpIPredicate.ult, pair, ops.constant(pairs))
        pair = arith.minui(pair, ops.constant(pairs - 1))
        number = memref.load(places, [arith.index_cast(ir.IndexType.get(), pair)])
        place = arith.extsi(ir.IntegerType.get_signless(64), number)
        has_one = arith.cmpi(arith.CmpIPredicate.sge, place, ops.constant(0))
        with mgpu_utils.when(arith.andi(there, has_one)):
            token = arith.divui(pair, ops.constant(each))
            _copy_vectors(x_, token, out_, place, x.shape[1], x.dtype)

    run(x, places, out, first)


def _copy_vectors(x: Any, row: Any, out: Any, place: Any, size: int, dtype: Any) -> None:
    """By a warp, of [.., size] a row to a place; lanes beyond the last run of a row take that run again."""
    bits = 8 * jnp.dtype(dtype).itemsize
    element = ir.IntegerType.get_signless(bits)
    vector = 8 * BYTES // bits
    held, runs, lane = ir.VectorType.get((vector,), element), size // vector, _thread()[1]
    source, target = (
        mgpu_utils.getelementptr(ops.pointer_of(ref), [ops.muladd((at, size))], element)
        for ref, at in ((x, row), (out, place))
    )
    for some in range(0, runs, LANES * AT_ONCE):
        starts = range(some, min(runs, some + LANES * AT_ONCE), LANES)
        own = [arith.minui(arith.addi(lane, ops.constant(start)), ops.constant(runs - 1)) for start in starts]
        offsets = [ops.muladd((at, vector)) for at in own]
        values = [  # all under way before the first is stored
            llvm.load(held, mgpu_utils.getelementptr(source, [at], element), alignment=BYTES)
            for at in offsets
        ]
        for at, value in zip(offsets, values, strict=True):
            llvm.store(value, mgpu_utils.getelementptr(target, [at], element), alignment=BYTES)


def _thread() -> tuple[ir.Value, ir.Value]:
    """A thread's warp and lane, of 64 bits."""
    i64 = ir.IntegerType.get_signless(64)
    thread = arith.remui(arith.extui(i64, mgpu_utils.thread_idx()), ops.constant(ops.WARPGROUP))
    return arith.divui(thread, ops.constant(LANES)), arith.remui(thread, ops.constant(LANES))
