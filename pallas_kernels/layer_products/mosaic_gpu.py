"""The layer's products for Hopper GPUs, in Pallas' Mosaic GPU.

CTAs stay on their multiprocessors and work through three or four products (`phases`), with barriers over the grid between
them. A tile has 128 columns, and where tiles are fewer than CTAs their depth is split: parts go to global memory, where each
tile's CTAs add them up with the residual, and the norm's factor comes behind the next product (`by_tile`); or one CTA for
each token does, and makes the norms (`compute`). The depth of gates is not split: where tiles of 64 columns are no more than
CTAs, they have these. Where tiles of 128 are more than CTAs, the last ones come first, all CTAs' with their depth split. A
warpgroup loads weights ahead across the barriers, so that the memory is not idle meanwhile, but few at a time: loads queue,
and what a barrier stores and reads would wait behind them
(`load`). Weights are read once, so the L2 keeps what CTAs leave there for each other, and forgets what of that is spent, so
that little of it is ever written to the memory. Weights in FP8 have products of their own (`fp8`), the rest is the same.

Of one token's products with experts a router is one more, whose largest numbers one CTA finds (`choice`), after which the
chosen experts' weights are loaded (`phases.mixture_phases`).
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.all_reduce.links import EVEN, MOST_COLUMNS, PARTS, most_rows
from pallas_kernels.fp8_products.packing import TILE, WORDS
from pallas_kernels.gates import Gate
from pallas_kernels.layer_products.by_tile import LINE_OF_NUMBERS
from pallas_kernels.layer_products.by_tile import add_up as add_up_tile
from pallas_kernels.layer_products.compute import LINE, WARPGROUP, add_up, choose, compute, f32, open_last
from pallas_kernels.layer_products.load import load_tokens, load_weights
from pallas_kernels.layer_products.phases import (
    HALVES,
    MOST_PHASES,
    Addition,
    Config,
    Phase,
    Share,
    added_by_tile,
    adds_by_tile,
    mixture_phases,
    phases_of,
)
from pallas_kernels.layer_products.tuning import COLUMNS, STEP, TOKENS, Tuning
from pallas_kernels.layer_products.weights import LayerWeights, MixtureWeights, Routing, scales_of
from pallas_kernels.support import num_sms

COMPUTING, LOADING = 216, 40  # registers of a thread, with two warpgroups of each
PARAMS = plgpu.CompilerParams(approx_math=True)
Arrays = dict[str, jax.Array]


@functools.partial(
    jax.jit, static_argnames=("gate", "eps", "offset", "tuning", "routing", "interpret", "in_parts")
)
def layer_products_mosaic_gpu(
    attended: jax.Array,
    x: jax.Array,
    weights: LayerWeights | MixtureWeights,
    counters: jax.Array,
    links: jax.Array | None = None,
    *,
    gate: Gate,
    eps: float,
    offset: float,
    tuning: Tuning,
    routing: Routing | None = None,
    interpret: Any = None,
    in_parts: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """See `pallas_kernels.layer_products.layer_products`."""
    interpreted = interpret is not None
    phases = phases_for(x, weights, gate, tuning, routing, links, interpreted=interpreted)
    given = weights.operands | {"attended": attended, "x": x, "counters": counters}
    given |= {} if links is None else {"links": links}
    made = results_of(x, phases)
    config = functools.partial(
        Config, tokens=len(x), tuning=tuning, eps=eps, offset=offset, routing=routing, interpreted=interpreted
    )
    if interpreted:
        known = _interpreted([config(phases=(phase,)) for phase in phases], given, made, interpret)
    else:
        known = _call(config(phases=phases), given, made)
    parts = known.get("heads_parts")
    if parts is not None and not in_parts:
        # What reads the heads adds up their parts: a kernel of their sums alone would be one more.
        parts = parts[:, : len(x)].sum(0).astype(x.dtype)
    return known["x_new"], parts


def phases_for(
    x: jax.Array,
    weights: LayerWeights | MixtureWeights,
    gate: Gate,
    tuning: Tuning,
    routing: Routing | None = None,
    links: jax.Array | None = None,
    *,
    interpreted: bool = False,
) -> tuple[Phase, ...]:
    """Raises ValueError for weights that `tuning` cannot cut, and for what `links` have no place for."""
    tokens, (depth, width, inner, heads) = len(x), weights.columns
    if width % COLUMNS or inner % COLUMNS or heads % COLUMNS or depth % tuning.step:
        raise ValueError(f"{weights.columns} columns cannot be cut into tiles of {COLUMNS}")
    post_norms = isinstance(weights, LayerWeights) and weights.out_post is not None
    if isinstance(weights, MixtureWeights):
        assert routing is not None
        phases = mixture_phases(*weights.columns, gate, tuning, weights.router.shape[1], routing)
    else:
        phases = phases_of(*weights.columns, gate, post_norms, tuning)
    if tuning.by_tile and adds_by_tile(x, post_norms):
        phases = added_by_tile(phases)
    if weights.fp8 != tuning.fp8:
        raise ValueError(f"weights {'' if weights.fp8 else 'not '}in FP8: {tuning} is for others")
    most = max([phase.ctas for phase in phases] + [tokens] * (not interpreted))
    if most > tuning.ctas:
        raise ValueError(f"{weights.columns} columns for {tokens} tokens need {most} CTAs: {tuning}")
    if links is not None and not interpreted:
        rows = most_rows(links.shape[0] - 1)
        if most > PARTS or tokens > rows or width % EVEN or width > MOST_COLUMNS:
            raise ValueError(
                f"{weights.columns} columns of {tokens} tokens in {most} CTAs: links between devices have places for "
                f"multiples of {EVEN} up to {MOST_COLUMNS} columns, {rows} tokens and {PARTS} CTAs"
            )
    if not interpreted and tuning.ctas > num_sms():  # they would wait for some that never run
        raise ValueError(f"{tuning}: there are {num_sms()} multiprocessors")
    return phases


def results_of(x: jax.Array, phases: tuple[Phase, ...]) -> dict[str, jax.ShapeDtypeStruct]:
    """What the kernel makes, by name."""
    tokens, rows = len(x), -(-len(x) // TOKENS) * TOKENS
    made = {}
    for phase in phases:
        if phase.gate:
            columns = phase.columns + phase.others * phase.wide
            made[phase.out] = jax.ShapeDtypeStruct((tokens, columns), x.dtype)
        else:
            made[phase.out] = jax.ShapeDtypeStruct((phase.splits, rows, phase.columns), f32)
        if phase.addition:
            made |= dict.fromkeys(phase.addition.made, jax.ShapeDtypeStruct(x.shape, x.dtype))
            if phase.addition.squares:
                made[phase.addition.squares] = jax.ShapeDtypeStruct((phase.tiles, LINE_OF_NUMBERS), f32)
        if phase.chooses:
            made |= choice_of(phase)
    return made


def choice_of(phase: Phase) -> dict[str, jax.ShapeDtypeStruct]:
    """What is made of a router's product: its numbers, the chosen experts, the likeliest first, and their weights."""
    each = jax.ShapeDtypeStruct((phase.chooses,), f32)
    logits = jax.ShapeDtypeStruct((phase.columns,), f32)
    return {"logits": logits, "chosen": jax.ShapeDtypeStruct(each.shape, jnp.int32), "factors": each}


