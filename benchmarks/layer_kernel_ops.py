"""Device operations of `layer_kernel` that Pallas does not offer, written with `inline_mgpu`."""

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, vector

WARP, WARPS = 32, 4


def totals(xs: list[jax.Array], exchange: Any) -> list[jax.Array]:
    """The sum of each f32[n], of which every thread of a warpgroup has a number or more, one at a time.

    `exchange`: f32[len(xs), 4] in shared memory, of this warpgroup.
    """
    result = plgpu.ShapeDtypeStruct((), jnp.float32, layout=plgpu.Layout.WG_SPLAT(()))
    arrays = [plgpu.Layout.WG_STRIDED(x.shape, vec_size=1) for x in xs]

    @plgpu.inline_mgpu(arg_types=(*arrays, plgpu.RefType()), return_type=[result] * len(xs))
    def run(_: Any, *operands: Any) -> list[Any]:
        *arrays, exchange = operands
        i32, index = ir.IntegerType.get_signless(32), ir.IndexType.get()
        lane = arith.remui(mgpu_utils.thread_idx(), mgpu_utils.c(WARP, i32))
        warp = arith.remui(
            arith.divui(mgpu_utils.thread_idx(), mgpu_utils.c(WARP, i32)), mgpu_utils.c(WARPS, i32)
        )
        sums = [_of_thread(x) for x in arrays]
        for distance in (16, 8, 4, 2, 1):
            sums = [arith.addf(x, mgpu_utils.shfl_bfly(x, distance)) for x in sums]
        mgpu_utils.warpgroup_barrier()  # what stood there has been read
        with mgpu_utils.when(arith.cmpi(arith.CmpIPredicate.eq, lane, mgpu_utils.c(0, i32))):
            for n, x in enumerate(sums):
                memref.store(x, exchange, [mgpu_utils.c(n, index), arith.index_cast(index, warp)])
        mgpu_utils.warpgroup_barrier()
        return [_of_warps(exchange, n) for n in range(len(sums))]

    return run(*xs, exchange)


def _of_thread(x: Any) -> Any:
    registers = (
        vector.extract(r, [], [0]) if isinstance(r.type, ir.VectorType) else r for r in x.registers.flat
    )
    total = next(registers)
    for register in registers:
        total = arith.addf(total, register)
    return total


def _of_warps(exchange: Any, n: int) -> Any:
    index = ir.IndexType.get()
    a, b, c, d = (
        memref.load(exchange, [mgpu_utils.c(n, index), mgpu_utils.c(w, index)]) for w in range(WARPS)
    )
    return mgpu.FragmentedArray.splat(arith.addf(arith.addf(a, b), arith.addf(c, d)), (), is_signed=None)


def stamp(place: Any, special: str) -> None:
    """A special register (PTX: "globaltimer_lo", "smid") to an i32 in global memory."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def run(ctx: Any, place: Any) -> None:
        del ctx
        i32 = ir.IntegerType.get_signless(32)
        value = mgpu_utils.inline_ptx(f"mov.u32 $0, %{special};", result_types=i32, has_side_effects=True)
        mgpu_utils.inline_ptx(
            "st.global.u32 [$0], $1;",
            mgpu_utils.memref_ptr(place),
            value,
            predicate=mgpu_utils.single_thread_predicate(mgpu_utils.ThreadSubset.WARPGROUP),
            has_side_effects=True,
        )

    run(place)
