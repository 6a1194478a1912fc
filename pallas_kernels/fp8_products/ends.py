"""What becomes of a computing warpgroup's sums of a unit of work."""

import functools
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.fp8_products import device_ops
from pallas_kernels.fp8_products.common import Config, Unit, f32, i32, pieces_of
from pallas_kernels.fp8_products.packing import TILE
from pallas_kernels.gates import gated
from pallas_kernels.left_operand import in_transposed, load_transposed, store_transposed

BY_ROW, BY_COLUMN = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)


def finish(cfg: Config, wg: Any, unit: Unit, sums: tuple[jax.Array, ...], refs: dict[str, Any]) -> None:
    """Stores what becomes of sums f32[TILE, rows] of each of a block's parts."""
    if cfg.splits > 1 and not cfg.interpreted:
        for mine in range(cfg.splits):  # which rows they are has to be known
            pl.when(unit.split == mine)(functools.partial(_exchange, cfg, wg, unit, mine, sums[0], refs))
        return
    for part, (first, rows) in zip(sums, cfg.parts, strict=True):
        _finish(cfg, wg, unit, part, unit.row + first, pieces_of(rows, cfg.stored), refs)


def _exchange(cfg: Config, wg: Any, unit: Unit, mine: int, sums: jax.Array, refs: dict[str, Any]) -> None:
    """Sends the cluster's other CTAs the sums of their tokens, and finishes its own with what comes of these."""
    received, sent = refs["received"].at[wg], refs["sent"].at[wg]
    for other, (first, rows) in enumerate(cfg.shares):
        if other != mine:
            place = received.at[mine - (mine > other), :, pl.ds(0, rows)]
            theirs = sums[:, first : first + rows]
            plgpu.async_store_smem(
                theirs, place, sent, cluster_idx=i32(other), cluster_dim="split", optimized=False
            )
    if mine >= len(cfg.shares):  # there are fewer than CTAs
        return
    first, rows = cfg.shares[mine]
    plgpu.barrier_wait(sent)
    parts = [sums[:, first : first + rows]]
    for n in range(cfg.splits - 1):
        place = received.at[n, :, pl.ds(0, rows)]
        parts.append(plgpu.load(place, layout=plgpu.Layout.WGMMA, optimized=False))
    parts.insert(mine, parts.pop(0))  # in the same order whichever rows they are
    _finish(cfg, wg, unit, functools.reduce(jnp.add, parts), unit.row + first, [(0, rows)], refs)


def _finish(
    cfg: Config,
    wg: Any,
    unit: Unit,
    sums: jax.Array,  # f32[TILE, rows]
    row: Any,  # the first
    pieces: list[tuple[int, int]],  # of the rows, stored one after another
    refs: dict[str, Any],
) -> None:
    if not cfg.narrow:
        sums = device_ops.in_full(sums, interpreted=cfg.interpreted)
    columns = _columns(unit.tile(wg))
    of = [(refs["scales"], columns, BY_ROW)]
    if cfg.narrow:
        of.append((refs["of_tokens"], pl.ds(row, sums.shape[1]), BY_COLUMN))
    for axis, (held, at, layout) in enumerate(of):
        factors = plgpu.load(held.at[at], layout=layout, optimized=False)
        sums = sums * lax.broadcast_in_dim(factors, sums.shape, (axis,))
    staged, out = refs["out_s"], refs["out"]
    to = out.at[unit.split] if cfg.in_parts else out
    results = sums.astype(out.dtype)
    if cfg.gate:
        for mine in range(2):
            gates = functools.partial(_finish_gated, cfg, results, pieces, mine, staged, refs["met"])
            pl.when(wg == mine)(functools.partial(gates, to, row, _columns(unit.column)))
        return
    for offset, stored in pieces:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        rows_s = staged.at[wg, pl.ds(0, stored)]
        store_transposed(results[:, offset : offset + stored], rows_s, interpreted=cfg.interpreted)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(rows_s, to.at[pl.ds(row + offset, stored), columns])


def _columns(tile: Any) -> Any:
    return pl.ds(pl.multiple_of(tile * TILE, TILE), TILE)


def _finish_gated(
    cfg: Config,
    results: jax.Array,  # [TILE, rows]: of the first warpgroup gates
    pieces: list[tuple[int, int]],  # of the rows: the first warpgroup finishes the first
    mine: int,
    staged: Any,
    met: Any,
    out: Any,
    row: Any,
    columns: Any,
) -> None:
    """What a warpgroup of two does with the sums of a part of a block: takes the other's for its piece, and stores that."""
    other = 1 - mine
    (offset, rows), (left, left_rows) = pieces[mine], pieces[other]
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    to_other = staged.at[mine, pl.ds(0, left_rows)]
    store_transposed(results[:, left : left + left_rows], to_other, interpreted=cfg.interpreted)
    _meet(met.at[0])
    theirs = load_transposed(staged.at[other, pl.ds(0, rows)], interpreted=cfg.interpreted)
    _meet(met.at[1])
    own = in_transposed(results[:, offset : offset + rows], interpreted=cfg.interpreted)
    gates, values = (x.astype(f32) for x in ((own, theirs) if mine == 0 else (theirs, own)))
    assert cfg.gate
    rows_s = staged.at[mine, pl.ds(0, rows)]
    finished = gated(gates, values, cfg.gate).astype(out.dtype)
    store_transposed(finished, rows_s, interpreted=cfg.interpreted)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(rows_s, out.at[pl.ds(row + offset, rows), columns])


def _meet(barrier: Any) -> None:
    """Both warpgroups have come here."""
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)