def _call(cfg: Config, given: Arrays, made: dict[str, Any], interpret: Any = None) -> Arrays:
    def layer_products(*refs: Any) -> None:  # the name that profiles show
        _kernel(cfg, given["x"].dtype, dict(zip((*given, *made), refs, strict=True)))

    kernel = plgpu.kernel(
        layer_products, out_type=list(made.values()), grid=(cfg.tuning.ctas,), grid_names=("cta",),
        num_threads=cfg.warpgroups + 2, thread_name="wg", compiler_params=PARAMS,
        **({} if interpret is None else {"interpret": interpret}),
    )  # fmt: skip
    return dict(zip(made, kernel(*given.values()), strict=True))


def _kernel(cfg: Config, dtype: Any, refs: dict[str, Any]) -> None:
    cta, wgs = lax.axis_index("cta"), cfg.warpgroups

    def body(shared: Any, *slots: Any) -> None:
        wg = lax.axis_index("wg")
        weights_s, tokens_s, out_s = views_of(cfg, shared)

        def registers(count: int, action: Any) -> None:
            if wgs == 2:
                plgpu.set_max_registers(count, action=action)

        @pl.when(wg < wgs)
        def _compute() -> None:
            registers(COMPUTING, "increase")
            compute(cfg, refs, cta, wg, weights_s, tokens_s, out_s.at[wg], *slots)

        @pl.when(wg == wgs)
        def _load_weights() -> None:
            registers(LOADING, "decrease")
            load_weights(cfg, refs, cta, weights_s, *slots[:2])

        @pl.when(wg == wgs + 1)
        def _load_tokens() -> None:
            registers(LOADING, "decrease")
            load_tokens(cfg, refs, cta, tokens_s, *slots[2 : 6 if cfg.scales else 4])

    spare = [plgpu.SMEM((wgs, TILE, TILE), dtype)] * (cfg.interpreted and cfg.tuning.fp8)
    shared = plgpu.RefUnion(*memory(cfg, dtype))
    pl.run_scoped(body, shared, *barriers(cfg), *spare, collective_axes="wg")


