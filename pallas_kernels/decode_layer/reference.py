"""The same as XLA operations, on any backend."""

import jax

from pallas_kernels.gates import Gate
from pallas_kernels.layer_products import LayerWeights, layer_products_reference
from pallas_kernels.ragged_decode import DecodePlan, ragged_decode_reference
from pallas_kernels.ragged_decode.heads import Heads, Made, heads_reference


def decode_layer_reference(
    heads: Heads,
    pool: jax.Array,
    plan: DecodePlan,
    x: jax.Array,
    weights: LayerWeights,
    counters: jax.Array | None = None,
    following: jax.Array | None = None,
    *,
    made: Made,
    scale: float,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    gate: Gate = "silu",
    eps: float,
    offset: float = 0.0,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `decode_layer`; the arrays may have any float dtype. The next layer's heads are of one part."""
    del following
    qkv = heads_reference(heads, made)
    attended, _ = ragged_decode_reference(
        qkv, pool, plan, scale=scale, soft_cap=soft_cap, sinks=sinks, has_new=True
    )
    attended = attended.reshape(len(qkv), -1).astype(x.dtype)
    x, product = layer_products_reference(attended, x, weights, counters, gate=gate, eps=eps, offset=offset)
    assert product is not None
    return x, product[None].astype("float32"), qkv[:, :, -2:]
