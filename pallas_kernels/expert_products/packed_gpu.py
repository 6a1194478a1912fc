"""The products with packed weights, MXFP4 or FP8, for Hopper GPUs, in Pallas' Mosaic GPU.

As `mosaic_gpu`, but turned round: a warpgroup takes 64 columns of the weights, which it makes bfloat16 in registers, as the
left operand, and the rows of a block as the right one. So a block may have as few as 8 rows, and nothing of what is
unpacked goes through shared memory. Rows in FP8 meet the codes of weights in FP8 themselves. A warpgroup's matrix
instruction takes as long for 8 rows as for 16, and unpacking waits meanwhile: of few rows each warp has its own.

Each computing warpgroup has columns of its own; they share the rows.
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
from pallas_kernels.expert_products.formats import FP8, FP8_NARROW, MXFP4, Format
from pallas_kernels.expert_products.mosaic_gpu import finish
from pallas_kernels.expert_products.plan import DirectPlan, ExpertPlan
from pallas_kernels.expert_products.tuning import ALIGN, PackedTuning
from pallas_kernels.fp8_products import Fp8Tokens, Fp8Weights
from pallas_kernels.fp8_products.device_ops import in_full
from pallas_kernels.left_operand import TILE, add_product, no_sums, right_operand, store_transposed
from pallas_kernels.read_once import load_once

BY_ROW, BY_COLUMN = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)
i32, f32 = jnp.int32, jnp.float32
FEW = 16  # rows of a block up to which a warp's matrix instructions are faster than a warpgroup's
OVERLAPPED = 64  # rows of a block from which on the tensor cores count, not the memory
LOADING = 40  # registers of the loading warpgroup, where the others need many


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Config:
    format: Format
    scaled: bool  # each column has a scale
    narrow: bool  # rows are in FP8 and have one, too
    deep: int  # tiles along the depth
    across: int  # tiles along the columns of one part
    parts: int
    limit: float | None
    of_tokens: bool  # tokens are multiplied, not rows
    rows: int  # of a block
    warpgroups: int  # computing ones
    deep_step: int  # tiles along the depth that one step loads
    stages: int  # steps under way
    num_ctas: int
    once: bool  # most weights are read once
    interpreted: bool

    @property
    def tiles(self) -> int:
        """Of a block of rows: each computing warpgroup takes a tile's columns."""
        return self.across // self.warpgroups

    @property
    def steps(self) -> int:
        return self.deep // self.deep_step

    @property
    def span(self) -> int:
        """Tiles along the depth of one left operand."""
        return self.format.most if self.deep_step % self.format.most == 0 else 1

    @property
    def by_warp(self) -> bool:
        """Whether each warp multiplies with instructions of its own, which of few rows keep nothing waiting."""
        return self.rows <= FEW and not self.narrow

    @property
    def overlapped(self) -> bool:
        """Whether a step is unpacked while the products of the one before go on, which then holds its memory for longer."""
        return self.rows >= OVERLAPPED


class _Tile:
    """The n-th tile of a CTA."""

    def __init__(self, cfg: _Config, blocks: Any, n: Any) -> None:
        block, column = blocks.tile(n * cfg.num_ctas + lax.axis_index("cta"), cfg.tiles)
        self.column = column * cfg.warpgroups
        self.expert, row, self.rows = blocks.place(block, cfg.rows)
        self.row = pl.multiple_of(row, ALIGN)
        of_token = first_rows(ALIGN, row)  # a token is one
        self.given = (blocks.token(row), of_token) if cfg.of_tokens else (pl.ds(self.row, cfg.rows),)


