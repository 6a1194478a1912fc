"""Moments of turned queries for Hopper GPUs, in Pallas' Mosaic GPU.

A CTA takes a share of the tokens of one query head, tile by tile: it loads the queries and what they are turned by (TMA),
turns them in registers, rounds them to 16 bits in shared memory, and adds the tile's products, transposed by itself, to
sums in registers. Products of one tile run while the next is turned. Shares are added up by XLA.
"""

import functools
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
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
    scale: float,
    ctas: int | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """See `reference.query_gaussian_reference`."""
    if missing := -q.shape[0] % TILE:
        q, turns = (jnp.pad(x, ((0, missing), *[(0, 0)] * (x.ndim - 1))) for x in (q, turns))
    squares, sums = _moments(q, turns, ctas or num_sms(), interpret)
    # Added one by one, not reduced: XLA then makes one pass of this and of what follows.
    mean = functools.reduce(jnp.add, sums) / count
    second = functools.reduce(jnp.add, squares) / count
    covariance = second - mean[:, :, None] * mean[:, None, :]
    return scale * mean, (scale**2 / 2 * covariance).astype(q.dtype)


def _moments(q: jax.Array, turns: jax.Array, ctas: int, interpret: Any) -> tuple[jax.Array, jax.Array]:
    """(f32[S, N, D, D], f32[S, N, D]): sums of S shares of the tokens."""
    tokens, heads, head_dim = q.shape
    rows = 128 if head_dim == 128 else 64  # of the product in one CTA's registers
    blocks, tiles = head_dim // rows, tokens // TILE
    splits = max(1, min(tiles, ctas // (heads * blocks)))
    half = min(64, head_dim // 2)  # columns of one tile in shared memory: turning takes two halves of a query
    tiled = (plgpu.TilingTransform((8, half)), plgpu.SwizzleTransform(2 * half))  # type: ignore[abstract]

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
            jax.ShapeDtypeStruct((splits, heads, head_dim, head_dim), f32),
            jax.ShapeDtypeStruct((splits, heads, head_dim), f32),
        ),
        grid=(blocks, splits, heads),
        grid_names=("block", "split", "head"),
        **({} if interpret is None else {"interpret": interpret}),
    )
    return kernel(q, turns, jnp.ones((8, TILE), q.dtype))


def _kernel(
    rows: int, splits: int,
    q: Any, turns: Any, ones: Any, squares: Any, sums: Any,
    q_s: Any, turns_s: Any, turned_s: Any, ones_s: Any, loaded: Any, ones_loaded: Any,
) -> None:  # fmt: skip
    head_dim, tiles = q.shape[2], q.shape[0] // TILE
    block, split, head = (lax.axis_index(name) for name in ("block", "split", "head"))
    first = lax.div(split * tiles, i32(splits))
    mine = lax.div((split + 1) * tiles, i32(splits)) - first

    def load(n: Any) -> None:
        begin = pl.multiple_of((first + n) * TILE, TILE)
        slot = lax.rem(n, i32(STAGES))
        plgpu.copy_gmem_to_smem(q.at[pl.ds(begin, TILE), head], q_s.at[slot], loaded.at[slot])
        plgpu.copy_gmem_to_smem(turns.at[pl.ds(begin, TILE)], turns_s.at[slot], loaded.at[slot])

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
