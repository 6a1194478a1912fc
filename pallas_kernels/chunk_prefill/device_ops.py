"""What Pallas does not offer, written with `inline_mgpu`: rows of registers stored to strided places, up to a limit; sums of
the columns that a thread has.

The CPU interpreter cannot run the stores: `kernel.py` has a plain path beside.
"""

from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, vector

from pallas_kernels.chunk_prefill.tuning import ROWS
from pallas_kernels.stores import rows_of_a_thread

SCALAR = plgpu.Layout.WG_SPLAT(())
COLUMNS = 1  # dimension of an array's registers (WGMMA layout, 64 rows): eights of columns
FOLDED = 8  # so many columns further a thread has the same row and places again


class TileRows(NamedTuple):
    """How rows hold queries: row g * positions + t is token t of head g."""

    positions: int
    heads: int

    def place(self, r: Any, row: Any, column: Any, there: Any, rows_before: Any) -> tuple[Any, Any, Any]:
        """Token and query head of the warpgroup's row `r` (index type), whether it has any; `rows_before` come first."""
        index = ir.IndexType.get()
        row, column, there, rows_before = (
            arith.index_cast(index, x.registers.item()) for x in (row, column, there, rows_before)
        )
        r = arith.addi(r, rows_before)
        size = mgpu_utils.c(self.positions, index)
        t, g = arith.remui(r, size), arith.divui(r, size)
        held = arith.cmpi(arith.CmpIPredicate.slt, t, there)
        if self.heads * self.positions % ROWS:  # rows are left over
            held = arith.andi(held, arith.cmpi(arith.CmpIPredicate.ult, g, mgpu_utils.c(self.heads, index)))
        return arith.addi(row, t), arith.addi(column, g), held


def store_rows(
    value: jax.Array, dst: jax.Ref, row: Any, column: Any, there: Any, rows_before: Any, rows: TileRows
) -> None:
    """Stores [64, D] (WGMMA layout) to dst [T, H, D]: token t of head g to [row + t, column + g], where t < there."""

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType(), SCALAR, SCALAR, SCALAR, SCALAR))
    def run(ctx: Any, value: Any, dst: Any, *places: Any) -> None:
        del ctx
        for entries in rows_of_a_thread(value):
            token, head, held = rows.place(entries[0][0], *places)
            with mgpu_utils.when(held):
                for _, c, register in entries:
                    vector.store(register, dst, [token, head, c])

    run(value, dst, row, column, there, rows_before)


def store_values(
    value: jax.Array, dst: jax.Ref, row: Any, column: Any, there: Any, rows_before: Any, rows: TileRows
) -> None:
    """The same for one value per row: f32[64] (reduced WGMMA layout) to dst [T, H]."""

    arg_types = (plgpu.Layout.WGMMA.reduce(1), plgpu.RefType(), SCALAR, SCALAR, SCALAR, SCALAR)

    @plgpu.inline_mgpu(arg_types=arg_types)
    def run(ctx: Any, value: Any, dst: Any, *places: Any) -> None:
        del ctx

        def store(element: Any, position: Any) -> None:
            token, head, held = rows.place(position[0], *places)
            with mgpu_utils.when(held):
                memref.store(element, dst, [token, head])

        value.foreach(store)

    run(value, dst, row, column, there, rows_before)


def fold_columns(x: jax.Array, *, interpreted: bool) -> jax.Array:
    """f32[64, 8]: sums of every eighth column of [64, n] (WGMMA layout); each thread adds up what it has."""
    if interpreted:
        return x.reshape(len(x), -1, FOLDED).sum(axis=1)
    result = plgpu.ShapeDtypeStruct((len(x), FOLDED), x.dtype, layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA,), return_type=result)
    def run(ctx: Any, x: Any) -> Any:
        del ctx
        total, *others = np.split(x.registers, x.registers.shape[COLUMNS], axis=COLUMNS)
        for other in others:
            total = np.vectorize(arith.addf, otypes=[object])(total, other)
        return mgpu.FragmentedArray(_registers=total, _layout=x.layout, _is_signed=None)

    return run(x)
