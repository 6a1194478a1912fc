"""Attention sums of one tile or item that several CTAs left, put together by a warpgroup in a fixed order."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

LOW = -1e30  # below every logit, and finite: exp2(LOW - m) is 0, never NaN

Sums = tuple[Any, Any, Any]  # weighted values, largest logit in units of log 2, sum of the weights


def fold(
    sums: Sums, count: Any, read: Callable[[Any], Sums], spread: Callable[[Any], Any], unroll: int
) -> Sums:
    """`sums` and those that `read(k)` gives for k < `count`, at least 1; `unroll` are read at a time, so that reads overlap.

    `spread`: a value per query to the shape of the weighted values.
    """

    def some(r: Any, carry: Any) -> Any:
        acc, m, norm = carry
        parts = []
        for k in (r * unroll + u for u in range(unroll)):
            part, part_m, part_norm = read(jnp.minimum(k, count - 1))
            parts.append((part, part_m + jnp.where(k < count, jnp.float32(0), jnp.float32(LOW)), part_norm))
        top = m
        for _, part_m, _ in parts:
            top = jnp.maximum(top, part_m)
        fade = jnp.exp2(m - top)
        acc, norm = acc * spread(fade), norm * fade
        for part, part_m, part_norm in parts:
            weight = jnp.exp2(part_m - top)
            acc, norm = acc + part * spread(weight), norm + part_norm * weight
        return acc, top, norm

    return lax.fori_loop(0, lax.div(count + (unroll - 1), jnp.int32(unroll)), some, sums)
