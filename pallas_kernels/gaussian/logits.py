"""Logits of a chunk's candidates under a Gaussian model of queries for Hopper GPUs, in Pallas' Mosaic GPU.

A CTA has the matrix of one query head of one chunk in shared memory and goes through a share of the candidates of its KV
head tile by tile, of the tail and of the chunk, each read where it lies (TMA). The query heads of a KV head share the
candidates' values: each takes the norms of its part of the tiles, after its logits and through the same slots.
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
    starts: jax.Array | np.ndarray,
    sizes: jax.Array | np.ndarray,
    most: int,
    ctas: int | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Of each chunk, at most `most` tokens, what `reference.candidate_logits_reference` gives of one."""
    # A matrix of dimension 256 takes half the shared memory of an SM.
    ctas = ctas or num_sms() * (2 if keys.shape[2] <= 128 else 1)
    return _call(
        *(jnp.asarray(x, i32) for x in (layer, unlocked, place, starts, sizes)),
        linear, quadratic, keys, values, tail, most=most, ctas=ctas, interpret=interpret,
    )  # fmt: skip


@functools.partial(jax.jit, static_argnames=("most", "ctas", "interpret"))
def _call(
    layer, unlocked, place, starts, sizes, linear, quadratic, keys, values, tail, *, most, ctas, interpret
):
    # One jitted function for all layers, nothing of a layer static: one kernel text, compiled once.
    (_, kv_heads, head_dim), (chunks, heads, _), capacity = keys.shape, linear.shape, tail.shape[4]
    tail_tiles, chunk_tiles = (pl.cdiv(x, TILE) for x in (capacity, most))
    tiles = tail_tiles + chunk_tiles
    splits = max(1, min(tiles, ctas // (chunks * heads)))
    slots = min(SLOT_BYTES // (2 * TILE * head_dim), pl.cdiv(tiles, splits) + 1)
    # Of each chunk and head the place, the first tile with a candidate that exists, and of the chunk where it begins and its
    # tiles, in one row: one read instead of a chain of two.
    first = lax.div(capacity - unlocked[:, place[..., 0]], i32(TILE))  # [S, L, K]
    values_of = [*jnp.moveaxis(place, -1, 0), first, *(x[:, None, None] for x in (starts, -(-sizes // TILE)))]
    heads_at = jnp.stack([jnp.broadcast_to(x, first.shape) for x in values_of], axis=-1)

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
        out_type=tuple(jax.ShapeDtypeStruct((chunks * n, tiles * TILE), f32) for n in (heads, kv_heads)),
        grid=(splits, chunks * heads),
        grid_names=("split", "head"),
        **({} if interpret is None else {"interpret": interpret}),
    )
    linear, quadratic, tail = (x.reshape(-1, *x.shape[2:]) for x in (linear, quadratic, tail))
    out = kernel(layer[None], heads_at, linear, quadratic, keys, values, tail)
    return tuple(_without_gaps(x.reshape(chunks, -1, x.shape[-1]), capacity, most) for x in out)


def _without_gaps(x: jax.Array, capacity: int, chunk: int) -> jax.Array:
    start = pl.cdiv(capacity, TILE) * TILE
    if start == capacity:
        return x[..., : capacity + chunk]
    return jnp.concatenate([x[..., :capacity], x[..., start : start + chunk]], axis=-1)


def _kernel(
    tail_tiles: int, splits: int,
    layer: Any, heads_at: Any, linear: Any, quadratic: Any, keys: Any, values: Any, tail: Any,
    logits: Any, norms: Any,
    matrix_s: Any, slots_s: Any, matrix_loaded: Any, loaded: Any,
) -> None:  # fmt: skip
    slots, _, head_dim = slots_s.shape
    kv_heads, group = keys.shape[1], linear.shape[0] // norms.shape[0]
    split, head = lax.axis_index("split"), lax.axis_index("head")
    norm_row, turn = lax.div(head, i32(group)), lax.rem(head, i32(group))
    which_chunk, kv_head = lax.div(norm_row, i32(kv_heads)), lax.rem(norm_row, i32(kv_heads))
    plgpu.copy_gmem_to_smem(quadratic.at[head], matrix_s, matrix_loaded)
    cache_group, column, begin, chunk_start, chunk_tiles = (
        heads_at[which_chunk, layer[0], kv_head, n] for n in range(5)
    )
    there = tail_tiles + chunk_tiles - begin
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
                source = tail.at[2 * which_chunk + which, cache_group, column, pl.ds(row, TILE)]
                plgpu.copy_gmem_to_smem(source, slots_s.at[slot], loaded.at[slot])

            @pl.when(of_kind & (tile >= tail_tiles))
            def _chunk(chunk: Any = chunk) -> None:
                row = pl.multiple_of(chunk_start + (tile - tail_tiles) * TILE, 8)
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
        one(n, norms, norm_row, _square_norms)

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
