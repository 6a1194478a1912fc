"""The few device operations that Pallas does not offer (or only at a price), written with `inline_mgpu`.

The CPU interpreter cannot run them: `mosaic_gpu.py` has a plain path beside each.
"""

from collections.abc import Callable

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref

SCALAR = plgpu.Layout.WG_SPLAT(())
Dimension = Callable[[ir.Value], ir.Value]


def _same(row: ir.Value) -> ir.Value:
    return row


def signal(counter: jax.Ref) -> None:
    """Adds 1 to an i32 in global memory, after all stores of this warpgroup (release)."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def run(ctx, counter):
        del ctx
        mgpu_utils.warpgroup_barrier()
        mgpu_utils.SemaphoreRef(mgpu_utils.memref_ptr(counter)).signal(1, memory_scope="gpu")

    run(counter)


def wait(counter: jax.Ref, value: jax.Array, *, clear: bool = False) -> None:
    """Waits until an i32 in global memory has reached `value` (acquire). With `clear` it takes `value` off again."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR))
    def run(ctx, counter, value):
        del ctx
        mgpu_utils.SemaphoreRef(mgpu_utils.memref_ptr(counter)).wait(
            value.registers.item(), decrement=clear, memory_scope="gpu"
        )

    run(counter, value)


def reduce_rows(how: str, x: jax.Array, exchange: jax.Ref) -> jax.Array:
    """ "max" or "add" over the rows of [R, C] (WGMMA layout): [C]. `exchange` f32[n] in shared memory, of this warpgroup."""
    result = plgpu.ShapeDtypeStruct(x.shape[1:], x.dtype, layout=plgpu.Layout.WGMMA.reduce(0))

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType()), return_type=result)
    def run(_, x, exchange):
        return x.reduce(how, 0, scratch=exchange)

    return run(x, exchange)


def load_transposed(src: jax.Ref, columns: int, dimension: Dimension = _same) -> jax.Array:
    """[G, D] in global memory to [D, columns] registers (WGMMA layout); columns from G on repeat the last row.

    Row r is of dimension(r), see `byte_ops`.
    """
    group, head_dim = src.shape
    result = plgpu.ShapeDtypeStruct((head_dim, columns), src.dtype, layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=result)
    def run(ctx, src):
        del ctx
        index = ir.IndexType.get()
        element = ir.MemRefType(src.type).element_type
        most = mgpu_utils.c(group - 1, index)
        zero = mgpu.FragmentedArray.splat(
            mgpu_utils.c(0.0, element), (head_dim, columns), layout=mgpu.WGMMA_LAYOUT
        )

        def load(_, position):
            d, g = position
            return memref.load(src, [arith.minui(g, most), dimension(d)])

        return zero.foreach(load, create_array=True)

    return run(src)


def store_transposed(value: jax.Array, dst: jax.Ref, dimension: Dimension = _same) -> None:
    """Stores [D, Gp] registers (WGMMA layout) to [G, D] in global memory; columns from G on are dropped."""
    group = dst.shape[-2]
    dtype = dst.dtype

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType()))
    def run(ctx, value, dst):
        del ctx
        index = ir.IndexType.get()
        limit = mgpu_utils.c(group, index)
        rows = value.shape[1]

        def store(element, position):
            d, g = dimension(position[0]), position[1]
            if rows == group:
                memref.store(element, dst, [g, d])
                return
            with mgpu_utils.when(arith.cmpi(arith.CmpIPredicate.ult, g, limit)):
                memref.store(element, dst, [g, d])

        value.foreach(store)

    run(value.astype(dtype), dst)
