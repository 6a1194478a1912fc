"""Whole numbers in registers, a few to a thread, that say where others lie: loads, stores and sums that Pallas lacks.

A vector is i32[n], n a multiple of 128, number i in thread i % 128 (`layout`). `inline_mgpu`; the CPU interpreter has a
plain path of each, so that whole kernels of such vectors run there.
"""

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, nvvm, vector

WARPS, LANES = 4, 32
THREADS = WARPS * LANES


def padded(size: int) -> int:
    """Numbers of a vector that holds so many."""
    return -(-size // THREADS) * THREADS


def layout(size: int) -> Any:
    return plgpu.Layout.WG_STRIDED((size,), vec_size=1)


def count_up(size: int) -> jax.Array:
    """0, 1, ... of a vector that holds `size`."""
    size = padded(size)
    return plgpu.broadcasted_iota(jnp.int32, (size,), 0, layout=layout(size))


def gather(ref: jax.Ref, index: jax.Array, *, interpreted: bool) -> jax.Array:
    """Of a reference i32[m] the numbers at each index, none of which is out of it."""
    if interpreted:
        return ref[...][index]
    (size,) = index.shape

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout(size)), return_type=_vector(size))
    def run(_: Any, ref: Any, index: Any) -> Any:
        found = [memref.load(ref, [_as_index(x)]) for x in _numbers(index)]
        return _held(found, index)

    return run(ref, _placed(index))


def scatter(ref: jax.Ref, index: jax.Array, value: jax.Array | int, *, interpreted: bool) -> None:
    """To each index of a reference i32[m] its value, or one for all; a negative index drops it, and none is there twice."""
    if interpreted:
        kept = jnp.where(index < 0, ref.shape[0], index)
        ref[...] = ref[...].at[kept].set(value, mode="drop")
        return
    (size,) = index.shape
    given = () if isinstance(value, int) else (value,)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout(size), *[layout(size)] * len(given)))
    def run(_: Any, ref: Any, index: Any, *given: Any) -> None:
        places = _numbers(index)
        found = [_c(value)] * len(places) if isinstance(value, int) else _numbers(given[0])
        for at, number in zip(places, found, strict=True):
            with mgpu_utils.when(arith.cmpi(arith.CmpIPredicate.sge, at, _c(0))):
                memref.store(number, ref, [_as_index(at)])

    run(ref, _placed(index), *[_placed(x) for x in given])


def add_to(ref: jax.Ref, index: jax.Array, value: jax.Array, *, interpreted: bool) -> None:
    """Adds to a reference i32[m] in shared memory at each index its value; a negative index drops it."""
    if interpreted:
        kept = jnp.where(index < 0, ref.shape[0], index)
        ref[...] = ref[...].at[kept].add(value, mode="drop")
        return
    (size,) = index.shape

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout(size), layout(size)))
    def run(_: Any, ref: Any, index: Any, value: Any) -> None:
        pointer, i32 = mgpu_utils.memref_ptr(ref), ir.IntegerType.get_signless(32)
        for at, number in zip(_numbers(index), _numbers(value), strict=True):
            mgpu_utils.inline_ptx(
                "red.shared.add.u32 [$0], $1;",
                mgpu_utils.getelementptr(pointer, [at], i32),
                number,
                predicate=arith.cmpi(arith.CmpIPredicate.sge, at, _c(0)),
                has_side_effects=True,
            )

    run(ref, _placed(index), _placed(value))


def running_sum(x: jax.Array, scratch: jax.Ref, *, interpreted: bool) -> tuple[jax.Array, jax.Array]:
    """(the sums up to and with each number, the sum of all). `scratch`: i32[n / 32] in shared memory, of this call alone."""
    if interpreted:
        return jnp.cumsum(x), jnp.sum(x)
    (size,) = x.shape
    result = (_vector(size), plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT(())))

    @plgpu.inline_mgpu(arg_types=(layout(size), plgpu.RefType()), return_type=result)
    def run(_: Any, x: Any, scratch: Any) -> Any:
        thread = arith.remui(mgpu_utils.thread_idx(), _c(THREADS))
        lane, warp = (f(thread, _c(LANES)) for f in (arith.remui, arith.divui))
        in_warps = [_sum_of_lanes(number, lane) for number in _numbers(x)]
        for n, number in enumerate(in_warps):
            with mgpu_utils.when(arith.cmpi(arith.CmpIPredicate.eq, lane, _c(LANES - 1))):
                memref.store(number, scratch, [_as_index(arith.addi(warp, _c(n * WARPS)))])
        mgpu_utils.warpgroup_barrier()
        total, sums = _c(0), []
        for n, number in enumerate(in_warps):
            before = total
            for w in range(WARPS):
                before = arith.select(arith.cmpi(arith.CmpIPredicate.eq, warp, _c(w)), total, before)
                of_warp = memref.load(scratch, [mgpu_utils.c(n * WARPS + w, ir.IndexType.get())])
                total = arith.addi(total, of_warp)
            sums.append(arith.addi(number, before))
        return _held(sums, x), mgpu.FragmentedArray.splat(total, (), is_signed=True)

    return run(_placed(x), scratch)


def count_bits(x: jax.Array, *, interpreted: bool) -> jax.Array:
    """How many bits of each number are set."""
    if interpreted:
        return lax.population_count(x)
    (size,) = x.shape

    @plgpu.inline_mgpu(arg_types=(layout(size),), return_type=_vector(size))
    def run(_: Any, x: Any) -> Any:
        return _held([llvm.intr_ctpop(number) for number in _numbers(x)], x)

    return run(_placed(x))


def barrier(*, interpreted: bool) -> None:
    """What the warpgroup's threads have stored is there for all of them."""
    if interpreted:
        return

    @plgpu.inline_mgpu()
    def run(_: Any) -> None:
        mgpu_utils.warpgroup_barrier()

    run()


def _vector(size: int) -> Any:
    return plgpu.ShapeDtypeStruct((size,), jnp.int32, layout=layout(size))


def _placed(x: jax.Array) -> jax.Array:
    """Also of a constant, which has a layout of its own, each thread has its numbers."""
    return plgpu.layout_cast(x, layout(x.shape[0]))


def _c(value: int) -> ir.Value:
    return mgpu_utils.c(value, ir.IntegerType.get_signless(32))


def _as_index(number: ir.Value) -> ir.Value:
    return arith.index_cast(ir.IndexType.get(), number)


def _numbers(x: Any) -> list[ir.Value]:
    return [vector.extract(r, dynamic_position=[], static_position=[0]) for r in x.registers.flat]


def _held(numbers: list[ir.Value], like: Any) -> Any:
    kind = ir.VectorType.get((1,), ir.IntegerType.get_signless(32))
    registers = np.empty(like.registers.shape, dtype=object)
    for at, number in zip(np.ndindex(registers.shape), numbers, strict=True):
        registers[at] = vector.broadcast(kind, number)
    return mgpu.FragmentedArray(_registers=registers, _layout=like.layout, _is_signed=True)


def _sum_of_lanes(number: ir.Value, lane: ir.Value) -> ir.Value:
    """Of the warp's lanes up to this one."""
    distance = 1
    while distance < LANES:
        other = nvvm.shfl_sync(_c(0xFFFFFFFF), number, _c(distance), _c(0), nvvm.ShflKind.up)
        there = arith.cmpi(arith.CmpIPredicate.uge, lane, _c(distance))
        number = arith.addi(number, arith.select(there, other, _c(0)))
        distance *= 2
    return number
