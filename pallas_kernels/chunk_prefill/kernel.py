"""The chunk prefill kernel for Hopper GPUs, in Pallas' Mosaic GPU.

A CTA works through tiles of queries: 64 rows (positions times query heads of one KV head) for each computing warpgroup. One
more warpgroup issues all loads (TMA): the tile's queries, and blocks of keys and values, which come page by page from the
pool where they are history and in boxes of the same size from the chunk where they are its own. It runs ahead of the
computing ones, across tiles too. History and chunk go through one running softmax, so nothing is gathered and nothing
merged. Blocks that need a mask come first; the long loop over the rest has none.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.chunk_prefill import device_ops
from pallas_kernels.chunk_prefill import plan as P
from pallas_kernels.chunk_prefill.tuning import Tuning

LOG2E = math.log2(math.e)
LOW = -1e30  # below every logit, and finite: exp2(LOW - m) is 0, never NaN
ROWS = 64  # of one computing warpgroup
WGMMA = plgpu.Layout.WGMMA
BY_ROW = plgpu.Layout.WGMMA.reduce(1)
i32, f32 = jnp.int32, jnp.float32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Everything static. `group` is G rounded up to a power of two."""

    group: int
    head_dim: int
    page: int
    block: int
    num_ctas: int
    scale: float
    soft_cap: float | None
    window: int | None
    interpreted: bool
    tuning: Tuning

    @property
    def box(self) -> int:
        """Entries of one load."""
        return min(self.page, self.block)

    @property
    def boxes(self) -> int:
        return self.block // self.box

    @property
    def positions(self) -> int:
        """Tokens of one warpgroup's rows; the rows hold them query head by query head."""
        return max(ROWS // self.group, 8)

    @property
    def heads(self) -> int:
        """Query heads of one warpgroup's rows."""
        return ROWS // self.positions

    def place(self, wg: Any) -> tuple[Any, Any]:
        """A warpgroup's first position in the tile and its first query head."""
        if self.heads == self.group:
            return wg * self.positions, 0
        parts = self.group // self.heads
        return lax.div(wg, i32(parts)) * self.positions, lax.rem(wg, i32(parts)) * self.heads


def tile_positions(group: int, warpgroups: int) -> int:
    """Tokens of one tile, for G query heads per KV head."""
    group = 1 << (group - 1).bit_length()
    positions = max(ROWS // group, 8)
    return warpgroups * positions // (group * positions // ROWS)


class _Refs(NamedTuple):
    tiles: Any  # i32[n, TILE_COLUMNS]
    count: Any  # i32[1]
    table: Any  # i32[B * R]
    q: Any  # [T, K * Gp, D]
    k: Any  # [T, K, D]
    v: Any
    pool: Any  # [num_pages, 2, Hp, P, D]
    out: Any  # [T, K * Gp, D]
    lse: Any  # f32[T, K * Gp]
    q_s: Any = None  # [warpgroups, 64, D]
    k_s: Any = None  # [stages, block, D]
    v_s: Any = None
    q_full: Any = None
    q_free: Any = None
    k_full: Any = None
    k_free: Any = None
    v_full: Any = None
    v_free: Any = None
    turn: Any = None
    p_s: Any = None  # [warpgroups, 64, block], for the interpreter alone, as the next two
    out_s: Any = None  # [warpgroups, 64, D]
    lse_s: Any = None  # f32[warpgroups, 64]


def kernel_body(cfg: Config, dtype: Any, *refs: Any) -> None:
    gmem = _Refs(*refs)
    wgs, stages = cfg.tuning.warpgroups, cfg.tuning.stages

    def body(*smem: Any) -> None:
        refs = gmem._replace(**dict(zip(_Refs._fields[9:], smem, strict=False)))
        wg = lax.axis_index("wg")
        pl.when(wg < wgs)(functools.partial(_compute, cfg, refs, wg))
        pl.when(wg == wgs)(functools.partial(_load, cfg, refs))

    tiled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))  # type: ignore[abstract]
    simulated = ((wgs, ROWS, cfg.block), dtype), ((wgs, ROWS, cfg.head_dim), dtype), ((wgs, ROWS), f32)
    pl.run_scoped(
        body,
        plgpu.SMEM((wgs, ROWS, cfg.head_dim), dtype, transforms=tiled),
        plgpu.SMEM((stages, cfg.block, cfg.head_dim), dtype, transforms=tiled),
        plgpu.SMEM((stages, cfg.block, cfg.head_dim), dtype, transforms=tiled),
        plgpu.Barrier(num_arrivals=wgs * cfg.heads),
        plgpu.Barrier(num_arrivals=wgs),
        plgpu.Barrier(num_arrivals=cfg.boxes, num_barriers=stages),
        plgpu.Barrier(num_arrivals=wgs, num_barriers=stages),
        plgpu.Barrier(num_arrivals=cfg.boxes, num_barriers=stages),
        plgpu.Barrier(num_arrivals=wgs, num_barriers=stages),
        plgpu.Barrier(num_arrivals=wgs),
        *(plgpu.SMEM(*x) for x in simulated if cfg.interpreted),
        collective_axes="wg",
    )


