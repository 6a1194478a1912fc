"""Moments of turned queries for Hopper GPUs, in Pallas' Mosaic GPU.

A CTA takes a share of one chunk's tokens of one query head, tile by tile: it loads the queries and what they are turned by
(TMA), turns them in registers, rounds them to 16 bits in shared memory, and adds the tile's products, transposed by itself,
to sums in registers. Products of one tile run while the next is turned. Shares are added up by XLA.
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

TILE = 64  # tokens
STAGES = 2  # tiles under way; four took 8% longer
WGMMA = plgpu.Layout.WGMMA
i32, f32 = jnp.int32, jnp.float32


@functools.partial(jax.jit, static_argnames=("scale", "ctas", "interpret"))
def query_gaussian_mosaic_gpu(
    q: jax.Array,
    turns: jax.Array,
    count: jax.Array,
    *,
    starts: jax.Array | np.ndarray,
    sizes: jax.Array | np.ndarray,
    scale: float,
    ctas: int | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Of each chunk what `reference.query_gaussian_reference` gives of one: (f32[S, N, D], [S, N, D, D])."""
    if missing := -turns.shape[1] % TILE:
        turns = jnp.pad(turns, ((0, 0), (0, missing), (0, 0)))
    if len(q) < TILE:
        q = jnp.pad(q, ((0, TILE - len(q)), (0, 0), (0, 0)))
    squares, sums = _moments(q, turns, starts, sizes, ctas or num_sms(), interpret)
    # Added one by one, not reduced: XLA then makes one pass of this and of what follows.
    by_head = count[:, None, None]
    mean = functools.reduce(jnp.add, sums) / by_head
    second = functools.reduce(jnp.add, squares) / by_head[..., None]
    covariance = second - mean[..., :, None] * mean[..., None, :]
    return scale * mean, (scale**2 / 2 * covariance).astype(q.dtype)