def packed_products_mosaic_gpu(
    x: jax.Array | Fp8Tokens,
    weights: jax.Array | Fp8Weights,
    plan: ExpertPlan | DirectPlan,
    *,
    tuning: PackedTuning,
    bias: jax.Array | None = None,
    limit: float | None = None,
    dtype: Any = jnp.bfloat16,
    interpret: Any = None,
) -> jax.Array:
    """See `pallas_kernels.expert_products.expert_products`; of rows in FP8 the result has the `dtype`."""
    if plan.block != tuning.rows:
        raise ValueError(f"a plan for blocks of {plan.block} rows, expected {tuning.rows}")
    codes, scales = weights if isinstance(weights, Fp8Weights) else (weights, None)
    of_rows = None
    if isinstance(x, Fp8Tokens):
        # Plain loads, which know no bounds, read whole blocks of them.
        of_rows = jnp.pad(x.scales, (0, max(0, x.count + tuning.rows - len(x.scales))))
        x = x.codes[: x.count]
    else:
        dtype = x.dtype
    options = {"dtype": dtype, "limit": limit, "tuning": tuning, "interpret": interpret}
    return _call(x, codes, scales, bias, of_rows, plan.blocks, **options)


@functools.partial(jax.jit, static_argnames=("dtype", "limit", "tuning", "interpret"))
def _call(
    x: jax.Array,
    codes: jax.Array,
    scales: jax.Array | None,
    bias: jax.Array | None,
    of_rows: jax.Array | None,
    blocks: Any,
    dtype: Any,
    limit: float | None,
    tuning: PackedTuning,
    interpret: Any,
) -> jax.Array:
    num_experts, parts, across, deep, *tile = codes.shape
    form = MXFP4 if scales is None else FP8 if of_rows is None else FP8_NARROW
    wgs, deep_step, stages = tuning.shape(across, deep, parts, form.bytes, x.dtype.itemsize)
    cfg = _Config(
        format=form, scaled=scales is not None, narrow=of_rows is not None, of_tokens=blocks.of_tokens(x.shape[0]),
        deep=deep, across=across, parts=parts, limit=limit, rows=tuning.rows, warpgroups=wgs,
        deep_step=deep_step, stages=stages, num_ctas=tuning.ctas(wgs), once=tuning.once,
        interpreted=interpret is not None,
    )  # fmt: skip
    factors = [a for a in (of_rows, scales, bias) if a is not None]

    def expert_products(*refs: Any) -> None:  # the name that profiles show
        x_ref, codes_ref, *factors_refs, out = refs[len(blocks) :]
        places = type(blocks)(*refs[: len(blocks)])
        _kernel(cfg, x.dtype, places, x_ref, codes_ref, factors_refs, out)

    kernel = plgpu.kernel(
        expert_products,
        out_type=jax.ShapeDtypeStruct((blocks.products(x.shape[0]), across * TILE), dtype),
        grid=(cfg.num_ctas,),
        grid_names=("cta",),
        num_threads=wgs + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **({} if interpret is None else {"interpret": interpret}),
    )
    x = x[:, None] if cfg.of_tokens else x
    return kernel(*blocks, x, codes.reshape(num_experts * parts * across, deep, *tile), *factors)


def _kernel(cfg: _Config, dtype: Any, blocks: Any, x: Any, codes: Any, factors: list[Any], out: Any) -> None:
    wgs, deep_step, slots = cfg.warpgroups, cfg.deep_step, cfg.stages

    def body(x_s: Any, w_s: Any, out_s: Any, full: Any, free: Any, *spare: Any) -> None:
        wg = lax.axis_index("wg")
        total = blocks.total() * cfg.tiles
        rounds = lax.div(
            jnp.maximum(total - lax.axis_index("cta") + (cfg.num_ctas - 1), 0), i32(cfg.num_ctas)
        )

        # A block of many rows has its sums in more registers than each warpgroup gets by default.
        uneven = cfg.rows > 64 and wgs > 1
        by_default = 512 // (wgs + 1) // 8 * 8

        @pl.when(wg < wgs)
        def _compute_all() -> None:
            if uneven:
                own = (by_default * (wgs + 1) - LOADING) // wgs // 8 * 8
                plgpu.set_max_registers(own, action="increase")
            unpacked = spare[0].at[wg] if spare else None
            _compute(cfg, wg, rounds, blocks, factors, out, x_s, w_s, out_s, unpacked, full, free)

        @pl.when(wg == wgs)
        def _load_all() -> None:
            if uneven:
                plgpu.set_max_registers(LOADING, action="decrease")
            _load(cfg, rounds, blocks, x, codes, x_s, w_s, full, free)

    def tiled(width: int, row: int = 128) -> Any:  # of rows of so many bytes
        return plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(row)  # type: ignore[abstract]

    row = cfg.span * TILE
    pl.run_scoped(
        body,
        plgpu.SMEM((slots, cfg.rows, deep_step * TILE), dtype, transforms=tiled(row, row * dtype.itemsize)),
        plgpu.SMEM((slots, wgs, cfg.parts, deep_step, *cfg.format.tile), jnp.int32),
        plgpu.SMEM((wgs, cfg.rows, TILE), out.dtype, transforms=tiled(TILE)),
        plgpu.Barrier(num_arrivals=1 + wgs * cfg.parts, num_barriers=slots),
        plgpu.Barrier(num_arrivals=wgs, num_barriers=slots),
        *([plgpu.SMEM((wgs, TILE, row), dtype)] if cfg.interpreted else []),
        collective_axes="wg",
    )


