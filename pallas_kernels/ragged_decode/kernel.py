"""The ragged decode kernel for Hopper GPUs, in Pallas' Mosaic GPU.

CTA `w` takes share `w` of the plan: an interval of the line of all KV entries of one layer. One warpgroup issues the loads
of pages (TMA), one computes. Keys are the left operand of the matrix products: S^T = K Q^T and O^T = V^T P^T, so that a tile
of 64 or more entries fills the instruction's 64 rows and the G queries, of all new tokens of a request, are its columns (8
to 32 of them), where Q K^T would pad G to 64. Every operand comes from shared memory; or keys and values do not, where they
are bytes (`byte_ops`): then they become floats on their way into registers, and more than one warpgroup computes.

A share is worked through from its back: the piece that another CTA waits for comes first. It leaves that piece in global
memory and counts it; the CTA that holds the item's end, or several, wait, fold the item's pieces in order and write the
result (`ends`). Results repeat bit for bit. The counters are part of the plan and are zero again when the kernel ends.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.logits import log2_logits
from pallas_kernels.pieces import LOW
from pallas_kernels.ragged_decode import byte_ops, device_ops, ends, heads
from pallas_kernels.ragged_decode import plan as P
from pallas_kernels.ragged_decode.common import (
    BY_QUERY,
    WGMMA,
    Config,
    Item,
    Refs,
    f32,
    i32,
    layer_of,
    spread,
)
from pallas_kernels.ragged_decode.load import load
from pallas_kernels.ragged_decode.rest import rest_alone, with_rest
from pallas_kernels.ragged_decode.rows import read_key, read_queries, read_value

OWN = ("q_s", "p_s", "exchange_s", "spare_s")  # of each computing warpgroup
REDUCTION_BYTES = 6144
SHARED = Refs._fields[Refs._fields.index("q_s") : Refs._fields.index("rope")]


def kernel_body(cfg: Config, dtype: Any, gmem: dict[str, Any]) -> None:
    """`gmem`: operands and results, by their names in `Refs`."""

    def body(*smem: Any) -> None:
        refs = refs_of(gmem, smem)
        wg = lax.axis_index("wg")
        pl.when(wg < cfg.turns)(functools.partial(compute, cfg, refs, wg if cfg.turns > 1 else 0))

        @pl.when(wg == cfg.turns)
        def _() -> None:
            load(cfg, refs)

    pl.run_scoped(body, *scratch(cfg, dtype), collective_axes="wg")


def refs_of(gmem: dict[str, Any], smem: Sequence[Any]) -> Refs:
    """`smem`: what is made of `scratch`."""
    return Refs(**gmem, **dict(zip(SHARED, smem, strict=False)))


def scratch(cfg: Config, dtype: Any) -> list[Any]:
    """What the kernel has in shared memory: `SHARED`, pages of `dtype`."""
    tiled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))  # type: ignore[abstract]
    operand = jnp.float16 if cfg.packed else dtype
    smem = [
        plgpu.SMEM((cfg.turns, cfg.queries, cfg.head_dim), operand, transforms=tiled),
        plgpu.SMEM(
            (cfg.slots, *cfg.tile), dtype, transforms=byte_ops.lines(cfg.tile) if cfg.packed else tiled
        ),
        plgpu.SMEM((cfg.turns, cfg.queries, cfg.block), operand, transforms=tiled),
        plgpu.Barrier(num_arrivals=cfg.pages * cfg.halves, num_barriers=cfg.slots),
        plgpu.Barrier(num_barriers=cfg.slots),
    ]
    if cfg.packed:
        smem.append(plgpu.SMEM((cfg.turns - 1, cfg.head_dim, cfg.queries), f32))
        smem.append(plgpu.SMEM((cfg.turns - 1, 2, cfg.queries), f32))
        smem.append(plgpu.Barrier(num_barriers=2 * cfg.turns))
        smem.append(plgpu.SMEM((cfg.turns, REDUCTION_BYTES // 4), f32))
        if cfg.interpreted:
            smem.append(plgpu.SMEM((cfg.turns, cfg.block, cfg.head_dim), operand))
    return smem


def compute(cfg: Config, refs: Refs, turn: Any) -> None:
    """A computing warpgroup: items without entries, then the share from its back.

    Where there are several they take the tiles in turns, and at an item's end the first takes over what the others have.
    """
    own = {name: x.at[turn] for name in OWN if (x := getattr(refs, name)) is not None}
    refs = refs._replace(**own)
    if cfg.turns > 1:
        plgpu.set_max_registers(cfg.registers, action="increase")
    cta, layer = lax.axis_index("cta"), layer_of(refs)
    start, end, first, last = (
        refs.share[layer, cta, column] for column in (P.START, P.END, P.FIRST_ITEM, P.LAST_ITEM)
    )
    begin, stop, length, number = (
        refs.share[layer, cta, column] for column in (P.BEGIN, P.STOP, P.LENGTH, P.NUMBER)
    )
    num_empty = refs.share[layer, cta, P.EMPTY]
    others = (refs.share[layer, cta, column] for column in (P.HAND_TO, P.FIRST_SHARE))
    cut = ends.Cut(layer, *others)

    def read_item(before: Any) -> tuple[Any, Any, Any, Any]:
        at = jnp.maximum(last - before, 0)
        begin, length, number = (
            refs.item[layer, at, x] for x in (P.ITEM_BEGIN, P.ITEM_LENGTH, P.ITEM_NUMBER)
        )
        return begin, length, number, refs.item[layer, at, P.ITEM_SKIP] if cfg.skips else i32(0)

    skip = refs.share[layer, cta, P.SKIP] if cfg.skips else i32(0)
    tile_shape, out_shape = (cfg.block, cfg.queries), (cfg.head_dim, cfg.queries)
    slots = i32(cfg.slots)

    def nothing() -> tuple[Any, Any, Any]:
        return (
            plgpu.layout_cast(jnp.zeros(out_shape, f32), WGMMA),
            plgpu.layout_cast(jnp.full((cfg.queries,), LOW, f32), BY_QUERY),
            plgpu.layout_cast(jnp.zeros((cfg.queries,), f32), BY_QUERY),
        )

    def read_new(number: Any) -> Any:
        """The one new token's key and value, f32[D] each; read early, used when the item ends."""
        if not cfg.has_new or cfg.rest_first:
            return None
        return read_key(cfg, refs, number), read_value(cfg, refs, number)

    def store_new(number: Any, new: Any, when: Any = True) -> None:
        if cfg.heads:
            pl.when(when)(lambda: heads.store_new(cfg, refs, number, new))

    def empty(n: Any, _: Any) -> Any:
        number = refs.item[layer, cta + n * cfg.num_shares, P.ITEM_EMPTY]
        q = read_queries(cfg, refs, number) if cfg.has_new else None
        if cfg.rest_first:
            sums = rest_alone(cfg, refs, number, q)
        else:
            store_new(number, new := read_new(number))
            sums = with_rest(cfg, refs, number, q, new, nothing())
        ends.write(cfg, refs, number, sums)
        return ()

    rounds = lax.div(jnp.maximum(num_empty - cta, 0) + (cfg.num_shares - 1), i32(cfg.num_shares))
    lax.fori_loop(0, jnp.where(turn == 0, rounds, 0), empty, ())

    @pl.when(end > start)
    def _() -> None:
        def one_item(j: Any, carry: Any) -> Any:
            done, item, q, (begin, length, number, skip) = carry
            after_next = read_item(j + 2)  # early: the next one's queries wait for its number
            base, limit, tiles = item.piece(cfg, start, end)
            new = read_new(item.number)
            store_new(item.number, new, end >= item.stop)
            refs.q_s.transpose((1, 0))[...] = q.astype(refs.q_s.dtype)
            plgpu.commit_smem()
            next_q = read_queries(cfg, refs, number)

            first_tile = lax.rem(turn + (cfg.turns - lax.rem(done, i32(cfg.turns))), i32(cfg.turns))

            def one_tile(n: Any, carry: Any) -> Any:
                t = first_tile + n * cfg.turns
                acc, m_old, weights = carry
                k, v = (lax.rem(2 * (done + t) + kv, slots) for kv in range(2))
                plgpu.barrier_wait(refs.full.at[k])
                key_steps = _steps(cfg, refs, k)
                s = _logits(cfg, refs, k)
                plgpu.barrier_arrive(refs.free.at[k])
                if cfg.packed:  # the values' scales are wanted before the values
                    plgpu.barrier_wait(refs.full.at[v])
                value_steps = _steps(cfg, refs, v)
                entry = plgpu.broadcasted_iota(i32, tile_shape, 0, layout=WGMMA)
                at = base + t * cfg.block
                seen = entry < limit - at
                if cfg.skips:
                    seen &= entry >= item.skip - at
                if key_steps is not None:
                    s = s * lax.broadcast_in_dim(key_steps, tile_shape, [0])
                s = log2_logits(s, cfg.scale, cfg.soft_cap)
                if value_steps is not None:
                    # From here on the weights of what the values' bytes say: none is above 1, as float16 needs.
                    s = s + lax.broadcast_in_dim(jnp.log2(value_steps), tile_shape, [0])
                s = jnp.where(seen, s, LOW)
                m = jnp.maximum(m_old, _over_rows(cfg, refs, "max", s))
                fade = jnp.exp2(m_old - m)
                p = jnp.exp2(s - spread(m, tile_shape))
                refs.p_s.transpose((1, 0))[...] = p.astype(refs.p_s.dtype)
                plgpu.commit_smem()
                if value_steps is not None:  # of the values themselves
                    p = p * lax.broadcast_in_dim(1.0 / value_steps, tile_shape, [0])
                weights = weights * spread(fade, tile_shape) + p  # summed over entries once, at the end
                acc = acc * spread(fade, out_shape)
                if not cfg.packed:
                    plgpu.barrier_wait(refs.full.at[v])
                acc = acc + _weighted_values(cfg, refs, v)
                plgpu.barrier_arrive(refs.free.at[v])
                return acc, m, weights

            acc, m, norm = nothing()
            weights = plgpu.layout_cast(jnp.zeros(tile_shape, f32), WGMMA)
            if cfg.rest_first:
                ends_here = (end >= item.stop) & (turn == 0)
                rest = functools.partial(rest_alone, cfg, refs, item.number, q)
                acc, m, norm = lax.cond(ends_here, rest, nothing)
                row = plgpu.broadcasted_iota(i32, tile_shape, 0, layout=WGMMA)
                weights = jnp.where(row == 0, spread(norm, tile_shape), weights)
            mine = lax.div(jnp.maximum(tiles - first_tile, 0) + (cfg.turns - 1), i32(cfg.turns))
            acc, m, weights = lax.fori_loop(0, mine, one_tile, (acc, m, weights))
            norm = _over_rows(cfg, refs, "add", weights)

            def end_item(*sums: Any) -> None:
                ends.end_item(cfg, refs, item, start, end, cut, q, new, sums)

            if cfg.turns == 1:
                end_item(acc, m, norm)
            else:
                pl.when(turn > 0)(functools.partial(_hand_over, cfg, refs, turn, j, acc, m, norm))
                pl.when(turn == 0)(lambda: end_item(*_take_over(cfg, refs, acc, m, norm)))
            return done + tiles, Item(begin, item.begin, length, number, skip), next_q, after_next

        upcoming, first_item = read_item(1), Item(begin, stop, length, number, skip)
        init = (i32(0), first_item, read_queries(cfg, refs, number), upcoming)
        lax.fori_loop(0, last - first + 1, one_item, init)
        if cfg.turns > 1:
            pl.when(turn > 0)(lambda: plgpu.barrier_wait(refs.meet.at[cfg.turns + turn]))


