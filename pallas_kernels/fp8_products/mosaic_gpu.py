"""The products with FP8 weights for Hopper GPUs, in Pallas' Mosaic GPU.

A warpgroup takes 64 columns of the weights, which it makes bfloat16 in registers, as the left operand of its matrix
instructions, and the tokens of a block as the right one; so a block may have as few as 8 tokens, and nothing of what is
unpacked goes through shared memory. Tokens in FP8 meet the codes themselves. One more warpgroup loads. A unit of work is a
block's tokens times the columns of a CTA's warpgroups, over the whole depth or a part of it. Parts of the depth are those of
a cluster's CTAs, which send each other their sums: each finishes some of the tokens.

The last block may have fewer tokens: copies fill what lies beyond an array with zeros, and write nothing there. Only tokens
that are no multiple of eight, the rows of a tile in shared memory, are padded. A matrix instruction takes up to 256 tokens;
those of a larger block meet each left operand in two parts, with sums of their own.

Left operands take turns: a warpgroup makes that of a step while the tensor cores still have the one of the step before.

Of a gated product one warpgroup of two has a tile of gates, the other that of what they let through. Each finishes half of
the tokens, with what the other one leaves in shared memory.
"""

import functools
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.fp8_products import device_ops, ends
from pallas_kernels.fp8_products.common import Config, Unit, f32, i32
from pallas_kernels.fp8_products.packing import TILE, WORDS, Fp8Weights
from pallas_kernels.fp8_products.tokens import Fp8Tokens
from pallas_kernels.fp8_products.tuning import LEAST_TOKENS, MOST_SPLITS, MOST_TOKENS, Tuning
from pallas_kernels.gates import Gate
from pallas_kernels.read_once import load_once

