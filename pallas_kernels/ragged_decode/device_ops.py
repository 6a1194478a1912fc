"""The few device operations that Pallas does not offer (or only at a price), written with `inline_mgpu`.

The CPU interpreter cannot run them: `mosaic_gpu.py` has a plain path beside each.
"""

import math
import struct
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref

SCALAR = plgpu.Layout.WG_SPLAT(())
Dimension = Callable[[ir.Value], ir.Value]


def same(row: ir.Value) -> ir.Value:
    return row


def _query(column: ir.Value, shape: Sequence[int]) -> list[ir.Value]:
    """The place of a column among queries [G] or, token by token, [S, G]."""
    if len(shape) == 1:
        return [column]
    group = mgpu_utils.c(shape[1], column.type)
    return [arith.divui(column, group), arith.remui(column, group)]


def signal(counter: jax.Ref) -> None:
    """Adds 1 to an i32 in global memory, after all stores of this warpgroup (release)."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def run(ctx, counter):
        del ctx
        mgpu_utils.warpgroup_barrier()
        mgpu_utils.SemaphoreRef(mgpu_utils.memref_ptr(counter)).signal(1, memory_scope="gpu")

    run(counter)


def wait(counter: jax.Ref, value: jax.Array, *, clear: bool = False, waiting: int = 0) -> None:
    """Waits until an i32 in global memory has reached `value` (acquire).

    With `clear` it takes `value` off again. Or where several wait for the same, `waiting` of them, and nothing is added
    later: the last one leaves a zero.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR))
    def run(ctx, counter, value):
        del ctx
        value, pointer = value.registers.item(), mgpu_utils.memref_ptr(counter)
        mgpu_utils.SemaphoreRef(pointer).wait(value, decrement=clear, memory_scope="gpu")
        if waiting:  # each adds 1, and at this bound 1 more is 0
            bound = arith.addi(value, mgpu_utils.c(waiting - 1, value.type))
            mgpu_utils.inline_ptx(
                "red.relaxed.gpu.global.inc.u32 [$0], $1;",
                pointer,
                bound,
                predicate=mgpu_utils.single_thread_predicate(mgpu_utils.ThreadSubset.WARPGROUP),
                has_side_effects=True,
            )

    run(counter, value)


def reduce_rows(how: str, x: jax.Array, exchange: jax.Ref) -> jax.Array:
    """ "max" or "add" over the rows of [R, C] (WGMMA layout): [C]. `exchange` f32[n] in shared memory, of this warpgroup."""
    result = plgpu.ShapeDtypeStruct(x.shape[1:], x.dtype, layout=plgpu.Layout.WGMMA.reduce(0))

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType()), return_type=result)
    def run(_, x, exchange):
        return x.reduce(how, 0, scratch=exchange)

    return run(x, exchange)


