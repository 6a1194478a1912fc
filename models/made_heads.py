"""Queries, keys and values that attention makes itself, from the product that gives them."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from jaxtyping import Array, Float

from models.config import ModelConfig
from models.params import Params
from pallas_kernels.ragged_decode import Heads, Made, rope_of

Rope = tuple[Float[Array, "T D/2"], Float[Array, "T D/2"]]


@runtime_checkable
class AttendHeads(Protocol):
    """Attention that may make its heads itself, which saves the kernels that would."""

    def makes_heads(self) -> bool:
        """Whether it does, for all layers, of the tokens at hand."""
        ...

    def of_heads(
        self, state: Any, layer: int, heads: Heads, made: Made, sinks: Array | None
    ) -> tuple[Float[Array, "T A"], Any]:
        """(attention's result, state)."""
        ...


class LayerHeads:
    """What the heads of a model's layers are made of, but for the products."""

    def __init__(self, config: ModelConfig, dtype: Any, rope: Rope, sliding_rope: Rope) -> None:
        self.made = Made(config.num_kv_heads, str(dtype), config.norm_eps, config.norm_offset)
        self.columns = config.num_kv_heads * (config.group_size + 2) * config.head_dim
        self._config = config
        self._turned, self._sliding_turned = rope_of(*rope), rope_of(*sliding_rope)

    def of_layer(self, layer: int, params: Params, parts: Float[Array, "splits rows H"]) -> Heads:
        config = self._config
        heads = Heads(parts, self._sliding_turned if layer in config.sliding_layers else self._turned)
        if config.qkv_bias:
            heads = heads._replace(bias=params["qkv_bias"].reshape(-1))
        if config.qk_norm:
            heads = heads._replace(q_norm=params["q_norm"], k_norm=params["k_norm"])
        return heads


def making(attend: Any) -> AttendHeads | None:
    """`attend` if it makes heads."""
    return attend if isinstance(attend, AttendHeads) and attend.makes_heads() else None
