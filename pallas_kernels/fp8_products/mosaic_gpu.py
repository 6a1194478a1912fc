"""The products with FP8 weights for Hopper GPUs, in Pallas' Mosaic GPU.

A warpgroup takes 64 columns of the weights, which it makes bfloat16 in registers, as the left operand of its matrix
instructions, and the tokens of a block as the right one; so a block may have as few as 8 tokens, and nothing of what is
unpacked goes through shared memory. Tokens in FP8 meet the codes themselves. One more warpgroup loads. A unit of work is a
block's tokens times the columns of a CTA's warpgroups, over the whole depth or a part of it; the sums of parts are added up
by XLA, with what follows.

The last block may have fewer tokens: copies fill what lies beyond an array with zeros, and write nothing there. Only tokens
that are no multiple of eight, the rows of a tile in shared memory, are padded. A matrix instruction takes up to 256 tokens;
those of a larger block meet each left operand in two parts, with sums of their own.

Left operands take turns: a warpgroup makes that of a step while the tensor cores still have the one of the step before.

Of a gated product one warpgroup of two has a tile of gates, the other that of what they let through. Each finishes half of
the tokens, with what the other one leaves in shared memory.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.fp8_products import device_ops
from pallas_kernels.fp8_products.packing import TILE, WORDS, Fp8Weights
from pallas_kernels.fp8_products.tokens import Fp8Tokens
from pallas_kernels.fp8_products.tuning import LEAST_TOKENS, Tuning
from pallas_kernels.gates import Gate, gated
from pallas_kernels.left_operand import in_transposed, load_transposed, store_transposed
from pallas_kernels.read_once import load_once

BY_ROW, BY_COLUMN = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)
i32, f32 = jnp.int32, jnp.float32
BAND = 8  # blocks of tokens
LOADING = 40  # registers of the loading warpgroup, where the others need many


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Config:
    blocks: int  # of tokens
    rows: int  # of a block
    part: int  # of them, that a matrix instruction takes
    stored: int  # of these at once
    columns: int  # of the weights, as many as a CTA takes at once
    warpgroups: int  # computing ones, a tile's columns each
    splits: int  # of the depth
    steps: int  # of a unit
    deep_step: int  # tiles along the depth that one step loads
    stages: int  # steps under way
    num_ctas: int
    narrow: bool  # tokens in FP8 too
    gate: Gate | None
    interpreted: bool

    @property
    def span(self) -> int:
        """Tiles along the depth of one matrix product: tokens in rows of 128 bytes, if a step has so many.

        With parts, whose sums are float32, Mosaic finds no layouts for that.
        """
        return 2 if self.narrow and self.deep_step % 2 == 0 and self.splits == 1 else 1

    @property
    def parts(self) -> list[tuple[int, int]]:
        """(First row, rows) of a block's."""
        return _pieces(self.rows, self.part)

    @property
    def units(self) -> int:
        return self.blocks * self.columns * self.splits


def _pieces(rows: int, most: int) -> list[tuple[int, int]]:
    """(First row, rows) of each."""
    return [(first, min(most, rows - first)) for first in range(0, rows, most)]


class _Unit:
    """The n-th unit of a CTA."""

    def __init__(self, cfg: _Config, n: Any) -> None:
        number = n * cfg.num_ctas + lax.axis_index("cta")
        # Those under way at a time have few blocks and few columns between them, so that the L2 holds what they read.
        band = lax.div(number, i32(BAND * cfg.columns * cfg.splits)) * BAND
        within = number - band * (cfg.columns * cfg.splits)
        blocks = jnp.minimum(cfg.blocks - band, BAND)
        rest = lax.div(within, blocks)
        block = band + within - rest * blocks
        self.column = lax.div(rest, i32(cfg.splits)) * (1 if cfg.gate else cfg.warpgroups)
        self.split = lax.rem(rest, i32(cfg.splits))
        self.row = pl.multiple_of(block * cfg.rows, cfg.rows)
        self.first = self.split * cfg.steps * cfg.deep_step
        self.apart = cfg.columns if cfg.gate else 1  # tiles of columns between those of two warpgroups

    def tile(self, wg: Any) -> Any:
        """Of the weights, a warpgroup's."""
        return self.column + wg * self.apart