def load_transposed(src: jax.Ref, columns: int, dimension: Dimension = same, *, group: int = 0) -> jax.Array:
    """[G, D] or [S, G, D], or with `group` G [G * D], in global memory to [D, columns] registers (WGMMA layout).

    Columns beyond repeat the last row.

    Row r is of dimension(r), see `byte_ops`.
    """
    *queries, head_dim = (group, src.shape[0] // group) if group else src.shape
    result = plgpu.ShapeDtypeStruct((head_dim, columns), src.dtype, layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=result)
    def run(ctx, src):
        del ctx
        index = ir.IndexType.get()
        element = ir.MemRefType(src.type).element_type
        most = mgpu_utils.c(math.prod(queries) - 1, index)
        zero = mgpu.FragmentedArray.splat(
            mgpu_utils.c(0.0, element), (head_dim, columns), layout=mgpu.WGMMA_LAYOUT
        )

        width = mgpu_utils.c(head_dim, index)

        def load(_, position):
            d, g = dimension(position[0]), arith.minui(position[1], most)
            place = [arith.addi(arith.muli(g, width), d)] if group else [*_query(g, queries), d]
            return memref.load(src, place)

        return zero.foreach(load, create_array=True)

    return run(src)


def store_transposed(
    value: jax.Array,
    dst: jax.Ref,
    dimension: Dimension = same,
    *,
    first: jax.Array | None = None,
    layout: Any = plgpu.Layout.WGMMA,
    group: int = 0,
) -> None:
    """Stores [D, Gp] registers, or rows `first` and on, to [S, G, D] or, with `group` G, to [G * D] in global memory.

    Columns beyond are dropped.
    """
    queries, dtype = (group,) if group else dst.shape[:-1], dst.dtype
    head_dim = math.prod(dst.shape) // math.prod(queries)

    @plgpu.inline_mgpu(arg_types=(layout, plgpu.RefType(), SCALAR))
    def run(ctx, value, dst, first):
        del ctx
        index = ir.IndexType.get()
        limit = mgpu_utils.c(math.prod(queries), index)
        columns = value.shape[1]
        start = arith.index_cast(index, first.registers.item())
        width = mgpu_utils.c(head_dim, index)

        def place(g, d):
            return [arith.addi(arith.muli(g, width), d)] if group else [*_query(g, queries), d]

        def store(element, position):
            d, g = dimension(arith.addi(start, position[0])), position[1]
            if columns == math.prod(queries):
                memref.store(element, dst, place(g, d))
                return
            with mgpu_utils.when(arith.cmpi(arith.CmpIPredicate.ult, g, limit)):
                memref.store(element, dst, place(g, d))

        value.foreach(store)

    run(value.astype(dtype), dst, jnp.int32(0) if first is None else first)


def slice_layout(shape: tuple[int, int]) -> Any:
    """How some rows of [D, Gp] lie in registers: element by element over the threads."""
    return plgpu.Layout.WG_STRIDED(shape, vec_size=1)


def load_pieces(
    parts: jax.Ref, lses: jax.Ref, count: jax.Array, otherwise: float
) -> tuple[list[jax.Array], list[jax.Array]]:
    """The same rows f32[R, Gp] of pieces [N, R, Gp] in global memory, and their f32[Gp], repeated, of [N, Gp].

    All loads are under way at once. What comes after the first `count` is not read: it is 0, and `otherwise`.
    """
    number, *shape = parts.shape
    layout = slice_layout(tuple(shape))
    each = plgpu.ShapeDtypeStruct(tuple(shape), jnp.float32, layout=layout)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), SCALAR), return_type=[each] * 2 * number)
    def run(ctx, parts, lses, count):
        del ctx
        count, element, index = count.registers.item(), ir.F32Type.get(), ir.IndexType.get()
        zero = mgpu.FragmentedArray.splat(
            mgpu_utils.c(0.0, element), tuple(shape), layout=layout.to_mgpu(), is_signed=None
        )
        width = mgpu_utils.c(shape[1], index)

        def load(memory, k, missing, place):
            (stride, *_), _ = ir.MemRefType(memory.type).get_strides_and_offset()
            base = mgpu_utils.memref_ptr(memory)

            def one(_, position):
                offset = arith.index_cast(ir.IntegerType.get_signless(32), place(*position))
                at = mgpu_utils.getelementptr(base, [offset], element)
                return mgpu_utils.inline_ptx(
                    f"{{ .reg .pred there; setp.gt.s32 there, $2, {k}; mov.f32 $0, 0f{_hex(missing)}; "
                    f"@there ld.global.f32 $0, [$1+{4 * k * stride}]; }}",
                    at,
                    count,
                    result_types=element,
                    has_side_effects=True,
                )

            return zero.foreach(one, create_array=True)

        def in_part(row, column):
            return arith.addi(arith.muli(row, width), column)

        loaded = []
        for k in range(number):
            loaded.append(load(parts, k, 0.0, in_part))
            loaded.append(load(lses, k, otherwise, lambda _, column: column))
        return loaded

    loaded = run(parts, lses, count)
    return loaded[::2], loaded[1::2]


def _hex(value: float) -> str:
    return struct.pack(">f", value).hex()


def store_first_row(value: jax.Array, dst: jax.Ref, layout: Any) -> None:
    """Stores the first row of f32[R, C] to [C] in global memory."""

    @plgpu.inline_mgpu(arg_types=(layout, plgpu.RefType()))
    def run(ctx, value, dst):
        del ctx
        zero = mgpu_utils.c(0, ir.IndexType.get())

        def store(element, position):
            with mgpu_utils.when(arith.cmpi(arith.CmpIPredicate.eq, position[0], zero)):
                memref.store(element, dst, [position[1]])

        value.foreach(store)

    run(value, dst)
