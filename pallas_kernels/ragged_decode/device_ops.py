"""The few device operations that Pallas does not offer (or only at a price), written with `inline_mgpu`.

The CPU interpreter cannot run them: `mosaic_gpu.py` has a plain path beside each.
"""

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, vector

SCALAR = plgpu.Layout.WG_SPLAT(())


def signal(counter: jax.Ref) -> None:
    """Adds 1 to an i32 in global memory, after all stores of this warpgroup (release)."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def run(ctx, counter):
        del ctx
        mgpu_utils.warpgroup_barrier()
        mgpu_utils.SemaphoreRef(mgpu_utils.memref_ptr(counter)).signal(1, memory_scope="gpu")

    run(counter)


def wait_and_clear(counter: jax.Ref, value: jax.Array) -> None:
    """Waits until an i32 in global memory has reached `value`, takes it down to zero again (acquire)."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR))
    def run(ctx, counter, value):
        del ctx
        mgpu_utils.SemaphoreRef(mgpu_utils.memref_ptr(counter)).wait(
            value.registers.item(), decrement=True, memory_scope="gpu"
        )

    run(counter, value)


def load_transposed(src: jax.Ref, columns: int) -> jax.Array:
    """[G, D] in global memory to [D, columns] registers (WGMMA layout); columns from G on repeat the last row."""
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
            return memref.load(src, [arith.minui(g, most), d])

        return zero.foreach(load, create_array=True)

    return run(src)


def load_columns(src: jax.Ref, columns: int) -> jax.Array:
    """[D, n] in global memory, n even, to [D, columns] registers (WGMMA layout); columns from n on repeat the last two."""
    rows, held = src.shape
    result = plgpu.ShapeDtypeStruct((rows, columns), src.dtype, layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=result)
    def run(ctx, src):
        del ctx
        most = mgpu_utils.c(held - 2, ir.IndexType.get())
        pair = ir.VectorType.get((2,), ir.MemRefType(src.type).element_type)
        registers = np.empty(mgpu.WGMMA_LAYOUT.registers_shape((rows, columns)), dtype=object)
        places = mgpu.WGMMA_LAYOUT.thread_idxs((rows, columns))
        for at, (row, column) in zip(np.ndindex(registers.shape), places, strict=True):
            registers[at] = vector.load(pair, src, [row, arith.minui(column, most)])
        return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)

    return run(src)


def store_columns(value: jax.Array, dst: jax.Ref) -> None:
    """Stores [D, columns] registers (WGMMA layout) to [D, n] in global memory, n even; columns from n on are dropped."""
    held = dst.shape[-1]

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType()))
    def run(ctx, value, dst):
        del ctx
        limit = mgpu_utils.c(held, ir.IndexType.get())
        for register, (row, column) in zip(
            value.registers.flat, value.layout.thread_idxs(value.shape), strict=True
        ):
            with mgpu_utils.when(arith.cmpi(arith.CmpIPredicate.ult, column, limit)):
                vector.store(register, dst, [row, column])

    run(value, dst)


def store_transposed(value: jax.Array, dst: jax.Ref) -> None:
    """Stores [D, Gp] registers (WGMMA layout) to [G, D] in global memory; rows from G on are dropped."""
    group = dst.shape[-2]
    dtype = dst.dtype

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType()))
    def run(ctx, value, dst):
        del ctx
        index = ir.IndexType.get()
        limit = mgpu_utils.c(group, index)
        rows = value.shape[1]

        def store(element, position):
            d, g = position
            if rows == group:
                memref.store(element, dst, [g, d])
                return
            with mgpu_utils.when(arith.cmpi(arith.CmpIPredicate.ult, g, limit)):
                memref.store(element, dst, [g, d])

        value.foreach(store)

    run(value.astype(dtype), dst)
