"""Attention and the layer's products as one kernel for Hopper GPUs, in Pallas' Mosaic GPU.

What `ragged_decode` and `layer_products` do, one after the other on the same CTAs: where attention has no more pages to
read its loading warpgroup goes on with weights, so that the memory is not idle while the last tiles are worked through and
put together, and no kernel ends or begins between them. Their shared memory is the same: weights come to where pages lay as
soon as these are read, tokens once all CTAs have attended.

The interpreter knows neither part's counters; it has the two kernels one after the other.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.gates import Gate
from pallas_kernels.layer_products import Tuning as ProductsTuning
from pallas_kernels.layer_products import device_ops
from pallas_kernels.layer_products import mosaic_gpu as products
from pallas_kernels.layer_products.compute import compute
from pallas_kernels.layer_products.load import load_tokens, load_weights
from pallas_kernels.layer_products.phases import ATTENDED
from pallas_kernels.layer_products.phases import Config as ProductsConfig
from pallas_kernels.layer_products.tuning import COLUMNS, STEP
from pallas_kernels.layer_products.weights import LayerWeights
from pallas_kernels.ragged_decode import DecodePlan
from pallas_kernels.ragged_decode import Tuning as AttentionTuning
from pallas_kernels.ragged_decode import kernel as attention
from pallas_kernels.ragged_decode.common import Config as AttentionConfig
from pallas_kernels.ragged_decode.heads import Heads, Made, shape_of
from pallas_kernels.ragged_decode.load import load, wait_for_last
from pallas_kernels.ragged_decode.mosaic_gpu import config_of, operands_of
from pallas_kernels.ragged_decode.mosaic_gpu import results_of as attention_results

# Registers of a thread that computes, and of one that loads tokens; those that load pages and weights keep their 168.
COMPUTING, WAITING = 232, 104
MANY_TILES = 64  # of keys, and as many of values, that a CTA has read
LEAST_REDUCTION = 2048  # bytes in which a warpgroup's warps exchange what they reduce
MOST_QUERIES = 16  # of a KV head: those of more exchange so much that the twelfth slot of weights has no room
Arrays = dict[str, Any]


@functools.partial(
    jax.jit,
    static_argnames=(
        "made", "scale", "soft_cap", "gate", "eps", "offset", "attention_tuning", "products_tuning"
    ),
)  # fmt: skip
def decode_layer_mosaic_gpu(
    heads: Heads,
    pool: jax.Array,
    plan: DecodePlan,
    sinks: jax.Array | None,
    x: jax.Array,
    weights: LayerWeights,
    counters: jax.Array,
    following: jax.Array,
    links: jax.Array | None = None,
    *,
    made: Made,
    scale: float,
    soft_cap: float | None,
    gate: Gate,
    eps: float,
    offset: float,
    attention_tuning: AttentionTuning,
    products_tuning: ProductsTuning,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `pallas_kernels.decode_layer.decode_layer`."""
    shape = shape_of(heads, made)
    attend = config_of(
        shape, pool, plan, sinks, scale=scale, soft_cap=soft_cap, has_new=True, tokens=1, tuning=attention_tuning,
        made=made,
    )  # fmt: skip
    reduction = max(LEAST_REDUCTION, attention.REDUCTION_BYTES * attend.queries // 32)
    if attend.queries > MOST_QUERIES:
        slots = min(products_tuning.weight_slots, 11)
        products_tuning = dataclasses.replace(products_tuning, weight_slots=slots)
    multiply = ProductsConfig(
        tokens=len(x), tuning=products_tuning, eps=eps, offset=offset, interpreted=False, attends=True,
        phases=products.phases_for(x, weights, gate, products_tuning, links=links),
    )  # fmt: skip
    of_attention = operands_of(heads, pool, plan, sinks, attend)
    results = attention_results(attend, shape[0], x.dtype)
    given = weights.operands | {"x": x, "counters": counters, "following": following}
    given |= {} if links is None else {"links": links}
    made_there = products.results_of(x, multiply.phases)
    operands, outputs = (of_attention, given), (results, made_there)

    def decode_layer(*refs: Any) -> None:  # the name that profiles show
        rest = iter(refs)
        its = [dict(zip(part, rest, strict=False)) for part in (*operands, *outputs)]
        _kernel(attend, multiply, pool.dtype, its[0] | its[2], its[1] | its[3] | {"attended": its[2]["out"]})

    kernel = plgpu.kernel(
        decode_layer,
        out_type=[each for part in outputs for each in part.values()],
        grid=(products_tuning.ctas,),
        grid_names=("cta",),
        num_threads=3,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=reduction),
    )
    outs = kernel(*(each for part in operands for each in part.values()))
    known = dict(zip((*results, *made_there), outs, strict=True))
    return known["x_new"], known["heads_parts"], known["new"]


