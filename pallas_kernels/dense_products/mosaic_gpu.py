"""The dense products for Hopper GPUs, in Pallas' Mosaic GPU.

A decode step of many requests reads all weights for some dozens of tokens each, which takes as long as the memory needs, if
nothing else does. So every CTA has all tokens, 64 for each computing warpgroup, and a share of the weights that it reads
once: some columns over the whole depth, or over a half of it. Then the two CTAs of a cluster send each other the sums of
half of their columns, which costs less than writing and reading parts. One more warpgroup loads.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.beyond import first_rows
from pallas_kernels.dense_products.tuning import STEP, TOKENS, TUNING, Tuning, warpgroups
from pallas_kernels.gates import Gate, gated_sums
from pallas_kernels.read_once import load_once
from pallas_kernels.support import record_for

i32, f32 = jnp.int32, jnp.float32
# Registers of a thread in the loading and in two computing warpgroups: together what three get by default.
LOADING, COMPUTING = 40, 232
OTHER = 2 * 1024  # bytes of shared memory beside the buffers


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Config:
    warpgroups: int  # computing ones
    halves: int  # of the weights' columns: two where one is of gates
    columns: int  # of each half, a CTA's
    splits: int  # of the depth
    steps: int  # of a CTA
    stages: int  # steps under way
    gate: Gate | None
    interpreted: bool

    @property
    def own(self) -> int:
        """Columns that a CTA finishes. The interpreter has no clusters: there each stores its sums, added up later."""
        return self.columns if self.interpreted else self.columns // self.splits

    @property
    def stored(self) -> int:
        """Columns that are stored at once, a swizzled line or a part of it."""
        return min(self.own, 64)


@functools.partial(jax.jit, static_argnames=("gate", "tuning", "interpret"))
def dense_products_mosaic_gpu(
    x: jax.Array, weights: jax.Array, *, gate: Gate | None, tuning: Tuning, interpret: Any = None
) -> jax.Array:
    """See `pallas_kernels.dense_products.dense_products`."""
    (tokens, depth), columns = x.shape, weights.shape[1]
    halves, splits, wgs = 2 if gate else 1, tuning.splits, warpgroups(tokens)
    if depth % (STEP * splits) or columns % (tuning.columns * halves) or (gate and splits > 1):
        raise ValueError(f"weights {weights.shape} cannot be cut by {tuning}")
    interpreted = interpret is not None
    cfg = _Config(
        warpgroups=wgs, halves=halves, columns=tuning.columns, splits=splits, steps=depth // splits // STEP,
        stages=_stages(tuning, wgs, halves, depth // splits // STEP), gate=gate, interpreted=interpreted,
    )  # fmt: skip
    out = jax.ShapeDtypeStruct((tokens, columns // halves), x.dtype)
    if interpreted and splits > 1:
        out = jax.ShapeDtypeStruct((splits, *out.shape), f32)

    def dense_products(*refs: Any) -> None:  # the name that profiles show
        _kernel(cfg, x.dtype, *refs)

    grid: dict[str, Any] = {"grid": (columns // (tuning.columns * halves),), "grid_names": ("tile",)}
    if interpreted:
        grid = {"grid": (*grid["grid"], splits), "grid_names": ("tile", "split"), "interpret": interpret}
    elif splits > 1:
        grid |= {"cluster": (splits,), "cluster_names": ("split",)}
    kernel = plgpu.kernel(
        dense_products,
        out_type=out,
        num_threads=wgs + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **grid,
    )
    result = kernel(x, weights)
    return result.sum(0).astype(x.dtype) if result.ndim == 3 else result


def _stages(tuning: Tuning, wgs: int, halves: int, steps: int) -> int:
    """As many as shared memory has room for."""
    own = tuning.columns // tuning.splits
    others = wgs * TOKENS * (2 * min(own, 64) + 4 * own * (tuning.splits - 1))
    of_step = 2 * STEP * (wgs * TOKENS + halves * tuning.columns)
    return max(2, min(steps, (record_for(TUNING).shared_bytes - OTHER - others) // of_step))


def _tiled(width: int, itemsize: int) -> Any:
    """How rows of so many numbers lie in shared memory."""
    line = min(width * itemsize, 128)
    return plgpu.TilingTransform((8, line // itemsize)), plgpu.SwizzleTransform(line)  # type: ignore[abstract]


def _kernel(cfg: _Config, dtype: Any, x: Any, weights: Any, out: Any) -> None:
    wgs = cfg.warpgroups

    def body(x_s: Any, weights_s: Any, out_s: Any, full: Any, free: Any, *received: Any) -> None:
        wg = lax.axis_index("wg")

        @pl.when(wg < wgs)
        def _compute_all() -> None:
            if wgs == 2:
                plgpu.set_max_registers(COMPUTING, action="increase")
            sums = _sums(cfg, wg, x_s, weights_s, full, free)
            _finish(cfg, wg, sums, out, out_s.at[wg], *(buffer.at[wg] for buffer in received))

        @pl.when(wg == wgs)
        def _load_all() -> None:
            if wgs == 2:
                plgpu.set_max_registers(LOADING, action="decrease")
            _load(cfg, x, weights, x_s, weights_s, full, free)

    exchange = []
    if cfg.own < cfg.columns:
        parts = (wgs, cfg.splits - 1, TOKENS, cfg.own)
        exchange = [
            plgpu.SMEM(parts, f32, transforms=_tiled(cfg.own, 4)),
            plgpu.Barrier(num_arrivals=cfg.splits - 1, num_barriers=wgs),
        ]
    pl.run_scoped(
        body,
        plgpu.SMEM((cfg.stages, wgs * TOKENS, STEP), dtype, transforms=_tiled(STEP, dtype.itemsize)),
        plgpu.SMEM(
            (cfg.stages, cfg.halves, STEP, cfg.columns), dtype, transforms=_tiled(cfg.columns, dtype.itemsize)
        ),
        plgpu.SMEM((wgs, TOKENS, cfg.stored), out.dtype, transforms=_tiled(cfg.stored, out.dtype.itemsize)),
        plgpu.Barrier(num_arrivals=1 + cfg.halves, num_barriers=cfg.stages),
        plgpu.Barrier(num_arrivals=wgs, num_barriers=cfg.stages),
        *exchange,
        collective_axes="wg",
    )


def _split(cfg: _Config) -> Any:
    """The part of the depth that is this CTA's."""
    return lax.axis_index("split") if cfg.splits > 1 else i32(0)