def _over_rows(cfg: Config, refs: Refs, how: str, x: Any) -> Any:
    """The largest or the sum of each column of [*, Gp]."""
    # Pallas has one place for what warps exchange: not for several warpgroups at once.
    if cfg.turns > 1 and not cfg.interpreted:
        return device_ops.reduce_rows(how, x, refs.exchange_s)
    return x.max(axis=0) if how == "max" else x.sum(axis=0)


def _hand_over(cfg: Config, refs: Refs, turn: Any, items: Any, acc: Any, m: Any, norm: Any) -> None:
    """Leaves what a warpgroup has of an item to the first one; `items`: ended before."""
    pl.when(items > 0)(lambda: plgpu.barrier_wait(refs.meet.at[cfg.turns + turn]))
    refs.sums_s.at[turn - 1][...] = acc
    refs.sums_ml.at[turn - 1, 0][...] = m
    refs.sums_ml.at[turn - 1, 1][...] = norm
    plgpu.barrier_arrive(refs.meet.at[turn])


def _take_over(cfg: Config, refs: Refs, acc: Any, m: Any, norm: Any) -> tuple[Any, Any, Any]:
    for turn in range(1, cfg.turns):
        plgpu.barrier_wait(refs.meet.at[turn])
        other = plgpu.load(refs.sums_s.at[turn - 1], layout=WGMMA, optimized=False)
        other_m, other_norm = (
            plgpu.load(refs.sums_ml.at[turn - 1, n], layout=BY_QUERY, optimized=False) for n in range(2)
        )
        plgpu.barrier_arrive(refs.meet.at[cfg.turns + turn])
        top = jnp.maximum(m, other_m)
        fade, other_fade = jnp.exp2(m - top), jnp.exp2(other_m - top)
        acc = acc * spread(fade, acc.shape) + other * spread(other_fade, acc.shape)
        m, norm = top, norm * fade + other_norm * other_fade
    return acc, m, norm


