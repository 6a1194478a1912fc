"""A phase's product with FP8 weights: these are the left operand, made bfloat16 in registers, and the tokens the right one.

So sums have a column of the weights in each row. They are turned round as they are stored.

A warpgroup that reads codes, makes numbers of them and multiplies waits most of the time, so two take turns at the slots of
weights, each with all columns of a tile: one has the gates and the other the values, or each has every other step of the
depth. Side by side in the same slot they would wait for the same things at the same time. In the end they exchange half of
their sums.
"""

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.beyond import first_rows
from pallas_kernels.fp8_products.device_ops import in_full, unpack
from pallas_kernels.fp8_products.packing import TILE
from pallas_kernels.gates import gated_sums
from pallas_kernels.layer_products import device_ops
from pallas_kernels.layer_products.device_ops import load_registers, store_registers
from pallas_kernels.layer_products.phases import HALVES, Config, Phase, Share, i32
from pallas_kernels.layer_products.slots import Steps
from pallas_kernels.layer_products.tuning import COLUMNS
from pallas_kernels.layer_products.weights import scales_of
from pallas_kernels.left_operand import add_product, no_sums, right_operand, store_transposed
from pallas_kernels.stores import put

BY_ROW, BY_COLUMN = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)
f32 = jnp.float32


def product(
    cfg: Config, refs: dict[str, Any], phase: Phase, share: Share, wg: Any, read: Steps, out_s: Any, exchanged: Any,
    spare: Any = None, known: Any = None, factors_s: Any = None,
) -> None:  # fmt: skip
    """As `compute` has it of floats; in the end half of a tile's columns for all tokens are a warpgroup's.

    `exchanged`: see `mosaic_gpu.barriers`.
    """
    rows, pieces = cfg.slot_rows, range(phase.pieces)

    def columns_of(tile: Any) -> Any:
        return pl.ds(pl.multiple_of(tile * COLUMNS + wg * TILE, TILE), TILE)

    def scales_of_columns(piece: int) -> jax.Array:
        source = refs[scales_of(phase.weights)].at[columns_of(phase.tile_of_weights(share.tile, piece))]
        return plgpu.load(source, layout=BY_ROW, optimized=False)

    # Before the products: what follows these is waited for.
    scales = [scales_of_columns(piece) for piece in pieces]
    # The piece, or the first step, whose slot is this warpgroup's.
    first = lax.rem(wg + read.turn, i32(HALVES))
    sums = _sums(cfg, phase, share, first, read, None if spare is None else spare.at[wg])
    own, other = _exchange(cfg, sums, wg, exchanged, waits=bool(phase.opens))
    totals = [own + other]
    if phase.gate:
        totals = [_either(first == piece, own, other) for piece in pieces]
    results = [
        in_full(each, interpreted=cfg.interpreted) * lax.broadcast_in_dim(factors, each.shape, [0])
        for each, factors in zip(totals, scales, strict=True)
    ]
    if known is not None:
        plgpu.barrier_wait(known)
        factors = plgpu.load(factors_s.at[pl.ds(0, rows)], layout=BY_COLUMN, optimized=False)
        results = [each * lax.broadcast_in_dim(factors, each.shape, [1]) for each in results]
    out = refs[phase.out]
    if phase.gate is None:
        place = out.at[share.split, pl.ds(0, rows), columns_of(share.tile)]
        if cfg.interpreted:
            put(place, results[0].T)
        else:
            device_ops.store_columns(results[0], place, cfg.tokens)
        return
    gates, values = results
    opened = gated_sums(gates, values, phase.gate, out_s.dtype).astype(out_s.dtype)
    store_transposed(opened, out_s, interpreted=cfg.interpreted)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(out_s, out.at[first_rows(rows, wg), columns_of(share.tile)])
    plgpu.wait_smem_to_gmem(0)


