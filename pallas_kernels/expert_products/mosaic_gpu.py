"""Products of rows with the weights of their experts for Hopper GPUs, in Pallas' Mosaic GPU.

A CTA works through tiles: a block of one expert's rows times some columns of its weights. One warpgroup issues all loads
(TMA), ahead of the computing ones and across tiles; each computing warpgroup has 64 rows. Gate and up are two parts of the
weights whose columns one tile takes side by side, so that what lies between the two products of an MLP needs no kernel.
Rows of an expert begin at multiples of 8, and so do the stores: no row of another expert is ever written. Of a direct plan
a block has 8 rows, the first of which counts; it is loaded from where the token lies.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.experimental.mosaic.gpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.beyond import first_rows
from pallas_kernels.expert_products.plan import DirectPlan, ExpertPlan
from pallas_kernels.expert_products.reference import GATE_SLOPE
from pallas_kernels.expert_products.tuning import ALIGN, BOX, DEPTH, ROWS, Tuning
from pallas_kernels.read_once import load_once

LOG2E = 1.4426950408889634
BY_COLUMN = plgpu.Layout.WGMMA.reduce(0)  # one value per column of an accumulator
i32, f32 = jnp.int32, jnp.float32


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Config:
    depth: int
    columns: int  # of one part
    parts: int
    limit: float | None
    of_tokens: bool  # tokens are multiplied, not rows
    rows: int  # of a block, at most
    num_ctas: int
    interpreted: bool
    tuning: Tuning

    @property
    def width(self) -> int:
        """Columns of a tile in each part: the most that the tuning allows and that divide them."""
        most = self.tuning.columns // self.parts
        return max(n for n in range(BOX, most + 1, BOX) if self.columns % n == 0)

    @property
    def tiles(self) -> int:
        """Of a block of rows."""
        return self.columns // self.width

    @property
    def steps(self) -> int:
        return self.depth // DEPTH


class _Tile:
    """The n-th tile of a CTA."""

    def __init__(self, cfg: _Config, blocks: Any, n: Any) -> None:
        block, column = blocks.tile(n * cfg.num_ctas + lax.axis_index("cta"), cfg.tiles)
        self.column = pl.multiple_of(column * cfg.width, cfg.width)
        self.expert, row, self.rows = blocks.place(block, cfg.rows)
        self.row = pl.multiple_of(row, ALIGN)
        of_token = first_rows(ALIGN, row)  # a token is one
        self.given = (blocks.token(row), of_token) if cfg.of_tokens else (pl.ds(self.row, cfg.rows),)


def expert_products_mosaic_gpu(
    x: jax.Array,
    weights: jax.Array,
    plan: ExpertPlan | DirectPlan,
    *,
    tuning: Tuning,
    bias: jax.Array | None = None,
    limit: float | None = None,
    interpret: Any = None,
) -> jax.Array:
    """See `pallas_kernels.expert_products.expert_products`."""
    if isinstance(plan, ExpertPlan) and plan.block != tuning.rows:
        raise ValueError(f"a plan for blocks of {plan.block} rows, expected {tuning.rows}")
    options: dict[str, Any] = {"limit": limit, "tuning": tuning, "interpret": interpret}
    return _call(x, weights, bias, plan.blocks, rows=plan.block, **options)


@functools.partial(jax.jit, static_argnames=("rows", "limit", "tuning", "interpret"))
def _call(
    x: jax.Array,
    weights: jax.Array,
    bias: jax.Array | None,
    blocks: Any,
    rows: int,
    limit: float | None,
    tuning: Tuning,
    interpret: Any,
) -> jax.Array:
    # One jitted function for all layers, as for attention: it is traced and lowered once.
    given, depth = x.shape
    num_experts, _, parts, columns = weights.shape
    cfg = _Config(
        depth=depth, columns=columns, parts=parts, limit=limit, of_tokens=blocks.of_tokens(given), rows=rows,
        num_ctas=tuning.ctas(), interpreted=interpret is not None, tuning=tuning,
    )  # fmt: skip

    biases = () if bias is None else (bias,)

    def expert_products(*refs: Any) -> None:  # the name that profiles show
        x_ref, weights_ref, *bias_ref, out = refs[len(blocks) :]
        _kernel(cfg, x.dtype, type(blocks)(*refs[: len(blocks)]), x_ref, weights_ref, bias_ref, out)

    kernel = plgpu.kernel(
        expert_products,
        out_type=jax.ShapeDtypeStruct((blocks.products(given), columns), x.dtype),
        grid=(cfg.num_ctas,),
        grid_names=("cta",),
        num_threads=tuning.warpgroups + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **({} if interpret is None else {"interpret": interpret}),
    )
    x = x[:, None] if cfg.of_tokens else x
    return kernel(*blocks, x, weights.reshape(num_experts, depth, parts * columns), *biases)


def _kernel(cfg: _Config, dtype: Any, blocks: Any, x: Any, weights: Any, bias: list[Any], out: Any) -> None:
    tuning = cfg.tuning
    wgs, stages = tuning.warpgroups, tuning.stages

    def body(x_s: Any, w_s: Any, out_s: Any, full: Any, free: Any) -> None:
        wg = lax.axis_index("wg")
        total = blocks.total() * cfg.tiles
        rounds = lax.div(
            jnp.maximum(total - lax.axis_index("cta") + (cfg.num_ctas - 1), 0), i32(cfg.num_ctas)
        )

        @pl.when(wg < wgs)
        def _compute_all() -> None:
            _compute(cfg, wg, rounds, blocks, bias, out, x_s, w_s, out_s, full, free)

        @pl.when(wg == wgs)
        def _load_all() -> None:
            _load(cfg, rounds, blocks, x, weights, x_s, w_s, full, free)

    tiled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))  # type: ignore[abstract]
    pl.run_scoped(
        body,
        plgpu.SMEM((stages, tuning.rows, DEPTH), dtype, transforms=tiled),
        plgpu.SMEM((stages, cfg.parts, DEPTH, cfg.width), dtype, transforms=tiled),
        plgpu.SMEM((wgs, ROWS, cfg.width), dtype, transforms=tiled),
        plgpu.Barrier(num_arrivals=1 + cfg.parts, num_barriers=stages),
        plgpu.Barrier(num_arrivals=wgs, num_barriers=stages),
        collective_axes="wg",
    )


def _load(
    cfg: _Config, rounds: Any, blocks: Any, x: Any, weights: Any, x_s: Any, w_s: Any, full: Any, free: Any
) -> None:
    """The loading warpgroup."""
    plgpu.set_max_registers(cfg.tuning.load_registers, action="decrease")
    stages = i32(cfg.tuning.stages)
    load_weights = load_once if cfg.tuning.once else plgpu.copy_gmem_to_smem

    def one_tile(n: Any, done: Any) -> Any:
        tile = _Tile(cfg, blocks, n)

        def one_step(j: Any, nothing: Any) -> None:
            slot = lax.rem(done + j, stages)

            @pl.when(done + j >= stages)
            def _() -> None:
                plgpu.barrier_wait(free.at[slot])

            deep = pl.ds(j * DEPTH, DEPTH)
            for part in range(cfg.parts):
                columns = pl.ds(part * cfg.columns + tile.column, cfg.width)
                load_weights(weights.at[tile.expert, deep, columns], w_s.at[slot, part], full.at[slot])
            # Further rows hold anything, and their products too, which nobody stores.
            plgpu.copy_gmem_to_smem(x.at[*tile.given, deep], x_s.at[slot, pl.ds(0, cfg.rows)], full.at[slot])

        lax.fori_loop(0, cfg.steps, one_step, None)
        return done + cfg.steps

    done = lax.fori_loop(0, rounds, one_tile, i32(0))
    if cfg.interpreted:  # it wants every completion of a barrier to be seen
        for slot in range(cfg.tuning.stages):
            pl.when(done > slot)(functools.partial(plgpu.barrier_wait, free.at[slot]))


def _compute(
    cfg: _Config,
    wg: Any,
    rounds: Any,
    blocks: Any,
    bias: list[Any],  # of none or one reference
    out: Any,
    x_s: Any,
    w_s: Any,
    out_s: Any,
    full: Any,
    free: Any,
) -> None:
    """A computing warpgroup."""
    plgpu.set_max_registers(cfg.tuning.compute_registers, action="increase")
    stages = i32(cfg.tuning.stages)
    staged = out_s.at[wg]

    def one_tile(n: Any, done: Any) -> Any:
        tile = _Tile(cfg, blocks, n)
        there = tile.rows - wg * ROWS

        def products(*accumulators: Any) -> tuple[Any, ...]:
            def one_step(j: Any, nothing: Any) -> None:
                slot = lax.rem(done + j, stages)
                plgpu.barrier_wait(full.at[slot])
                rows = x_s.at[slot, pl.ds(wg * ROWS, ROWS)]
                for part, acc in enumerate(accumulators):
                    plgpu.wgmma(acc, rows, w_s.at[slot, part])
                plgpu.wgmma_wait(cfg.parts)  # those of the step before have ended

                @pl.when(j > 0)
                def _() -> None:
                    plgpu.barrier_arrive(free.at[lax.rem(done + j - 1, stages)])

            lax.fori_loop(0, cfg.steps, one_step, None)
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(free.at[lax.rem(done + cfg.steps - 1, stages)])
            return tuple(acc[...] for acc in accumulators)

        def store() -> None:
            sums = pl.run_scoped(products, *[plgpu.ACC((ROWS, cfg.width), f32)] * cfg.parts)
            if bias:
                sums = tuple(s + _bias(cfg, bias[0], tile, part) for part, s in enumerate(sums))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            staged[...] = finish(sums, cfg.limit).astype(out.dtype)
            plgpu.commit_smem()
            row = pl.multiple_of(tile.row + wg * ROWS, ALIGN)

            def copy(first: int, rows: int) -> None:
                rows_out = out.at[pl.ds(row + first, rows), pl.ds(tile.column, cfg.width)]
                plgpu.copy_smem_to_gmem(staged.at[pl.ds(first, rows)], rows_out)

            pl.when(there >= ROWS)(functools.partial(copy, 0, ROWS))
            for first in range(0, ROWS, ALIGN):
                pl.when((there < ROWS) & (there > first))(functools.partial(copy, first, ALIGN))

        def let_pass() -> None:
            def one_step(j: Any, _: Any) -> None:
                slot = lax.rem(done + j, stages)
                plgpu.barrier_wait(full.at[slot])
                plgpu.barrier_arrive(free.at[slot])

            lax.fori_loop(0, cfg.steps, one_step, None)

        pl.when(there > 0)(store)
        if cfg.tuning.warpgroups > 1:
            pl.when(there <= 0)(let_pass)
        return done + cfg.steps

    lax.fori_loop(0, rounds, one_tile, i32(0))
    plgpu.wait_smem_to_gmem(0)


def _bias(cfg: _Config, bias: Any, tile: _Tile, part: int) -> Any:
    """Of a tile's columns, for all its rows."""
    columns = bias.at[tile.expert, part, pl.ds(tile.column, cfg.width)]
    values = plgpu.load(columns, layout=BY_COLUMN, optimized=False).astype(f32)
    return lax.broadcast_in_dim(values, (ROWS, cfg.width), (1,))


def finish(sums: tuple[Any, ...], limit: float | None) -> Any:
    """One part as it is; of gate and up `reference.activation`."""
    if len(sums) == 1:
        return sums[0]
    gate, up = sums
    slope = 1.0
    if limit is not None:
        gate, up = jnp.minimum(gate, limit), jnp.minimum(jnp.maximum(up, -limit), limit) + 1.0
        slope = GATE_SLOPE
    return gate / (1.0 + jnp.exp2(gate * (-LOG2E * slope))) * up
