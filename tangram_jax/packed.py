"""Chunks of several rows in one run of tokens, so that the model's matrix products see little padding.

On a Hopper GPU one kernel does the attention of all of them; elsewhere, and over pages of bytes that are compressed, each
chunk's is done as if it were alone in as many token slots as all have. Expected Attention's logits are taken of all at
once as well; what else is scored, and writing, is each chunk's own.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from models.config import ModelConfig
from models.sinks import with_sinks
from pallas_kernels.chunk_prefill import aligned
from tangram_jax.attention import ChunkAttention, WindowAttention
from tangram_jax.cache import Cache
from tangram_jax.chunk_scores import Gaussians
from tangram_jax.plan import CachePlan
from tangram_jax.rings import RingChunks, row_rings
from tangram_jax.scorers import Scorer
from tangram_jax.step_layers import Chunk, ChunkLayers, Decode, Layers


class Packed(NamedTuple):
    """The next tokens of several rows. Arrays of the host or the device.

    Tokens one after another, without the places between that `of` leaves, are taken for others than they are.
    """

    rows: Any  # i32[S]; a number of no row makes an empty chunk
    tokens: Any  # i32[T], each row's from `starts_of(counts)` on, with padding between and after
    counts: Any  # i32[S]: tokens of each, at least 1, of an empty chunk 0

    @classmethod
    def of(
        cls, rows: Sequence[int] | np.ndarray, texts: Sequence[Sequence[int] | np.ndarray], slots: int
    ) -> "Packed":
        """The next tokens i32[:] of each row, in T = `slots`.

        Raises ValueError where they do not fit, and on no rows or texts of others.
        """
        if not len(rows) or len(rows) != len(texts):
            raise ValueError(
                f"{len(rows)} rows and {len(texts)} texts: expected as many of both, and one at least"
            )
        arrays = [np.asarray(text if len(text) else np.zeros(0, np.int32)) for text in texts]
        counts = np.array([len(text) for text in arrays], np.int32)
        tokens = np.zeros(slots, np.result_type(np.int32, *arrays))  # what is not whole `step` refuses
        for start, text in zip(starts_of(counts).tolist(), arrays, strict=True):
            if len(text) and start + len(text) > slots:
                raise ValueError(f"chunks of {counts.tolist()} tokens do not fit into {slots} slots")
            tokens[start : start + len(text)] = text
        return cls(np.asarray(rows), tokens, counts)


def chunks_of(chunk: Any, decode: Any) -> list[Chunk | Packed]:
    """The chunks that a step is given. Raises TypeError where these are none, or `decode` is something else."""
    if not isinstance(decode, Decode | None):
        raise TypeError(f"a step's decode must be a tj.Decode or None, got {type(decode).__name__}")
    if chunk is None or isinstance(chunk, Chunk | Packed):
        return [] if chunk is None else [chunk]
    several = isinstance(chunk, list | tuple) and not isinstance(chunk, Decode)
    if several and all(isinstance(part, Chunk | Packed) for part in chunk):
        return [*chunk]
    parts = " of " + ", ".join(type(part).__name__ for part in chunk) if several else ""
    raise TypeError(
        f"a step's chunk must be a tj.Chunk, a tj.Packed, a list of these, or None, got {type(chunk).__name__}{parts}; "
        "single tokens are a tj.Decode, given as decode"
    )


def packed_slots(count: Any) -> Any:
    """Of a chunk of so many tokens: the next one begins at a multiple of 8."""
    return aligned(count)


def starts_of(counts: Any) -> Any:
    """i32[S]: where each of chunks of so many tokens begins."""
    slots = packed_slots(counts)
    return slots.cumsum() - slots


class Places:
    """Where the tokens of each chunk lie. The same in all layers."""

    def __init__(self, packed: Packed, cache: Cache) -> None:
        size, slots = packed.tokens.shape[0], packed.rows.shape[0]
        # Those of a chunk that is left out keep their places, so that the chunks behind it have their own.
        self.counts = jnp.where(packed.rows < cache.num_rows, packed.counts, 0)
        at, self.starts = np.arange(size), starts_of(packed.counts)
        owner = jnp.maximum((at[:, None] >= self.starts).sum(1) - 1, 0)
        within = at - self.starts[owner]
        self.there = within < self.counts[owner]
        # i32[S]: tokens of the rows.
        self.before = (cache.tokens + cache.tail).at[packed.rows].get(mode="fill", fill_value=0)
        self.positions = self.before[owner] + within  # i32[T]
        self.last = jnp.clip(self.starts + packed.counts - 1, 0, size - 1)  # i32[S]
        # Of each chunk's tokens among all, beyond them for padding; and of each token among those of all chunks.
        self._apart = jnp.where(at < self.counts[:, None], self.starts[:, None] + at, size)  # [S, T]
        self._together = jnp.minimum(owner * size + within, slots * size - 1)  # [T]

    def apart(self, x: jax.Array) -> jax.Array:
        """[T, ...] -> [S, T, ...]: each chunk's own first, then zeros, so that nothing of one gets into another."""
        return x.at[self._apart].get(mode="fill", fill_value=0)

    def together(self, parts: Sequence[jax.Array]) -> jax.Array:
        """Of each chunk [T, ...] -> [T, ...]."""
        return jnp.concatenate(parts)[self._together]

    def or_zero(self, x: jax.Array) -> jax.Array:
        """[T, ...] with zeros where no token is."""
        return jnp.where(self.there.reshape(-1, *(1,) * (x.ndim - 1)), x, 0)


