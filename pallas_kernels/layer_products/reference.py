"""The same products as XLA operations, on any backend."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.dense_products.reference import dense_products_reference
from pallas_kernels.fp8_products import Fp8Weights, fp8_products_reference
from pallas_kernels.gates import Gate
from pallas_kernels.layer_products.weights import LayerWeights, Matrix, MixtureWeights, Routing
from pallas_kernels.norms import rms_norm


def times(x: jax.Array, matrix: Matrix, gate: Gate | None = None) -> jax.Array:
    """Of floats, or of weights in FP8."""
    if isinstance(matrix, Fp8Weights):
        return fp8_products_reference(x, matrix, gate=gate)
    return dense_products_reference(x, matrix, gate=gate)


def layer_products_reference(
    attended: jax.Array,
    x: jax.Array,
    weights: LayerWeights | MixtureWeights,
    counters: jax.Array | None = None,
    *,
    gate: Gate = "silu",
    eps: float,
    offset: float = 0.0,
    routing: Routing | None = None,
    axis: str | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """See `layer_products`; the arrays may have any float dtype. `axis`: of the devices that have a share each."""
    del counters
    w = weights
    norm = functools.partial(rms_norm, eps=eps, offset=offset)

    def over_devices(added: jax.Array) -> jax.Array:
        return added if axis is None else lax.psum(added, axis)

    added = over_devices(times(attended, w.out))
    if isinstance(w, MixtureWeights):
        assert routing is not None
        x = x + added
        x = x + over_devices(_experts(norm(x, w.norm), w, gate, routing)).astype(x.dtype)
    else:
        x = x + (added if w.out_post is None else norm(added, w.out_post))
        added = over_devices(times(times(norm(x, w.norm), w.gate_up, gate=gate), w.down))
        x = x + (added if w.down_post is None else norm(added, w.down_post))
    return x, None if w.next_norm is None or w.heads is None else times(norm(x, w.next_norm), w.heads)


def _experts(h: jax.Array, weights: MixtureWeights, gate: Gate, routing: Routing) -> jax.Array:
    """What the chosen experts make of one token, added up in float32."""
    logits = jnp.matmul(h[0], weights.router, preferred_element_type=jnp.float32)
    largest, chosen = lax.top_k(logits, routing.experts)
    shares = jax.nn.softmax(largest) if routing.normalize else jax.nn.softmax(logits)[chosen]
    products = [times(times(h, weights.gate_up[n], gate=gate), weights.down[n]) for n in chosen]
    return sum(
        (share * each.astype(jnp.float32) for share, each in zip(shares, products, strict=True)),
        jnp.zeros(h.shape, jnp.float32),
    )