def _load(
    cfg: _Config, rounds: Any, blocks: Any, x: Any, codes: Any, x_s: Any, w_s: Any, full: Any, free: Any
) -> None:
    """The loading warpgroup."""
    stages, deep_step = cfg.stages, cfg.deep_step
    load_codes = load_once if cfg.once else plgpu.copy_gmem_to_smem

    def one_tile(n: Any, nothing: Any) -> None:
        tile = _Tile(cfg, blocks, n)

        def one_step(j: Any, nothing: Any) -> None:
            before = n * cfg.steps + j
            slot = lax.rem(before, i32(stages))

            @pl.when(before >= stages)
            def _() -> None:
                plgpu.barrier_wait(free.at[slot])

            for wg in range(cfg.warpgroups):
                for part in range(cfg.parts):
                    at = (tile.expert * cfg.parts + part) * cfg.across + tile.column + wg
                    held = codes.at[at, pl.ds(j * deep_step, deep_step)]
                    load_codes(held, w_s.at[slot, wg, part], full.at[slot])
            deep = pl.ds(j * deep_step * TILE, deep_step * TILE)
            plgpu.copy_gmem_to_smem(x.at[*tile.given, deep], x_s.at[slot], full.at[slot])

        lax.fori_loop(0, cfg.steps, one_step, None)

    lax.fori_loop(0, rounds, one_tile, None)
    if cfg.interpreted:  # it wants every completion of a barrier to be seen
        for slot in range(stages):
            pl.when(rounds * cfg.steps > slot)(functools.partial(plgpu.barrier_wait, free.at[slot]))


