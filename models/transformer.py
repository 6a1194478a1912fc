"""The forward pass of the Llama family (Mistral, Qwen, Gemma, GPT-OSS), which takes attention as an argument.

Tokens are flat (no batch axis), so the chunk and decode tokens of one engine step share the matrix products. The
model does not know about caches: it calls `attend` once per layer and threads its state through.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from models import whole_layers
from models.config import ModelConfig
from models.experts import expert_mlp
from models.made_heads import LayerHeads, making
from models.params import Params
from models.products import (
    added_norm,
    added_product,
    end_of_layer,
    ended,
    gated_product,
    has_layer_kernel,
    may_add,
    product,
)
from models.rope import rope_tables, rotate
from models.shares import Share, over_devices
from pallas_kernels.dense_products import Scaled
from pallas_kernels.layer_products import counters_of
from pallas_kernels.norms import rms_norm

MANY_TOKENS = 1024  # from which on norms of heads are worth a kernel for their sums, and the rest goes with the rotation


@runtime_checkable
class Attend(Protocol):
    """Attention of one layer: q[T, N, D], k[T, K, D], v[T, K, D] (q and k after RoPE) -> (out[T, N, D], state).

    Of models with attention sinks it gets `sinks`[K, G] as well, a logit of every query head that has no value.
    `layer` is a Python int. To be traced once for all layers, an implementation jits its inner function and
    passes `layer` as an array.
    """

    def __call__(
        self, state: Any, layer: int, q: Array, k: Array, v: Array, sinks: Array | None = None
    ) -> tuple[Array, Any]: ...


def soft_cap(x: Float[Array, "*S"], cap: float) -> Float[Array, "*S"]:
    """cap * tanh(x / cap): x where it is small, and never beyond +-cap."""
    return cap * jnp.tanh(x / cap)


def _norm(x: Array, weight: Array, config: ModelConfig) -> Array:
    return rms_norm(x, weight, config.norm_eps, config.norm_offset)


def _embed(table: Array, tokens: Array, config: ModelConfig, links: Array | None) -> Array:
    """Rows of the embedding; a device's share of it may have a part of the vocabulary."""
    size = table.shape[0]
    if config.tensor_axis is None or size == config.vocab_size:
        return table[tokens]
    at = tokens - jax.lax.axis_index(config.tensor_axis) * size
    mine = (at >= 0) & (at < size)
    return over_devices(Share(jnp.where(mine[:, None], table[jnp.where(mine, at, 0)], 0), links), config)


# The two halves of a layer are jitted by themselves: they are traced once, not once per layer, and XLA inlines them.


@partial(jax.jit, static_argnames="config")
def _attention_inputs(
    layer_params: Params,
    x: Array,
    added: Array | Share | Scaled | None,
    heads: Array | None,
    cos: Array,
    sin: Array,
    config: ModelConfig,
) -> tuple[Array, Array, Array, Array]:
    """(x + added, q, k, v). `heads`: the product that these are made of, where the layer before has it."""
    T, G = x.shape[0], config.group_size
    shape = (config.num_kv_heads, G + 2, config.head_dim)
    if heads is None:
        with jax.named_scope("attn_norm"):
            x, h = added_norm(x, added, layer_params["attn_norm"], layer_params["qkv"], config)
    with jax.named_scope("qkv"):
        qkv = product(h, layer_params["qkv"], shape, config) if heads is None else heads.reshape(T, *shape)
        if config.qkv_bias:
            qkv = qkv + layer_params["qkv_bias"]
    if config.qk_norm:
        with jax.named_scope("qk_norm"):
            # All heads at once, the values' for nothing: on a GPU one kernel, where queries and keys alone were five.
            head = jnp.arange(G + 2)[:, None]
            weight = jnp.where(head < G, layer_params["q_norm"], layer_params["k_norm"])
            normed = rms_norm(qkv, weight, config.norm_eps, config.norm_offset, hold=T >= MANY_TOKENS)
            qkv = jnp.where(head <= G, normed, qkv)
    q = qkv[:, :, :G].reshape(T, config.num_heads, config.head_dim)
    k, v = qkv[:, :, G], qkv[:, :, G + 1]
    with jax.named_scope("rope"):
        return x, rotate(q, cos, sin), rotate(k, cos, sin), v


