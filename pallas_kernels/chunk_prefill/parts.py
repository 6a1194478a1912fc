"""Pieces of a tile's history that other CTAs work on: how a piece's result is handed over and taken in."""

from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.chunk_prefill.common import Config, Refs, Tile, i32
from pallas_kernels.ragged_decode import device_ops

WGMMA = plgpu.Layout.WGMMA
BY_ROW = WGMMA.reduce(1)


def _counter(cfg: Config, refs: Refs, wg: Any, tile: Tile) -> Any:
    return refs.sync.at[refs.layer, tile.head * cfg.stride + lax.rem(tile.part, i32(cfg.stride)), wg]


def leave(cfg: Config, refs: Refs, wg: Any, tile: Tile, acc: Any, m: Any, norm: Any) -> None:
    """Leaves a piece's sums in global memory and counts it."""
    refs.part.at[tile.part, wg][...] = acc
    refs.part_ml.at[tile.part, wg, 0][...] = m
    refs.part_ml.at[tile.part, wg, 1][...] = norm
    if not cfg.interpreted:  # there one CTA does everything, in order
        device_ops.signal(_counter(cfg, refs, wg, tile))


def gather(cfg: Config, refs: Refs, wg: Any, tile: Tile, acc: Any, m: Any, norm: Any) -> tuple[Any, Any, Any]:
    """A tile's own sums with those of its pieces, in a fixed order. The counter is zero again afterwards."""
    if not cfg.interpreted:

        @pl.when(tile.pieces > 0)
        def _() -> None:
            device_ops.wait_and_clear(_counter(cfg, refs, wg, tile), tile.pieces)

    def one(i: Any, carry: Any) -> Any:
        acc, m, norm = carry
        at = tile.part + i * cfg.stride
        part_m = plgpu.load(refs.part_ml.at[at, wg, 0], layout=BY_ROW, optimized=False)
        part_norm = plgpu.load(refs.part_ml.at[at, wg, 1], layout=BY_ROW, optimized=False)
        part = plgpu.load(refs.part.at[at, wg], layout=WGMMA, optimized=False)
        top = jnp.maximum(m, part_m)
        fade, weight = jnp.exp2(m - top), jnp.exp2(part_m - top)
        spread = (lax.broadcast_in_dim(x, acc.shape, [0]) for x in (fade, weight))
        acc = acc * next(spread) + part * next(spread)
        return acc, top, norm * fade + part_norm * weight

    return lax.fori_loop(0, tile.pieces, one, (acc, m, norm))
