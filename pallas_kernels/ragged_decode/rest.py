"""What an item's queries see beside the cache's entries: the sink, and the new tokens of the step.

One new token is read early and added when the item ends. Several are where an item's sums begin, while its first tile is on
its way: they are too many to be held until the end, and to read them there is to wait for them.
"""

import functools
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.logits import LOG2E, log2_logits
from pallas_kernels.pieces import LOW, Sums
from pallas_kernels.ragged_decode.common import BY_QUERY, Config, Refs, f32, i32, spread
from pallas_kernels.ragged_decode.rows import read_key, read_value

# By so much, in units of log 2, the logit that sums begin with is below the largest of the new tokens: weights of entries,
# which may be float16, lose nothing beside a new token of far more weight.
SPARE = 32.0


def with_rest(cfg: Config, refs: Refs, number: Any, q: Any, new: Any, sums: Sums) -> Sums:
    """With the sink and the new token: what the sums did not begin with."""
    if cfg.rest_first:
        return sums
    shape = (cfg.head_dim, cfg.queries)

    def fold(sums: Sums, logit: Any, value: Any) -> Sums:
        acc, m, norm = sums
        top = jnp.maximum(m, logit)
        fade, weight = jnp.exp2(m - top), jnp.exp2(logit - top)
        acc = acc * spread(fade, shape)
        if value is not None:
            acc = acc + spread(weight, shape) * lax.broadcast_in_dim(value, shape, [0])
        return acc, top, norm * fade + weight

    if cfg.has_sinks:
        sums = fold(sums, _sink(cfg, refs, number), None)
    if cfg.has_new:
        key, value = new
        sums = fold(sums, _logits(cfg, q, key), value)
    return sums


def rest_alone(cfg: Config, refs: Refs, number: Any, q: Any) -> Sums:
    """The sink and several new tokens, each seen by its own queries and those of the tokens after it."""
    shape = (cfg.head_dim, cfg.queries)
    query = plgpu.broadcasted_iota(i32, (cfg.queries,), 0, layout=BY_QUERY)
    keys = [read_key(cfg, refs, number, token) for token in range(cfg.tokens)]
    logits = [_logits(cfg, q, key) for key in keys]
    # All queries see the first token, also those that pad them: the largest logit is above LOW.
    seen = [x if n == 0 else jnp.where(query >= n * cfg.group, x, LOW) for n, x in enumerate(logits)]
    others = [_sink(cfg, refs, number)] if cfg.has_sinks else []
    m = functools.reduce(jnp.maximum, seen + others) - SPARE
    weights = [jnp.exp2(x - m) for x in seen]
    norm = functools.reduce(jnp.add, weights + [jnp.exp2(x - m) for x in others])
    values = [read_value(cfg, refs, number, token) for token in range(cfg.tokens)]
    parts = [
        spread(weight, shape) * lax.broadcast_in_dim(value, shape, [0])
        for weight, value in zip(weights, values, strict=True)
    ]
    return functools.reduce(jnp.add, parts), m, norm


def _sink(cfg: Config, refs: Refs, number: Any) -> Any:
    """Its logits, in units of log 2."""
    given = refs.sinks.at[lax.rem(number, i32(cfg.kv_heads))]
    return plgpu.load(given, layout=BY_QUERY, optimized=False).astype(f32) * LOG2E


def _logits(cfg: Config, q: Any, key: Any) -> Any:
    """Of queries [D, Gp] and one key f32[D], in units of log 2."""
    products = (q.astype(f32) * lax.broadcast_in_dim(key, q.shape, [0])).sum(axis=0)
    return log2_logits(products, cfg.scale, cfg.soft_cap)
