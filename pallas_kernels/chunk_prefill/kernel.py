"""The chunk prefill kernel for Hopper GPUs, in Pallas' Mosaic GPU.

A CTA works through tiles of queries: positions times query heads of one KV head, 64 rows for each computing warpgroup. One
more warpgroup issues all loads (TMA): the tile's queries, and blocks of keys and values, which come page by page from the
pool where they are history and in boxes of the same size from the chunk where they are its own. It runs ahead of the
computing ones, across tiles too. History and chunk go through one running softmax, so nothing is gathered, and nothing
merged but the results of histories that were cut (`parts.py`). Blocks that need a mask come first; the long loop over the
rest has none.

A warpgroup's block is one chain, of which the products are less than half: so the warpgroups take turns at the tensor cores,
and the softmax of the others runs meanwhile (`products.py`).
"""

import functools
from collections.abc import Callable
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.chunk_prefill import device_ops, parts
from pallas_kernels.chunk_prefill.common import (
    LINE,
    LOG2E,
    Config,
    Refs,
    Span,
    Tile,
    f32,
    i32,
    rounds_of,
    tile_of,
)
from pallas_kernels.chunk_prefill.load import load
from pallas_kernels.chunk_prefill.products import WGMMA, Products
from pallas_kernels.chunk_prefill.tuning import ROWS
from pallas_kernels.logits import log2_logits
from pallas_kernels.pieces import LOW

BY_ROW = plgpu.Layout.WGMMA.reduce(1)


def kernel_body(cfg: Config, dtype: Any, *refs: Any) -> None:
    gmem = Refs(*refs)
    wgs, stages = cfg.tuning.warpgroups, cfg.tuning.stages

    def body(*smem: Any) -> None:
        refs = gmem._replace(**dict(zip(Refs._fields[Refs._fields.index("q_s") :], smem, strict=False)))
        refs = refs._replace(layer=gmem.layer[0])
        q, out = ((x, x) if cfg.interpreted else x for x in (refs.q_s, refs.out_s))
        refs = refs._replace(q_s=q[0], q_rows=q[1], out_s=out[0], out_rows=out[1])
        wg = lax.axis_index("wg")
        pl.when(wg < wgs)(functools.partial(_compute, cfg, refs, wg))
        pl.when(wg == wgs)(functools.partial(load, cfg, refs))

    tiled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))  # type: ignore[abstract]

    def rows_of(width: int) -> Any:
        """64 rows of queries or results for each warpgroup, twice the same place: see `Refs.q_rows`."""
        shape = wgs, width // LINE, ROWS, LINE
        if cfg.interpreted:
            return plgpu.SMEM(shape, dtype)
        return plgpu.RefUnion(*(plgpu.SMEM(shape, dtype, transforms=x) for x in (tiled, tiled[1:])))

    simulated = ((wgs, ROWS, cfg.block), dtype), ((wgs, ROWS), f32)
    pl.run_scoped(
        body,
        rows_of(cfg.head_dim),
        plgpu.SMEM((stages, cfg.block, cfg.head_dim), dtype, transforms=tiled),
        plgpu.SMEM((stages, cfg.block, cfg.head_dim), dtype, transforms=tiled),
        plgpu.Barrier(num_arrivals=cfg.loads, num_barriers=wgs),
        plgpu.Barrier(num_barriers=wgs),
        plgpu.Barrier(num_arrivals=cfg.boxes, num_barriers=stages),
        plgpu.Barrier(num_arrivals=wgs, num_barriers=stages),
        plgpu.Barrier(num_arrivals=cfg.boxes, num_barriers=stages),
        plgpu.Barrier(num_arrivals=wgs, num_barriers=stages),
        plgpu.Barrier(num_barriers=wgs),
        rows_of(cfg.staged),
        *(plgpu.SMEM(*x) for x in simulated if cfg.interpreted),
        collective_axes="wg",
    )


