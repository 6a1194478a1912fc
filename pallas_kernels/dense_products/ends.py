"""What becomes of a computing warpgroup's sums, and what it fetches for that before it begins."""

import functools
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.dense_products.common import Config, f32, i32
from pallas_kernels.dense_products.tuning import TOKENS
from pallas_kernels.gates import gated_sums
from pallas_kernels.stores import put

BY_ROW, BY_COLUMN = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)
PAIR = 2 * TOKENS  # sums of squares that a warpgroup's threads read at once: two parts' of all its tokens


def split(cfg: Config) -> Any:
    """The part of the depth that is this CTA's."""
    return lax.axis_index("split") if cfg.splits > 1 else i32(0)


def _columns(cfg: Config, offset: int) -> Any:
    """Of those that the CTA finishes, as many as are stored at once."""
    first = lax.axis_index("tile") * cfg.columns + offset
    if not cfg.in_parts:
        first += split(cfg) * cfg.own
    return pl.ds(pl.multiple_of(first, cfg.stored), cfg.stored)


def begin(cfg: Config, wg: Any, refs: dict[str, Any]) -> list[jax.Array]:
    """Asks for the residual, and reads sums of squares while the first weights are on their way.

    Returns the norm's weights f32[stored], of each columns that are stored at once.
    """
    norms = []
    if cfg.adds and not cfg.in_parts:
        for n in range(cfg.own // cfg.stored):
            columns = _columns(cfg, n * cfg.stored)
            source = refs["residual"].at[pl.ds(wg * TOKENS, TOKENS), columns]
            plgpu.copy_gmem_to_smem(source, refs["residual_s"].at[wg, n], refs["there"].at[wg])
            weights = plgpu.load(refs["norm"].at[columns], layout=BY_COLUMN, optimized=False)
            norms.append(weights.astype(f32) + cfg.offset)
    if cfg.eps is not None:
        squares, layout = refs["squares"], plgpu.Layout.WG_STRIDED((PAIR,), 1)
        size = squares.shape[0] // cfg.warpgroups
        places = [pl.multiple_of(wg * size + first, PAIR) for first in range(0, size, PAIR)]
        pairs = [plgpu.load(squares.at[pl.ds(at, PAIR)], layout=layout, optimized=False) for at in places]
        refs["pair_s"].at[wg][...] = functools.reduce(jnp.add, pairs)
    return norms


def finish(
    cfg: Config, wg: Any, sums: tuple[jax.Array, ...], norms: list[jax.Array], refs: dict[str, Any]
) -> None:
    """Stores what becomes of a warpgroup's sums; of a split depth with those that come from the cluster's other CTAs."""
    if cfg.splits > 1 and not cfg.interpreted:
        for mine in range(cfg.splits):  # which columns they are has to be known
            pl.when(split(cfg) == mine)(functools.partial(_exchange, cfg, wg, mine, sums[0], norms, refs))
        return
    _finish_all(cfg, wg, sums, norms, refs)


def _exchange(
    cfg: Config, wg: Any, mine: int, sums: jax.Array, norms: list[jax.Array], refs: dict[str, Any]
) -> None:
    """Sends the others' columns, and takes what comes of its own: `received` f32[splits - 1, TOKENS, own]."""
    received, sent = refs["received"].at[wg], refs["sent"].at[wg]

    def columns_of(split: int) -> jax.Array:
        return sums[:, split * cfg.own : (split + 1) * cfg.own]

    for other in range(cfg.splits):
        if other != mine:
            place = received.at[mine - (mine > other)]
            plgpu.async_store_smem(
                columns_of(other), place, sent, cluster_idx=i32(other), cluster_dim="split", optimized=False
            )
    plgpu.barrier_wait(sent)
    total = columns_of(mine)
    for n in range(cfg.splits - 1):
        total += plgpu.load(received.at[n], layout=plgpu.Layout.WGMMA, optimized=False)
    _finish_all(cfg, wg, (total,), norms, refs)


def _finish_all(
    cfg: Config, wg: Any, sums: tuple[jax.Array, ...], norms: list[jax.Array], refs: dict[str, Any]
) -> None:
    """Of the columns that the CTA finishes, whose sums are all there."""
    if cfg.eps is not None:
        factors = _factors(refs["pair_s"].at[wg], cfg.depth, cfg.eps)
        sums = tuple(x * lax.broadcast_in_dim(factors, x.shape, [0]) for x in sums)
    if cfg.in_parts:
        _store(cfg, wg, sums[0], refs["out"].at[split(cfg)], refs["out_s"].at[wg])
    elif cfg.gate:
        gates, values = sums
        opened = gated_sums(gates, values, cfg.gate, refs["out"].dtype)
        _store(cfg, wg, opened, refs["out"], refs["out_s"].at[wg])
    elif cfg.adds:
        _add(cfg, wg, sums[0], norms, refs)
    else:
        _store(cfg, wg, sums[0], refs["out"], refs["out_s"].at[wg])


def _factors(pair: Any, depth: int, eps: float) -> jax.Array:
    """f32[TOKENS] of norms, from the sums of squares of the even and of the odd parts of the depth."""
    plgpu.commit_smem()  # other threads have stored them
    even, odd = (
        plgpu.load(pair.at[pl.ds(first, TOKENS)], layout=BY_ROW, optimized=False) for first in (0, TOKENS)
    )
    return lax.rsqrt((even + odd) / depth + eps)


def _store(cfg: Config, wg: Any, results: jax.Array, out: Any, out_s: Any) -> None:
    """Results [TOKENS, own]. Rows beyond the tokens are written nowhere."""
    rows = pl.ds(wg * TOKENS, TOKENS)
    for offset in range(0, cfg.own, cfg.stored):
        if offset:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        out_s[...] = results[:, offset : offset + cfg.stored].astype(out.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_s, out.at[rows, _columns(cfg, offset)])
    plgpu.wait_smem_to_gmem(0)


def _add(cfg: Config, wg: Any, sums: jax.Array, norms: list[jax.Array], refs: dict[str, Any]) -> None:
    """Sums [TOKENS, own] and the residual, that times the norm's weights, and its sums of squares."""
    rows, out_s, dtype = pl.ds(wg * TOKENS, TOKENS), refs["out_s"].at[wg], refs["out"].dtype
    plgpu.barrier_wait(refs["there"].at[wg])
    squares: Any = f32(0)
    for n, weights in enumerate(norms):
        offset = n * cfg.stored
        columns, held = _columns(cfg, offset), refs["residual_s"].at[wg, n]
        residual = plgpu.load(held, layout=plgpu.Layout.WGMMA, optimized=False)
        added = sums[:, offset : offset + cfg.stored].astype(dtype)
        total = (residual.astype(f32) + added.astype(f32)).astype(dtype)
        numbers = total.astype(f32)
        squares += jnp.sum(numbers * numbers, axis=1)
        if offset:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        out_s[...] = (numbers * lax.broadcast_in_dim(weights, numbers.shape, [1])).astype(dtype)
        held[...] = total
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(held, refs["out"].at[rows, columns])
        plgpu.copy_smem_to_gmem(out_s, refs["normed"].at[rows, columns])
    parts = refs["squares_out"].shape[0] // (cfg.warpgroups * TOKENS)
    part = lax.axis_index("tile") * cfg.splits + split(cfg)
    place = pl.ds(pl.multiple_of((wg * parts + part) * TOKENS, TOKENS), TOKENS)
    put(refs["squares_out"].at[place], squares)
    plgpu.wait_smem_to_gmem(0)
