"""What experts made of tokens, weighted and added up with the residual, and the norm of that, as one kernel for Hopper GPUs.

XLA takes two, as it does not keep what a sum is of. A warpgroup has a token, a thread eight numbers at a time.
"""

import functools
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, vector

from pallas_kernels import row_loads as ops
from pallas_kernels.numbers import LANES, THREADS, WARPS

VECTOR = 8  # 16-bit numbers that a thread loads at once


@functools.partial(jax.jit, static_argnames=("eps", "offset", "interpret"))
def combine_mosaic_gpu(
    x: jax.Array,
    products: jax.Array,
    rows: jax.Array,
    weights: jax.Array,
    norm: jax.Array,
    there: jax.Array | None,
    *,
    eps: float,
    offset: float,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """See `expert_products.combine`."""
    given = {
        "x": x,
        "products": products,
        "rows": rows.reshape(-1),
        "weights": weights.reshape(-1),
        "norm": norm,
    }
    if there is not None:
        given["there"] = there.astype(jnp.int32)
    made = [jax.ShapeDtypeStruct(x.shape, x.dtype)] * 2

    def expert_combine(*refs: Any) -> None:  # the name that profiles show
        *others, sums = refs
        held = dict(zip((*given, "total", "normed"), others, strict=True))
        body = _combine if interpret is None else _combine_plainly
        body(held, sums, lax.axis_index("token"), rows.shape[1], eps, offset)

    kernel = plgpu.kernel(
        expert_combine,
        out_type=made,
        grid=(len(x),),
        grid_names=("token",),
        scratch_types=[plgpu.SMEM((WARPS,), jnp.float32)],
        **({} if interpret is None else {"interpret": interpret}),
    )
    total, normed = kernel(*given.values())
    return total, normed


def _combine_plainly(refs: dict[str, Any], _: Any, token: Any, count: int, eps: float, offset: float) -> None:
    f32, total = jnp.float32, refs["total"].at[token]
    added = jnp.zeros(total.shape, f32)
    for n in range(count):
        at = token * count + n
        added += refs["products"].at[refs["rows"][at]][...].astype(f32) * refs["weights"][at]
    if "there" in refs:
        added = jnp.where(refs["there"][token] > 0, added, 0.0)
    x = refs["x"].at[token][...]
    x = (x.astype(f32) + added.astype(x.dtype).astype(f32)).astype(x.dtype)
    total[...] = x
    numbers = x.astype(f32)
    factor = lax.rsqrt(jnp.sum(numbers * numbers) / numbers.shape[0] + eps)
    normed = numbers * factor * (refs["norm"][...].astype(f32) + offset)
    refs["normed"].at[token][...] = normed.astype(x.dtype)


def _combine(refs: dict[str, Any], sums: Any, token: Any, count: int, eps: float, offset: float) -> None:
    names, size = list(refs), refs["x"].shape[1]

    @plgpu.inline_mgpu(arg_types=(ops.SCALAR, plgpu.RefType(), *[plgpu.RefType()] * len(names)))
    def run(_: Any, token: Any, sums: Any, *given: Any) -> None:
        _Thread(dict(zip(names, given, strict=True)), ops.as_operand(token), size, count).run(
            sums, eps, offset
        )

    run(token, sums, *refs.values())


class _Thread:
    """The numbers of a thread: of vectors of a token every 128th. Past the token's end it has the last one again."""

    def __init__(self, refs: dict[str, Any], token: ir.Value, size: int, count: int) -> None:
        self._refs, self._token, self._size, self._count = refs, token, size, count
        self._element = ir.MemRefType(refs["x"].type).element_type
        self._f32 = ir.F32Type.get()
        vectors = size // VECTOR
        thread = arith.extui(ir.IntegerType.get_signless(64), mgpu_utils.thread_idx())
        self._lane, self._warp = (f(thread, ops.constant(LANES)) for f in (arith.remui, arith.divui))
        places = [arith.addi(thread, ops.constant(first)) for first in range(0, vectors, THREADS)]
        self._is_own = [arith.cmpi(arith.CmpIPredicate.ult, at, ops.constant(vectors)) for at in places]
        self._own = [arith.minui(at, ops.constant(vectors - 1)) for at in places]

    def run(self, sums: Any, eps: float, offset: float) -> None:
        totals = self._added()
        total = mgpu_utils.c(0.0, self._f32)
        for own, numbers in zip(self._is_own, totals, strict=True):
            square = self._sum_of(arith.mulf(numbers, numbers))
            total = arith.addf(total, arith.select(own, square, mgpu_utils.c(0.0, self._f32)))
        mean = arith.divf(self._over_threads(total, sums), mgpu_utils.c(float(self._size), self._f32))
        factor = mgpu_utils.inline_ptx(
            "rsqrt.approx.f32 $0, $1;",
            arith.addf(mean, mgpu_utils.c(eps, self._f32)),
            result_types=self._f32,
        )
        zero = ops.constant(0)
        for at, numbers in enumerate(totals):
            weights = arith.addf(self._load("norm", zero, at), self._all(mgpu_utils.c(offset, self._f32)))
            self._store("normed", at, arith.mulf(arith.mulf(numbers, self._all(factor)), weights))

    def _added(self) -> list[ir.Value]:
        """The residual and the products, as they are rounded and stored."""
        first = arith.muli(self._token, ops.constant(self._count))
        places = [arith.addi(first, ops.constant(n)) for n in range(self._count)]
        rows = [ops.load_index(self._refs["rows"], place) for place in places]
        factors = [
            memref.load(self._refs["weights"], [arith.index_cast(ir.IndexType.get(), place)])
            for place in places
        ]
        there = None
        if "there" in self._refs:
            held = ops.load_index(self._refs["there"], self._token)
            there = arith.cmpi(arith.CmpIPredicate.ne, held, ops.constant(0))
        totals = []
        for at in range(len(self._own)):
            parts = [
                arith.mulf(self._load("products", row, at), self._all(factor))
                for row, factor in zip(rows, factors, strict=True)
            ]
            added = functools.reduce(arith.addf, parts)
            if there is not None:
                added = arith.select(there, added, self._all(mgpu_utils.c(0.0, self._f32)))
            total = self._rounded(arith.addf(self._load("x", self._token, at), self._rounded(added)))
            self._store("total", at, total)
            totals.append(total)
        return totals

    def _over_threads(self, value: ir.Value, sums: Any) -> ir.Value:
        """The sum of all threads' values; `sums` f32[warps] in shared memory."""
        for distance in (1, 2, 4, 8, 16):
            value = arith.addf(value, mgpu_utils.shfl_bfly(value, distance))
        index = ir.IndexType.get()
        with mgpu_utils.when(arith.cmpi(arith.CmpIPredicate.eq, self._lane, ops.constant(0))):
            memref.store(value, sums, [arith.index_cast(index, self._warp)])
        mgpu_utils.warpgroup_barrier()
        return functools.reduce(
            arith.addf, [memref.load(sums, [mgpu_utils.c(n, index)]) for n in range(WARPS)]
        )

    # --- vectors --------------------------------------------------------------------------------------------------------

    def _kind(self, element: ir.Type) -> ir.VectorType:
        return ir.VectorType.get((VECTOR,), element)

    def _all(self, value: ir.Value) -> ir.Value:
        return vector.broadcast(self._kind(self._f32), value)

    def _rounded(self, value: ir.Value) -> ir.Value:
        return arith.extf(self._kind(self._f32), arith.truncf(self._kind(self._element), value))

    def _sum_of(self, value: ir.Value) -> ir.Value:
        numbers = [vector.extract(value, dynamic_position=[], static_position=[n]) for n in range(VECTOR)]
        return functools.reduce(arith.addf, numbers)

    def _at(self, name: str, row: ir.Value, at: int) -> ir.Value:
        offset = ops.muladd((row, self._size), (self._own[at], VECTOR))
        return mgpu_utils.getelementptr(ops.pointer_of(self._refs[name]), [offset], self._element)

    def _load(self, name: str, row: ir.Value, at: int) -> ir.Value:
        value = llvm.load(self._kind(self._element), self._at(name, row, at), alignment=2 * VECTOR)
        return arith.extf(self._kind(self._f32), value)

    def _store(self, name: str, at: int, value: ir.Value) -> None:
        narrow = arith.truncf(self._kind(self._element), value)
        llvm.store(narrow, self._at(name, self._token, at), alignment=2 * VECTOR)
