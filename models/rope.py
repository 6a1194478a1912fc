"""Rotary position embeddings in the half-split layout of Hugging Face Llama (RoFormer, arXiv 2104.09864)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from models.config import ModelConfig, RopeScaling


def _yarn_blend(config: ModelConfig, scaling: RopeScaling) -> np.ndarray:
    """[D/2], 1: the frequency is kept, 0: divided by the factor (YaRN, section 3.2)."""

    def dimension(turns: float) -> float:
        """Which pair of dimensions turns so often within the original context, as a fraction."""
        ratio = scaling.original_max_positions / (turns * 2 * math.pi)
        return config.head_dim * math.log(ratio) / (2 * math.log(config.rope_theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.head_dim - 1)
    ramp = (np.arange(config.head_dim // 2) - low) / (high - low if high != low else 0.001)
    return 1.0 - np.clip(ramp, 0.0, 1.0)


def _scaled(inv_freq: np.ndarray, config: ModelConfig, scaling: RopeScaling) -> np.ndarray:
    if scaling.kind == "linear":
        return inv_freq / scaling.factor
    if scaling.kind == "yarn":
        blend = _yarn_blend(config, scaling)
        return inv_freq * (blend + (1.0 - blend) / scaling.factor)
    if scaling.kind == "factors":
        factors = np.asarray(scaling.factors, np.float64)
        if factors.shape != inv_freq.shape:
            raise ValueError(f"rope factors: expected {inv_freq.shape[0]}, found {factors.shape[0]}")
        return inv_freq / factors
    if scaling.kind != "llama3":
        raise ValueError(f"unknown rope scaling {scaling.kind!r}: expected llama3, yarn, linear or factors")
    # Full turns within the pretrained context.
    turns = scaling.original_max_positions * inv_freq / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    # 0: slower than `low` turns, divided by the factor; 1: faster than `high` turns, kept as it is
    blend = np.clip((turns - low) / (high - low), 0.0, 1.0) if high > low else turns > low
    return inv_freq * (blend + (1.0 - blend) / scaling.factor)


def rope_frequencies(config: ModelConfig, *, sliding: bool = False) -> Float[np.ndarray, " half"]:
    """Inverse frequencies f32[D/2] (radians per position), with the model's scaling applied.

    `sliding`: those of the sliding layers, which are never scaled where the model has a base for them.
    """
    own_theta = config.sliding_rope_theta if sliding else None
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
    inv_freq = (config.rope_theta if own_theta is None else own_theta) ** -exponents
    if config.rope_scaling is not None and own_theta is None:
        inv_freq = _scaled(inv_freq, config, config.rope_scaling)
    return inv_freq.astype(np.float32)


def rope_record(config: ModelConfig) -> dict[str, Any]:
    """What a model's budgets were measured under, as JSON holds it: frequencies of both kinds of layers, and the window."""
    return {
        "frequencies": rope_frequencies(config).tolist(),
        "factor": config.rope_scaling.attention_factor if config.rope_scaling else 1.0,
        "sliding_frequencies": rope_frequencies(config, sliding=True).tolist()
        if config.sliding_layers
        else None,
        "window": config.sliding_window,
    }


def same_rope(record: Any, config: ModelConfig) -> bool:
    """Whether `rope_record` gave that for a model like this one. Files of one model differ in the last digits."""
    if not isinstance(record, Mapping):
        return False

    def close(a: Any, b: Any) -> bool:
        if a is None or b is None:
            return a is b
        try:
            a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        except (TypeError, ValueError, OverflowError):  # no numbers
            return False
        return a.shape == b.shape and bool(np.allclose(a, b, rtol=1e-4, atol=0.0))

    return all(close(record.get(key), value) for key, value in rope_record(config).items())


def rope_tables(
    positions: Int[Array, " T"], config: ModelConfig, *, sliding: bool = False
) -> tuple[Float[Array, "T D/2"], Float[Array, "T D/2"]]:
    """Cosines and sines f32[T, D/2] of the rotation at each position; computed once for all layers of a type."""
    angles = positions.astype(jnp.float32)[:, None] * rope_frequencies(config, sliding=sliding)
    scaling = None if sliding and config.sliding_rope_theta is not None else config.rope_scaling
    factor = scaling.attention_factor if scaling else 1.0
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def rotate(
    x: Float[Array, "*B T H D"], cos: Float[Array, "T D/2"], sin: Float[Array, "T D/2"]
) -> Float[Array, "*B T H D"]:
    """Rotates the pairs (x[i], x[i + D/2]) in float32; the result has the dtype of `x`."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
