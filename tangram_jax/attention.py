"""Attention of one layer over a row's paged entries: the one place that decides what runs, and the XLA operations.

Both kinds walk over the entries a block at a time with a running softmax, so memory is bounded by the block, the work
by the longest head of the layer, and no shape depends on a length. Entries have no order and no positions: keys were
rotated to their true positions before they were stored.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from models.logits import AttentionLogits
from models.products import EndOfLayer
from models.sinks import with_sinks
from pallas_kernels.decode_layer import Heads, Made
from pallas_kernels.layer_products import Tuning
from pallas_kernels.ragged_decode.tokens import by_request, by_token
from tangram_jax import gpu_attention
from tangram_jax.pages import NEVER, LayerPages, StepPages

BLOCK = 256  # entries of each head that one step of a decode walk gathers
CHUNK_BLOCK = 512  # the same for a chunk
QUERY_BLOCK = 256  # queries of a chunk whose causal part is taken together


log = logging.getLogger("tangram")


class Softmax(NamedTuple):
    """A softmax-weighted sum under way: scaled by exp(-top)."""

    out: jax.Array  # f32[..., D]
    top: jax.Array  # f32[...]: the largest score so far
    total: jax.Array  # f32[...]

    @classmethod
    def of_nothing(cls, shape: tuple[int, ...]) -> "Softmax":
        """Of queries of a shape [..., D], before any score."""
        zero = jnp.zeros(shape, jnp.float32)
        return cls(zero, jnp.full(shape[:-1], NEVER, jnp.float32), zero[..., 0])

    def add(self, scores: jax.Array, weigh: Callable[[jax.Array], jax.Array]) -> "Softmax":
        """Take in scores [..., S] and, through `weigh`, the values under weights of that shape: [..., D]."""
        top = jnp.maximum(self.top, scores.max(-1))
        keep = jnp.exp(self.top - top)
        weights = jnp.exp(scores - top[..., None])
        return Softmax(self.out * keep[..., None] + weigh(weights), top, self.total * keep + weights.sum(-1))

    def result(self) -> tuple[jax.Array, jax.Array]:
        """(out f32[..., D], natural log-sum-exp f32[...])."""
        return self.out / self.total[..., None], self.top + jnp.log(self.total)


def _walk(pages: LayerPages, start: Softmax, dtype: Any, scores_of: Callable, weigh: Callable) -> Softmax:
    """Add all entries to `start`. scores_of(keys [B, K, S, D]) -> [B, K, ..., S]; weigh(weights, values) -> out.

    `dtype`: of keys and values.
    """
    page_size, head_dim = pages.page_size, pages.pool.shape[-1]
    batch, heads = pages.lengths.shape
    per_block = max(1, BLOCK // page_size)
    block = per_block * page_size
    width = pages.table.shape[1]

    def body(i: jax.Array, state: Softmax) -> Softmax:
        at = pages.first[:, None] + i * per_block + np.arange(per_block)
        numbers = pages.table[:, jnp.minimum(at, width - 1)]  # [B, K, per_block]
        keys, values = (
            x.reshape(batch, heads, block, head_dim)
            for x in pages.gather(numbers, pages.column[:, None], dtype)
        )
        scores = scores_of(keys)
        entry = i * block + np.arange(block)
        there = entry < pages.lengths[..., None]  # [B, K, S]
        if pages.skip is not None:
            there &= entry >= pages.skip[:, None, None]
        there = there.reshape(batch, heads, *(1,) * (scores.ndim - 3), block)
        # Where a head has no entry left, the block adds exp(NEVER - top) = 0, whatever lies in the page.
        return state.add(jnp.where(there, scores, NEVER), lambda w: weigh(w, values))

    steps = lax.div(pages.lengths.max() + (block - 1), np.int32(block))
    return lax.fori_loop(0, steps, body, start)


class DecodeAttention:
    """One new token of each request, or several, over its entries and, causally, themselves, for all layers of one step.

    On a Hopper GPU the ragged decode kernel, its work planned once for all layers; elsewhere, and for what it does not
    support, XLA operations.
    """

    def __init__(
        self,
        q_shape: tuple[int, ...],
        dtype: Any,
        pages: StepPages,
        logits: AttentionLogits,
        splits: np.ndarray | int | None = None,
        *,
        tokens: int = 1,
    ) -> None:
        """q_shape (B * S, K, G, D), where each request has S `tokens`.

        `splits`: parts that the kernel makes of each head, of `CachePlan.splits`.
        """
        self._kernel = None
        try:
            self._kernel = gpu_attention.DecodeKernel(q_shape, dtype, pages, logits, splits, tokens=tokens)
            return
        except NotImplementedError as reason:
            if jax.default_backend() == "gpu":
                log.warning("Decode attention runs as XLA operations, several times slower: %s", reason)
        self._pages, self._logits, self._tokens = pages, logits, tokens

    def __call__(self, layer: int, qkv: jax.Array, sinks: jax.Array | None = None) -> jax.Array:
        """See `decode_attention`."""
        if self._kernel:
            return self._kernel(layer, qkv, sinks)
        return decode_attention(qkv, self._pages.of_layer(layer), self._logits, sinks, self._tokens)

    def makes_heads(self) -> bool:
        """Whether a kernel makes queries, keys and values itself, faster than others do."""
        return self._kernel is not None and self._kernel.makes_heads()

    def of_heads(
        self, layer: int, heads: Heads, made: Made, sinks: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Where it `makes_heads`: as `decode_attention`, and keys and values [B, K, 2, D] to append."""
        assert self._kernel is not None
        return self._kernel.of_heads(layer, heads, made, sinks)

    def reaches_the_end(self, tuning: Tuning) -> bool:
        """Whether one kernel goes on with the products of the layer, tuned so."""
        return self._kernel is not None and self._kernel.reaches_the_end(tuning)

    def to_the_end(
        self, layer: int, heads: Heads, made: Made, sinks: jax.Array | None, end: EndOfLayer
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """See `pallas_kernels.decode_layer.decode_layer`, where it `reaches_the_end`."""
        assert self._kernel is not None
        return self._kernel.to_the_end(layer, heads, made, sinks, end)

    def history(self, layer: int, q: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Over the entries alone: see `history_attention`."""
        if self._kernel:
            return self._kernel.history(layer, q)
        return history_attention(q, self._pages.of_layer(layer), self._logits)


def decode_attention(
    qkv: jax.Array,
    pages: LayerPages,
    logits: AttentionLogits,
    sinks: jax.Array | None = None,
    tokens: int = 1,
) -> jax.Array:
    """New tokens of each request over its entries and, causally, themselves, as XLA operations.

    qkv [B * S, K, G + 2, D]: queries, key and value of each of S `tokens` (not in the pool yet), those of a request one
    after another -> [B * S, K, G, D] in float32 or the dtype of qkv. `sinks` [K, G]: see `models.sinks`.
    """
    f32 = jnp.float32
    qkv = by_request(qkv, tokens)
    q, k, v = qkv[..., :-2, :], qkv[..., -2, :], qkv[..., -1, :]
    seen = np.tri(tokens, dtype=bool).repeat(q.shape[3], axis=0)
    side_by_side = q.reshape(*q.shape[:2], -1, q.shape[4])
    own = logits(jnp.einsum("bkgd,bktd->bkgt", side_by_side, k, preferred_element_type=f32))
    start = Softmax.of_nothing(side_by_side.shape).add(
        jnp.where(seen, own, NEVER), lambda w: jnp.einsum("bkgt,bktd->bkgd", w, v.astype(f32))
    )
    out, lse = _walk_all(pages, start, side_by_side, logits).result()
    out, lse = (by_token(x.reshape(q.shape[:n])) for x, n in ((out, 5), (lse, 4)))
    return with_sinks(out, lse, sinks)[0]


def history_attention(
    q: jax.Array, pages: LayerPages, logits: AttentionLogits
) -> tuple[jax.Array, jax.Array]:
    """A query token of each request over its entries alone, as XLA operations.

    q [B, K, G, D] -> (out f32[B, K, G, D], natural log-sum-exp f32[B, K, G]). Of a head without entries: finite values, and
    -inf or nearly so.
    """
    state = _walk_all(pages, Softmax.of_nothing(q.shape), q, logits)
    total = jnp.maximum(state.total, jnp.finfo(jnp.float32).tiny)
    return state.out / total[..., None], state.top + jnp.log(total)


def _walk_all(pages: LayerPages, start: Softmax, q: jax.Array, logits: AttentionLogits) -> Softmax:
    """Add all entries to `start`, for queries [B, K, G, D]."""
    f32 = jnp.float32
    return _walk(
        pages,
        start,
        q.dtype,
        lambda keys: logits(jnp.einsum("bkgd,bksd->bkgs", q, keys, preferred_element_type=f32)),
        lambda w, values: jnp.einsum(
            "bkgs,bksd->bkgd", w.astype(values.dtype), values, preferred_element_type=f32
        ),
    )


class ChunkAttention:
    """A chunk's queries over a row's entries and over the chunk, for all layers of one step.

    On a GPU our kernel or cuDNN does it where they can, elsewhere XLA operations.
    """

    def __init__(
        self, q_shape: tuple[int, ...], dtype: Any, pages: StepPages, logits: AttentionLogits
    ) -> None:
        """q_shape (T, K, G, D); `pages` of one row."""
        self._pages, self._logits = pages, logits
        self._on_gpu = None
        if gpu_attention.chunk_supported(q_shape, dtype, pages.pool, logits.soft_cap):
            self._on_gpu = gpu_attention.ChunkAttention(q_shape, dtype, pages, logits)

    @staticmethod
    def of_several(
        q_shape: tuple[int, ...],
        dtype: Any,
        pages: StepPages,
        logits: AttentionLogits,
        chunks: tuple[jax.Array, jax.Array],
    ) -> gpu_attention.ChunkAttention | None:
        """Of chunks of several rows in one call, each over its own; None where nothing takes them.

        q_shape (T, K, G, D); `pages` of their rows; `chunks`: where they begin among T, multiples of ALIGN, and how many
        tokens they have, i32[S] each. Rows of no chunk are not written.
        """
        if not gpu_attention.takes_several(q_shape, dtype, pages.pool):
            return None
        return gpu_attention.ChunkAttention(q_shape, dtype, pages, logits, chunks)

    def __call__(self, layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        """See `chunk_attention`."""
        if self._on_gpu:
            return self._on_gpu(layer, q, k, v)
        return chunk_attention(q, k, v, self._pages.of_layer(layer), self._logits)


def chunk_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, pages: LayerPages, logits: AttentionLogits
) -> tuple[jax.Array, jax.Array]:
    """A chunk's queries over the row's entries (all visible) and over the chunk (causal), as XLA operations.

    q [T, K, G, D], k and v [T, K, D], `pages` of one row -> (out [T, K, G, D] in float32 or q's dtype, natural log-sum-exp
    f32[T, K, G]). Rows past the chunk's valid tokens give finite values without meaning.

    Head by head, as each walks over what it holds, and plain matrix products take half the time of batched ones on a CPU.
    In a loop: as a copy for each head attention is half of what a chunk's program takes to compile. Over a history it is as
    fast, without one attention takes a quarter longer.
    """
    tokens, _, group, head_dim = q.shape

    def one(given: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        q, k, v, *where = given
        rows = q.reshape(tokens * group, head_dim)
        state = _causal(rows, k, v, group, logits)
        out, lse = _walk_head(rows, pages, where, state, logits).result()
        return out.reshape(tokens, group, head_dim), lse.reshape(tokens, group)

    heads = (x.swapaxes(0, 1) for x in (q, k, v))
    out, lse = lax.map(one, (*heads, jnp.asarray(pages.first), jnp.asarray(pages.column), pages.lengths[0]))
    return out.swapaxes(0, 1), lse.swapaxes(0, 1)


class WindowAttention:
    """A chunk's queries over the last tokens before the chunk and over the chunk, in layers with a sliding window.

    On a GPU our kernel or cuDNN does it where they can, elsewhere XLA operations.
    """

    def __init__(
        self,
        q_shape: tuple[int, ...],
        dtype: Any,
        window: int,
        before: jax.Array,
        pool: jax.Array,
        logits: AttentionLogits,
    ) -> None:
        """q_shape (T, K, G, D); `before` i32[]: tokens of the row before the chunk."""
        self._window, self._behind, self._logits = window, jnp.minimum(before, window - 1), logits
        self._on_gpu = None
        pool = gpu_attention.window_pool(pool, dtype)
        if gpu_attention.chunk_supported(q_shape, dtype, pool, logits.soft_cap):
            behind = self._behind[None]
            self._on_gpu = gpu_attention.WindowAttention(q_shape, dtype, window, behind, pool, logits)

    @staticmethod
    def of_several(
        q_shape: tuple[int, ...],
        dtype: Any,
        window: int,
        behind: jax.Array,
        pool: jax.Array,
        logits: AttentionLogits,
        chunks: tuple[jax.Array, jax.Array, jax.Array],
    ) -> gpu_attention.WindowAttention | None:
        """Of chunks of several rows in one call; None where nothing takes them.

        q_shape (T, K, G, D); `behind` i32[S]: keys before that of each chunk's first query; `chunks`: where they begin among
        T, how many tokens they have, and where each one's keys begin, i32[S] each. Rows of no chunk are not written.
        """
        pool = gpu_attention.window_pool(pool, dtype)
        if not gpu_attention.takes_several(q_shape, dtype, pool):
            return None
        return gpu_attention.WindowAttention(q_shape, dtype, window, behind, pool, logits, chunks)

    def __call__(self, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        """See `window_attention`."""
        if self._on_gpu:
            return self._on_gpu(q, k, v)
        return window_attention(q, k, v, self._behind, self._window, self._logits)


def window_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, behind: jax.Array, window: int, logits: AttentionLogits
) -> tuple[jax.Array, jax.Array]:
    """A chunk's queries, each over the `window` last tokens up to its own, as XLA operations.

    q [T, K, G, D]; k and v [H + T or more, K, D], H as there, where `behind` i32[] rows come before that of the first query
    (`rings.with_history`) -> as `chunk_attention`.
    """
    tokens, heads, group, head_dim = q.shape
    outs, lses = [], []
    for head in range(heads):
        parts = []
        for start in range(0, tokens, QUERY_BLOCK):
            stop = min(start + QUERY_BLOCK, tokens)
            first = jnp.maximum(behind + start - (window - 1), 0)  # that any of these queries sees
            size = min(stop - start + window - 1, k.shape[0])
            keys, values = (lax.dynamic_slice_in_dim(x[:, head], first, size) for x in (k, v))
            scores = logits(_product(q[start:stop, head].reshape(-1, head_dim), keys.T))
            ahead = behind + np.repeat(np.arange(start, stop), group)[:, None] - first
            distance = ahead - lax.iota(jnp.int32, size)
            parts.append(_softmax(jnp.where((distance >= 0) & (distance < window), scores, NEVER), values))
        out, lse = jax.tree.map(lambda *x: jnp.concatenate(x), *parts).result()
        outs.append(out.reshape(tokens, group, head_dim))
        lses.append(lse.reshape(tokens, group))
    return jnp.stack(outs, 1), jnp.stack(lses, 1)


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, preferred_element_type=jnp.float32)


def _causal(rows: jax.Array, k: jax.Array, v: jax.Array, group: int, logits: AttentionLogits) -> Softmax:
    """Queries [T * G, D] over keys and values [T, D] of their own chunk, in blocks that skip most of what is masked."""
    parts = []
    for start in range(0, k.shape[0], QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, k.shape[0])
        scores = logits(_product(rows[start * group : stop * group], k[:stop].T))
        # Compared by the program: as constants of it, the masks of 8192 tokens take a gigabyte a layer.
        visible = lax.iota(jnp.int32, stop) <= np.repeat(np.arange(start, stop), group)[:, None]
        parts.append(_softmax(jnp.where(visible, scores, NEVER), v[:stop]))
    return jax.tree.map(lambda *x: jnp.concatenate(x), *parts)


def _softmax(scores: jax.Array, values: jax.Array) -> Softmax:
    """Scores [R, S] and values [S, D] alone."""
    top = scores.max(-1)
    weights = jnp.exp(scores - top[:, None])
    return Softmax(_product(weights.astype(values.dtype), values), top, weights.sum(-1))


def _walk_head(
    rows: jax.Array, pages: LayerPages, where: Sequence[jax.Array], start: Softmax, logits: AttentionLogits
) -> Softmax:
    """Add all entries of one head of the one request of `pages` to `start`, for queries [R, D].

    `where`: first, column and length i32[] of the head.
    """
    first, column, length = where
    page_size, head_dim = pages.page_size, pages.pool.shape[-1]
    per_block = max(1, CHUNK_BLOCK // page_size)
    block = per_block * page_size

    def body(i: jax.Array, state: Softmax) -> Softmax:
        at = first + i * per_block + np.arange(per_block)
        numbers = pages.table[0, jnp.minimum(at, pages.table.shape[1] - 1)]
        keys, values = (x.reshape(block, head_dim) for x in pages.gather(numbers, column, rows.dtype))
        scores = logits(_product(rows, keys.T))
        scores = jnp.where(i * block + np.arange(block) < length, scores, NEVER)
        return state.add(scores, lambda w: _product(w.astype(values.dtype), values))

    return lax.fori_loop(0, lax.div(length + (block - 1), np.int32(block)), body, start)
