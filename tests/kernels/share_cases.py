"""Devices' shares of a layer's products: matrices, and what attention gave, of their own, all else the same on all."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import layer_products as lp
from tests.kernels.layer_cases import in_float32

SAME = ("norm", "out_post", "down_post", "next_norm", "router")
AXIS = "tensor"


def shares_of(case: Any, devices: int) -> tuple[jax.Array, jax.Array, Any]:
    """Attention's results [N, T, A], the residual stream [T, E], and weights whose leaves have N in front."""
    arrays = [dataclasses.replace(case, seed=seed).arrays() for seed in range(devices)]
    _, x, first = arrays[0]
    weights = [
        each._replace(**{name: getattr(first, name) for name in SAME if hasattr(first, name)})
        for _, _, each in arrays
    ]
    return (
        jnp.stack([attended for attended, *_ in arrays]),
        x,
        jax.tree.map(lambda *x: jnp.stack(x), *weights),
    )


def options(case: Any) -> dict[str, Any]:
    """Of `layer_products`."""
    chosen = getattr(case, "chosen", 0)
    routing = lp.Routing(chosen, case.normalize) if chosen else None
    return {"gate": case.gate, "eps": 1e-5, "offset": case.offset, "routing": routing}


def exact(case: Any, attended: jax.Array, x: jax.Array, weights: Any) -> tuple[jax.Array, jax.Array | None]:
    """In float32: the residual stream [T, E], and each device's heads [N, T, H]."""
    attended, x, weights = jax.tree.map(in_float32, (attended, x, weights))

    def on_one(attended: jax.Array, weights: Any) -> tuple[jax.Array, jax.Array | None]:
        return lp.layer_products_reference(attended, x, weights, axis=AXIS, **options(case))

    out, heads = jax.vmap(on_one, axis_name=AXIS)(attended, weights)
    return out[0], heads