class PackedLayers(Layers):
    """The layers of several chunks, as `ChunkLayers` of one."""

    def __init__(
        self,
        plan: CachePlan,
        config: ModelConfig,
        scorer: Scorer,
        cache: Cache,
        packed: Packed,
        dtype: Any,
    ) -> None:
        """`packed`: rows below `cache.num_rows`, or that for an empty chunk; `dtype` of the activations."""
        super().__init__(plan, config, cache)
        self._places = places = Places(packed, cache)
        self._chunks = [
            ChunkLayers(plan, config, scorer, cache, Chunk(row, packed.tokens, count), dtype, start)
            for row, count, start in zip(
                packed.rows, jnp.maximum(places.counts, 1), places.starts, strict=True
            )
        ]
        self._gaussians = Gaussians.of_several([chunk.scores for chunk in self._chunks])
        shape, pages = (packed.tokens.shape[0], *self._heads), self.row_pages(packed.rows)
        where = places.starts, places.counts
        self._attention = ChunkAttention.of_several(shape, dtype, pages, self._logits, where)
        self._window_attention = None
        if rings := plan.rings:
            numbers = row_rings(rings, cache.row(packed.rows).pages, cache.layout)
            self._rings = RingChunks(rings, numbers, places.before, places.starts, shape[0])
            self._window_attention = WindowAttention.of_several(
                shape, dtype, rings.window, self._rings.behind, cache.pool, self._logits,
                (*where, self._rings.key_starts),
            )  # fmt: skip

    def __call__(
        self, layer: int, q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None = None
    ) -> jax.Array:
        """Attention of all chunks' q [T, K, G, D], k and v [T, K, D]: [T, K, G, D]. `sinks` as for `ChunkLayers`."""
        k, v = self._finite(k), self._finite(v)
        if parts := self._at_once(layer, q, k, v):
            out, lse = map(self._places.or_zero, parts)
        else:
            qs, ks, vs = map(self._places.apart, (q, k, v))
            each = [chunk.attend(layer, qs[i], ks[i], vs[i]) for i, chunk in enumerate(self._chunks)]
            out, lse = map(self._places.together, zip(*each, strict=True))
        out, lse = with_sinks(out, lse, sinks)
        for chunk in self._chunks:
            chunk.take(k, v)
        q = jnp.where(jnp.isfinite(q), q, 0)  # scores leave other chunks' queries out, by zeros
        self._score(layer, q, k, v, lse)
        return out

    def _score(self, layer: int, q: jax.Array, k: jax.Array, v: jax.Array, lse: jax.Array) -> None:
        if self._gaussians and self._window_number(layer) is None:
            try:
                with jax.named_scope("score"):
                    flat = q.reshape(len(q), self._config.num_heads, -1)
                    self._gaussians.add(self._config.full_layers.index(layer), flat, k, v)
                return
            except NotImplementedError:
                self._gaussians = None  # each one's scores say why
        for chunk in self._chunks:
            chunk.score(layer, q, k, v, lse)

    def _at_once(
        self, layer: int, q: jax.Array, k: jax.Array, v: jax.Array
    ) -> tuple[jax.Array, jax.Array] | None:
        """Attention and log-sum-exp of all chunks by one call, anything in rows of none; None where nothing does that."""
        number = self._window_number(layer)
        if number is None:
            full = self._config.full_layers.index(layer)
            return self._attention(full, q, k, v) if self._attention else None
        if self._window_attention is None:
            return None
        keys, values = self._rings.with_history(self._cache.pool, number, k, v)
        return self._window_attention(q, keys, values)

    @property
    def kept(self) -> list[Any]:
        return [chunk.kept for chunk in self._chunks]

    def write(self, cache: Cache, kept: Sequence[Any]) -> Cache:
        """What the chunks leave, from `kept` of each."""
        for chunk, own in zip(self._chunks, kept, strict=True):
            cache = chunk.write(cache, own)
        return cache