def _compute(cfg: Config, refs: Refs, wg: Any) -> None:
    """A computing warpgroup."""
    plgpu.set_max_registers(cfg.tuning.compute_registers, action="increase")
    cta = lax.axis_index("cta")
    out_shape, score_shape = (ROWS, cfg.head_dim), (ROWS, cfg.block)

    def one_tile(n: Any, done: Any) -> Any:
        tile = tile_of(cfg, refs, cta, n)
        work = Products(cfg, refs, wg, tile.masked + tile.free, done)

        def soften(masked: bool, j: Any, s: Any, m: Any, norm: Any) -> tuple[Any, ...]:
            """The block's weights, the sums of the softmax with them, and the factor of what was summed so far."""
            factor = cfg.scale * LOG2E
            if cfg.soft_cap is not None:
                s, factor = log2_logits(s, cfg.scale, cfg.soft_cap), 1.0
            if masked:
                s = jnp.where(_visible(cfg, tile, j, wg), s, -jnp.inf)
            top = jnp.maximum(m, s.max(axis=1) * factor)
            fade = jnp.exp2(m - top)
            p = jnp.exp2(s * factor - _spread(top, score_shape))
            folded = device_ops.fold_columns(p, interpreted=cfg.interpreted)
            norm = norm * _spread(fade, norm.shape) + folded
            return p.astype(refs.q.dtype), top, norm, _spread(fade, out_shape)

        def in_turn(masked: bool, j: Any, carry: Any) -> Any:
            acc, m, norm = carry
            s = work.scores(j)
            p, m, norm, fade = soften(masked, j, s, m, norm)
            return work.weigh(acc * fade, p, j), m, norm

        def fused(masked: bool, j: Any, carry: Any) -> Any:
            acc, m, norm, p = carry
            acc, s = work.weigh_and_score(acc, p, j)
            p, m, norm, fade = soften(masked, j, s, m, norm)
            return acc * fade, m, norm, p

        # Each thread sums the weights that it has: what they would exchange for the sums of rows costs time in every block.
        carry: Any = (
            plgpu.layout_cast(jnp.zeros(out_shape, f32), WGMMA),
            plgpu.layout_cast(jnp.full((ROWS,), LOW, f32), BY_ROW),
            plgpu.layout_cast(jnp.zeros((ROWS, device_ops.FOLDED), f32), WGMMA),
        )
        plgpu.barrier_wait(refs.q_full.at[wg])
        start, one_block = i32(0), in_turn
        if cfg.fused:
            p, m, norm, _ = soften(True, 0, work.scores(0), *carry[1:])
            carry, start, one_block = (carry[0], m, norm, p), i32(1), fused
        carry = lax.fori_loop(start, tile.masked, functools.partial(one_block, True), carry)
        carry = lax.fori_loop(
            jnp.maximum(tile.masked, start), work.blocks, functools.partial(one_block, False), carry
        )
        acc, m, norm, *p = carry
        if cfg.fused:
            acc = work.weigh(acc, p[0], work.blocks - 1)
        norm = norm.sum(axis=1)

        def write() -> None:
            _write(cfg, refs, wg, (tile.row, tile.end, tile.head), acc, m, norm)

        if cfg.cuts:
            pl.when(tile.pieces != 0)(lambda: parts.leave(cfg, refs, wg, tile, acc, m, norm))
            pl.when(tile.pieces == 0)(write)
        else:
            write()
        return done + work.blocks

    if cfg.tuning.ping_pong:
        pl.when(wg == 0)(lambda: plgpu.barrier_arrive(refs.turn.at[0]))
    lax.fori_loop(0, rounds_of(cfg, refs, cta), one_tile, i32(0))
    if cfg.tuning.ping_pong and cfg.interpreted:  # it wants every completion of a barrier to be seen
        pl.when(wg == 0)(lambda: plgpu.barrier_wait(refs.turn.at[0]))
    if not cfg.interpreted:
        plgpu.wait_smem_to_gmem(0)
    if cfg.cuts:
        parts.merge(cfg, refs, wg, functools.partial(_write, cfg, refs, wg))


def _spread(x: Any, shape: tuple[int, ...]) -> Any:
    """A value per row, repeated over the columns."""
    return lax.broadcast_in_dim(x, shape, [0])


def _by_span(cfg: Config, wg: Any, do: Callable[[Span], None]) -> None:
    """`do` with each span of the warpgroup."""

    def all_of(w: int) -> None:
        for span in cfg.spans(w):
            do(span)

    for w in range(cfg.tuning.warpgroups):
        pl.when(wg == w)(functools.partial(all_of, w))