class _Tile(NamedTuple):
    """A row of the plan."""

    row: Any
    end: Any
    segment: Any
    head: Any
    length: Any
    offset: Any
    column: Any
    masked: Any
    free: Any
    diagonal: Any
    chunk_last: Any
    chunk_first: Any
    chunk_free: Any

    def block(self, cfg: Config, j: Any) -> tuple[Any, Any]:
        """Whether the tile's j-th block is history, and its first entry in the history or in the chunk."""
        f = j - self.masked  # among those without a mask
        full = lax.div(self.length, i32(cfg.block))
        partial = lax.rem(self.length, i32(cfg.block)) > 0
        history = jnp.where(f < 0, partial & (j == self.masked - 1), f < full)
        edge = self.chunk_first + (j - self.diagonal)
        in_chunk = jnp.where(
            f < 0,
            jnp.where(j < self.diagonal, self.chunk_last - j, edge),
            self.chunk_free + f - full,
        )
        in_history = jnp.where(f < 0, full, f)
        return history, jnp.where(history, in_history, in_chunk) * cfg.block


def _rounds(cfg: Config, refs: _Refs, cta: Any) -> Any:
    """Tiles of this CTA: they are dealt back and forth."""
    count, ctas = refs.count[0], i32(cfg.num_ctas)
    full = lax.div(count, ctas)
    at = jnp.where(lax.rem(full, i32(2)) == 0, cta, cfg.num_ctas - 1 - cta)
    return full + (at < lax.rem(count, ctas)).astype(i32)


def _tile(cfg: Config, refs: _Refs, cta: Any, n: Any) -> _Tile:
    at = jnp.where(lax.rem(n, i32(2)) == 0, cta, cfg.num_ctas - 1 - cta)
    number = jnp.minimum(n * cfg.num_ctas + at, refs.tiles.shape[0] - 1)
    return _Tile(*(refs.tiles[number, c] for c in range(len(_Tile._fields))))


def _load(cfg: Config, refs: _Refs) -> None:
    """The loading warpgroup."""
    plgpu.set_max_registers(cfg.tuning.load_registers, action="decrease")
    cta, stages = lax.axis_index("cta"), i32(cfg.tuning.stages)
    most = refs.table.shape[0] - 1

    def page_numbers(tile: _Tile, j: Any) -> tuple[Any, ...]:
        _, entry = tile.block(cfg, j)
        last = jnp.maximum(tile.length - 1, 0)
        at = (
            tile.offset + lax.div(jnp.minimum(entry + u * cfg.box, last), i32(cfg.page))
            for u in range(cfg.boxes)
        )
        return tuple(refs.table[jnp.clip(x, 0, most)] for x in at)

    def load_block(tile: _Tile, j: Any, ids: Any, kv: int, slot: Any) -> None:
        history, entry = tile.block(cfg, j)
        smem, full = (refs.k_s, refs.k_full) if kv == 0 else (refs.v_s, refs.v_full)
        own = refs.k if kv == 0 else refs.v

        @pl.when(history)
        def _() -> None:
            inside = lax.rem(entry, i32(cfg.page))
            for u, page in enumerate(ids):
                src = refs.pool.at[page, kv, tile.column]
                if cfg.box < cfg.page:
                    src = src.at[pl.ds(pl.multiple_of(inside + u * cfg.box, cfg.box), cfg.box)]
                plgpu.copy_gmem_to_smem(src, smem.at[slot, pl.ds(u * cfg.box, cfg.box)], full.at[slot])

        @pl.when(jnp.logical_not(history))
        def _() -> None:
            for u in range(cfg.boxes):
                row = pl.multiple_of(tile.segment + entry + u * cfg.box, P.ALIGN)
                src = own.at[pl.ds(row, cfg.box), tile.head]
                plgpu.copy_gmem_to_smem(src, smem.at[slot, pl.ds(u * cfg.box, cfg.box)], full.at[slot])

    def one_tile(n: Any, carry: Any) -> Any:
        done, *tile = carry
        tile = _Tile(*tile)
        next_tile = _tile(cfg, refs, cta, n + 1)
        blocks = tile.masked + tile.free

        def one_block(j: Any, ids: Any) -> Any:
            ahead = page_numbers(tile, jnp.minimum(j + 1, blocks - 1))
            slot = lax.rem(done + j, stages)

            @pl.when(done + j >= stages)
            def _() -> None:
                plgpu.barrier_wait(refs.k_free.at[slot])

            load_block(tile, j, ids, 0, slot)

            @pl.when(j == 0)
            def _() -> None:
                @pl.when(n > 0)
                def _() -> None:
                    plgpu.barrier_wait(refs.q_free)

                for w in range(cfg.tuning.warpgroups):
                    position, head = cfg.place(w)
                    row = pl.multiple_of(tile.row + position, P.ALIGN)
                    for g in range(cfg.heads):
                        src = refs.q.at[pl.ds(row, cfg.positions), tile.head * cfg.group + head + g]
                        dst = refs.q_s.at[w, pl.ds(g * cfg.positions, cfg.positions)]
                        plgpu.copy_gmem_to_smem(src, dst, refs.q_full)

            @pl.when(done + j >= stages)
            def _() -> None:
                plgpu.barrier_wait(refs.v_free.at[slot])

            load_block(tile, j, ids, 1, slot)
            return ahead

        lax.fori_loop(0, blocks, one_block, page_numbers(tile, 0))
        return done + blocks, *next_tile

    rounds = _rounds(cfg, refs, cta)
    done, *_ = lax.fori_loop(0, rounds, one_tile, (i32(0), *_tile(cfg, refs, cta, i32(0))))
    if cfg.interpreted:  # it wants every completion of a barrier to be seen
        pl.when(rounds > 0)(lambda: plgpu.barrier_wait(refs.q_free))
        for slot in range(cfg.tuning.stages):

            @pl.when(done > slot)
            def _(slot: int = slot) -> None:
                plgpu.barrier_wait(refs.k_free.at[slot])
                plgpu.barrier_wait(refs.v_free.at[slot])


