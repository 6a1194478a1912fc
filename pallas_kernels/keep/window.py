"""Window attention sums for Hopper GPUs, in Pallas' Mosaic GPU: what the last queries of a chunk pay to each candidate.

A CTA takes a tile of candidates of one KV head, of the tail or of the chunk, each read where it lies (TMA), and all
queries of the window. Candidates are the rows of the matrix product, the queries of one query head its columns, so
that the sum over queries stays inside a warp.
"""

import functools
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref

from pallas_kernels.logits import LOG2E, log2_logits
from pallas_kernels.stores import put

TILE = 64  # candidates of one CTA
WGMMA = plgpu.Layout.WGMMA
BY_QUERY = plgpu.Layout.WGMMA.reduce(0)  # one value per column
i32, f32 = jnp.int32, jnp.float32


def window_sums_mosaic_gpu(
    q: jax.Array,
    keys: jax.Array,
    tail: jax.Array,
    lse: jax.Array,
    *,
    place: np.ndarray,
    layer: jax.Array,
    unlocked: jax.Array,
    count: jax.Array,
    window: int,
    scale: float,
    power: int,
    soft_cap: float | None = None,
    interpret: Any = None,
) -> jax.Array:
    """See `pallas_kernels.keep.window_sums`."""
    scalars = jnp.stack([jnp.asarray(layer, i32), jnp.asarray(count, i32)])
    return _call(
        scalars, unlocked.astype(i32), jnp.asarray(place, i32), q, keys, tail, lse,
        window=window, scale=float(scale), power=power,
        soft_cap=None if soft_cap is None else float(soft_cap), interpret=interpret,
    )  # fmt: skip


@functools.partial(jax.jit, static_argnames=("window", "scale", "power", "soft_cap", "interpret"))
def _call(scalars, unlocked, place, q, keys, tail, lse, *, window, scale, power, soft_cap, interpret):
    # One jitted function for all layers, nothing of a layer static: one kernel text, compiled once.
    chunk, kv_heads, head_dim = keys.shape
    capacity, group = tail.shape[3], q.shape[1] // kv_heads
    tail_tiles, chunk_tiles = (pl.cdiv(x, TILE) for x in (capacity, chunk))
    # A head's place and its first candidate that exists in one row: one read instead of a chain of two.
    heads = jnp.concatenate([place, capacity - unlocked[place[..., :1]]], axis=-1)  # [L, K, 3]

    def window_sums(*refs: Any) -> None:  # the name that profiles show
        tiled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))  # type: ignore[abstract]
        pl.run_scoped(
            functools.partial(
                _kernel, tail_tiles, window, scale, power, soft_cap, interpret is not None, *refs
            ),
            plgpu.SMEM((group, min(window + 8, chunk), head_dim), q.dtype, transforms=tiled),
            plgpu.SMEM((TILE, head_dim), q.dtype, transforms=tiled),
            plgpu.Barrier(num_arrivals=group + 1),
        )

    kernel = plgpu.kernel(
        window_sums,
        out_type=jax.ShapeDtypeStruct((kv_heads, (tail_tiles + chunk_tiles) * TILE), f32),
        grid=(tail_tiles + chunk_tiles, kv_heads),
        grid_names=("tile", "head"),
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=6144),
        **({} if interpret is None else {"interpret": interpret}),
    )
    sums = kernel(scalars, heads, q, keys, tail, lse)
    start = tail_tiles * TILE
    return jnp.concatenate([sums[:, :capacity], sums[:, start : start + chunk]], axis=1)