def _logits(cfg: Config, refs: Refs, slot: Any) -> Any:
    """Keys by queries: f32[block, Gp]."""
    shape, keys, queries = (cfg.block, cfg.queries), refs.kv_s.at[slot], refs.q_s.transpose((1, 0))
    if not cfg.packed:
        return _product(shape, keys, queries)
    if cfg.interpreted:
        return _product(shape, _as_floats(cfg, refs, slot), queries)
    return _product_unpacked(cfg, shape, byte_ops.unpack_keys, keys, refs.q_s)


def _weighted_values(cfg: Config, refs: Refs, slot: Any) -> Any:
    """Values by weights: f32[D, Gp]."""
    shape, values, weights = (cfg.head_dim, cfg.queries), refs.kv_s.at[slot], refs.p_s.transpose((1, 0))
    if not cfg.packed:
        return _product(shape, values.transpose((1, 0)), weights)
    if cfg.interpreted:
        return _product(shape, _as_floats(cfg, refs, slot).transpose((1, 0)), weights)
    return _product_unpacked(cfg, shape, byte_ops.unpack_values, values, refs.p_s)


def _product(shape: tuple[int, int], a: Any, b: Any) -> Any:
    def run(ref: Any) -> Any:
        plgpu.wgmma(ref, a, b)
        return ref[...]

    return pl.run_scoped(run, plgpu.ACC(shape, f32))


