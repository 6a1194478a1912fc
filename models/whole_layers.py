"""Layers of a decode step that are one kernel each, attention and all; see `pallas_kernels.decode_layer`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from models.config import ModelConfig
from models.made_heads import LayerHeads, Rope
from models.params import Params
from models.products import EndOfLayer, end_of_layer, layer_tuning, product
from pallas_kernels import decode_layer
from pallas_kernels.decode_layer import Heads, Made, parts_of
from pallas_kernels.layer_products import Tuning
from pallas_kernels.norms import rms_norm


@runtime_checkable
class AttendToTheEnd(Protocol):
    """Attention that may have a kernel for itself and all that follows in a layer."""

    def reaches_the_end(self, tuning: Tuning) -> bool:
        """Whether it has one for all layers, with products of this tuning."""
        ...

    def to_the_end(
        self, state: Any, layer: int, heads: Heads, made: Made, sinks: Array | None, end: EndOfLayer
    ) -> tuple[tuple[Float[Array, "T E"], Float[Array, "splits rows H"]], Any]:
        """((the residual stream after the layer, parts of the following layer's heads), state)."""
        ...


def reaching(
    attend: Any, x: Float[Array, "T E"], config: ModelConfig, links: Array | None = None
) -> AttendToTheEnd | None:
    """`attend` if `run` takes it, with layers that have a kernel for their products, and is no slower."""
    tuning = layer_tuning(len(x), config, links)
    if tuning is None or config.num_experts or decode_layer.tuning_for(config.head_dim) is None:
        return None
    return attend if isinstance(attend, AttendToTheEnd) and attend.reaches_the_end(tuning) else None


def run(
    layers: Sequence[Params],
    x: Float[Array, "T E"],
    rope: Rope,
    sliding_rope: Rope,
    attend: AttendToTheEnd,
    state: Any,
    counters: Array,
    links: Array | None,
    config: ModelConfig,
) -> tuple[Float[Array, "T E"], Any]:
    """(the residual stream after all layers, state)."""
    tuning = layer_tuning(len(x), config, links)
    assert tuning is not None
    of_layers = LayerHeads(config, x.dtype, rope, sliding_rope)
    with jax.named_scope("heads"):
        normed = rms_norm(x, layers[0]["attn_norm"], config.norm_eps, config.norm_offset)
        first = product(normed, layers[0]["qkv"], (of_layers.columns,), config)
        parts = parts_of(first.astype(jnp.float32), x.shape[1], tuning)
    for layer, params in enumerate(layers):
        last = layer + 1 == len(layers)
        end = end_of_layer(params, params if last else layers[layer + 1], x, counters, links, config)
        end = end._replace(last=last)
        heads = of_layers.of_layer(layer, params, parts)
        with jax.named_scope(f"layer_{layer}"):
            sinks = params["sinks"] if config.attention_sinks else None
            (x, parts), state = attend.to_the_end(state, layer, heads, of_layers.made, sinks, end)
    return x, state