@partial(jax.jit, static_argnames="config")
def _heads_product(
    layer_params: Params, x: Array, added: Array | Share | Scaled | None, config: ModelConfig
) -> tuple[Array, Array]:
    """(x + added, the product [1, T, H] of which attention makes its heads)."""
    with jax.named_scope("attn_norm"):
        x, h = added_norm(x, added, layer_params["attn_norm"], layer_params["qkv"], config)
    with jax.named_scope("qkv"):
        columns = config.num_kv_heads * (config.group_size + 2) * config.head_dim
        return x, product(h, layer_params["qkv"], (columns,), config)[None]


@partial(jax.jit, static_argnames=("config", "in_parts"))
def _after_attention(
    layer_params: Params,
    following: Params | None,
    x: Array,
    attended: Array,
    there: Array | None,
    links: Array | None,
    counters: Array | None,
    config: ModelConfig,
    in_parts: bool = False,
) -> tuple[Array, Array | Share | Scaled | None, Array | None]:
    """(x, what is to be added to it or its norm, see `added_norm`; the following layer's heads).

    `counters`: of `end_of_layer`, or there is none. `in_parts`: see `ended`.
    """
    h: Any = attended.reshape(x.shape[0], -1).astype(x.dtype)
    if counters is not None:
        with jax.named_scope("end_of_layer"):
            x, heads = ended(h, end_of_layer(layer_params, following, x, counters, links, config), in_parts)
        return x, None, heads
    routed = "router" in layer_params
    gates = None if routed else layer_params["gate_up"]
    out, norm = layer_params["attn_out"], layer_params["mlp_norm"]
    with jax.named_scope("attn_out"):
        done = added_product(h, out, x, norm, gates, config, gated=True)
        if done is None:
            added = _shared(product(h, out, (x.shape[1],), config), links, config)
            if config.attn_out_bias:
                added = _whole(added, config) + layer_params["attn_out_bias"]
            if config.post_norms:
                added = _norm(_whole(added, config), layer_params["attn_post_norm"], config)
    with jax.named_scope("mlp_norm"):
        x, h = added_norm(x, added, norm, gates, config) if done is None else done
    with jax.named_scope("mlp"):
        if routed:
            h = expert_mlp(layer_params, h, config, there)
        else:
            h, down = gated_product(h, layer_params["gate_up"], config), layer_params["down"]
            if following is not None:
                done = added_product(h, down, x, following["attn_norm"], following["qkv"], config)
                if done is not None:
                    return *done, None
            h = product(h, down, (config.hidden_size,), config)
        added = _shared(h, links, config)
        if config.post_norms:
            added = _norm(_whole(added, config), layer_params["mlp_post_norm"], config)
        return x, added, None


def _shared(h: Array, links: Array | None, config: ModelConfig) -> Array | Share:
    """Of a product over an axis that is dealt to the devices."""
    return h if config.tensor_axis is None else Share(h, links)


def _whole(added: Array | Share, config: ModelConfig) -> Array:
    return over_devices(added, config) if isinstance(added, Share) else added


def check_tokens(config: ModelConfig, tokens: Any, there: Any = None) -> None:
    """Raises ValueError on ids beyond the vocabulary, which an embedding clips, among the tokens that are `there`.

    Traced ones pass, as nothing can be raised for them.
    """
    if isinstance(tokens, jax.core.Tracer) or isinstance(there, jax.core.Tracer):
        return
    ids = np.asarray(tokens)
    wrong = (ids < 0) | (ids >= config.vocab_size)
    if there is not None:
        wrong &= np.asarray(there)
    if wrong.any():
        raise ValueError(
            f"token {ids[wrong][0]} is none of model {config.name}, whose vocabulary has {config.vocab_size}: expected ids "
            f"from 0 to {config.vocab_size - 1}"
        )