def _store_whole(cfg: Config, refs: Refs, wg: Any, row: Any, column: Any, out: Any) -> None:
    """Stores a warpgroup's rows, all of which are tokens of the request, by TMA."""
    # Adds nothing, which the compiler does not know: registers for addresses that it could work out once for all tiles would
    # be missing in the loops over blocks.
    mine, parts = wg + jnp.minimum(row, 0), cfg.columns(cfg.staged)
    for start in range(0, cfg.head_dim, cfg.staged):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for n, at in enumerate(parts):
            refs.out_s.at[mine, n][...] = out[:, start + at : start + at + LINE]
        plgpu.commit_smem()

        def copy(span: Span, start: int = start) -> None:
            for n, at in enumerate(parts):
                to = refs.out.at[
                    pl.ds(row + span.token, span.size), column + span.head, pl.ds(start + at, LINE)
                ]
                plgpu.copy_smem_to_gmem(refs.out_rows.at[mine, n, pl.ds(span.row, span.size)], to)

        _by_span(cfg, wg, copy)


def _visible(cfg: Config, tile: Tile, j: Any, wg: Any) -> Any:
    """Which entries of the tile's j-th block each of a warpgroup's rows sees."""
    shape = (ROWS, cfg.block)
    history, entry = tile.block(cfg, j)
    row = plgpu.broadcasted_iota(i32, shape, 0, layout=WGMMA)
    column = plgpu.broadcasted_iota(i32, shape, 1, layout=WGMMA)
    # One form serves both kinds of block: of the history every row sees the entries below its length, of the chunk those not
    # ahead of the row's token.
    own = jnp.where(history, 0, 1)
    ahead = jnp.where(history, tile.length - 1 - entry, tile.at - entry)
    # Of the chunk: tokens from the entry to the query.
    distance = cfg.token(row, wg) * own + ahead - column
    seen = distance >= 0
    if cfg.window is not None:
        seen &= distance * own < cfg.window
    return seen


def _write(
    cfg: Config,
    refs: Refs,
    wg: Any,
    where: tuple[Any, Any, Any],
    acc: Any,
    m: Any,
    norm: Any,
    part: Any = None,
) -> None:
    """Normalises and stores the rows of tokens that are the request's.

    `where`: the tile's first row, the row after its request's last, its head. `part`: if `acc` is not all columns, whether
    it is the first ones, and where they begin.
    """
    tile_row, end, tile_head = where
    row, column = tile_row, tile_head * cfg.group
    there = end - row  # positions that are
    out = (acc * _spread(1.0 / norm, acc.shape)).astype(refs.out.dtype)
    lse = (m + jnp.log2(norm)) * (1 / LOG2E)
    if not cfg.interpreted:
        rows = device_ops.TileRows(cfg.positions, cfg.group)
        at = row, column, there, i32(wg * ROWS)
        if part is None:
            store = functools.partial(device_ops.store_rows, out, refs.out, *at, rows)
            device_ops.store_values(lse, refs.lse, *at, rows)
            # Threads store 16 bytes of a row at a time, and wait for each other: only what TMA does not know the end of.
            whole = there >= cfg.positions
            pl.when(whole)(functools.partial(_store_whole, cfg, refs, wg, row, column, out))
            pl.when(jnp.logical_not(whole))(store)
            return
        first, start = part
        columns = refs.out.at[:, :, pl.ds(start, acc.shape[1])]
        device_ops.store_rows(out, columns, *at, rows)
        pl.when(first)(lambda: device_ops.store_values(lse, refs.lse, *at, rows))
        return
    refs.lse_s.at[wg][...] = lse
    parts = cfg.columns(cfg.staged)
    for n, first in enumerate(parts):
        refs.out_s.at[wg, n][...] = out[:, first : first + LINE]
    plgpu.commit_smem()

    def copy(r: int, g: int, t: int, count: int) -> None:
        for n, first in enumerate(parts):
            to = refs.out.at[pl.ds(row + t, count), column + g, pl.ds(first, LINE)]
            plgpu.copy_smem_to_gmem(refs.out_rows.at[wg, n, pl.ds(r, count)], to)
        refs.lse.at[pl.ds(row + t, count), column + g][...] = refs.lse_s.at[wg, pl.ds(r, count)][...]

    def copy_span(span: Span) -> None:
        start, head, token, size = span
        whole = there >= token + size
        pl.when(whole)(functools.partial(copy, start, head, token, size))
        for n in range(size):
            held = (token + n < there) & jnp.logical_not(whole)
            pl.when(held)(functools.partial(copy, start + n, head, token + n, 1))

    _by_span(cfg, wg, copy_span)
    plgpu.wait_smem_to_gmem(0)
