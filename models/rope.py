"""Rotary position embeddings in the half-split layout of Hugging Face Llama (RoFormer, arXiv 2104.09864)."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from models.config import ModelConfig, RopeScaling


def _scaled(inv_freq: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    if scaling.kind == "linear":
        return inv_freq / scaling.factor
    if scaling.kind == "factors":
        factors = np.asarray(scaling.factors, np.float64)
        if factors.shape != inv_freq.shape:
            raise ValueError(f"rope factors: expected {inv_freq.shape[0]}, found {factors.shape[0]}")
        return inv_freq / factors
    if scaling.kind != "llama3":
        raise ValueError(f"unknown rope scaling {scaling.kind!r}: expected llama3, linear or factors")
    turns = (
        scaling.original_max_positions * inv_freq / (2 * math.pi)
    )  # full turns within the pretrained context
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    # 0: slower than `low` turns, divided by the factor; 1: faster than `high` turns, kept as it is
    blend = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return inv_freq * (blend + (1.0 - blend) / scaling.factor)


def rope_frequencies(config: ModelConfig) -> Float[np.ndarray, D / 2]:
    """Inverse frequencies f32[D/2] (radians per position), with the model's scaling applied."""
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
    inv_freq = config.rope_theta**-exponents
    if config.rope_scaling is not None:
        inv_freq = _scaled(inv_freq, config.rope_scaling)
    return inv_freq.astype(np.float32)


def rope_tables(
    positions: Int[Array, " T"], config: ModelConfig
) -> tuple[Float[Array, "T D/2"], Float[Array, "T D/2"]]:
    """Cosines and sines f32[T, D/2] of the rotation at each position; computed once for all layers."""
    angles = positions.astype(jnp.float32)[:, None] * rope_frequencies(config)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(
    x: Float[Array, "*B T H D"], cos: Float[Array, "T D/2"], sin: Float[Array, "T D/2"]
) -> Float[Array, "*B T H D"]:
    """Rotates the pairs (x[i], x[i + D/2]) in float32; the result has the dtype of `x`."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def apply_rope(
    x: Float[Array, "*B T H D"], positions: Int[Array, " T"], config: ModelConfig
) -> Float[Array, "*B T H D"]:
    """Queries or keys `x` [..., T, H, D] rotated to their true positions i32[T]."""
    return rotate(x, *rope_tables(positions, config))
