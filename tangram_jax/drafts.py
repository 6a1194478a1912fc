"""Speculative decoding's side of a step: each row's next token and drafts of those after it, verified at once.

All of a row's tokens are queries over its entries, which are read once for all of them, and see each other causally. All are
appended; `rollback` takes back those that turn out wrong (`tangram_jax.sampling_drafts`).
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models.config import ModelConfig
from models.logits import AttentionLogits
from models.sinks import with_sinks
from pallas_kernels.support import num_sms
from tangram_jax.attention import DecodeAttention
from tangram_jax.cache import Cache
from tangram_jax.compress import Slots
from tangram_jax.gpu_attention import merge
from tangram_jax.pages import NEVER
from tangram_jax.plan import CachePlan
from tangram_jax.rings import row_rings, visible_pages
from tangram_jax.step_layers import TokenLayers


class DraftLayers(TokenLayers):
    """The layers of S new tokens each of several rows."""

    def __init__(
        self,
        plan: CachePlan,
        config: ModelConfig,
        cache: Cache,
        rows: jax.Array,
        valid: jax.Array,
        dtype: Any,
    ) -> None:
        """`rows` i32[B], `cache.num_rows` for an empty slot; `valid` bool[B, S]: the tokens that are there."""
        super().__init__(plan, config, cache)
        (batch, size), at = valid.shape, np.arange(valid.shape[1], dtype=np.int32)
        numbers, tokens, tail, budgets = cache.row(rows)
        there = rows < cache.num_rows
        before = tokens + tail
        lengths = jnp.where(there[:, None], plan.lengths(tokens, budgets) + tail[:, None], 0)
        self._slots = Slots(
            jnp.where(valid, rows[:, None], cache.num_rows).reshape(-1),
            (lengths[:, None] + at[:, None]).reshape(batch * size, -1),
            (before[:, None] + at).reshape(-1),
        )
        shape = (batch * size, *self._heads)
        ctas = max(num_sms() // batch, config.num_kv_heads)
        pages = self._pages(rows, jnp.where(there[:, None], lengths, -1))
        splits = plan.splits(ctas)
        self._attention = DecodeAttention(shape, dtype, pages, self._logits, splits, tokens=size)
        if rings := plan.rings:
            numbers = row_rings(rings, numbers, cache.layout)
            counts = jnp.where(there, before, -1).repeat(size)
            numbers, ahead = numbers.repeat(size, axis=0), np.tile(at, batch)
            pages = visible_pages(rings, cache.pool, numbers, counts, ahead)
            splits = plan.splits(max(ctas // size, config.num_kv_heads), rings=True)
            history = DecodeAttention(shape, dtype, pages, self._logits, splits)
            self._window_attention = WindowDraftAttention(history, self._logits, size, rings.window)


class WindowDraftAttention:
    """Several new tokens of each request in a sliding window, where each sees other entries, as if of other requests.

    The few products of tokens with each other are XLA operations everywhere.
    """

    def __init__(self, history: DecodeAttention, logits: AttentionLogits, tokens: int, window: int) -> None:
        """`history` of B * S requests."""
        self._history, self._logits, self._tokens, self._window = history, logits, tokens, window

    def __call__(self, layer: int, qkv: jax.Array, sinks: jax.Array | None = None) -> jax.Array:
        """See `attention.decode_attention`."""
        q = qkv[:, :, :-2]
        own_out, own_lse = _among_themselves(
            qkv.reshape(-1, self._tokens, *qkv.shape[1:]), self._logits, self._window
        )
        own = own_out.reshape(q.shape), own_lse.reshape(q.shape[:-1])
        return with_sinks(*merge(own, self._history.history(layer, q)), sinks)[0]


def _among_themselves(qkv: jax.Array, logits: AttentionLogits, window: int) -> tuple[jax.Array, jax.Array]:
    """A request's tokens over themselves, causally.

    qkv [B, S, K, G + 2, D] -> (f32[B, S, K, G, D], natural log-sum-exp f32[B, S, K, G]).
    """
    at = np.arange(qkv.shape[1])
    distance = at[:, None] - at
    seen = (distance >= 0) & (distance < window)
    qkv = qkv.astype(jnp.float32)
    q, k, v = qkv[:, :, None, :, :-2], qkv[:, None, :, :, -2:-1], qkv[:, None, :, :, -1:]
    # Sums, no matrix products: XLA makes one kernel of them.
    scores = logits((q * k).sum(-1))  # [B, S, S, K, G]
    scores = jnp.where(seen[:, :, None, None], scores, NEVER)
    lse = jax.nn.logsumexp(scores, axis=2)
    weights = jnp.exp(scores - lse[:, :, None])
    return (weights[..., None] * v).sum(2), lse
