"""The dense products for Hopper GPUs, in Pallas' Mosaic GPU.

A decode step of many requests reads all weights for some dozens of tokens each, which takes as long as the memory needs, if
nothing else does. So every CTA has all tokens, 64 for each computing warpgroup, and a share of the weights that it reads
once: some columns over the whole depth, or over a half of it. Then the two CTAs of a cluster send each other the sums of
half of their columns, which costs less than writing and reading parts. One more warpgroup loads.

Where a residual and a norm follow, the CTAs add their columns to the residual and leave its sums of squares (`ends`): the
norm's factors come behind the next products, as no CTA has all of a token.
"""

import functools
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.beyond import first_rows
from pallas_kernels.dense_products import ends, reference
from pallas_kernels.dense_products.common import Config, Scaled, f32, i32, squares_shape, tiled
from pallas_kernels.dense_products.tuning import MULTIPLE, STEP, TOKENS, TUNING, Tuning, warpgroups
from pallas_kernels.gates import Gate
from pallas_kernels.read_once import load_once
from pallas_kernels.support import record_for

# Registers of a thread in the loading and in two computing warpgroups: together what three get by default.
LOADING, COMPUTING = 40, 232
OTHER = 2 * 1024  # bytes of shared memory beside the buffers


@functools.partial(jax.jit, static_argnames=("gate", "eps", "offset", "tuning", "interpret"))
def dense_products_mosaic_gpu(
    x: jax.Array | Scaled,
    weights: jax.Array,
    following: tuple[jax.Array, jax.Array] | None = None,
    *,
    gate: Gate | None = None,
    eps: float | None = None,
    offset: float = 0.0,
    tuning: Tuning,
    interpret: Any = None,
) -> jax.Array | tuple[jax.Array, Scaled]:
    """See `pallas_kernels.dense_products`. following: a residual and the weights of a norm, see `added_products`."""
    given = {"x": x.tokens, "squares": x.squares} if isinstance(x, Scaled) else {"x": x}
    given["weights"] = weights
    (tokens, depth), columns, dtype = given["x"].shape, weights.shape[1], given["x"].dtype
    halves, splits, wgs = 2 if gate else 1, tuning.splits, warpgroups(tokens)
    if depth % (STEP * splits) or columns % (tuning.columns * halves) or (gate and splits > 1):
        raise ValueError(f"weights {weights.shape} cannot be cut by {tuning}")
    if following and not tuning.leaves_squares(columns):
        raise ValueError(f"{columns} columns are an odd number of parts by {tuning}")
    interpreted, steps = interpret is not None, depth // splits // STEP
    cfg = Config(
        warpgroups=wgs, halves=halves, columns=tuning.columns, splits=splits, steps=steps, depth=depth, gate=gate,
        stages=_stages(tuning, wgs, halves, steps, following is not None), adds=following is not None, offset=offset,
        eps=eps if isinstance(x, Scaled) else None, interpreted=interpreted,
    )  # fmt: skip
    made = {"out": jax.ShapeDtypeStruct((tokens, columns // halves), dtype)}
    if cfg.in_parts:
        made["out"] = jax.ShapeDtypeStruct((splits, *made["out"].shape), f32)
    elif following:
        given |= dict(zip(("residual", "norm"), following, strict=True))
        made |= {"normed": made["out"], "squares_out": squares_shape(tokens, columns, cfg.own)}

    def dense_products(*refs: Any) -> None:  # the name that profiles show
        _kernel(cfg, dtype, dict(zip((*given, *made), refs, strict=True)))

    grid: dict[str, Any] = {"grid": (columns // (tuning.columns * halves),), "grid_names": ("tile",)}
    if interpreted:
        grid = {"grid": (*grid["grid"], splits), "grid_names": ("tile", "split"), "interpret": interpret}
    elif splits > 1:
        grid |= {"cluster": (splits,), "cluster_names": ("split",)}
    kernel = plgpu.kernel(
        dense_products,
        out_type=list(made.values()),
        num_threads=wgs + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **grid,
    )
    result, *others = kernel(*given.values())
    if cfg.in_parts:
        result = result.sum(0).astype(dtype)
        return reference.added(result, *following, offset=offset) if following else result
    return (result, Scaled(*others)) if others else result


def _stages(tuning: Tuning, wgs: int, halves: int, steps: int, adds: bool) -> int:
    """As many as shared memory has room for."""
    own = tuning.columns // tuning.splits
    others = wgs * TOKENS * (2 * min(own, 64) + 4 * own * (tuning.splits - 1) + 2 * own * adds)
    of_step = 2 * STEP * (wgs * TOKENS + halves * tuning.columns)
    return max(2, min(steps, (record_for(TUNING).shared_bytes - OTHER - others) // of_step))


def _kernel(cfg: Config, dtype: Any, gmem: dict[str, Any]) -> None:
    wgs, names = cfg.warpgroups, _scratch(cfg, dtype, gmem["out"].dtype)

    def body(*smem: Any) -> None:
        wg = lax.axis_index("wg")
        refs = gmem | dict(zip(names, smem, strict=True))

        @pl.when(wg < wgs)
        def _compute_all() -> None:
            if wgs == 2:
                plgpu.set_max_registers(COMPUTING, action="increase")
            norms = ends.begin(cfg, wg, refs)
            ends.finish(cfg, wg, _sums(cfg, wg, refs), norms, refs)

        @pl.when(wg == wgs)
        def _load_all() -> None:
            if wgs == 2:
                plgpu.set_max_registers(LOADING, action="decrease")
            _load(cfg, refs)

    pl.run_scoped(body, *names.values(), collective_axes="wg")


def _scratch(cfg: Config, dtype: Any, stored: Any) -> dict[str, Any]:
    """Shared memory and barriers, by name."""
    wgs, itemsize = cfg.warpgroups, dtype.itemsize
    weights, lines = (cfg.stages, cfg.halves, STEP, cfg.columns), tiled(cfg.columns, itemsize)
    scratch = {
        "x_s": plgpu.SMEM((cfg.stages, wgs * TOKENS, STEP), dtype, transforms=tiled(STEP, itemsize)),
        "weights_s": plgpu.SMEM(weights, dtype, transforms=lines),
        "out_s": plgpu.SMEM((wgs, TOKENS, cfg.stored), stored, transforms=tiled(cfg.stored, stored.itemsize)),
        "full": plgpu.Barrier(num_arrivals=1 + cfg.halves, num_barriers=cfg.stages),
        "free": plgpu.Barrier(num_arrivals=wgs, num_barriers=cfg.stages),
    }
    if cfg.own < cfg.columns:
        parts = (wgs, cfg.splits - 1, TOKENS, cfg.own)
        scratch["received"] = plgpu.SMEM(parts, f32, transforms=tiled(cfg.own, 4))
        scratch["sent"] = plgpu.Barrier(num_arrivals=cfg.splits - 1, num_barriers=wgs)
    if cfg.adds and not cfg.in_parts:
        count = cfg.own // cfg.stored
        residual = (wgs, count, TOKENS, cfg.stored)
        scratch["residual_s"] = plgpu.SMEM(residual, dtype, transforms=tiled(cfg.stored, itemsize))
        scratch["there"] = plgpu.Barrier(num_arrivals=count, num_barriers=wgs)
    if cfg.eps is not None:
        scratch["pair_s"] = plgpu.SMEM((wgs, ends.PAIR), f32)
    return scratch


def _load(cfg: Config, refs: dict[str, Any]) -> None:
    """The loading warpgroup."""
    x, weights, x_s, weights_s, full, free = (
        refs[name] for name in ("x", "weights", "x_s", "weights_s", "full", "free")
    )
    per_half = weights.shape[1] // cfg.halves
    # What lies behind the tokens' rows is multiplied, too, and nothing of it is kept. The interpreter wants it to be there.
    rows = x_s.shape[1] if cfg.interpreted else max(x.shape[0], MULTIPLE)

    def one_step(j: Any, nothing: Any) -> None:
        slot = lax.rem(j, i32(cfg.stages))

        @pl.when(j >= cfg.stages)
        def _() -> None:
            plgpu.barrier_wait(free.at[slot])

        deep = pl.ds(pl.multiple_of((ends.split(cfg) * cfg.steps + j) * STEP, STEP), STEP)
        for half in range(cfg.halves):
            first = pl.multiple_of(half * per_half + lax.axis_index("tile") * cfg.columns, cfg.columns)
            held = weights.at[deep, pl.ds(first, cfg.columns)]
            load_once(held, weights_s.at[slot, half], full.at[slot])
        source = x.at[first_rows(rows, j), deep]
        plgpu.copy_gmem_to_smem(source, x_s.at[slot, pl.ds(0, rows)], full.at[slot])

    lax.fori_loop(0, cfg.steps, one_step, None)


def _sums(cfg: Config, wg: Any, refs: dict[str, Any]) -> tuple[jax.Array, ...]:
    """Of a computing warpgroup's tokens and this CTA's part of the depth, f32[TOKENS, columns] of each half."""
    x_s, weights_s, full, free = (refs[name] for name in ("x_s", "weights_s", "full", "free"))

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
