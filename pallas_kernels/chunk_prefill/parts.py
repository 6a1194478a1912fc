"""Tiles whose history is cut into pieces that other CTAs work on: how their results are handed over and put together.

Every piece, and the tile that it was cut from, leaves its sums in global memory and counts itself. When a CTA has no tile
left it takes its share of the putting together: some columns of a cut tile's output at a time, out of all of its results.
"""

from collections.abc import Callable
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.chunk_prefill import columns as C
from pallas_kernels.chunk_prefill.common import Config, Refs, Tile, f32, i32
from pallas_kernels.chunk_prefill.tuning import ROWS
from pallas_kernels.pieces import LOW, Sums, fold
from pallas_kernels.ragged_decode import device_ops
from pallas_kernels.stores import put

WGMMA = plgpu.Layout.WGMMA
BY_ROW = WGMMA.reduce(1)


def leave(cfg: Config, refs: Refs, wg: Any, tile: Tile, acc: Any, m: Any, norm: Any) -> None:
    """Leaves the sums of a piece or of a cut tile in global memory and counts them."""
    put(refs.part.at[tile.part, wg], acc)
    put(refs.part_ml.at[tile.part, wg, 0], m)
    put(refs.part_ml.at[tile.part, wg, 1], norm)
    if not cfg.interpreted:  # there one CTA does everything, in order
        device_ops.signal(refs.sync.at[refs.layer, tile.number, wg])


def merge(cfg: Config, refs: Refs, wg: Any, write: Callable) -> None:
    """This CTA's share of putting cut tiles together; each warpgroup its own rows."""
    cta, width = lax.axis_index("cta"), cfg.merge_columns
    tiles = refs.merges[refs.layer, 0, 0]
    slices = cfg.head_dim // width
    jobs = tiles * slices

    def one(n: Any, _: Any) -> Any:
        job = cta + n * cfg.num_ctas
        # All first columns, then all second ones ... The last ones of a tile clear its counters.
        column, at = lax.div(job, tiles), 1 + lax.rem(job, tiles)
        row, end, head, number, first, step, pieces = (
            refs.merges[refs.layer, at, c] for c in range(C.MERGE_COLUMNS)
        )
        come = refs.sync.at[refs.layer, number, wg]
        seen = refs.sync.at[refs.layer, number, cfg.tuning.warpgroups + wg]
        if not cfg.interpreted:
            device_ops.wait(come, pieces + 1)
            pl.when(column < slices - 1)(lambda: device_ops.signal(seen))

        part = column == 0, pl.multiple_of(column * width, width)
        results = cfg.pieces + number, first, step
        write((row, end, head), *_sums(cfg, refs, wg, results, pieces + 1, column), part=part)
        if not cfg.interpreted:

            @pl.when(column == slices - 1)
            def _() -> None:
                if slices > 1:
                    device_ops.wait(seen, i32(slices - 1), clear=True)
                device_ops.wait(come, pieces + 1, clear=True)

        return ()

    lax.fori_loop(0, lax.div(jnp.maximum(jobs - cta, 0) + (cfg.num_ctas - 1), i32(cfg.num_ctas)), one, ())


def _sums(cfg: Config, refs: Refs, wg: Any, results: tuple[Any, Any, Any], count: Any, column: Any) -> Sums:
    """Some columns of a tile's sums, with those of its pieces, in a fixed order; several are read at a time.

    `results`: PART of the tile and of its first piece, and how far the others' are apart.
    """
    own, first, step = results
    shape, unroll = (ROWS, cfg.merge_columns), max(cfg.tuning.merge_elements // cfg.merge_columns, 1)
    columns = pl.ds(pl.multiple_of(column * shape[1], shape[1]), shape[1])

    def spread(x: Any) -> Any:
        return lax.broadcast_in_dim(x, shape, [0])

    def read(k: Any) -> Any:
        at = jnp.where(k == 0, own, first + (k - 1) * step)
        part = plgpu.load(refs.part.at[at, wg, :, columns], layout=WGMMA, optimized=False)
        part_m = plgpu.load(refs.part_ml.at[at, wg, 0], layout=BY_ROW, optimized=False)
        part_norm = plgpu.load(refs.part_ml.at[at, wg, 1], layout=BY_ROW, optimized=False)
        return part, part_m, part_norm

    nothing = (
        plgpu.layout_cast(jnp.zeros(shape, f32), WGMMA),
        plgpu.layout_cast(jnp.full((ROWS,), LOW, f32), BY_ROW),
        plgpu.layout_cast(jnp.zeros((ROWS,), f32), BY_ROW),
    )
    return fold(nothing, count, read, spread, unroll)