def _sums(cfg: Config, phase: Phase, share: Share, first: Any, read: Steps, spare: Any) -> list[jax.Array]:
    """f32[64, rows] of each half of a tile's columns, from the slots of weights that are a warpgroup's."""
    rows, every = cfg.slot_rows, 1 if phase.gate else HALVES
    piece, begin = (first, i32(0)) if phase.gate else (0, first)
    count = lax.div(share.steps - begin + (every - 1), i32(every))

    def leave(step: Any) -> None:  # the tokens of a step that is the other warpgroup's
        read.wait_for_tokens(step)
        read.release_tokens(step)

    def tiles(i: Any) -> Any:
        """The next step, and of its tiles (tokens, half of the columns, codes)."""
        step = begin + every * i
        if every > 1:
            pl.when(step > 0)(lambda: leave(step - 1))
        (given,) = read.wait_for_tokens(step)
        held = read.wait_for_weights(step, piece)
        deeps = range(phase.step // TILE)
        of_tokens = [given.at[:, pl.ds(deep * TILE, TILE)] for deep in deeps]
        codes = [[held.at[half, pl.ds(deep, 1)] for half in range(HALVES)] for deep in deeps]
        return step, of_tokens, codes

    def release(step: Any) -> None:
        read.release_weights(step, piece)
        read.release_tokens(step)

    def by_warpgroup(*accs: Any) -> list[jax.Array]:
        def one(i: Any, nothing: Any) -> None:
            step, of_tokens, codes = tiles(i)
            for tokens, of_halves in zip(of_tokens, codes, strict=True):
                for acc, each in zip(accs, of_halves, strict=True):  # each with registers of its own
                    plgpu.wgmma(acc, unpack(each, spare, narrow=False), tokens.transpose((1, 0)))
            plgpu.wgmma_wait(0)
            release(step)

        lax.fori_loop(0, count, one, None)
        return [acc[...] for acc in accs]

    def added(sums: jax.Array, codes: Any, right: jax.Array) -> jax.Array:
        left = unpack(codes, spare, narrow=False, by_warp=True)
        return add_product(sums, left, right, interpreted=cfg.interpreted)

    def by_warp() -> list[jax.Array]:
        def one(i: Any, sums: list[Any]) -> list[Any]:
            step, of_tokens, codes = tiles(i)
            for tokens, of_halves in zip(of_tokens, codes, strict=True):
                right = right_operand(tokens, interpreted=cfg.interpreted)
                sums = [added(before, each, right) for before, each in zip(sums, of_halves, strict=True)]
            release(step)
            return sums

        return lax.fori_loop(0, count, one, [no_sums((TILE, rows), interpreted=cfg.interpreted)] * HALVES)

    accs = [plgpu.ACC((TILE, rows), f32)] * HALVES
    sums = by_warp() if cfg.tuning.by_warp else pl.run_scoped(by_warpgroup, *accs)
    if every > 1:
        pl.when(lax.rem(share.steps - 1 - begin, i32(every)) != 0)(lambda: leave(share.steps - 1))
    return sums


def _exchange(
    cfg: Config, sums: list[jax.Array], wg: Any, exchanged: tuple[Any, Any], waits: bool
) -> tuple[jax.Array, jax.Array]:
    """A warpgroup's own half of its sums, and the other one's of the same columns, through shared memory of each's.

    The next exchange must be far enough: behind a barrier over the grid, whose tokens all threads wait for, or this one
    `waits` until both have read. That is another barrier, as a warp ahead must not stand for one that has given nothing yet.
    """
    (given, sums_s), other = exchanged, HALVES - 1 - wg
    store_registers(_either(wg == 0, sums[1], sums[0]), sums_s.at[other], interpreted=cfg.interpreted)
    plgpu.barrier_arrive(given.at[other])
    plgpu.barrier_wait(given.at[wg])
    there = load_registers(sums_s.at[wg], interpreted=cfg.interpreted)
    if waits:
        plgpu.barrier_arrive(given.at[HALVES + other])
        plgpu.barrier_wait(given.at[HALVES + wg])
    return _either(wg == 0, sums[0], sums[1]), there


def _either(first: Any, one: jax.Array, other: jax.Array) -> jax.Array:
    return lax.cond(first, lambda: one, lambda: other)
