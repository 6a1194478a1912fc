"""What the layers of one step do beside the model: attention over the cache and themselves, scores, what is to be written.

A chunk and the decode tokens have one object each, made once for all layers of the step. The pool is only read here; the
writes come at the end of the step (`ChunkLayers.write`, `TokenLayers.append`).
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from models.config import ModelConfig
from models.logits import AttentionLogits
from models.products import EndOfLayer
from models.sinks import with_sinks
from pallas_kernels import byte_pages
from pallas_kernels.decode_layer import Heads, Made
from pallas_kernels.layer_products import Tuning
from pallas_kernels.support import num_sms
from tangram_jax.attention import ChunkAttention, DecodeAttention, WindowAttention
from tangram_jax.cache import Cache
from tangram_jax.chunk_scores import ChunkScores
from tangram_jax.compress import Slots, append, candidates, read_tail, select, write, write_rings
from tangram_jax.pages import StepPages
from tangram_jax.plan import CachePlan
from tangram_jax.rings import RingChunk, row_rings, visible_pages, with_history
from tangram_jax.scorers import Scorer


class Chunk(NamedTuple):
    """The next tokens of one row. Arrays of the host or the device."""

    row: Any  # i32[]; a number of no row makes an empty chunk
    tokens: Any  # i32[T], padded
    valid: Any  # i32[]: how many are, at least 1


class Decode(NamedTuple):
    """One new token for each of several rows, or that and drafts of those after it, to be verified at once."""

    rows: Any  # i32[B]; a number of no row is an empty slot
    tokens: Any  # i32[B], or of S tokens each i32[B, S]
    counts: Any = None  # i32[B]: how many of a row's S tokens, or of its one, are there; None: all


class Layers:
    """The layers of a model by kind: those whose cache is compressed, and those with a sliding window."""

    def __init__(self, plan: CachePlan, config: ModelConfig, cache: Cache) -> None:
        self._plan, self._config, self._cache = plan, config, cache
        self._heads = (config.num_kv_heads, config.group_size, config.head_dim)
        self._logits = AttentionLogits.of(config)

    def _window_number(self, layer: int) -> int | None:
        """Which of the sliding-window layers it is."""
        sliding = self._config.sliding_layers
        return sliding.index(layer) if layer in sliding else None

    def _finite(self, x: jax.Array) -> jax.Array:
        # What attention masks it still multiplies, by zero: a NaN in the pool would be in other requests' outputs.
        # Bytes hold any finite number, the largest ones cut.
        dtype = self._cache.pool.dtype
        return jnp.where(jnp.isfinite(x if byte_pages.is_bytes(dtype) else x.astype(dtype)), x, 0)

    def _pages(self, rows: jax.Array, lengths: jax.Array) -> StepPages:
        """Of `rows` i32[B], whose groups hold `lengths` i32[B, M] entries."""
        plan, cache = self._plan, self._cache
        first = cache.layout.first[plan.group_of]
        most = max(cache.layout.capacity[: plan.num_groups])
        return StepPages(
            cache.pool, cache.table, rows, lengths[:, plan.group_of], first, plan.column_of, most
        )

    def row_pages(self, rows: jax.Array) -> StepPages:
        """Of all that `rows` i32[S] have; of numbers of no row anything."""
        _, tokens, tail, budgets = self._cache.row(rows)
        lengths = self._plan.lengths(tokens, budgets) + tail[:, None]
        return self._pages(jnp.minimum(rows, self._cache.num_rows - 1), lengths)

    def _by_kind(self, layers: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """(of the compressed layers, of those with a window), each in order."""
        config = self._config
        return [layers[i] for i in config.full_layers], [layers[i] for i in config.sliding_layers]


class ChunkLayers(Layers):
    """The layers of a chunk."""

    def __init__(
        self,
        plan: CachePlan,
        config: ModelConfig,
        scorer: Scorer,
        cache: Cache,
        chunk: Chunk,
        dtype: Any,
        start: jax.Array | None = None,
    ) -> None:
        """`dtype` of the activations; `start` i32[]: where it begins in what `score` and `take` get, if of several."""
        super().__init__(plan, config, cache)
        row, self._size, self._start = jnp.asarray(chunk.row), chunk.tokens.shape[0], start
        self._shape, self._dtype = (self._size, *self._heads), dtype
        self._what = candidates(plan, cache, row, self._size, chunk.valid)
        self._tail = read_tail(plan, cache, row, dtype)
        self.scores = ChunkScores(plan, config, scorer, self._what, self._tail, start)
        if rings := plan.rings:
            numbers = row_rings(rings, cache.row(row).pages, cache.layout)
            self._rings = RingChunk(numbers, self._what.before, jnp.asarray(chunk.valid))
        self._layers: list[tuple[jax.Array, jax.Array]] = []  # keys and values of each

    @property
    def kept(self) -> tuple[jax.Array, list[tuple[jax.Array, jax.Array]]]:
        """What `write` is to be given: all that it would read from a pool that others may have written to."""
        return self._tail, self._layers

    def __call__(
        self, layer: int, q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None = None
    ) -> jax.Array:
        """Attention of the chunk's q [T, K, G, D], k and v [T, K, D]: [T, K, G, D]. `sinks` [K, G]: see `models.sinks`."""
        k, v = self._finite(k), self._finite(v)
        out, lse = with_sinks(*self.attend(layer, q, k, v), sinks)
        self.take(k, v)
        self.score(layer, q, k, v, lse)
        return out

    def attend(self, layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Of the chunk alone, without sinks: (out [T, K, G, D], natural log-sum-exp f32[T, K, G])."""
        number = self._window_number(layer)
        if number is None:
            return self._attention(self._config.full_layers.index(layer), q, k, v)
        assert self._plan.rings is not None
        keys, values = with_history(self._plan.rings, self._cache.pool, self._rings, number, k, v)
        return self._window_attention(q, keys, values)

    def take(self, k: jax.Array, v: jax.Array) -> None:
        """What of the next layer is to be written."""
        self._layers.append((k, v))

    def score(self, layer: int, q: jax.Array, k: jax.Array, v: jax.Array, lse: jax.Array) -> None:
        """Candidates of a layer, unless it has a window; f32[T, K, G] `lse` over all that q saw."""
        if self._window_number(layer) is None:
            with jax.named_scope("score"):
                flat = q.reshape(self._size, self._config.num_heads, -1)
                number = self._config.full_layers.index(layer)
                self.scores.add(number, flat, k, v, lse.reshape(self._size, -1))

    # Made where they are used: several chunks may have one for all.

    @functools.cached_property
    def _attention(self) -> ChunkAttention:
        pages = self.row_pages(self._what.row[None])
        return ChunkAttention(self._shape, self._dtype, pages, self._logits)

    @functools.cached_property
    def _window_attention(self) -> WindowAttention:
        assert self._plan.rings is not None
        window, before = self._plan.rings.window, self._rings.before
        return WindowAttention(self._shape, self._dtype, window, before, self._cache.pool, self._logits)

    def write(self, cache: Cache, kept: tuple[jax.Array, Sequence[tuple[jax.Array, jax.Array]]]) -> Cache:
        """What the chunk leaves, from `kept`."""
        tail, layers = kept
        full, sliding = self._by_kind(layers)
        with jax.named_scope("keep"):
            order = select(self._plan, cache, self._what, self.scores.result())
            keys, values = [k for k, _ in full], [v for _, v in full]
            cache = write(self._plan, cache, self._what, order, tail, keys, values, self._start)
        # After the others: they take the tail, which was read from the pool, and no write may come before that read.
        if sliding:
            keys, values = [k for k, _ in sliding], [v for _, v in sliding]
            cache = write_rings(self._plan, cache, self._rings, keys, values, self._start)
        return cache


class TokenLayers(Layers):
    """The layers of one or a few new tokens each of several rows, all of which are appended."""

    _attention: Any  # of the compressed layers, and of those with a window: called with (which of them it is, qkv, sinks)
    _window_attention: Any
    _slots: Slots  # of the tokens

    def __init__(self, plan: CachePlan, config: ModelConfig, cache: Cache) -> None:
        super().__init__(plan, config, cache)
        self.new: list[jax.Array] = []  # of each layer, keys and values last

    def __call__(
        self, layer: int, q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None = None
    ) -> jax.Array:
        """Attention of the tokens' q [T, K, G, D], k and v [T, K, D], a row's one after another: [T, K, G, D].

        `sinks` as for `ChunkLayers`.
        """
        # Side by side: on a GPU one kernel rotates and writes all three, and attention and appending read them there.
        qkv = jnp.concatenate([q, *(self._finite(x)[:, :, None] for x in (k, v))], axis=2)
        self.new.append(qkv)
        attention, number = self._of(layer)
        return attention(number, qkv, sinks)

    def _of(self, layer: int) -> tuple[Any, int]:
        """The attention of its kind of layers, and which of them it is."""
        number = self._window_number(layer)
        if number is not None:
            return self._window_attention, number
        return self._attention, self._config.full_layers.index(layer)

    def append(self, cache: Cache, new: Sequence[jax.Array]) -> Cache:
        """The cache with the tokens that are there, from `new` of all layers."""
        full, sliding = self._by_kind(new)
        with jax.named_scope("append"):
            return append(self._plan, cache, self._slots, full + sliding)


class DecodeLayers(TokenLayers):
    """The layers of one new token each of several rows."""

    def __init__(
        self,
        plan: CachePlan,
        config: ModelConfig,
        cache: Cache,
        rows: jax.Array,
        dtype: Any,
        *,
        empty: int = 0,
    ) -> None:
        """`rows` i32[B], `cache.num_rows` for an empty slot; `empty`: slots that are known to be."""
        super().__init__(plan, config, cache)
        numbers, tokens, tail, budgets = cache.row(rows)
        there = (rows < cache.num_rows)[:, None]
        lengths = jnp.where(there, plan.lengths(tokens, budgets) + tail[:, None], 0)
        self._slots = Slots(rows, lengths, tokens + tail)
        shape = (len(rows), *self._heads)
        ctas = max(num_sms() // max(len(rows) - empty, 1), config.num_kv_heads)  # of each request
        pages = self._pages(rows, jnp.where(there, lengths, -1))
        self._attention = DecodeAttention(shape, dtype, pages, self._logits, plan.splits(ctas))
        if plan.rings:
            numbers = row_rings(plan.rings, numbers, cache.layout)
            pages = visible_pages(plan.rings, cache.pool, numbers, jnp.where(there[:, 0], tokens + tail, -1))
            splits = plan.splits(ctas, rings=True)
            self._window_attention = DecodeAttention(shape, dtype, pages, self._logits, splits)

    def _kinds(self) -> list[DecodeAttention]:
        return [self._attention, *([self._window_attention] if self._plan.rings else [])]

    def makes_heads(self) -> bool:
        """See `models.made_heads.AttendHeads`."""
        return all(attention.makes_heads() for attention in self._kinds())

    def of_heads(self, layer: int, heads: Heads, made: Made, sinks: jax.Array | None) -> jax.Array:
        """Attention of the tokens [T, K, G, D]."""
        attention, number = self._of(layer)
        out, new = attention.of_heads(number, heads, made, sinks)
        self.new.append(new)
        return out

    def reaches_the_end(self, tuning: Tuning) -> bool:
        """See `models.whole_layers.AttendToTheEnd`."""
        return all(attention.reaches_the_end(tuning) for attention in self._kinds())

    def to_the_end(
        self, layer: int, heads: Heads, made: Made, sinks: jax.Array | None, end: EndOfLayer
    ) -> tuple[jax.Array, jax.Array]:
        """The residual stream after the layer, and parts of the following layer's heads."""
        attention, number = self._of(layer)
        x, parts, new = attention.to_the_end(number, heads, made, sinks, end)
        self.new.append(new)
        return x, parts
