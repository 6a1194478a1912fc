"""The loading warpgroup of the ragged decode kernel."""

import functools
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.ragged_decode import plan as P
from pallas_kernels.ragged_decode.common import LOAD_REGISTERS, Config, Item, Refs, i32, layer_of
from pallas_kernels.read_once import load_once


def load(cfg: Config, refs: Refs) -> Any:
    """The pages of the share, tile by tile. Gives the number of tiles; None where warps load on their own."""
    if cfg.turns > 1:
        plgpu.set_max_registers(LOAD_REGISTERS, action="decrease")
    if cfg.loaders == 1:
        return _load_share(cfg, refs)

    @plgpu.warp_map
    def _(warp: Any) -> None:
        _load_share(cfg, refs, warp)

    return None


def _load_share(cfg: Config, refs: Refs, warp: Any = None) -> Any:
    """All of it by the warpgroup, or a warp's part: every so-manieth page. Gives the number of all tiles."""
    cta, layer = lax.axis_index("cta"), layer_of(refs)
    start, end, first, last = (
        refs.share[layer, cta, column] for column in (P.START, P.END, P.FIRST_ITEM, P.LAST_ITEM)
    )
    columns = (P.BEGIN, P.STOP, P.LENGTH, P.NUMBER, P.OFFSET, P.COLUMN)
    begin, stop, length, number, offset, column = (refs.share[layer, cta, column] for column in columns)
    slots, most = i32(cfg.slots), refs.table.shape[0] - 1

    def page_numbers(offset: Any, entry: Any, limit: Any) -> tuple[Any, ...]:
        page, last_page = lax.div(entry, i32(cfg.page)), lax.div(limit - 1, i32(cfg.page))
        at = (jnp.clip(offset + jnp.minimum(page + u, last_page), 0, most) for u in range(cfg.pages))
        return tuple(refs.table[x] for x in at)

    def read_item(before: Any) -> tuple[Any, ...]:
        at = jnp.maximum(last - before, 0)
        return tuple(refs.item[layer, at, x] for x in range(5))

    def share() -> Any:
        item = Item(begin, stop, length, number)
        base, limit, _ = item.piece(cfg, start, end)

        def one_item(j: Any, carry: Any) -> Any:
            done, item, offset, column, ids, (begin, length, next_offset, next_column, number) = carry
            after_next = read_item(j + 2)
            base, limit, tiles = item.piece(cfg, start, end)
            next_item = Item(begin, item.begin, length, number)
            next_base, next_limit, _ = next_item.piece(cfg, start, end)

            def one_tile(t: Any, ids: Any) -> Any:
                ahead = ids
                for kv in range(2):
                    turn = 2 * (done + t) + kv
                    slot = lax.rem(turn, slots)

                    @pl.when(turn >= slots)
                    def _(slot: Any = slot) -> None:
                        plgpu.barrier_wait(refs.free.at[slot])

                    held = limit - base - t * cfg.block
                    # What a slot's first load leaves out would be read as whatever lay there: it is whole.
                    whole = (held >= cfg.block) | (turn < slots)

                    def load_pages(held: Any, kv: int = kv, slot: Any = slot, turn: Any = turn) -> None:
                        for u, page in enumerate(ids):
                            left = cfg.page if held is None else held - u * cfg.page
                            one = functools.partial(_load_page, cfg, refs, page, kv, column, slot, u, left)
                            if warp is None:
                                one()
                            else:
                                pl.when(lax.rem(turn * cfg.pages + u, i32(cfg.loaders)) == warp)(one)

                    pl.when(whole)(functools.partial(load_pages, None))
                    pl.when((held < cfg.block) & (turn >= slots))(functools.partial(load_pages, held))
                    if kv == 0:
                        # Page numbers are read one tile ahead of their use, across items too; but after these keys are
                        # asked for, which at first wait for nothing but the share's row.
                        more = t + 1 < tiles
                        ahead = page_numbers(
                            jnp.where(more, offset, next_offset),
                            jnp.where(more, base + (t + 1) * cfg.block, next_base),
                            jnp.where(more, limit, next_limit),
                        )
                return ahead

            ids = lax.fori_loop(0, tiles, one_tile, ids)
            return done + tiles, next_item, next_offset, next_column, ids, after_next

        if cfg.pages <= P.MAX_FIRST_PAGES:  # those of the first tile stand in the share's row
            ids = tuple(refs.share[layer, cta, P.FIRST_PAGES + u] for u in range(cfg.pages))
        else:
            ids = page_numbers(offset, base, limit)
        init = (i32(0), item, offset, column, ids, read_item(1))
        done, *_ = lax.fori_loop(0, last - first + 1, one_item, init)
        if cfg.interpreted:  # it wants every completion of a barrier to be seen
            for slot in range(cfg.slots):
                wait_for_last(refs, done, slot)
        return done

    return lax.cond(end > start, share, lambda: i32(0))


def wait_for_last(refs: Refs, tiles: Any, slot: Any) -> None:
    """Waits until the last of the `tiles` that lay in `slot` is read, after which the slot is nobody's."""
    pl.when(2 * tiles > slot)(lambda: plgpu.barrier_wait(refs.free.at[slot]))


def _load_page(
    cfg: Config, refs: Refs, page: Any, kv: int, column: Any, slot: Any, place: int, held: Any
) -> None:
    """The first `held` entries of a page or a few more: an item's last page is often half empty.

    The rows that are not loaded keep finite values of an earlier tile; the weights there are zero.
    """

    def copy(count: int) -> None:
        src = refs.pool.at[page, kv, column]
        count += cfg.scale_rows  # which come first
        if count < src.shape[0]:
            src = src.at[pl.ds(0, count)]
        rows = pl.ds(place * (cfg.paged.stride if cfg.packed else cfg.page), count)
        if not cfg.packed:
            load_once(src, refs.kv_s.at[slot, rows], refs.full.at[slot])
            return
        width = cfg.tile[-1]
        for half in range(cfg.halves):
            part = src.at[:, pl.ds(half * width, width)]
            load_once(part, refs.kv_s.at[slot, half, rows], refs.full.at[slot])

    def at_most(count: int) -> None:
        if count == cfg.granule:
            copy(count)
            return
        pl.when(held > count - cfg.granule)(lambda: copy(count))
        pl.when(held <= count - cfg.granule)(lambda: at_most(count - cfg.granule))

    if isinstance(held, int):
        copy(held)
    else:
        at_most(cfg.page)
