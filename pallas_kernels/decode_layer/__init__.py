"""A layer of a decode step as one kernel, from the parts of its heads to those of the next layer's."""

import jax
import jax.numpy as jnp

from pallas_kernels import layer_products, ragged_decode
from pallas_kernels.decode_layer.reference import decode_layer_reference
from pallas_kernels.decode_layer.tuning import TUNING, tuning_for
from pallas_kernels.gates import Gate
from pallas_kernels.layer_products import LayerWeights
from pallas_kernels.layer_products.tuning import TOKENS, splits
from pallas_kernels.ragged_decode import DecodePlan, Heads, Made, heads_reference, rope_of, shape_of

__all__ = [
    "TUNING",
    "Heads",
    "Made",
    "check_supported",
    "decode_layer",
    "decode_layer_reference",
    "heads_reference",
    "parts_of",
    "rope_of",
    "tuning_for",
]


def check_supported(
    shape: tuple[int, ...],
    dtype: jax.typing.DTypeLike,
    pool: jax.Array,
    plan: DecodePlan,
    products: layer_products.Tuning | None,
    attention: ragged_decode.Tuning | None = None,
) -> None:
    """Raises NotImplementedError where this attention and products tuned so are no one kernel; see `decode_layer`.

    shape (T, K, G + 2, D) of queries, key and value.
    """
    from pallas_kernels.decode_layer.mosaic_gpu import fits
    from pallas_kernels.ragged_decode.mosaic_gpu import config_of

    rows, kv_heads, held, head_dim = shape
    if rows > TOKENS:
        raise NotImplementedError(
            f"{rows} tokens: one kernel takes {TOKENS} at most, with more two are faster"
        )
    ragged_decode.check_supported((rows, kv_heads, held - 2, head_dim), dtype, pool.shape, pool.dtype)
    if products is None:
        raise NotImplementedError("the layer's products have no kernel: see `layer_products`")
    if products.fp8:
        raise NotImplementedError(
            "weights in FP8: attention and the layer's products are faster as two kernels"
        )
    tuning = attention or ragged_decode.tuning_for()
    config = config_of(
        shape, pool, plan, None, scale=1.0, soft_cap=None, has_new=True, tokens=1, tuning=tuning
    )
    if not fits(config, products):
        raise NotImplementedError(
            f"attention over {plan.num_shares} shares of pages of {plan.page_size} {pool.dtype} entries beside "
            f"{products}: one kernel takes 16-bit pages of more than {tuning.small_page} bytes a head, tiles that fit in "
            "the slots of weights, and no more shares than CTAs"
        )


def parts_of(heads: jax.Array, width: int, tuning: layer_products.Tuning) -> jax.Array:
    """A product [T, H] with weights of `width` rows as `decode_layer` gives that of the next layer."""
    tokens, columns = heads.shape
    rows = -(-tokens // TOKENS) * TOKENS
    return (
        jnp.zeros((splits(width, columns, tuning.ctas), rows, columns), jnp.float32).at[0, :tokens].set(heads)
    )


def decode_layer(
    heads: Heads,
    pool: jax.Array,
    plan: DecodePlan,
    x: jax.Array,
    weights: LayerWeights,
    counters: jax.Array,
    following: jax.Array,
    links: jax.Array | None = None,
    *,
    made: Made,
    scale: float,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    gate: Gate = "silu",
    eps: float,
    offset: float = 0.0,
    attention_tuning: ragged_decode.Tuning | None = None,
    products_tuning: layer_products.Tuning | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The residual stream [T, E] at the end of a layer; the next layer's heads, and this one's keys and values.

    The next layer's are parts f32[splits, rows, H] as `Heads` has them; keys and values [T, K, 2, D] are those to append.

    Args:
      heads, made: what queries, key and value of the one token of each request are made of, and how.
      pool, plan, scale, soft_cap, sinks: as in `ragged_decode`.
      x, weights, counters, gate, eps, offset: as in `layer_products`; the weights have those of the next layer's heads.
      following: i32[1], 0 where no layer follows: weights for its heads are not read then, and the heads are anything. So
        all layers of a model have the same kernel.
      links: as in `layer_products`; heads, pool and plan are the device's own.
      attention_tuning, products_tuning: by default the device's, and that for these shapes.

    Raises:
      NotImplementedError: for what `check_supported` says; `decode_layer_reference` takes the same.
      ValueError: for shapes that do not belong together, as in `layer_products`.
    """
    from pallas_kernels.decode_layer.mosaic_gpu import decode_layer_mosaic_gpu

    tokens, kv_heads, held, head_dim = shape = shape_of(heads, made)
    if weights.heads is None:
        raise ValueError(
            "weights without heads: give some of the same shapes for the last layer, which are not read"
        )
    attended = jax.ShapeDtypeStruct((tokens, kv_heads * (held - 2) * head_dim), x.dtype)
    layer_products.check_shapes(attended, x, weights, counters)
    products_tuning = products_tuning or layer_products.tuning_for(len(x), *weights.columns, fp8=weights.fp8)
    attention_tuning = attention_tuning or ragged_decode.tuning_for()
    check_supported(shape, made.dtype, pool, plan, products_tuning, attention_tuning)
    layer_products.check_supported(x, *weights.given.values())
    return decode_layer_mosaic_gpu(
        heads, pool, plan, sinks, x, weights, counters, following, links, made=made, scale=float(scale),
        soft_cap=None if soft_cap is None else float(soft_cap), gate=gate, eps=eps, offset=offset,
        attention_tuning=attention_tuning, products_tuning=products_tuning,
    )  # fmt: skip
