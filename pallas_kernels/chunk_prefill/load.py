"""The loading warpgroup of the chunk prefill kernel."""

import functools
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.chunk_prefill import columns as C
from pallas_kernels.chunk_prefill.common import LINE, Config, Refs, Tile, i32, rounds_of, tile_of


def load(cfg: Config, refs: Refs) -> None:
    """The loading warpgroup."""
    plgpu.set_max_registers(cfg.tuning.load_registers, action="decrease")
    cta, stages = lax.axis_index("cta"), i32(cfg.tuning.stages)
    most = refs.table.shape[0] - 1

    def page_numbers(tile: Tile, j: Any) -> tuple[Any, ...]:
        _, entry = tile.block(cfg, j)
        last = jnp.maximum(tile.length - 1, 0)
        at = (
            tile.offset + lax.div(jnp.minimum(entry + u * cfg.box, last), i32(cfg.page))
            for u in range(cfg.boxes)
        )
        return tuple(refs.table[jnp.clip(x, 0, most)] for x in at)

    def load_block(tile: Tile, j: Any, ids: Any, kv: int, slot: Any) -> None:
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
                row = pl.multiple_of(tile.segment + entry + u * cfg.box, C.ALIGN)
                src = own.at[pl.ds(row, cfg.box), tile.head]
                plgpu.copy_gmem_to_smem(src, smem.at[slot, pl.ds(u * cfg.box, cfg.box)], full.at[slot])

    def load_queries(tile: Tile, w: int) -> None:
        full, spans, parts = refs.q_full.at[w], cfg.spans(w), cfg.columns(cfg.head_dim)
        for span in spans:
            tokens = pl.ds(tile.row + span.token, span.size)
            for n, start in enumerate(parts):
                src = refs.q.at[tokens, tile.head * cfg.group + span.head, pl.ds(start, LINE)]
                plgpu.copy_gmem_to_smem(src, refs.q_rows.at[w, n, pl.ds(span.row, span.size)], full)
        for _ in range(cfg.loads - len(spans) * len(parts)):  # others have more
            plgpu.barrier_arrive(full)

    def one_tile(n: Any, carry: Any) -> Any:
        done, *tile = carry
        tile = Tile(*tile)
        next_tile = tile_of(cfg, refs, cta, n + 1)
        blocks = tile.masked + tile.free

        def one_block(j: Any, ids: Any) -> Any:
            ahead = page_numbers(tile, jnp.minimum(j + 1, blocks - 1))
            slot = cfg.slot(done + j)

            @pl.when(done + j >= stages)
            def _() -> None:
                plgpu.barrier_wait(refs.k_free.at[slot])

            load_block(tile, j, ids, 0, slot)

            @pl.when(j == 0)
            def _() -> None:
                for w in range(cfg.tuning.warpgroups):
                    pl.when(n > 0)(functools.partial(plgpu.barrier_wait, refs.q_free.at[w]))
                    load_queries(tile, w)

            @pl.when(done + j >= stages)
            def _() -> None:
                plgpu.barrier_wait(refs.v_free.at[slot])

            load_block(tile, j, ids, 1, slot)
            return ahead

        lax.fori_loop(0, blocks, one_block, page_numbers(tile, 0))
        return done + blocks, *next_tile

    rounds = rounds_of(cfg, refs, cta)
    done, *_ = lax.fori_loop(0, rounds, one_tile, (i32(0), *tile_of(cfg, refs, cta, i32(0))))
    if cfg.interpreted:  # it wants every completion of a barrier to be seen
        for w in range(cfg.tuning.warpgroups):
            pl.when(rounds > 0)(functools.partial(plgpu.barrier_wait, refs.q_free.at[w]))
        for slot in range(cfg.tuning.stages):

            @pl.when(done > slot)
            def _(slot: int = slot) -> None:
                plgpu.barrier_wait(refs.k_free.at[slot])
                plgpu.barrier_wait(refs.v_free.at[slot])