def memory(cfg: Config, dtype: Any) -> list[tuple[Any, ...]]:
    """Shared memory of weights, tokens and what is stored, then weights in other shapes, which lie in the same place."""
    tiled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))  # type: ignore[abstract]
    wgs, tuning = cfg.warpgroups, cfg.tuning
    read_on = 0 if tuning.fp8 else wgs * TOKENS - cfg.slot_rows
    shapes = [(tuning.weight_slots, STEP * COLUMNS // wide, wide) for wide in cfg.wides]
    weights = [plgpu.SMEM(shape, dtype, transforms=tiled) for shape in shapes]
    if tuning.fp8:  # as they are packed
        weights = [plgpu.SMEM((tuning.weight_slots, HALVES, tuning.step // TILE, WORDS, WORDS), jnp.int32)]
    tokens = plgpu.SMEM((tuning.token_slots * cfg.slot_rows + read_on, tuning.step), dtype, transforms=tiled)
    stored = plgpu.SMEM((wgs, cfg.slot_rows if tuning.fp8 else TOKENS, LINE), dtype, transforms=tiled)
    return [(weights[0], tokens, stored), *((each,) for each in weights[1:])]


def views_of(cfg: Config, held: Sequence[Any]) -> tuple[dict[int, Any], Any, Any]:
    """What is made of `memory`: weights by how many columns a tile of them has, tokens, and what is stored."""
    (first, tokens, stored), *others = held
    weights = [first, *(each for (each,) in others)]
    return dict(zip(cfg.wides, weights, strict=True)), tokens, stored


def barriers(cfg: Config) -> list[Any]:
    """Of slots of weights that are full and that are free, and of tokens.

    Where norms' factors come behind products, of phases whose factors are there, and these in shared memory. Where
    warpgroups exchange sums, of those that are there for each and that each has read, and these in shared memory.
    """
    tuning, wgs = cfg.tuning, cfg.warpgroups
    counts = (tuning.weight_slots, 1 if tuning.fp8 else wgs), (tuning.token_slots, wgs)
    held = [
        plgpu.Barrier(num_arrivals=arrivals, num_barriers=slots)
        for slots, reading in counts
        for arrivals in (1, reading)
    ]
    factors = [plgpu.Barrier(num_barriers=MOST_PHASES), plgpu.SMEM((LINE_OF_NUMBERS,), f32)]
    exchanged = [
        plgpu.Barrier(num_barriers=2 * HALVES),
        plgpu.SMEM((HALVES, cfg.slot_rows // 4, WARPGROUP, 2), f32),
    ]
    return held + factors * cfg.scales + exchanged * tuning.fp8


def _interpreted(configs: list[Config], given: Arrays, made: dict[str, Any], interpret: Any) -> Arrays:
    """A call for each product and for the sums of its parts: the interpreter has no barriers over the grid."""
    known = dict(given)
    for cfg in configs:
        (phase,) = cfg.phases
        others = [scales_of(phase.weights)] * cfg.tuning.fp8 + ["chosen", "factors"] * bool(phase.experts)
        others += [phase.scaled[0]] if phase.scaled else []
        used = {name: known[name] for name in (phase.source, phase.weights, "x", *others)}
        known |= _call(cfg, used, {phase.out: made[phase.out]}, interpret)
        if phase.addition:
            known |= _added_up(cfg, phase, phase.addition, known, made, interpret)
        if phase.chooses:
            known |= _chosen(cfg, phase, known, interpret)
        if phase.opens:
            last = _opened_last(cfg, phase, known, made, interpret)
        if phase.others and phase.gate:
            known[phase.out] = jnp.concatenate([known[phase.out][:, : phase.columns], last], axis=1)
    return known


def _added_up(
    cfg: Config, phase: Phase, how: Addition, known: Arrays, made: dict[str, Any], interpret: Any
) -> Arrays:
    given = {name: known[name] for name in (phase.out, *how.given)}
    if "links" in known:  # what others have of this product
        given["links"] = known["links"][int(phase.number > 0)]
    if how.by_tile:
        return _added_up_by_tile(cfg, phase, how, given, made, interpret)

    def add_up_rows(*refs: Any) -> None:
        held = dict(zip((*given, *how.made), refs, strict=True))
        add_up(cfg, held, phase, lax.axis_index("row"), lambda: None)

    kernel = plgpu.kernel(
        add_up_rows, out_type=[made[name] for name in how.made], grid=(cfg.tokens,), grid_names=("row",),
        compiler_params=PARAMS, interpret=interpret,
    )  # fmt: skip
    return dict(zip(how.made, kernel(*given.values()), strict=True))


def _added_up_by_tile(
    cfg: Config, phase: Phase, how: Addition, given: Arrays, made: dict[str, Any], interpret: Any
) -> Arrays:
    names = [*how.made, *([how.squares] if how.squares else [])]

    def add_up_tiles(*refs: Any) -> None:
        tile, split = lax.axis_index("tile"), lax.axis_index("split")
        share = Share(tile, split, None, None, None)
        add_up_tile(cfg, dict(zip((*given, *names), refs, strict=True)), phase, share, lambda: None)

    kernel = plgpu.kernel(
        add_up_tiles, out_type=[made[name] for name in names], grid=(phase.tiles, cfg.adding(phase)),
        grid_names=("tile", "split"), compiler_params=PARAMS, interpret=interpret,
    )  # fmt: skip
    return dict(zip(names, kernel(*given.values()), strict=True))


def _opened_last(cfg: Config, phase: Phase, known: Arrays, made: dict[str, Any], interpret: Any) -> jax.Array:
    def open_rows(parts: Any, opened: Any) -> None:
        open_last({phase.out: parts, "opened": opened}, phase, lax.axis_index("row"))

    kernel = plgpu.kernel(
        open_rows, out_type=made["opened"], grid=(cfg.tokens,), grid_names=("row",),
        compiler_params=PARAMS, interpret=interpret,
    )  # fmt: skip
    return kernel(known[phase.out])[:, phase.others * COLUMNS :]


def _chosen(cfg: Config, phase: Phase, known: Arrays, interpret: Any) -> Arrays:
    made = choice_of(phase)

    def choose_experts(parts: Any, *outs: Any) -> None:
        choose(cfg, {phase.out: parts} | dict(zip(made, outs, strict=True)), phase)

    kernel = plgpu.kernel(
        choose_experts, out_type=list(made.values()), compiler_params=PARAMS, interpret=interpret
    )
    return dict(zip(made, kernel(known[phase.out]), strict=True))