def _product_unpacked(cfg: Config, shape: tuple[int, int], unpack: Any, tile: Any, right: Any) -> Any:
    """The product of what `unpack` makes of a tile, 64 columns at a time, and `right` [columns of the result, depth]."""

    def run(ref: Any) -> Any:
        for slab in range(right.shape[1] // byte_ops.SLAB):
            depth = pl.ds(slab * byte_ops.SLAB, byte_ops.SLAB)
            plgpu.wgmma(ref, unpack(tile, slab, cfg.paged), right.at[:, depth].transpose((1, 0)))
            plgpu.wgmma_wait(1)  # registers of one left operand, while the next is unpacked
        return ref[...]

    return pl.run_scoped(run, plgpu.ACC(shape, f32))


def _as_floats(cfg: Config, refs: Refs, slot: Any) -> Any:
    refs.spare_s[...] = cfg.paged.floats(refs.kv_s.at[slot]).astype(refs.spare_s.dtype)
    plgpu.commit_smem()
    return refs.spare_s


def _steps(cfg: Config, refs: Refs, slot: Any) -> Any:
    """What the bytes of each entry of a tile count in, f32[block]; None where there are none."""
    if not cfg.packed:
        return None
    return byte_ops.read_steps(refs.kv_s.at[slot], cfg.paged, interpreted=cfg.interpreted)
