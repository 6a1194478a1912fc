"""Barriers over the whole grid, and stores of some rows, written with `inline_mgpu`.

The CPU interpreter has neither: it needs no barriers, and all rows may be stored.
"""

import contextlib
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, vector

from pallas_kernels.layer_products.tuning import TOKENS
from pallas_kernels.stores import rows_of_a_thread

LINE = 128  # bytes, of the L2


def _fence() -> None:
    # What ordinary stores wrote is read by the copy engine, another proxy of memory.
    llvm.inline_asm(ir.Type.parse("!llvm.void"), [], "fence.proxy.async.global;", "", has_side_effects=True)


def arrive(counter: jax.Ref) -> None:
    """Adds 1 to an i32 in global memory, after all stores of this warpgroup."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def run(_: Any, counter: Any) -> None:
        _fence()
        mgpu_utils.warpgroup_barrier()
        mgpu_utils.SemaphoreRef(mgpu_utils.memref_ptr(counter)).signal(1, memory_scope="gpu")

    run(counter)


def wait(counter: jax.Ref, value: int, waiting: int) -> None:
    """Waits until an i32 in global memory has reached `value`. The last of so many warpgroups that wait leaves a zero."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def run(_: Any, counter: Any) -> None:
        pointer = mgpu_utils.memref_ptr(counter)
        mgpu_utils.SemaphoreRef(pointer).wait(value, decrement=False, memory_scope="gpu")
        mgpu_utils.inline_ptx(  # each adds 1, and at this bound 1 more is 0
            "red.relaxed.gpu.global.inc.u32 [$0], $1;",
            pointer,
            mgpu_utils.c(value + waiting - 1, ir.IntegerType.get_signless(32)),
            predicate=mgpu_utils.single_thread_predicate(mgpu_utils.ThreadSubset.WARPGROUP),
            has_side_effects=True,
        )
        mgpu_utils.warpgroup_barrier()
        _fence()

    run(counter)


def forget(row: jax.Ref) -> None:
    """A row of global memory that this warpgroup is the last to read holds anything since: it need not reach the memory.

    It begins at a multiple of 128 bytes and has a multiple of that: lines of the L2.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def run(_: Any, row: Any) -> None:
        kind, i32 = ir.MemRefType(row.type), ir.IntegerType.get_signless(32)
        lines = kind.shape[0] * mgpu_utils.bytewidth(kind.element_type) // LINE
        mgpu_utils.warpgroup_barrier()  # all have read
        thread = arith.remui(mgpu_utils.thread_idx(), mgpu_utils.c(mgpu_utils.WARPGROUP_SIZE, i32))
        for first in range(0, lines, mgpu_utils.WARPGROUP_SIZE):
            line = arith.addi(thread, mgpu_utils.c(first, i32))
            place = [arith.muli(line, mgpu_utils.c(LINE, i32))]
            mgpu_utils.inline_ptx(
                f"discard.global.L2 [$0], {LINE};",
                mgpu_utils.getelementptr(mgpu_utils.memref_ptr(row), place, ir.IntegerType.get_signless(8)),
                predicate=arith.cmpi(arith.CmpIPredicate.ult, line, mgpu_utils.c(lines, i32)),
                has_side_effects=True,
            )

    run(row)


def store_rows(value: jax.Array, dst: jax.Ref, rows: jax.Array) -> None:
    """The first `rows` (i32) of [64, columns] (WGMMA layout) to global memory of that shape, whose other rows stay."""

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType(), plgpu.Layout.WG_SPLAT(())))
    def run(_: Any, value: Any, dst: Any, rows: Any) -> None:
        limit = arith.index_cast(ir.IndexType.get(), rows.registers.item())
        for entries in rows_of_a_thread(value):
            with mgpu_utils.when(arith.cmpi(arith.CmpIPredicate.slt, entries[0][0], limit)):
                for row, column, register in entries:
                    vector.store(register, dst, [row, column])

    run(value, dst, rows)


def store_columns(value: jax.Array, dst: jax.Ref, count: int) -> None:
    """The first `count` columns of [64, columns] (WGMMA layout) as rows of global memory [columns, 64], whose others stay.

    Four neighbouring threads have a column's eight numbers side by side: 32 bytes.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType()))
    def run(_: Any, value: Any, dst: Any) -> None:
        places = value.layout.thread_idxs(value.shape)
        for (row, column), at in zip(places, np.ndindex(value.registers.shape), strict=True):
            for n in range(2):
                token = arith.addi(column, mgpu_utils.c(n, column.type))
                there: Any = contextlib.nullcontext()
                if count % 8:
                    limit = mgpu_utils.c(count, token.type)
                    there = mgpu_utils.when(arith.cmpi(arith.CmpIPredicate.slt, token, limit))
                with there:
                    number = vector.extract(value.registers[at], dynamic_position=[], static_position=[n])
                    memref.store(number, dst, [token, row])

    run(value, dst)


def store_registers(value: jax.Array, dst: jax.Ref, *, interpreted: bool) -> None:
    """f32[64, n] (WGMMA layout) to shared memory f32[n / 4, 128, 2], pairs of threads side by side."""
    if interpreted:
        dst[...] = value.reshape(dst.shape)
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType()))
    def run(_: Any, value: Any, dst: Any) -> None:
        for n, register in enumerate(value.registers.flat):
            vector.store(register, dst, _pair(n))

    run(value, dst)


def load_registers(src: jax.Ref, *, interpreted: bool) -> jax.Array:
    """What another warpgroup has put there with `store_registers`."""
    shape = TOKENS, src.shape[0] * 4
    if interpreted:
        return src[...].reshape(shape)
    result = plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=result)
    def run(_: Any, src: Any) -> Any:
        layout = plgpu.Layout.WGMMA.to_mgpu()
        registers = np.empty(layout.registers_shape(shape), object)
        kind = ir.VectorType.get((2,), ir.F32Type.get())
        for n, at in enumerate(np.ndindex(registers.shape)):
            registers[at] = vector.load(kind, src, _pair(n))
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return run(src)


def _pair(number: int) -> list[Any]:
    """Where a thread's pair of that number lies."""
    index, i32 = ir.IndexType.get(), ir.IntegerType.get_signless(32)
    thread = arith.remui(mgpu_utils.thread_idx(), mgpu_utils.c(mgpu_utils.WARPGROUP_SIZE, i32))
    return [mgpu_utils.c(number, index), arith.index_cast(index, thread), mgpu_utils.c(0, index)]
