"""Plain attention, for tests, calibration and reference decoding: the dense cases of the model's `attend`."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from models.config import ModelConfig
from models.transformer import Attend, soft_cap

QUERY_BLOCK = 512  # queries scored at a time, which bounds the score matrix at [N, 512, S]


def masked_attention(
    q: Float[Array, "T N D"],
    k: Float[Array, "S K D"],
    v: Float[Array, "S K D"],
    mask: Bool[Array, "T S"],
    scale: float | None = None,
    sinks: Float[Array, "K G"] | None = None,
    cap: float | None = None,
) -> Float[Array, "T N D"]:
    """Softmax attention with `mask[t, s]` True where query t sees entry s; scores and softmax in float32.

    Query head n reads KV head n // G. `scale` is the factor on q.k, None: D ** -0.5. A query that sees nothing gets zeros.
    `sinks`: logits that join the softmax without a value. `cap`: no score gets beyond it (`models.transformer.soft_cap`).
    """
    T, N, D = q.shape
    factor = D**-0.5 if scale is None else scale
    K = k.shape[1]
    G = N // K

    def of_head(given: tuple[Any, ...]) -> Array:
        q, k, v, sink = given  # [G, T, D], [S, D], [S, D], [G] or None
        scores = jnp.matmul(q.reshape(G * T, D), k.T, preferred_element_type=jnp.float32) * factor
        if cap is not None:
            scores = soft_cap(scores, cap)
        scores = jnp.where(mask, scores.reshape(G, T, -1), -jnp.inf)
        peak = jnp.max(scores, axis=-1, keepdims=True)
        if sink is not None:
            sink = sink.astype(jnp.float32)[:, None, None]
            peak = jnp.maximum(peak, sink)
        peak = jnp.where(jnp.isfinite(peak), peak, 0.0)
        weights = jnp.exp(scores - peak)
        total = jnp.sum(weights, axis=-1, keepdims=True)
        if sink is not None:
            total += jnp.exp(sink - peak)
        weights = weights.reshape(G * T, -1).astype(v.dtype)
        out = jnp.matmul(weights, v, preferred_element_type=jnp.float32).reshape(G, T, D)
        return out / jnp.where(total > 0, total, 1.0)

    # Plain matrix products: a batched one takes twice as long on a CPU. A copy for each head would take long to compile.
    by_head = q.reshape(T, K, G, D).transpose(1, 2, 0, 3)
    out = jax.lax.map(of_head, (by_head, k.swapaxes(0, 1), v.swapaxes(0, 1), sinks))
    return out.reshape(N, T, D).swapaxes(0, 1).astype(q.dtype)


@partial(jax.jit, static_argnames=("scale", "window", "cap"))
def causal_attention(
    q: Float[Array, "T N D"],
    k: Float[Array, "S K D"],
    v: Float[Array, "S K D"],
    q_positions: Int[Array, " T"],
    k_positions: Int[Array, " S"],
    scale: float | None = None,
    window: int | None = None,
    sinks: Float[Array, "K G"] | None = None,
    cap: float | None = None,
) -> Float[Array, "T N D"]:
    """Each query sees the entries at its position or before, in blocks of `QUERY_BLOCK`.

    With a `window` only those of the last so many positions, its own included. `scale`, `sinks` and `cap` as in
    `masked_attention`.
    """
    T = q.shape[0]

    def block(args: tuple[Array, Array]) -> Array:
        q_block, positions = args
        mask = k_positions <= positions[:, None]
        if window is not None:
            mask &= k_positions > positions[:, None] - window
        return masked_attention(q_block, k, v, mask, scale, sinks, cap)

    if T <= QUERY_BLOCK:
        return block((q, q_positions))
    padding = -T % QUERY_BLOCK

    def blocks(x: Array) -> Array:
        padded = jnp.pad(x, [(0, padding)] + [(0, 0)] * (x.ndim - 1))
        return padded.reshape(-1, QUERY_BLOCK, *x.shape[1:])

    out = jax.lax.map(block, (blocks(q), blocks(q_positions)))
    return out.reshape(T + padding, *q.shape[1:])[:T]


def _of_layer(config: ModelConfig | None, layer: int) -> dict[str, Any]:
    """Scale, window and soft cap of a layer, as `causal_attention` takes them."""
    if config is None:
        return {}
    window = config.sliding_window if layer in config.sliding_layers else None
    return {"scale": config.query_scale, "window": window, "cap": config.attention_soft_cap}


def dense_attend(positions: Int[Array, " T"], *, config: ModelConfig | None = None) -> Attend:
    """Causal attention among the T tokens of the call; the state passes through unchanged.

    Args:
      positions: true positions i32[T]; a token sees those at its position or before.
      config: needed for a model with sliding layers, or a scale or soft cap of its own.
    """

    def attend(
        state: Any, layer: int, q: Array, k: Array, v: Array, sinks: Array | None = None
    ) -> tuple[Array, Any]:
        out = causal_attention(q, k, v, positions, positions, sinks=sinks, **_of_layer(config, layer))
        return out, state

    return attend


# Of each layer (keys [S, K, D], values [S, K, D]), entry i at position i.
DenseCache = tuple[tuple[Array, Array], ...]


def init_dense_cache(config: ModelConfig, max_length: int, dtype: DTypeLike = jnp.float32) -> DenseCache:
    """An empty contiguous cache of one sequence, `max_length` entries per layer."""
    shape = (max_length, config.num_kv_heads, config.head_dim)
    return tuple((jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(config.num_layers))


def cached_attend(positions: Int[Array, " T"], *, config: ModelConfig | None = None) -> Attend:
    """Attention of one sequence over a `DenseCache` (the state): writes the T tokens, then reads all that each sees.

    `config` as for `dense_attend`: sliding layers keep all entries too, and read those of their window. Tokens at
    positions >= max_length are dropped: that is how a caller pads.
    """

    def attend(
        state: DenseCache, layer: int, q: Array, k: Array, v: Array, sinks: Array | None = None
    ) -> tuple[Array, DenseCache]:
        keys, values = state[layer]
        keys = keys.at[positions].set(k.astype(keys.dtype), mode="drop")
        values = values.at[positions].set(v.astype(values.dtype), mode="drop")
        entry_positions = jnp.arange(keys.shape[0], dtype=positions.dtype)
        of_layer = _of_layer(config, layer)
        out = causal_attention(q, keys, values, positions, entry_positions, sinks=sinks, **of_layer)
        return out, (*state[:layer], (keys, values), *state[layer + 1 :])

    return attend
