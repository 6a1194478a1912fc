"""Which columns of one row are the largest, a column for each thread of a warpgroup."""

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, vector

COLUMNS = 128
VECTOR = 4  # that a thread reads at once
BY_THREAD = plgpu.Layout.WG_STRIDED((COLUMNS,), 1)


def ranks(values: jax.Array, row: jax.Ref, *, interpreted: bool) -> jax.Array:
    """Of f32[128]: i32[128], how many are before each one, ties in their order. `row`: the same in global memory."""
    if interpreted:
        number = lax.iota(jnp.int32, COLUMNS)
        mine, others = values[:, None], values[None]
        ahead = (others > mine) | ((others == mine) & (number[None] < number[:, None]))
        return jnp.sum(ahead, axis=1, dtype=jnp.int32)

    result = plgpu.ShapeDtypeStruct((COLUMNS,), jnp.int32, layout=BY_THREAD)

    @plgpu.inline_mgpu(arg_types=(BY_THREAD, plgpu.RefType()), return_type=result)
    def run(_: Any, values: Any, row: Any) -> Any:
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        mgpu_utils.warpgroup_barrier()  # all is stored
        thread = arith.remui(mgpu_utils.thread_idx(), mgpu_utils.c(mgpu_utils.WARPGROUP_SIZE, i32))
        mine = vector.extract(values.registers.item(), dynamic_position=[], static_position=[0])
        rank = mgpu_utils.c(0, i32)
        for first in range(0, COLUMNS, VECTOR):
            at = mgpu_utils.getelementptr(mgpu_utils.memref_ptr(row), [first], f32)
            others = llvm.load(ir.VectorType.get((VECTOR,), f32), at, alignment=4 * VECTOR)
            for n in range(VECTOR):
                other = vector.extract(others, dynamic_position=[], static_position=[n])
                larger = arith.cmpf(arith.CmpFPredicate.OGT, other, mine)
                equal = arith.cmpf(arith.CmpFPredicate.OEQ, other, mine)
                before = arith.cmpi(arith.CmpIPredicate.ugt, thread, mgpu_utils.c(first + n, i32))
                ahead = arith.ori(larger, arith.andi(equal, before))
                rank = arith.addi(rank, arith.extui(i32, ahead))
        held = vector.broadcast(ir.VectorType.get((1,), i32), rank)
        registers = values.registers.copy()
        registers[(0,) * registers.ndim] = held
        return mgpu.FragmentedArray(_registers=registers, _layout=values.layout, _is_signed=True)

    return run(values, row)


def store(ranks: jax.Array, shares: jax.Array, chosen: jax.Ref, factors: jax.Ref, interpreted: bool) -> None:
    """The columns of the first ranks i32[k], and their `shares` f32[k]."""
    count = chosen.shape[0]
    if interpreted:
        number = lax.iota(jnp.int32, COLUMNS)
        for n in range(count):
            chosen[n] = jnp.sum(jnp.where(ranks == n, number, 0))
            factors[n] = jnp.sum(jnp.where(ranks == n, shares, 0.0))
        return

    @plgpu.inline_mgpu(arg_types=(BY_THREAD, BY_THREAD, plgpu.RefType(), plgpu.RefType()))
    def run(_: Any, ranks: Any, shares: Any, chosen: Any, factors: Any) -> None:
        i32 = ir.IntegerType.get_signless(32)
        thread = arith.remui(mgpu_utils.thread_idx(), mgpu_utils.c(mgpu_utils.WARPGROUP_SIZE, i32))
        rank, share = (
            vector.extract(each.registers.item(), dynamic_position=[], static_position=[0])
            for each in (ranks, shares)
        )
        with mgpu_utils.when(arith.cmpi(arith.CmpIPredicate.ult, rank, mgpu_utils.c(count, i32))):
            place = arith.index_cast(ir.IndexType.get(), rank)
            memref.store(thread, chosen, [place])
            memref.store(share, factors, [place])

    run(ranks, shares, chosen, factors)
