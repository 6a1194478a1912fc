"""The loading warpgroups: one runs ahead with the weights, which depend on nothing, one waits for what the tokens become.

One warp of each does the loads, each with a scheduler of its own: what others would do as well takes turns of those that
compute.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.beyond import first_rows
from pallas_kernels.fp8_products.packing import TILE
from pallas_kernels.layer_products import by_tile, device_ops
from pallas_kernels.layer_products.phases import HALVES, Config, Phase, Share, i32
from pallas_kernels.read_once import load_once

FOR_WEIGHTS, FOR_TOKENS = 0, 1  # warps of their warpgroups


def _by_warp(number: int, work: Callable[[], None], *, interpreted: bool) -> None:
    """By one warp of a warpgroup, for which neither `pl.multiple_of` nor `~` is lowered. The interpreter has no warps."""
    if interpreted:
        work()
    else:
        plgpu.warp_map(lambda warp: pl.when(warp == number)(work))


def load_weights(
    cfg: Config, refs: dict[str, Any], cta: Any, held: Any, full: Any, free: Any, first_use: Any = None
) -> None:  # fmt: skip
    """Into slots held[columns] [slots, STEP, COLUMNS], or narrower and deeper, or codes i32[slots, HALVES, 2, 32, 32].

    Few at a time, whatever others do. `first_use`: waits until what a slot held before is read.
    """
    load = functools.partial(_load_weights, cfg, refs, cta, held, full, free, first_use)
    if any(phase.chooses for phase in cfg.phases):  # for which a warpgroup waits
        load()
    else:
        _by_warp(FOR_WEIGHTS, load, interpreted=cfg.interpreted)


def _load_weights(
    cfg: Config, refs: dict[str, Any], cta: Any, held: Any, full: Any, free: Any, first_use: Any
) -> None:  # fmt: skip
    slots = i32(cfg.tuning.weight_slots)
    turn: Any = i32(0)  # of loads
    seen: Any = i32(0)  # of those that have landed

    def land(count: Any, seen: Any) -> Any:
        def one(_: Any, seen: Any) -> Any:
            plgpu.barrier_wait(full.at[lax.rem(seen, slots)])
            return seen + 1

        return lax.fori_loop(0, jnp.maximum(count, 0), one, seen)

    shares = Share.all_of(cfg, refs, cta)
    for before, phase, share in zip((None, *cfg.phases), cfg.phases, shares, strict=False):
        routed = before is not None and bool(before.chooses)
        if before is not None and routed:  # CTAs without gates need to know for later
            device_ops.wait(refs["counters"].at[before.added], 1, cfg.waiting_for_choice(before))

        def one(n: Any, carry: Any, phase: Phase = phase, share: Share = share, routed: bool = routed) -> Any:
            turn, seen = carry
            step, piece = lax.div(n, i32(phase.pieces)), lax.rem(n, i32(phase.pieces))
            slot = lax.rem(turn, slots)
            if first_use:
                pl.when(turn < slots)(functools.partial(first_use, slot))
            pl.when(turn >= slots)(lambda: plgpu.barrier_wait(free.at[slot]))
            most: Any = i32(cfg.tuning.ahead)
            if (phase.number or cfg.attends) and not routed:
                most = jnp.where(n < slots, cfg.tuning.early, most)
            seen = land(turn - seen - most + 1, seen)
            tile, deep = phase.tile_of_weights(share.tile, piece), share.first + step
            if cfg.tuning.fp8:
                deep = pl.ds(deep * (phase.step // TILE), phase.step // TILE)
                source = refs[phase.weights].at[pl.ds(tile * HALVES, HALVES), deep]
            else:
                source = refs[phase.weights]
                if phase.experts:
                    nth, tile, deep = phase.place(share.tile, deep)
                    source = source.at[refs["chosen"][nth]]
                    tile += piece * (phase.tiles // phase.experts)
                source = source.at[pl.ds(deep * phase.step, phase.step), pl.ds(tile * phase.wide, phase.wide)]
            load_once(source, held[phase.wide].at[slot], full.at[slot])
            return turn + 1, seen

        turn, seen = lax.fori_loop(0, share.steps * phase.pieces, one, (turn, seen))
    land(turn - seen, seen)  # a warpgroup ends with none under way


def load_tokens(
    cfg: Config, refs: dict[str, Any], cta: Any, held: Any, full: Any, free: Any, known: Any = None, factors_s: Any = None
) -> None:  # fmt: skip
    """Into slots held [slots * rows and more, step], once the CTAs that make them have arrived.

    Then the factors of their norms to `factors_s` f32[128], of which `known` tells, if these come behind the product.
    """
    slots = i32(cfg.tuning.token_slots)
    turn: Any = i32(0)
    shares = Share.all_of(cfg, refs, cta)
    for phase, share in zip(cfg.phases, shares, strict=True):
        for place, total, waiting in cfg.awaited(phase) if not cfg.interpreted else []:
            arrived = functools.partial(device_ops.wait, refs["counters"].at[place], total, waiting)
            pl.when(share.active)(arrived)

        def one(
            step: Any, nothing: Any, phase: Phase = phase, share: Share = share, before: Any = turn
        ) -> None:
            turn = before + step
            slot = lax.rem(turn, slots)
            pl.when(turn >= slots)(lambda: plgpu.barrier_wait(free.at[slot]))
            each = phase.step // phase.token_loads
            deep = pl.ds(share.first * phase.step + step * each, each)
            source = refs[phase.source].at[first_rows(cfg.slot_rows, turn), deep]
            rows = pl.ds(slot * cfg.slot_rows, cfg.slot_rows)
            plgpu.copy_gmem_to_smem(source, held.at[rows], full.at[slot])

        count = share.steps * phase.token_loads
        load = functools.partial(lax.fori_loop, 0, count, one, None)
        _by_warp(FOR_TOKENS, load, interpreted=cfg.interpreted)
        turn += count
        if phase.scaled:

            @pl.when(share.active)
            def _(phase: Phase = phase) -> None:
                by_tile.factors(cfg, refs, phase, factors_s)
                plgpu.barrier_arrive(known.at[phase.number])

        if phase.forgets and not cfg.interpreted:
            number = share.split * phase.tiles + share.tile
            pl.when(share.active & (number < cfg.tokens))(
                functools.partial(device_ops.forget, refs[phase.forgets].at[number])
            )