def _compute(
    cfg: _Config,
    wg: Any,
    rounds: Any,
    blocks: Any,
    factors: list[Any],  # scales of rows and of columns, if there are any, and a bias, if there is one
    out: Any,
    x_s: Any,
    w_s: Any,
    out_s: Any,
    unpacked: Any,  # shared memory of the interpreter's, or None
    full: Any,
    free: Any,
) -> None:
    """A computing warpgroup."""
    stages, rows = cfg.stages, cfg.rows
    staged = out_s.at[wg]

    def one_tile(n: Any, nothing: Any) -> None:
        tile = _Tile(cfg, blocks, n)
        column = tile.column + wg
        done = n * cfg.steps
        # Loaded before the products, for which they are not waited.
        loaded = _load_factors(cfg, factors, tile, column)

        def slot_of(j: Any) -> Any:
            return lax.rem(done + j, i32(stages))

        def products_by_warp() -> tuple[Any, ...]:
            def one_step(j: Any, sums: tuple[Any, ...]) -> tuple[Any, ...]:
                slot = slot_of(j)
                plgpu.barrier_wait(full.at[slot])
                for i in range(cfg.deep_step):
                    given = x_s.at[slot, :, pl.ds(i * TILE, TILE)]
                    given = right_operand(given, interpreted=cfg.interpreted)
                    after = []
                    for part, before in enumerate(sums):
                        packed = w_s.at[slot, wg, part, pl.ds(i, 1)]
                        left = cfg.format.unpack(packed, unpacked, by_warp=True)
                        after.append(add_product(before, left, given, interpreted=cfg.interpreted))
                    sums = tuple(after)
                plgpu.barrier_arrive(free.at[slot])
                return sums

            zeros = no_sums((TILE, rows), interpreted=cfg.interpreted)
            return lax.fori_loop(0, cfg.steps, one_step, (zeros,) * cfg.parts)

        def products(*accumulators: Any) -> tuple[Any, ...]:
            def one_step(j: Any, nothing: Any) -> None:
                slot = slot_of(j)
                plgpu.barrier_wait(full.at[slot])
                for i in range(0, cfg.deep_step, cfg.span):
                    given = x_s.at[slot, :, pl.ds(i * TILE, cfg.span * TILE)].transpose((1, 0))
                    for part, acc in enumerate(accumulators):
                        packed = w_s.at[slot, wg, part, pl.ds(i, cfg.span)]
                        plgpu.wgmma(acc, cfg.format.unpack(packed, unpacked), given)
                        plgpu.wgmma_wait(1)  # registers of one left operand, while the next is unpacked
                        if cfg.overlapped and not i and not part:  # the step before is done only now
                            plgpu.barrier_arrive(free.at[slot_of(j - 1)], predicate=j > 0)
                if not cfg.overlapped:
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(free.at[slot])

            if not cfg.overlapped:
                lax.fori_loop(0, cfg.steps, one_step, None)
                return tuple(acc[...] for acc in accumulators)

            # An even number of left operands has registers of its own in each round.
            at_once = 2 if cfg.deep_step // cfg.span * cfg.parts % 2 else 1

            def one_round(k: Any, nothing: Any) -> None:
                for j in range(at_once):
                    one_step(k * at_once + j, None)

            lax.fori_loop(0, cfg.steps // at_once, one_round, None)
            if cfg.steps % at_once:
                one_step(i32(cfg.steps - 1), None)
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(free.at[slot_of(cfg.steps - 1)])
            return tuple(acc[...] for acc in accumulators)

        accumulators = [plgpu.ACC((TILE, rows), f32)] * cfg.parts
        sums = products_by_warp() if cfg.by_warp else pl.run_scoped(products, *accumulators)
        end(tile, column, loaded, sums)

    def end(tile: _Tile, column: Any, loaded: list[list[Any]], sums: tuple[Any, ...]) -> None:
        if cfg.format.small:
            sums = tuple(in_full(each, interpreted=cfg.interpreted) for each in sums)
        for number, held in enumerate(loaded):
            axis = 1 if number < cfg.narrow else 0
            spread = (lax.broadcast_in_dim(x, (TILE, rows), (axis,)) for x in held)
            combine = jnp.multiply if number < cfg.narrow + cfg.scaled else jnp.add
            sums = tuple(map(combine, sums, spread))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        store_transposed(finish(sums, cfg.limit).astype(out.dtype), staged, interpreted=cfg.interpreted)
        plgpu.commit_smem()
        columns = pl.ds(pl.multiple_of(column * TILE, TILE), TILE)

        def copy(first: int, size: int) -> None:
            rows_out = out.at[pl.ds(pl.multiple_of(tile.row + first, ALIGN), size), columns]
            plgpu.copy_smem_to_gmem(staged.at[pl.ds(first, size)], rows_out)

        pl.when(tile.rows >= rows)(functools.partial(copy, 0, rows))
        for first in range(0, rows, ALIGN):
            pl.when((tile.rows < rows) & (tile.rows > first))(functools.partial(copy, first, ALIGN))

    lax.fori_loop(0, rounds, one_tile, None)
    plgpu.wait_smem_to_gmem(0)


def _load_factors(cfg: _Config, factors: list[Any], tile: _Tile, column: Any) -> list[list[Any]]:
    """What the sums of each part are multiplied with, or for a bias added to: of rows f32[rows], of columns f32[TILE]."""
    of_rows, of_columns = factors[: cfg.narrow], factors[cfg.narrow :]
    columns = pl.ds(pl.multiple_of(column * TILE, TILE), TILE)
    at = pl.ds(tile.row, cfg.rows)
    found = [[plgpu.load(held.at[at], layout=BY_COLUMN, optimized=False)] * cfg.parts for held in of_rows]
    for held in of_columns:
        parts = [held.at[tile.expert, part, columns] for part in range(cfg.parts)]
        found.append([plgpu.load(part, layout=BY_ROW, optimized=False).astype(f32) for part in parts])
    return found
