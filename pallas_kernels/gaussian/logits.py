"""Logits of a chunk's candidates under a Gaussian model of queries for Hopper GPUs, in Pallas' Mosaic GPU.

A CTA has one query head's matrix in shared memory and goes through a share of the candidates of its KV head tile by tile,
of the tail and of the chunk, each read where it lies (TMA). The query heads of a KV head share the candidates' values: each
takes the norms of its part of the tiles, after its logits and through the same slots.
"""

import functools
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.stores import put
from pallas_kernels.support import num_sms

TILE = 64  # candidates
SLOT_BYTES = 64 * 1024  # of tiles under way: with a matrix of dimension 128, two CTAs fit on an SM
WGMMA = plgpu.Layout.WGMMA
BY_COLUMN = plgpu.Layout.WGMMA.reduce(0)
i32, f32 = jnp.int32, jnp.float32


def candidate_logits_mosaic_gpu(
    linear: jax.Array,
    quadratic: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    tail: jax.Array,
    *,
    place: np.ndarray,
    layer: jax.Array,
    unlocked: jax.Array,
    ctas: int | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """See `reference.candidate_logits_reference`."""
    # A matrix of dimension 256 takes half the shared memory of an SM.
    ctas = ctas or num_sms() * (2 if keys.shape[2] <= 128 else 1)
    return _call(
        jnp.asarray(layer, i32), unlocked.astype(i32), jnp.asarray(place, i32),
        linear, quadratic, keys, values, tail, ctas=ctas, interpret=interpret,
    )  # fmt: skip


@functools.partial(jax.jit, static_argnames=("ctas", "interpret"))
def _call(layer, unlocked, place, linear, quadratic, keys, values, tail, *, ctas, interpret):
    # One jitted function for all layers, nothing of a layer static: one kernel text, compiled once.
    (chunk, kv_heads, head_dim), heads, capacity = keys.shape, linear.shape[0], tail.shape[3]
    tail_tiles, chunk_tiles = (pl.cdiv(x, TILE) for x in (capacity, chunk))
    tiles = tail_tiles + chunk_tiles
    splits = max(1, min(tiles, ctas // heads))
    slots = min(SLOT_BYTES // (2 * TILE * head_dim), pl.cdiv(tiles, splits) + 1)
    # A head's place and its first tile with a candidate that exists in one row: one read instead of a chain of two.
    first = lax.div(capacity - unlocked[place[..., :1]], i32(TILE))
    heads_at = jnp.concatenate([place, first], axis=-1)  # [L, K, 3]

    def candidate_logits(*refs: Any) -> None:  # the name that profiles show
        tiled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))  # type: ignore[abstract]
        pl.run_scoped(
            functools.partial(_kernel, tail_tiles, splits, *refs),
            plgpu.SMEM((head_dim, head_dim), keys.dtype, transforms=tiled),
            plgpu.SMEM((slots, TILE, head_dim), keys.dtype, transforms=tiled),
            plgpu.Barrier(num_arrivals=1),
            plgpu.Barrier(num_arrivals=1, num_barriers=slots),
        )

    kernel = plgpu.kernel(
        candidate_logits,
        out_type=tuple(jax.ShapeDtypeStruct((n, tiles * TILE), f32) for n in (heads, kv_heads)),
        grid=(splits, heads),
        grid_names=("split", "head"),
        **({} if interpret is None else {"interpret": interpret}),
    )
    out = kernel(layer[None], heads_at, linear, quadratic, keys, values, tail)
    return tuple(_without_gaps(x, capacity, chunk) for x in out)


def _without_gaps(x: jax.Array, capacity: int, chunk: int) -> jax.Array:
    start = pl.cdiv(capacity, TILE) * TILE
    if start == capacity:
        return x[:, : capacity + chunk]
    return jnp.concatenate([x[:, :capacity], x[:, start : start + chunk]], axis=1)


def _kernel(
    tail_tiles: int, splits: int,
    layer: Any, heads_at: Any, linear: Any, quadratic: Any, keys: Any, values: Any, tail: Any,
    logits: Any, norms: Any,
    matrix_s: Any, slots_s: Any, matrix_loaded: Any, loaded: Any,
) -> None:  # fmt: skip
    slots, _, head_dim = slots_s.shape
    group = linear.shape[0] // keys.shape[1]
    split, head = lax.axis_index("split"), lax.axis_index("head")
    kv_head, turn = lax.div(head, i32(group)), lax.rem(head, i32(group))
    plgpu.copy_gmem_to_smem(quadratic.at[head], matrix_s, matrix_loaded)
    cache_group, column, begin = (heads_at[layer[0], kv_head, n] for n in range(3))
    there = logits.shape[1] // TILE - begin
    start, end = (begin + lax.div((split + n) * there, i32(splits)) for n in range(2))
    mine = end - start
    # Norms: of every group-th tile, the first at or after `start` whose remainder is this head's.
    first_value = start + lax.rem(turn - lax.rem(start, i32(group)) + group, i32(group))
    items = mine + lax.div(jnp.maximum(end - first_value, 0) + (group - 1), i32(group))

    def tile_of(n: Any) -> Any:
        return jnp.where(n < mine, start + n, first_value + (n - mine) * group)

    def load(n: Any) -> None:
        slot, tile = lax.rem(n, i32(slots)), tile_of(n)
        held = min(TILE, keys.shape[0])  # of a chunk shorter than a tile; the other rows hold anything
        for which, chunk in enumerate((keys, values)):
            of_kind = (n >= mine) == bool(which)

            @pl.when(of_kind & (tile < tail_tiles))
            def _tail(which: int = which) -> None:
                row = pl.multiple_of(tile * TILE, TILE)
                source = tail.at[which, cache_group, column, pl.ds(row, TILE)]
                plgpu.copy_gmem_to_smem(source, slots_s.at[slot], loaded.at[slot])

            @pl.when(of_kind & (tile >= tail_tiles))
            def _chunk(chunk: Any = chunk) -> None:
                row = pl.multiple_of((tile - tail_tiles) * TILE, TILE)
                target = slots_s.at[slot] if held == TILE else slots_s.at[slot, pl.ds(0, held)]
                plgpu.copy_gmem_to_smem(chunk.at[pl.ds(row, held), kv_head], target, loaded.at[slot])

    for n in range(slots):
        pl.when(n < items)(functools.partial(load, i32(n)))
    step = head_dim if head_dim <= 128 else 64  # columns of a product: what registers hold beside slopes
    parts = [pl.ds(at, step) for at in range(0, head_dim, step)]
    slopes = [plgpu.load(linear.at[head, part], layout=BY_COLUMN, optimized=False) for part in parts]
    plgpu.barrier_wait(matrix_loaded)

    def one(n: Any, result: Any, row: Any, compute: Any) -> None:
        slot = lax.rem(n, i32(slots))
        plgpu.barrier_wait(loaded.at[slot])
        value = compute(slots_s.at[slot])
        plgpu.commit_smem()  # all have read it
        pl.when(n + slots < items)(functools.partial(load, n + slots))
        put(result.at[row, pl.ds(tile_of(n) * TILE, TILE)], value)

    def one_logit(n: Any, _: Any) -> None:
        def compute(keys: Any) -> Any:
            sums = (_logits(keys, matrix_s, *given) for given in zip(slopes, parts, strict=True))
            return functools.reduce(jnp.add, sums)

        one(n, logits, head, compute)

    def one_norm(n: Any, _: Any) -> None:
        one(n, norms, kv_head, _square_norms)

    lax.fori_loop(0, mine, one_logit, None)
    lax.fori_loop(mine, items, one_norm, None)


def _logits(keys: Any, matrix: Any, slope: jax.Array, part: Any) -> jax.Array:
    """What some columns of the matrix add to the logits, f32[TILE], of keys [TILE, D] in shared memory."""
    shape = (TILE, part.size)

    def product(acc: Any) -> Any:
        plgpu.wgmma(acc, keys, matrix.at[:, part])
        return acc[...]

    acc = pl.run_scoped(product, plgpu.ACC(shape, f32)) + lax.broadcast_in_dim(slope, shape, [1])
    return (acc * plgpu.load(keys.at[:, part], layout=WGMMA).astype(f32)).sum(axis=1)


def _square_norms(values: Any) -> jax.Array:
    """f32[TILE] of values [TILE, D] in shared memory."""

    def part(at: int) -> jax.Array:
        x = plgpu.load(values.at[:, pl.ds(at, 64)], layout=WGMMA).astype(f32)
        return (x * x).sum(axis=1)

    return functools.reduce(jnp.add, (part(at) for at in range(0, values.shape[1], 64)))