def _moments(
    q: jax.Array, turns: jax.Array, starts: Any, sizes: Any, ctas: int, interpret: Any
) -> tuple[jax.Array, jax.Array]:
    """(f32[shares, S, N, D, D], f32[shares, S, N, D]): sums of shares of each chunk's tokens."""
    (_, heads, head_dim), (chunks, slots, _) = q.shape, turns.shape
    rows = 128 if head_dim == 128 else 64  # of the product in one CTA's registers
    blocks, tiles = head_dim // rows, slots // TILE
    splits = max(1, min(tiles, ctas // (chunks * heads * blocks)))
    half = min(64, head_dim // 2)  # columns of one tile in shared memory: turning takes two halves of a query
    tiled = (plgpu.TilingTransform((8, half)), plgpu.SwizzleTransform(2 * half))  # type: ignore[abstract]
    where = jnp.stack([jnp.asarray(starts, i32), -(-jnp.asarray(sizes, i32) // TILE)], axis=-1)

    def query_moments(*refs: Any) -> None:  # the name that profiles show
        pl.run_scoped(
            functools.partial(_kernel, rows, splits, *refs),
            plgpu.SMEM((STAGES, TILE, head_dim), q.dtype, transforms=tiled),
            plgpu.SMEM((STAGES, TILE, head_dim), turns.dtype, transforms=tiled),
            plgpu.SMEM((2, TILE, head_dim), q.dtype, transforms=tiled),
            plgpu.SMEM((8, TILE), q.dtype, transforms=tiled),
            plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
            plgpu.Barrier(num_arrivals=1),
        )

    kernel = plgpu.kernel(
        query_moments,
        out_type=(
            jax.ShapeDtypeStruct((splits, chunks * heads, head_dim, head_dim), f32),
            jax.ShapeDtypeStruct((splits, chunks * heads, head_dim), f32),
        ),
        grid=(blocks, splits, chunks * heads),
        grid_names=("block", "split", "head"),
        **({} if interpret is None else {"interpret": interpret}),
    )
    out = kernel(where, q, turns, jnp.ones((8, TILE), q.dtype))
    squares, sums = (x.reshape(splits, chunks, heads, *x.shape[2:]) for x in out)
    return squares, sums


def _kernel(
    rows: int, splits: int,
    where: Any, q: Any, turns: Any, ones: Any, squares: Any, sums: Any,
    q_s: Any, turns_s: Any, turned_s: Any, ones_s: Any, loaded: Any, ones_loaded: Any,
) -> None:  # fmt: skip
    _, heads, head_dim = q.shape
    block, split, head = (lax.axis_index(name) for name in ("block", "split", "head"))
    chunk, q_head = lax.div(head, i32(heads)), lax.rem(head, i32(heads))
    start, tiles = (where[chunk, n] for n in range(2))
    first = lax.div(split * tiles, i32(splits))
    mine = lax.div((split + 1) * tiles, i32(splits)) - first

    def load(n: Any) -> None:
        begin = pl.multiple_of((first + n) * TILE, TILE)
        slot = lax.rem(n, i32(STAGES))
        # Of the next chunk, or of nothing, where this one ends: `turns` has zeros there.
        queries = q.at[pl.ds(pl.multiple_of(start + begin, 8), TILE), q_head]
        plgpu.copy_gmem_to_smem(queries, q_s.at[slot], loaded.at[slot])
        plgpu.copy_gmem_to_smem(turns.at[chunk, pl.ds(begin, TILE)], turns_s.at[slot], loaded.at[slot])

    for n in range(STAGES):
        pl.when(n < mine)(functools.partial(load, i32(n)))
    plgpu.copy_gmem_to_smem(ones, ones_s, ones_loaded)
    plgpu.barrier_wait(ones_loaded)

    def multiply(b: int, square: Any, sum_: Any) -> tuple[Any, Any]:
        def one(n: Any, _: Any) -> None:
            slot = lax.rem(n, i32(STAGES))
            plgpu.barrier_wait(loaded.at[slot])
            turned = turned_s.at[lax.rem(n, i32(2))]
            _turn(q_s.at[slot], turns_s.at[slot], turned)
            plgpu.commit_smem()
            pl.when(n + STAGES < mine)(functools.partial(load, n + STAGES))
            transposed = turned.at[:, pl.ds(b * rows, rows)].transpose((1, 0))
            plgpu.wgmma(square, transposed, turned)
            plgpu.wgmma(sum_, transposed, ones_s.transpose((1, 0)))
            # The products of this tile may run on; those of the one before, whose place is turned into next, have ended.
            plgpu.wgmma_wait(2)

        lax.fori_loop(0, mine, one, None)
        plgpu.wgmma_wait(0)
        return square[...], sum_[...]

    for b in range(head_dim // rows):  # which columns of shared memory an instruction reads is static

        @pl.when(block == b)
        def _block(b: int = b) -> None:
            shapes = (plgpu.ACC((rows, n), f32) for n in (head_dim, 8))
            square, sum_ = pl.run_scoped(functools.partial(multiply, b), *shapes)
            put(squares.at[split, head, pl.ds(b * rows, rows)], square)
            # Eight equal columns, because no product is narrower.
            put(sums.at[split, head, pl.ds(b * rows, rows)], sum_.sum(axis=1) * 0.125)


def _turn(q: Any, turns: Any, turned: Any) -> None:
    """Pairs (q[i], q[i + D/2]) of a tile, rotated and stretched in f32 and rounded."""
    half = q.shape[1] // 2
    step = min(64, half)
    for start in range(0, half, step):
        near, far = pl.ds(start, step), pl.ds(half + start, step)
        x, y, cos, sin = (
            plgpu.load(ref.at[:, columns], layout=WGMMA).astype(f32)
            for ref in (q, turns)
            for columns in (near, far)
        )
        turned.at[:, near][...] = (x * cos - y * sin).astype(turned.dtype)
        turned.at[:, far][...] = (y * cos + x * sin).astype(turned.dtype)
