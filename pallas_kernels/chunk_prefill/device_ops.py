"""Stores that Pallas does not offer, written with `inline_mgpu`: rows of registers to strided places, up to a limit.

The CPU interpreter cannot run them: `kernel.py` has a plain path beside.
"""

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import numpy as np
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, vector

SCALAR = plgpu.Layout.WG_SPLAT(())


def _place(r: Any, row: Any, column: Any, positions: int) -> tuple[Any, Any, Any]:
    """Position in the tile, token and query head of the warpgroup's row `r` (index type)."""
    index = ir.IndexType.get()
    row, column = (arith.index_cast(index, x.registers.item()) for x in (row, column))
    size = mgpu_utils.c(positions, index)
    t = arith.remui(r, size)
    return t, arith.addi(row, t), arith.addi(column, arith.divui(r, size))


def store_rows(value: jax.Array, dst: jax.Ref, row: Any, column: Any, there: Any, positions: int) -> None:
    """Stores [64, D] (WGMMA layout) to dst [T, H, D]: row g * positions + t to [row + t, column + g], where t < there."""

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType(), SCALAR, SCALAR, SCALAR))
    def run(ctx: Any, value: Any, dst: Any, row: Any, column: Any, there: Any) -> None:
        del ctx
        limit = arith.index_cast(ir.IndexType.get(), there.registers.item())
        by_row: dict[Any, list[tuple[Any, Any, Any]]] = {}
        for (r, c), at in zip(
            value.layout.thread_idxs(value.shape), np.ndindex(value.registers.shape), strict=True
        ):
            # A thread holds two rows, eight apart; which one the register is of shows in the dimension of size two.
            half = at[value.registers.shape.index(2)] if 2 in value.registers.shape else 0
            by_row.setdefault(half, []).append((r, c, value.registers[at]))
        for entries in by_row.values():
            t, token, head = _place(entries[0][0], row, column, positions)
            with mgpu_utils.when(arith.cmpi(arith.CmpIPredicate.slt, t, limit)):
                for _, c, register in entries:
                    vector.store(register, dst, [token, head, c])

    run(value, dst, row, column, there)


def store_values(value: jax.Array, dst: jax.Ref, row: Any, column: Any, there: Any, positions: int) -> None:
    """The same for one value per row: f32[64] (reduced WGMMA layout) to dst [T, H]."""

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA.reduce(1), plgpu.RefType(), SCALAR, SCALAR, SCALAR))
    def run(ctx: Any, value: Any, dst: Any, row: Any, column: Any, there: Any) -> None:
        del ctx
        limit = arith.index_cast(ir.IndexType.get(), there.registers.item())

        def store(element: Any, position: Any) -> None:
            t, token, head = _place(position[0], row, column, positions)
            with mgpu_utils.when(arith.cmpi(arith.CmpIPredicate.slt, t, limit)):
                memref.store(element, dst, [token, head])

        value.foreach(store)

    run(value, dst, row, column, there)
