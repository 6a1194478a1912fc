"""Partial results put together by XLA: what the kernel does inside with `merge="fused"`, for the interpreter."""

import jax
import jax.numpy as jnp

from pallas_kernels.logits import LOG2E
from pallas_kernels.ragged_decode.plan import (
    END,
    FIRST_ITEM,
    ITEM_BEGIN,
    ITEM_NUMBER,
    NUMBER,
    START,
    STOP,
    DecodePlan,
)


def merge_pieces(
    plan: DecodePlan,
    out: jax.Array,
    lse: jax.Array,
    part: jax.Array,
    part_lse: jax.Array,
    q: jax.Array,
    sinks: jax.Array | None,
    new: jax.Array | None,
    scale: float,
    soft_cap: float | None,
) -> tuple[jax.Array, jax.Array]:
    """Fills in the items that borders cut.

    Args:
      plan: of one layer.
      out, lse: [items, G, D], f32[items, Gp]: right for whole items, unwritten for cut ones.
      part, part_lse: f32[2 W, D, Gp], f32[2 W, Gp]: of share w, slot w holds the piece of its last item if that goes on
        in another share, slot W + w the piece of its first item if that ends here but began elsewhere. Its output, and
        its log-sum-exp in units of log 2.
      q: [items, G or more, D]. sinks: [K, G]. new: [items, 2, D], key and value of the current token.
    """
    items, group, _ = out.shape
    share, rows = plan.of_layer("shares"), plan.of_layer("items")
    held = share[:, END] > share[:, START]
    first_begin = rows[share[:, FIRST_ITEM], ITEM_BEGIN]
    first_stop = rows[share[:, FIRST_ITEM] + 1, ITEM_BEGIN]
    handed = held & (share[:, END] < share[:, STOP])
    kept = held & (share[:, START] > first_begin) & (share[:, END] >= first_stop)
    item = jnp.concatenate([share[:, NUMBER], rows[share[:, FIRST_ITEM], ITEM_NUMBER]])
    valid = jnp.concatenate([handed, kept])
    item = jnp.where(valid, item, items)  # the others go to a segment that is dropped
    part = jnp.where(valid[:, None, None], part, 0.0)
    lse_of = jnp.where(valid[:, None], part_lse, -jnp.inf)
    top = jax.ops.segment_max(lse_of, item, items + 1)
    weight = jnp.where(valid[:, None], jnp.exp2(lse_of - top[item]), 0.0)
    denominator = jax.ops.segment_sum(weight, item, items + 1)[:-1]
    numerator = jax.ops.segment_sum(part * weight[:, None], item, items + 1)[:-1]
    cut = jnp.zeros(items + 1, bool).at[item].set(True)[:-1]
    top = jnp.where(cut[:, None], top[:-1], -1e30)

    queries = lse.shape[1]
    if sinks is not None:
        logit = jnp.pad(sinks.astype(jnp.float32) * LOG2E, ((0, 0), (0, queries - group)))
        logit = jnp.tile(logit, (items // sinks.shape[0], 1))
        numerator, top, denominator = _fold(numerator, top, denominator, logit, 0.0)
    if new is not None:
        key, value = new.astype(jnp.float32).swapaxes(0, 1)
        vectors = q[:, :group].astype(jnp.float32)
        logit = jnp.einsum("igd,id->ig", vectors, key, precision="highest") * scale
        if soft_cap is not None:
            logit = soft_cap * jnp.tanh(logit / soft_cap)
        logit = jnp.pad(logit * LOG2E, ((0, 0), (0, queries - group)))
        numerator, top, denominator = _fold(numerator, top, denominator, logit, value[:, :, None])
    merged = (numerator / denominator[:, None]).swapaxes(1, 2)[:, :group]
    out = jnp.where(cut[:, None, None], merged.astype(out.dtype), out)
    return out, jnp.where(cut[:, None], (top + jnp.log2(denominator)) / LOG2E, lse)


def _fold(
    acc: jax.Array, m: jax.Array, norm: jax.Array, logit: jax.Array, value: jax.Array | float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One more entry: acc [i, D, g], value [i, D, 1], the others [i, g]."""
    top = jnp.maximum(m, logit)
    fade, weight = jnp.exp2(m - top), jnp.exp2(logit - top)
    return acc * fade[:, None] + weight[:, None] * value, top, norm * fade + weight
