"""Attention sinks: a learnt logit per query head that takes its part of the softmax and has no value (GPT-OSS)."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float


def with_sinks(
    out: Float[Array, "*S D"], lse: Float[Array, "*S"], sinks: Array | None
) -> tuple[Float[Array, "*S D"], Float[Array, "*S"]]:
    """Attention that was computed without sinks, and its natural log-sum-exp, as with them: (out f32, lse f32).

    `sinks` broadcasts against `lse`; None: nothing changes.
    """
    if sinks is None:
        return out, lse
    total = jnp.logaddexp(lse, sinks.astype(jnp.float32))
    return out.astype(jnp.float32) * jnp.exp(lse - total)[..., None], total