def _kernel(
    tail_tiles: int, window: int, scale: float, power: int, soft_cap: float | None, interpreted: bool,
    scalars: Any, heads: Any, q: Any, keys: Any, tail: Any, lse: Any, out: Any, q_s: Any, k_s: Any, loaded: Any,
) -> None:  # fmt: skip
    (group, rows, _), capacity = q_s.shape, tail.shape[3]
    tile, head = lax.axis_index("tile"), lax.axis_index("head")
    in_tail = tile < tail_tiles
    begin = pl.multiple_of(jnp.where(in_tail, tile, tile - tail_tiles) * TILE, TILE)

    @pl.when(jnp.logical_not(in_tail))
    def _load_chunk() -> None:  # first, because it waits for no other read
        # Of a chunk shorter than a tile: the other rows hold anything, and so do their sums, until they are masked.
        held = min(TILE, keys.shape[0])
        rows_s = k_s if held == TILE else k_s.at[pl.ds(0, held)]
        plgpu.copy_gmem_to_smem(keys.at[pl.ds(begin, held), head], rows_s, loaded)

    layer, count = scalars[0], scalars[1]
    cache_group, column, least = (heads[layer, head, n] for n in range(3))
    first = jnp.maximum(count - window, 0)  # first query of the window
    # Loads of tiles begin at multiples of 8, so up to 7 queries before the window are loaded too.
    aligned = pl.multiple_of(jnp.minimum(lax.div(first, i32(8)) * 8, q.shape[0] - rows), 8)

    @pl.when(jnp.logical_not(in_tail) | (begin + TILE > least))
    def _score() -> None:
        for g in range(group):
            queries = q.at[pl.ds(aligned, rows), head * group + g]
            plgpu.copy_gmem_to_smem(queries, q_s.at[g], loaded)

        @pl.when(in_tail)
        def _load_tail() -> None:
            plgpu.copy_gmem_to_smem(tail.at[0, cache_group, column, pl.ds(begin, TILE)], k_s, loaded)

        shape = (TILE, rows)
        candidate = begin + plgpu.broadcasted_iota(i32, shape, 0, layout=WGMMA)
        query = aligned + plgpu.broadcasted_iota(i32, shape, 1, layout=WGMMA)
        # A candidate of the chunk is seen by itself and later queries, one of the tail by all; and queries must exist.
        lowest, ahead = jnp.where(in_tail, least, 0), jnp.where(in_tail, capacity, 0)
        seen = (candidate >= lowest) & (candidate - ahead <= query) & (query >= first) & (query < count)
        total = plgpu.layout_cast(jnp.zeros(shape, f32), WGMMA)
        offsets = [_load_strided(lse, aligned, head * group + g, rows, interpreted) for g in range(group)]
        plgpu.barrier_wait(loaded)
        for g, offset in enumerate(offsets):
            s = _product(shape, k_s, q_s.at[g].transpose((1, 0)))
            s = log2_logits(s, scale, soft_cap) - lax.broadcast_in_dim(offset * LOG2E, shape, [1])
            p = jnp.where(seen, jnp.exp2(s), 0.0)
            total = total + (p if power == 1 else p * p)
        put(out.at[head, pl.ds(tile * TILE, TILE)], total.sum(axis=1))


def _product(shape: tuple[int, int], a: Any, b: Any) -> Any:
    def run(ref: Any) -> Any:
        plgpu.wgmma(ref, a, b)
        return ref[...]

    return pl.run_scoped(run, plgpu.ACC(shape, f32))


def _load_strided(ref: Any, start: Any, column: Any, rows: int, interpreted: bool) -> jax.Array:
    """[rows] of one column of ref [T, N], one value per query. Pallas loads what lies together; this does not."""
    if interpreted:
        return plgpu.layout_cast(ref.at[pl.ds(start, rows), column][...], BY_QUERY)
    result = plgpu.ShapeDtypeStruct((rows,), f32, layout=BY_QUERY)
    scalar = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), scalar, scalar), return_type=result)
    def run(_: Any, ref: Any, start: Any, column: Any) -> Any:
        index = ir.IndexType.get()
        start, column = (arith.index_cast(index, x.registers.item()) for x in (start, column))
        zero = mgpu.FragmentedArray.splat(
            mgpu_utils.c(0.0, ir.F32Type.get()), (rows,), layout=mgpu.WGMMA_LAYOUT.reduce((0,))
        )

        def load(_: Any, position: Any) -> Any:
            return memref.load(ref, [arith.addi(start, position[0]), column])

        return zero.foreach(load, create_array=True)

    return run(ref, start, column)