def _compute(cfg: Config, refs: _Refs, wg: Any) -> None:
    """A computing warpgroup."""
    plgpu.set_max_registers(cfg.tuning.compute_registers, action="increase")
    cta, stages = lax.axis_index("cta"), i32(cfg.tuning.stages)
    position, head = cfg.place(wg)
    out_shape, score_shape = (ROWS, cfg.head_dim), (ROWS, cfg.block)
    q = refs.q_s.at[wg]
    ping_pong = cfg.tuning.ping_pong and not cfg.interpreted

    def arrive() -> None:
        if ping_pong:
            plgpu.barrier_arrive(refs.turn)

    def wait() -> None:
        if ping_pong:
            plgpu.barrier_wait(refs.turn)

    def scores(slot: Any) -> Any:
        def run(ref: Any) -> Any:
            plgpu.wgmma(ref, q, refs.k_s.at[slot].transpose((1, 0)))
            arrive()
            wait()
            return ref[...]

        return pl.run_scoped(run, plgpu.ACC(score_shape, f32))

    def weigh(acc: Any, p: Any, slot: Any) -> Any:
        values = refs.v_s.at[slot]
        if cfg.interpreted:
            refs.p_s.at[wg][...] = p
            plgpu.commit_smem()

            def fresh(ref: Any) -> Any:
                plgpu.wgmma(ref, refs.p_s.at[wg], values)
                return ref[...]

            return acc + pl.run_scoped(fresh, plgpu.ACC(out_shape, f32))

        def run(ref: Any) -> None:
            plgpu.wgmma(ref, p, values)

        return pl.run_state(run)(plgpu.ACC.init(acc))

    def one_tile(n: Any, done: Any) -> Any:
        tile = _tile(cfg, refs, cta, n)
        blocks = tile.masked + tile.free
        first = tile.row - tile.segment + position

        def one_block(masked: bool, j: Any, carry: Any) -> Any:
            acc, m, norm = carry
            slot = lax.rem(done + j, stages)
            plgpu.barrier_wait(refs.k_full.at[slot])
            s = scores(slot)
            plgpu.barrier_arrive(refs.k_free.at[slot])
            pl.when(j == blocks - 1)(lambda: plgpu.barrier_arrive(refs.q_free))
            factor = cfg.scale * LOG2E
            if cfg.soft_cap is not None:
                s, factor = _capped(cfg, s), 1.0
            if masked:
                s = jnp.where(_visible(cfg, tile, j, first), s, -jnp.inf)
            top = jnp.maximum(m, s.max(axis=1) * factor)
            fade = jnp.exp2(m - top)
            p = jnp.exp2(s * factor - _spread(top, score_shape))
            acc = acc * _spread(fade, out_shape)
            norm = norm * fade
            p16 = p.astype(refs.q.dtype)
            if cfg.head_dim <= 128:
                norm = norm + p.sum(axis=1)
                acc, norm, top, p16 = lax.optimization_barrier((acc, norm, top, p16))
            arrive()
            plgpu.barrier_wait(refs.v_full.at[slot])
            wait()
            if cfg.head_dim > 128:
                norm = norm + p.sum(axis=1)
            acc = weigh(acc, p16, slot)
            plgpu.barrier_arrive(refs.v_free.at[slot])
            return acc, top, norm

        carry = (
            plgpu.layout_cast(jnp.zeros(out_shape, f32), WGMMA),
            plgpu.layout_cast(jnp.full((ROWS,), LOW, f32), BY_ROW),
            plgpu.layout_cast(jnp.zeros((ROWS,), f32), BY_ROW),
        )
        plgpu.barrier_wait(refs.q_full)
        carry = lax.fori_loop(0, tile.masked, functools.partial(one_block, True), carry)
        acc, m, norm = lax.fori_loop(tile.masked, blocks, functools.partial(one_block, False), carry)
        out = acc * _spread(1.0 / norm, out_shape)
        lse = (m + jnp.log2(norm)) * (1 / LOG2E)
        _write(cfg, refs, wg, tile, position, head, out, lse)
        return done + blocks

    if ping_pong:
        pl.when(wg == 1)(lambda: (arrive(), wait())[0])
    lax.fori_loop(0, _rounds(cfg, refs, cta), one_tile, i32(0))
    if ping_pong:
        pl.when(wg == 0)(lambda: (arrive(), wait())[0])


