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
from tangram_jax.pages import NEVER, StepPages
from tangram_jax.plan import CachePlan
from tangram_jax.rings import row_rings, visible_pages
from tangram_jax.step_layers import Layers


class DraftLayers(Layers):
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
        shape = (batch, size, *self._heads)
        ctas = max(num_sms() // batch, config.num_kv_heads)
        pages = self._pages(rows, jnp.where(there[:, None], lengths, -1))
        self._attention = DraftAttention(shape, dtype, pages, self._logits, plan.splits(ctas))
        if rings := plan.rings:
            numbers = row_rings(rings, numbers, cache.layout)
            counts = jnp.where(there, before, -1).repeat(size)
            numbers, ahead = numbers.repeat(size, axis=0), np.tile(at, batch)
            pages = visible_pages(rings, cache.pool, numbers, counts, ahead)
            splits = plan.splits(max(ctas // size, config.num_kv_heads), rings=True)
            self._window_attention = DraftAttention(
                shape, dtype, pages, self._logits, splits, window=rings.window
            )
        self.new: list[jax.Array] = []  # keys and values of each layer

    def __call__(
        self, layer: int, q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None = None
    ) -> jax.Array:
        """Attention of q [B * S, K, G, D], k and v [B * S, K, D], a row's tokens one after another: f32[B * S, K, G, D].

        `sinks` [K, G]: see `models.sinks`.
        """
        k, v = self._finite(k), self._finite(v)
        self.new.append(jnp.stack([k, v], axis=2))
        number = self._window_number(layer)
        if number is not None:
            return self._window_attention(number, q, k, v, sinks)
        return self._attention(self._config.full_layers.index(layer), q, k, v, sinks)

    def append(self, cache: Cache, new: list[jax.Array]) -> Cache:
        """The cache with all tokens that are there, from `new` of all layers."""
        return self._append(cache, self._slots, new)


class DraftAttention:
    """Several query tokens of each request over its entries and, causally, themselves, for all layers of one step.

    The few products of tokens with each other are XLA operations everywhere.
    """

    def __init__(
        self,
        q_shape: tuple[int, ...],
        dtype: Any,
        pages: StepPages,
        logits: AttentionLogits,
        splits: np.ndarray | int | None = None,
        *,
        window: int | None = None,
    ) -> None:
        """q_shape (B, S, K, G, D); `splits` as for `DecodeAttention`.

        In a sliding `window` each token sees other entries: there `pages` are of B * S requests.
        """
        batch, self._size, heads, group, head_dim = q_shape
        self._logits, self._window = logits, window
        shape = (batch * self._size, heads, group) if window else (batch, heads, self._size * group)
        self._history = DecodeAttention((*shape, head_dim), dtype, pages, logits, splits)

    def __call__(
        self, layer: int, q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None = None
    ) -> jax.Array:
        """See `DraftLayers`."""
        tokens, heads, group, head_dim = q.shape
        by_row = [x.reshape(-1, self._size, *x.shape[1:]) for x in (q, k, v)]
        own_out, own_lse = _among_themselves(by_row[0], by_row[1], by_row[2], self._logits, self._window)
        if self._window:
            out, lse = self._history.history(layer, q)
        else:
            # A request's tokens side by side, as if they were more queries of each KV head.
            q = by_row[0].swapaxes(1, 2).reshape(-1, heads, self._size * group, head_dim)
            out, lse = self._history.history(layer, q)
            out = out.reshape(-1, heads, self._size, group, head_dim).swapaxes(1, 2)
            lse = lse.reshape(-1, heads, self._size, group).swapaxes(1, 2)
        of_tokens = (tokens, heads, group)
        history = out.reshape(*of_tokens, head_dim), lse.reshape(of_tokens)
        own = own_out.reshape(*of_tokens, head_dim), own_lse.reshape(of_tokens)
        return with_sinks(*merge(own, history), sinks)[0]


def _among_themselves(
    q: jax.Array, k: jax.Array, v: jax.Array, logits: AttentionLogits, window: int | None
) -> tuple[jax.Array, jax.Array]:
    """A request's tokens over themselves, causally.

    q [B, S, K, G, D], k and v [B, S, K, D] -> (f32[B, S, K, G, D], natural log-sum-exp f32[B, S, K, G]).
    """
    at = np.arange(q.shape[1])
    distance = at[:, None] - at
    seen = (distance >= 0) & (distance < (window or len(at)))
    q, k, v = (x.astype(jnp.float32) for x in (q, k[:, None, :, :, None], v[:, None, :, :, None]))
    # Sums, no matrix products: XLA makes one kernel of them.
    scores = logits((q[:, :, None] * k).sum(-1))  # [B, S, S, K, G]
    scores = jnp.where(seen[:, :, None, None], scores, NEVER)
    lse = jax.nn.logsumexp(scores, axis=2)
    weights = jnp.exp(scores - lse[:, :, None])
    return (weights[..., None] * v).sum(2), lse
