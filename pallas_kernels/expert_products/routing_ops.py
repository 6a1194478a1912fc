"""Loads and stores of the routing kernel that Pallas does not offer, written with `inline_mgpu`.

The CPU interpreter cannot run them: there is a plain path beside each.
"""

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref


def load_rows(src: jax.Ref, first: int, shape: tuple[int, int], rows: int, *, interpreted: bool) -> jax.Array:
    """f32[shape] from row `first` of src; rows from `rows` on and columns beyond its last repeat the last ones."""
    if interpreted:  # whose source is padded
        return src[pl.ds(first, shape[0])]
    result = plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=plgpu.Layout.WGMMA)
    columns = src.shape[1]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=result)
    def run(ctx: Any, src: Any) -> Any:
        del ctx
        index = ir.IndexType.get()
        zero = mgpu.FragmentedArray.splat(
            mgpu_utils.c(0.0, ir.F32Type.get()), shape, layout=mgpu.WGMMA_LAYOUT
        )

        def load(_: Any, position: Any) -> Any:
            row = arith.addi(position[0], mgpu_utils.c(first, index))
            row = arith.minui(row, mgpu_utils.c(rows - 1, index))
            return memref.load(src, [row, arith.minui(position[1], mgpu_utils.c(columns - 1, index))])

        return zero.foreach(load, create_array=True)

    return run(src)


def scatter_rows(target: jax.Array, dst: jax.Ref, first: int, *, interpreted: bool) -> None:
    """dst[target[r]] = first + r for i32[64] targets within dst; others are left out."""
    size = dst.shape[0]
    if interpreted:
        hit = target[None, :] == lax.iota(jnp.int32, size)[:, None]
        row = jnp.where(hit, lax.iota(jnp.int32, target.shape[0]) + first, 0).max(axis=1)
        dst[...] = jnp.where(hit.any(axis=1), row, dst[...])
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA.reduce(1), plgpu.RefType()))
    def run(ctx: Any, target: Any, dst: Any) -> None:
        del ctx
        index, i32 = ir.IndexType.get(), ir.IntegerType.get_signless(32)

        def store(value: Any, position: Any) -> None:
            at = arith.index_cast(index, value)
            with mgpu_utils.when(arith.cmpi(arith.CmpIPredicate.ult, at, mgpu_utils.c(size, index))):
                row = arith.index_cast(i32, arith.addi(position[0], mgpu_utils.c(first, index)))
                memref.store(row, dst, [at])

        target.foreach(store)

    run(target, dst)