LOADING = 40  # registers of the loading warpgroup, where the others need many


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
        out = out.sum(0).astype(dtype)
    return out[:tokens]


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
    """[tokens, columns] in `dtype`, or f32[splits, tokens, columns] of the interpreter, which has no clusters.

    `of_tokens`: their scales, if they are in FP8.
    """
    across, deep = codes.shape[:2]
    tuning = (tuning.for_gates(across) if gate else tuning).for_weights(across, deep)
    wgs, splits, (deep_step, stages) = tuning.warpgroups, tuning.splits, tuning.steps(deep, x.dtype.itemsize)
    if splits > 1 and (tuning.part < tuning.rows or splits > MOST_SPLITS):
        raise ValueError(
            f"up to {MOST_SPLITS} parts of the depth, of blocks of up to {MOST_TOKENS} tokens, not {tuning}"
        )
    blocks, columns = -(-x.shape[0] // tuning.rows), across // wgs
    # A cluster has a unit: what its CTAs receive of the next one would need a place of its own.
    num_ctas = blocks * columns if splits > 1 else tuning.ctas()
    cfg = Config(
        blocks=blocks, rows=tuning.rows, part=tuning.part, stored=tuning.stored, columns=columns, warpgroups=wgs,
        splits=splits, steps=deep // splits // deep_step, deep_step=deep_step, stages=stages, num_ctas=num_ctas,
        narrow=bool(of_tokens), gate=gate, interpreted=interpret is not None,
    )  # fmt: skip
    shape = (x.shape[0], across // (2 if gate else 1) * TILE)
    out = jax.ShapeDtypeStruct(shape, dtype)
    grid: dict[str, Any] = {"grid": (num_ctas,), "grid_names": ("cta",)}
    if cfg.in_parts:
        grid = {"grid": (num_ctas, splits), "grid_names": ("cta", "split")}
        out = jax.ShapeDtypeStruct((splits, *shape), f32)
    elif splits > 1:
        grid |= {"cluster": (splits,), "cluster_names": ("split",)}

    given = {"x": x, "codes": codes, "scales": scales} | dict(zip(("of_tokens",), of_tokens, strict=False))

    def fp8_products(*refs: Any) -> None:  # the name that profiles show
        _kernel(cfg, x.dtype, dict(zip((*given, "out"), refs, strict=True)))

    kernel = plgpu.kernel(
        fp8_products,
        out_type=out,
        num_threads=wgs + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **grid,
        **({} if interpret is None else {"interpret": interpret}),
    )
    return kernel(*given.values())


def _kernel(cfg: Config, dtype: Any, gmem: dict[str, Any]) -> None:
    wgs, names = cfg.warpgroups, _scratch(cfg, dtype, gmem["out"].dtype)

    def body(*smem: Any) -> None:
        wg = lax.axis_index("wg")
        rounds = lax.div(cfg.units - lax.axis_index("cta") + (cfg.num_ctas - 1), i32(cfg.num_ctas))
        refs = gmem | dict(zip(names, smem, strict=True))

        # A block of many tokens has its sums in more registers than each warpgroup gets by default. More than all threads
        # get together would be waited for for ever.
        uneven = wgs > 1 and cfg.rows > 64
        by_default = 512 // (wgs + 1) // 8 * 8

        @pl.when(wg < wgs)
        def _compute_all() -> None:
            if uneven:
                plgpu.set_max_registers((by_default * (wgs + 1) - LOADING) // wgs // 8 * 8, action="increase")
            _compute(cfg, wg, rounds, refs)

        @pl.when(wg == wgs)
        def _load_all() -> None:
            if uneven:
                plgpu.set_max_registers(LOADING, action="decrease")
            _load(cfg, rounds, refs)

    pl.run_scoped(body, *names.values(), collective_axes="wg")


def _scratch(cfg: Config, dtype: Any, stored: Any) -> dict[str, Any]:
    """Shared memory and barriers, by name."""
    wgs, row = cfg.warpgroups, cfg.span * TILE

    def tiled(width: int, row: int = 128) -> Any:  # of rows of so many bytes
        return plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(row)  # type: ignore[abstract]

    tokens, width = (cfg.stages, cfg.rows, cfg.deep_step * TILE), 128 // stored.itemsize
    scratch = {
        "x_s": plgpu.SMEM(tokens, dtype, transforms=tiled(row, row * dtype.itemsize)),
        "codes_s": plgpu.SMEM((cfg.stages, wgs, cfg.deep_step, WORDS, WORDS), jnp.int32),
        "out_s": plgpu.SMEM((wgs, cfg.stored, TILE), stored, transforms=tiled(width)),
        "full": plgpu.Barrier(num_arrivals=1 + wgs, num_barriers=cfg.stages),
        "free": plgpu.Barrier(num_arrivals=wgs, num_barriers=cfg.stages),
    }
    if cfg.gate:
        scratch["met"] = plgpu.Barrier(num_arrivals=wgs, num_barriers=2)
    if cfg.splits > 1 and not cfg.in_parts:
        parts = (wgs, cfg.splits - 1, TILE, cfg.stored)
        scratch["received"] = plgpu.SMEM(parts, f32, transforms=tiled(8, 32))
        scratch["sent"] = plgpu.Barrier(num_arrivals=cfg.splits - 1, num_barriers=wgs)
    if cfg.interpreted:
        scratch["unpacked"] = plgpu.SMEM((wgs, TILE, row), dtype)
    return scratch


def _load(cfg: Config, rounds: Any, refs: dict[str, Any]) -> None:
    """The loading warpgroup."""
    x, codes, x_s, codes_s, full, free = (
        refs[name] for name in ("x", "codes", "x_s", "codes_s", "full", "free")
    )
    # Other blocks of tokens read the same weights.
    load_codes = load_once if cfg.blocks == 1 else plgpu.copy_gmem_to_smem

    def one_unit(n: Any, nothing: Any) -> None:
        unit = Unit(cfg, n)

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
            at = pl.ds(pl.multiple_of(deep * TILE, cfg.deep_step * TILE), cfg.deep_step * TILE)
            plgpu.copy_gmem_to_smem(x.at[pl.ds(unit.row, cfg.rows), at], x_s.at[slot], full.at[slot])

        lax.fori_loop(0, cfg.steps, one_step, None)

    lax.fori_loop(0, rounds, one_unit, None)
    if cfg.interpreted:  # it wants every completion of a barrier to be seen
        for slot in range(cfg.stages):
            pl.when(rounds * cfg.steps > slot)(functools.partial(plgpu.barrier_wait, free.at[slot]))


def _compute(cfg: Config, wg: Any, rounds: Any, refs: dict[str, Any]) -> None:
    """A computing warpgroup."""
    x_s, codes_s, full, free = (refs[name] for name in ("x_s", "codes_s", "full", "free"))
    unpacked = refs["unpacked"].at[wg] if cfg.interpreted else None

    def one_unit(n: Any, nothing: Any) -> None:
        unit = Unit(cfg, n)

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
        ends.finish(cfg, wg, unit, pl.run_scoped(products, *accs), refs)

    lax.fori_loop(0, rounds, one_unit, None)
    plgpu.wait_smem_to_gmem(0)