def forward(
    params: Params,
    config: ModelConfig,
    tokens: Int[Array, " T"],
    positions: Int[Array, " T"],
    attend: Attend,
    state: Any,
    *,
    logits_at: Int[Array, " R"] | None = None,
    there: Bool[Array, " T"] | None = None,
) -> tuple[Float[Array, "R V"], Any]:
    """Logits of `tokens` i32[T] at the true `positions` i32[T], and the attention's new state.

    Args:
      params: weights, float32, bfloat16 or float16, in the structure of `models.params.param_specs`; those of the dense
        products may be in FP8 (`weights_fp8`). With "links" (`all_reduce.links_of`) linked GPUs add up shares by themselves.
      config: of the whole model; within `jax.shard_map` that of a device's share, and `params` its parts.
      attend: see `Attend`; called for layers 0..L-1 in order. The windows of sliding layers are its business.
      state: any pytree, handed to the first call of `attend` and returned by the last.
      logits_at: i32[R], the rows of `tokens` for which logits are wanted; only these go through the head.
        None: all T rows.
      there: bool[T], False for padding, of which attention and experts may make anything. None: all are.

    Returns:
      (logits f32[R or T, V], state)

    Raises:
      ValueError: on tokens beyond the vocabulary, where it is not traced.
    """
    check_tokens(config, tokens, there)
    links = params["links"][0] if "links" in params and config.tensor_axis is not None else None
    with jax.named_scope("embed"):
        x = _embed(params["embed"], tokens, config, links)
        if config.embed_scale != 1.0:
            x = x * jnp.asarray(config.embed_scale, x.dtype)
    with jax.named_scope("rope_tables"):
        rope = sliding_rope = rope_tables(positions, config)
        if config.sliding_layers and config.sliding_rope_theta is not None:
            sliding_rope = rope_tables(positions, config, sliding=True)
    layers = params["layers"]
    counters = counters_of(tokens) if has_layer_kernel(layers, x, config, links) else None
    # Of the layer before: a kernel may add it in the next one's norm, or has made the next one's heads already.
    added: Any = None
    heads: Array | None = None
    if counters is not None and (whole := whole_layers.reaching(attend, x, config, links)):
        x, state = whole_layers.run(layers, x, rope, sliding_rope, whole, state, counters, links, config)
        layers = []
    makes_heads = making(attend)
    of_layers = LayerHeads(config, x.dtype, rope, sliding_rope) if makes_heads else None
    for layer, layer_params in enumerate(layers):
        with jax.named_scope(f"layer_{layer}"):
            if makes_heads and of_layers:
                if heads is None:
                    x, heads = _heads_product(layer_params, x, added, config)
                made = of_layers.of_layer(layer, layer_params, heads), of_layers.made
            else:
                cos, sin = sliding_rope if layer in config.sliding_layers else rope
                x, q, k, v = _attention_inputs(layer_params, x, added, heads, cos, sin, config)
            with jax.named_scope("attend"):
                if makes_heads:
                    attended, state = makes_heads.of_heads(state, layer, *made, layer_params.get("sinks"))
                elif config.attention_sinks:
                    attended, state = attend(state, layer, q, k, v, sinks=layer_params["sinks"])
                else:
                    attended, state = attend(state, layer, q, k, v)
            following = None
            if layer + 1 < len(layers) and (counters is not None or may_add(x, config)):
                following = {name: layers[layer + 1][name] for name in ("attn_norm", "qkv")}
            x, added, heads = _after_attention(
                layer_params, following, x, attended, there, links, counters, config, makes_heads is not None
            )
    assert not isinstance(added, Scaled)  # no layer follows
    x = x if added is None else x + _whole(added, config)
    if logits_at is not None:
        x, there = x[logits_at], there if there is None else there[logits_at]
    with jax.named_scope("head"):
        x = _norm(x, params["final_norm"], config)
        if there is not None:  # the attention of padding may be anything
            x = jnp.where(there[:, None], x, 0)
        if config.tie_embeddings:
            logits = jnp.einsum("te,ve->tv", x, params["embed"], preferred_element_type=jnp.float32)
        else:
            logits = jnp.einsum("te,ev->tv", x, params["lm_head"], preferred_element_type=jnp.float32)
        if logits.shape[1] != config.vocab_size:
            assert config.tensor_axis is not None
            logits = jax.lax.all_gather(logits, config.tensor_axis, axis=1, tiled=True)
        if config.logits_soft_cap is not None:
            logits = soft_cap(logits, config.logits_soft_cap)
    return logits, state
