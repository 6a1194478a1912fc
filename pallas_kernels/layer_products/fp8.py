"""A phase's product with FP8 weights: these are the left operand, made bfloat16 in registers, and the tokens the right one.

So sums have a column of the weights in each row. They are turned round as they are stored.
"""

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.beyond import first_rows
from pallas_kernels.fp8_products.device_ops import unpack
from pallas_kernels.fp8_products.packing import TILE
from pallas_kernels.gates import gated_sums
from pallas_kernels.layer_products import device_ops
from pallas_kernels.layer_products.phases import Config, Phase, Share
from pallas_kernels.layer_products.slots import Steps
from pallas_kernels.layer_products.tuning import COLUMNS
from pallas_kernels.layer_products.weights import scales_of
from pallas_kernels.left_operand import store_transposed
from pallas_kernels.stores import put

BY_ROW, BY_COLUMN = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)
f32 = jnp.float32


def product(
    cfg: Config, refs: dict[str, Any], phase: Phase, share: Share, wg: Any, read: Steps, out_s: Any, spare: Any = None,
    known: Any = None, factors_s: Any = None,
) -> None:  # fmt: skip
    """As `compute` has it of floats, a warpgroup's columns of a tile for all tokens."""
    rows, pieces = cfg.slot_rows, range(phase.pieces)
    spare = None if spare is None else spare.at[wg]

    def columns_of(tile: Any) -> Any:
        return pl.ds(pl.multiple_of(tile * COLUMNS + wg * TILE, TILE), TILE)

    def scales_of_columns(piece: int) -> jax.Array:
        source = refs[scales_of(phase.weights)].at[columns_of(phase.tile_of_weights(share.tile, piece))]
        return plgpu.load(source, layout=BY_ROW, optimized=False)

    # Before the products: what follows these is waited for.
    scales = [scales_of_columns(piece) for piece in pieces]

    def products(*accs: Any) -> tuple[jax.Array, ...]:
        def one(step: Any, nothing: Any) -> None:
            (given,) = read.wait_for_tokens(step)
            for piece, acc in enumerate(accs):
                held = read.wait_for_weights(step, piece)
                # An even number of left operands has registers of its own in each step.
                for deep in range(phase.step // TILE):
                    codes = held.at[wg, pl.ds(deep, 1)]
                    right = given.at[:, pl.ds(deep * TILE, TILE)].transpose((1, 0))
                    plgpu.wgmma(acc, unpack(codes, spare, narrow=False), right)
                    plgpu.wgmma_wait(1)  # registers of one left operand, while the next is unpacked
                    if piece + deep == 0:  # what the step before has issued is done
                        read.release(jnp.maximum(step - 1, 0), step > 0)

        lax.fori_loop(0, share.steps, one, None)
        plgpu.wgmma_wait(0)
        read.release(share.steps - 1)
        return tuple(acc[...] for acc in accs)

    sums = pl.run_scoped(products, *[plgpu.ACC((TILE, rows), f32)] * phase.pieces)
    results = [
        each * lax.broadcast_in_dim(factors, each.shape, [0])
        for each, factors in zip(sums, scales, strict=True)
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
    opened_s = out_s.at[pl.ds(0, rows)]
    store_transposed(opened, opened_s, interpreted=cfg.interpreted)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(opened_s, out.at[first_rows(rows, wg), columns_of(share.tile)])
    plgpu.wait_smem_to_gmem(0)