def _load(cfg: _Config, x: Any, weights: Any, x_s: Any, weights_s: Any, full: Any, free: Any) -> None:
    """The loading warpgroup."""
    per_half = weights.shape[1] // cfg.halves

    def one_step(j: Any, nothing: Any) -> None:
        slot = lax.rem(j, i32(cfg.stages))

        @pl.when(j >= cfg.stages)
        def _() -> None:
            plgpu.barrier_wait(free.at[slot])

        deep = pl.ds(pl.multiple_of((_split(cfg) * cfg.steps + j) * STEP, STEP), STEP)
        for half in range(cfg.halves):
            first = pl.multiple_of(half * per_half + lax.axis_index("tile") * cfg.columns, cfg.columns)
            held = weights.at[deep, pl.ds(first, cfg.columns)]
            load_once(held, weights_s.at[slot, half], full.at[slot])
        plgpu.copy_gmem_to_smem(x.at[first_rows(x_s.shape[1], j), deep], x_s.at[slot], full.at[slot])

    lax.fori_loop(0, cfg.steps, one_step, None)


def _sums(cfg: _Config, wg: Any, x_s: Any, weights_s: Any, full: Any, free: Any) -> tuple[jax.Array, ...]:
    """Of a computing warpgroup's tokens and this CTA's part of the depth, f32[TOKENS, columns] of each half."""

    def products(*accs: Any) -> tuple[jax.Array, ...]:
        def one_step(j: Any, nothing: Any) -> None:
            slot = lax.rem(j, i32(cfg.stages))
            plgpu.barrier_wait(full.at[slot])
            for half, acc in enumerate(accs):
                plgpu.wgmma(acc, x_s.at[slot, pl.ds(wg * TOKENS, TOKENS)], weights_s.at[slot, half])
            plgpu.wgmma_wait(len(accs))
            # The step before is done. Nobody waits for slots that are not loaded again.
            again = (j > 0) & (j - 1 + cfg.stages < cfg.steps)
            plgpu.barrier_arrive(free.at[lax.rem(j + (cfg.stages - 1), i32(cfg.stages))], predicate=again)

        lax.fori_loop(0, cfg.steps, one_step, None)
        plgpu.wgmma_wait(0)
        return tuple(acc[...] for acc in accs)

    accumulators = [plgpu.ACC((TOKENS, cfg.columns), f32)] * cfg.halves
    return pl.run_scoped(products, *accumulators)


def _finish(
    cfg: _Config,
    wg: Any,
    sums: tuple[jax.Array, ...],
    out: Any,
    out_s: Any,
    received: Any = None,
    sent: Any = None,
) -> None:
    """Stores what becomes of a warpgroup's sums; of a split depth with those that come from the cluster's other CTAs.

    received: f32[splits - 1, TOKENS, own]. sent: barrier of these.
    """
    first = lax.axis_index("tile") * cfg.columns
    if cfg.gate:
        gates, values = sums
        _store(cfg, wg, gated_sums(gates, values, cfg.gate, out.dtype), out, out_s, first)
    elif cfg.splits == 1:
        _store(cfg, wg, sums[0], out, out_s, first)
    elif cfg.interpreted:
        _store(cfg, wg, sums[0], out.at[_split(cfg)], out_s, first)
    else:
        for mine in range(cfg.splits):  # which columns they are has to be known
            pl.when(_split(cfg) == mine)(
                functools.partial(_exchange, cfg, wg, mine, sums[0], out, out_s, first, received, sent)
            )


def _exchange(
    cfg: _Config,
    wg: Any,
    mine: int,
    sums: jax.Array,
    out: Any,
    out_s: Any,
    first: Any,
    received: Any,
    sent: Any,
) -> None:
    """Sends the others' columns, takes what comes of its own, and stores these."""

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
    _store(cfg, wg, total, out, out_s, first + mine * cfg.own)


def _store(cfg: _Config, wg: Any, results: jax.Array, out: Any, out_s: Any, first: Any) -> None:
    """Results [TOKENS, own] to columns from `first` on. Rows beyond the tokens are written nowhere."""
    rows = pl.ds(wg * TOKENS, TOKENS)
    for offset in range(0, cfg.own, cfg.stored):
        if offset:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        out_s[...] = results[:, offset : offset + cfg.stored].astype(out.dtype)
        plgpu.commit_smem()
        columns = pl.ds(pl.multiple_of(first + offset, cfg.stored), cfg.stored)
        plgpu.copy_smem_to_gmem(out_s, out.at[rows, columns])
    plgpu.wait_smem_to_gmem(0)