def fp8_products_mosaic_gpu(
    x: jax.Array | Fp8Tokens,
    weights: Fp8Weights,
    *,
    tuning: Tuning,
    gate: Gate | None = None,
    dtype: Any = jnp.bfloat16,
    interpret: Any = None,
) -> jax.Array:
    """See `pallas_kernels.fp8_products.fp8_products`; [T, columns] in `dtype`, which tokens that are not in FP8 have too."""
    values, tokens = (x.codes, x.count) if isinstance(x, Fp8Tokens) else (x, len(x))
    depth = values.shape[1]
    if depth != weights.depth:
        raise ValueError(f"tokens of {depth} numbers for weights of a depth of {weights.depth}")
    values = _padded(values, LEAST_TOKENS)
    of_tokens: tuple[jax.Array, ...] = ()
    if isinstance(x, Fp8Tokens):
        # The scales come by plain loads, which know no bounds: whole blocks of them, as `quantise_tokens` gives.
        blocks = -(-len(values) // tuning.rows)
        of_tokens = (x.scales if len(x.scales) >= blocks * tuning.rows else _padded(x.scales, tuning.rows),)
    out = _call(
        values, weights.codes, weights.scales, *of_tokens, dtype=dtype, tuning=tuning, gate=gate, interpret=interpret
    )  # fmt: skip
    if out.ndim == 3:
        out = out.sum(0) * (of_tokens[0][: len(values), None] if of_tokens else 1)
    return out[:tokens].astype(dtype)


def _padded(x: jax.Array, rows: int) -> jax.Array:
    """To a multiple of so many rows, unless it is one."""
    more = -len(x) % rows
    return jnp.pad(x, ((0, more), *[(0, 0)] * (x.ndim - 1))) if more else x


@functools.partial(jax.jit, static_argnames=("dtype", "tuning", "gate", "interpret"))
def _call(
    x: jax.Array,
    codes: jax.Array,
    scales: jax.Array,
    *of_tokens: jax.Array,
    dtype: Any,
    tuning: Tuning,
    gate: Gate | None,
    interpret: Any,
) -> jax.Array:
    """[tokens, columns] in `dtype`, or f32[splits, tokens, columns] to be summed, and times `of_tokens`.

    `of_tokens`: their scales, if they are in FP8.
    """
    across, deep = codes.shape[:2]
    tuning = tuning.for_gates(across) if gate else tuning
    wgs, splits, deep_step, stages = tuning.shape(across, deep, x.dtype.itemsize)
    cfg = _Config(
        blocks=-(-x.shape[0] // tuning.rows), rows=tuning.rows, part=tuning.part, stored=tuning.stored,
        columns=across // wgs, warpgroups=wgs, splits=splits, steps=deep // splits // deep_step, deep_step=deep_step,
        stages=stages, num_ctas=tuning.ctas(), narrow=bool(of_tokens), gate=gate,
        interpreted=interpret is not None,
    )  # fmt: skip
    shape = (x.shape[0], across // (2 if gate else 1) * TILE)
    out = jax.ShapeDtypeStruct((splits, *shape), f32) if splits > 1 else jax.ShapeDtypeStruct(shape, dtype)

    def fp8_products(*refs: Any) -> None:  # the name that profiles show
        _kernel(cfg, x.dtype, *refs)

    kernel = plgpu.kernel(
        fp8_products,
        out_type=out,
        grid=(cfg.num_ctas,),
        grid_names=("cta",),
        num_threads=wgs + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **({} if interpret is None else {"interpret": interpret}),
    )
    return kernel(x, codes, scales, *of_tokens)


def _kernel(cfg: _Config, dtype: Any, x: Any, codes: Any, *scales_and_out: Any) -> None:
    *scales, out = scales_and_out
    wgs = cfg.warpgroups

    def body(x_s: Any, codes_s: Any, out_s: Any, full: Any, free: Any, met: Any, *spare: Any) -> None:
        wg = lax.axis_index("wg")
        rounds = lax.div(cfg.units - lax.axis_index("cta") + (cfg.num_ctas - 1), i32(cfg.num_ctas))

        # A block of many tokens has its sums in more registers than each warpgroup gets by default. More than all threads
        # get together would be waited for for ever.
        uneven = wgs > 1 and cfg.rows > 64
        by_default = 512 // (wgs + 1) // 8 * 8

        @pl.when(wg < wgs)
        def _compute_all() -> None:
            if uneven:
                plgpu.set_max_registers((by_default * (wgs + 1) - LOADING) // wgs // 8 * 8, action="increase")
            unpacked = spare[0].at[wg] if spare else None
            _compute(cfg, wg, rounds, scales, out, x_s, codes_s, out_s, unpacked, full, free, met)

        @pl.when(wg == wgs)
        def _load_all() -> None:
            if uneven:
                plgpu.set_max_registers(LOADING, action="decrease")
            _load(cfg, rounds, x, codes, x_s, codes_s, full, free)

    def tiled(width: int, row: int = 128) -> Any:  # of rows of so many bytes
        return plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(row)  # type: ignore[abstract]

    row = cfg.span * TILE
    out_width = 32 if cfg.splits > 1 else TILE
    pl.run_scoped(
        body,
        plgpu.SMEM(
            (cfg.stages, cfg.rows, cfg.deep_step * TILE), dtype, transforms=tiled(row, row * dtype.itemsize)
        ),
        plgpu.SMEM((cfg.stages, wgs, cfg.deep_step, WORDS, WORDS), jnp.int32),
        plgpu.SMEM((wgs, cfg.stored, TILE), out.dtype, transforms=tiled(out_width)),
        plgpu.Barrier(num_arrivals=1 + wgs, num_barriers=cfg.stages),
        plgpu.Barrier(num_arrivals=wgs, num_barriers=cfg.stages),
        plgpu.Barrier(num_arrivals=wgs, num_barriers=2),
        *([plgpu.SMEM((wgs, TILE, row), dtype)] if cfg.interpreted else []),
        collective_axes="wg",
    )


def _load(
    cfg: _Config, rounds: Any, x: Any, codes: Any, x_s: Any, codes_s: Any, full: Any, free: Any
) -> None:
    """The loading warpgroup."""
    # Other blocks of tokens read the same weights.
    load_codes = load_once if cfg.blocks == 1 else plgpu.copy_gmem_to_smem

    def one_unit(n: Any, nothing: Any) -> None:
        unit = _Unit(cfg, n)

        def one_step(j: Any, nothing: Any) -> None:
            before = n * cfg.steps + j
            slot = lax.rem(before, i32(cfg.stages))

            @pl.when(before >= cfg.stages)
            def _() -> None:
                plgpu.barrier_wait(free.at[slot])

            deep = unit.first + j * cfg.deep_step
            for wg in range(cfg.warpgroups):
                held = codes.at[unit.tile(wg), pl.ds(deep, cfg.deep_step)]
                load_codes(held, codes_s.at[slot, wg], full.at[slot])
            at = pl.ds(pl.multiple_of(deep * TILE, TILE), cfg.deep_step * TILE)
            plgpu.copy_gmem_to_smem(x.at[pl.ds(unit.row, cfg.rows), at], x_s.at[slot], full.at[slot])

        lax.fori_loop(0, cfg.steps, one_step, None)

    lax.fori_loop(0, rounds, one_unit, None)
    if cfg.interpreted:  # it wants every completion of a barrier to be seen
        for slot in range(cfg.stages):
            pl.when(rounds * cfg.steps > slot)(functools.partial(plgpu.barrier_wait, free.at[slot]))


def _compute(
    cfg: _Config,
    wg: Any,
    rounds: Any,
    scales: Any,  # of the weights, and of the tokens if they are in FP8
    out: Any,
    x_s: Any,
    codes_s: Any,
    staged: Any,  # [warpgroups, stored, TILE]
    unpacked: Any,  # shared memory of the interpreter's, or None
    full: Any,
    free: Any,
    met: Any,
) -> None:
    """A computing warpgroup."""

    def one_unit(n: Any, nothing: Any) -> None:
        unit = _Unit(cfg, n)

        def slot_of(j: Any) -> Any:
            return lax.rem(n * cfg.steps + j, i32(cfg.stages))

        def products(*accs: Any) -> Any:
            def one_step(j: Any, nothing: Any) -> None:
                slot = slot_of(j)
                plgpu.barrier_wait(full.at[slot])
                for i in range(0, cfg.deep_step, cfg.span):
                    codes = codes_s.at[slot, wg, pl.ds(i, cfg.span)]
                    weights = device_ops.unpack(codes, unpacked, narrow=cfg.narrow)
                    for acc, (first, rows) in zip(accs, cfg.parts, strict=True):
                        given = x_s.at[slot, pl.ds(first, rows), pl.ds(i * TILE, cfg.span * TILE)]
                        plgpu.wgmma(acc, weights, given.transpose((1, 0)))
                    plgpu.wgmma_wait(len(accs))  # registers of one left operand, while the next is unpacked
                    if i == 0:  # what the step before has issued is done only now
                        plgpu.barrier_arrive(free.at[slot_of(j - 1)], predicate=j > 0)

            # An even number of left operands has registers of its own in each round.
            at_once = 2 if cfg.deep_step // cfg.span % 2 else 1

            def one_round(k: Any, nothing: Any) -> None:
                for j in range(at_once):
                    one_step(k * at_once + j, None)

            lax.fori_loop(0, cfg.steps // at_once, one_round, None)
            if cfg.steps % at_once:
                one_step(i32(cfg.steps - 1), None)
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(free.at[slot_of(cfg.steps - 1)])
            return tuple(acc[...] for acc in accs)

        accs = [plgpu.ACC((TILE, rows), f32) for _, rows in cfg.parts]
        to = out.at[unit.split] if cfg.splits > 1 else out
        columns = _columns(unit.tile(wg))
        for sums, (first, rows) in zip(pl.run_scoped(products, *accs), cfg.parts, strict=True):
            if not cfg.narrow:
                sums = device_ops.in_full(sums, interpreted=cfg.interpreted)
            of = [(columns, BY_ROW), (pl.ds(unit.row + first, rows), BY_COLUMN)]
            if cfg.splits > 1:  # XLA, which adds the parts of the depth up, has the tokens' scales
                of = of[:1]
            for axis, (held, (at, layout)) in enumerate(zip(scales, of, strict=False)):
                factors = plgpu.load(held.at[at], layout=layout, optimized=False)
                sums = sums * lax.broadcast_in_dim(factors, (TILE, rows), (axis,))
            results = sums.astype(out.dtype)
            pieces = _pieces(rows, cfg.stored)
            if cfg.gate:
                for mine in range(2):
                    gates = functools.partial(_finish_gated, cfg, results, pieces, mine, staged, met)
                    pl.when(wg == mine)(functools.partial(gates, to, unit.row + first, _columns(unit.column)))
                continue
            for offset, stored in pieces:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                rows_s = staged.at[wg, pl.ds(0, stored)]
                some = results[:, offset : offset + stored]
                store_transposed(some, rows_s, interpreted=cfg.interpreted)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(rows_s, to.at[pl.ds(unit.row + first + offset, stored), columns])

    lax.fori_loop(0, rounds, one_unit, None)
    plgpu.wait_smem_to_gmem(0)


def _columns(tile: Any) -> Any:
    return pl.ds(pl.multiple_of(tile * TILE, TILE), TILE)


def _finish_gated(
    cfg: _Config,
    results: jax.Array,  # [TILE, rows]: of the first warpgroup gates
    pieces: list[tuple[int, int]],  # of the rows: the first warpgroup finishes the first
    mine: int,
    staged: Any,
    met: Any,
    out: Any,
    row: Any,
    columns: Any,
) -> None:
    """What a warpgroup of two does with the sums of a part of a block: takes the other's for its piece, and stores that."""
    other = 1 - mine
    (offset, rows), (left, left_rows) = pieces[mine], pieces[other]
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    to_other = staged.at[mine, pl.ds(0, left_rows)]
    store_transposed(results[:, left : left + left_rows], to_other, interpreted=cfg.interpreted)
    _meet(met.at[0])
    theirs = load_transposed(staged.at[other, pl.ds(0, rows)], interpreted=cfg.interpreted)
    _meet(met.at[1])
    own = in_transposed(results[:, offset : offset + rows], interpreted=cfg.interpreted)
    gates, values = (x.astype(f32) for x in ((own, theirs) if mine == 0 else (theirs, own)))
    assert cfg.gate
    rows_s = staged.at[mine, pl.ds(0, rows)]
    finished = gated(gates, values, cfg.gate).astype(out.dtype)
    store_transposed(finished, rows_s, interpreted=cfg.interpreted)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(rows_s, out.at[pl.ds(row + offset, rows), columns])


def _meet(barrier: Any) -> None:
    """Both warpgroups have come here."""
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)