def _capped(cfg: Config, s: Any) -> Any:
    """Raw products to capped logits, in units of log 2."""
    assert cfg.soft_cap is not None
    # tanh(x) = 1 - 2 / (exp(2 x) + 1), exact where the hardware's approximate tanh has 11 bits
    e = jnp.exp2(s * (2 * LOG2E * cfg.scale / cfg.soft_cap))
    return cfg.soft_cap * LOG2E * (1.0 - 2.0 / (e + 1.0))


def _spread(x: Any, shape: tuple[int, ...]) -> Any:
    """A value per row, repeated over the columns."""
    return lax.broadcast_in_dim(x, shape, [0])


def _visible(cfg: Config, tile: _Tile, j: Any, first: Any) -> Any:
    """Which entries of the tile's j-th block each row sees. `first`: the warpgroup's first token within its request."""
    shape = (ROWS, cfg.block)
    history, entry = tile.block(cfg, j)
    row = plgpu.broadcasted_iota(i32, shape, 0, layout=WGMMA)
    column = plgpu.broadcasted_iota(i32, shape, 1, layout=WGMMA)
    # One form serves both kinds of block: of the history every row sees the entries below its length, of the chunk those not
    # ahead of the row's token.
    own = jnp.where(history, 0, 1)
    ahead = jnp.where(history, tile.length - 1 - entry, first - entry)
    distance = (row & (cfg.positions - 1)) * own + ahead - column  # of the chunk: tokens from the entry to the query
    seen = distance >= 0
    if cfg.window is not None:
        seen &= distance * own < cfg.window
    return seen


def _write(cfg: Config, refs: _Refs, wg: Any, tile: _Tile, position: Any, head: Any, out: Any, lse: Any) -> None:
    """Stores the rows of tokens that are the request's."""
    row, column = tile.row + position, tile.head * cfg.group + head
    there = tile.end - row  # positions that are
    if not cfg.interpreted:
        device_ops.store_rows(out.astype(refs.out.dtype), refs.out, row, column, there, cfg.positions)
        device_ops.store_values(lse, refs.lse, row, column, there, cfg.positions)
        return
    refs.lse_s.at[wg][...] = lse
    staged = refs.out_s.at[wg]
    staged[...] = out.astype(refs.out.dtype)
    plgpu.commit_smem()
    for g in range(cfg.heads):
        for t in range(cfg.positions):

            @pl.when(t < there)
            def _(g: int = g, t: int = t) -> None:
                r = g * cfg.positions + t
                plgpu.copy_smem_to_gmem(staged.at[pl.ds(r, 1)], refs.out.at[pl.ds(row + t, 1), column + g])
                refs.lse[row + t, column + g] = refs.lse_s[wg, r]

    plgpu.wait_smem_to_gmem(0)
