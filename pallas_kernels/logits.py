"""Logits as the softmax of a kernel takes them."""

import math
from typing import Any

import jax.numpy as jnp

LOG2E = math.log2(math.e)


def log2_logits(s: Any, scale: float, soft_cap: float | None) -> Any:
    """Raw products to logits, soft_cap * tanh(scale * s / soft_cap) where there is a cap, in units of log 2."""
    if soft_cap is None:
        return s * (scale * LOG2E)
    # tanh(x) = 1 - 2 / (exp(2 x) + 1), exact where the hardware's approximate tanh has 11 bits
    e = jnp.exp2(s * (2 * LOG2E * scale / soft_cap))
    return soft_cap * LOG2E * (1.0 - 2.0 / (e + 1.0))