def fits(attend: AttentionConfig, tuning: ProductsTuning) -> bool:
    """Whether attention's memory and threads are some of the products'."""
    one = attend.turns == 1 and attend.loaders == 1 and attend.num_shares <= tuning.ctas
    return one and _slots_of_a_tile(attend) * attend.slots <= tuning.weight_slots


def _slots_of_a_tile(attend: AttentionConfig) -> int:
    """Slots of weights that a tile of keys or values lies in."""
    return attend.block * attend.head_dim // (STEP * COLUMNS)


def _kernel(
    attend: AttentionConfig, multiply: ProductsConfig, dtype: Any, gmem: Arrays, refs: Arrays
) -> None:
    cta = lax.axis_index("cta")
    each = _slots_of_a_tile(attend)
    apart = multiply.tuning.weight_slots - each * attend.slots  # first slots, in which no pages lie
    queries, pages, weighted, *page_barriers = attention.scratch(attend, dtype)
    there = [plgpu.SMEM((apart, STEP, COLUMNS), dtype)] if apart else []

    def body(shared: Any, *barriers: Any) -> None:
        wg = lax.axis_index("wg")
        *of_products, (*_, pages_s, queries_s, weighted_s) = shared
        weights_s, tokens_s, out_s = products.views_of(multiply, of_products)
        smem = (queries_s, pages_s, weighted_s, *barriers[:2])
        attention_refs = attention.refs_of(gmem, smem)
        slots = barriers[2:]

        @pl.when(wg == 0)
        def _compute() -> None:
            plgpu.set_max_registers(COMPUTING, action="increase")
            pl.when(cta < attend.num_shares)(lambda: attention.compute(attend, attention_refs, 0))
            device_ops.arrive(refs["counters"].at[ATTENDED])
            compute(multiply, refs, cta, wg, weights_s, tokens_s, out_s.at[0], *slots)

        @pl.when(wg == 1)
        def _load() -> None:
            attends = cta < attend.num_shares
            tiles = lax.cond(attends, lambda: load(attend, attention_refs), lambda: jnp.int32(0))
            # Weights asked for early keep pages of other CTAs waiting, which costs more than it gains where these are many.
            many, few = tiles >= MANY_TILES, tiles < MANY_TILES

            @pl.when(many)
            def _wait_for_all() -> None:
                for slot in range(attend.slots):
                    wait_for_last(attention_refs, tiles, slot)

            def first_use(slot: Any) -> None:
                at = slot - apart
                tile = lax.div(at, jnp.int32(each))
                begins = (at >= 0) & (at == tile * each)
                pl.when(begins & few)(lambda: wait_for_last(attention_refs, tiles, tile))

            load_weights(multiply, refs, cta, weights_s, slots[0], slots[1], first_use)

        @pl.when(wg == 2)
        def _load_tokens() -> None:
            plgpu.set_max_registers(WAITING, action="decrease")
            load_tokens(multiply, refs, cta, tokens_s, *slots[2:])

    shared = plgpu.RefUnion(*products.memory(multiply, dtype), (*there, pages, queries, weighted))
    pl.run_scoped(body, shared, *page_barriers, *products.barriers(multiply), collective_axes="wg")
