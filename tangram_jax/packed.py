"""Chunks of several rows in one run of tokens, so that the model's matrix products see little padding.

On a Hopper GPU one kernel does the attention of all of them; elsewhere, over pages of bytes and in layers with a sliding
window each chunk's is done as if it were alone in as many token slots as all have. Scores and writing are each chunk's own.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from models.config import ModelConfig
from models.sinks import with_sinks
from pallas_kernels.chunk_prefill import ALIGN
from tangram_jax.attention import ChunkAttention
from tangram_jax.cache import Cache
from tangram_jax.plan import CachePlan
from tangram_jax.scorers import Scorer
from tangram_jax.step_layers import Chunk, ChunkLayers, Layers


class Packed(NamedTuple):
    """The next tokens of several rows. Arrays of the host or the device.

    Tokens one after another, without the places between that `of` leaves, are taken for others than they are.
    """

    rows: Any  # i32[S]; a number of no row makes an empty chunk
    tokens: Any  # i32[T], each row's from `starts_of(counts)` on, with padding between and after
    counts: Any  # i32[S]: tokens of each, at least 1, of an empty chunk 0

    @classmethod
    def of(cls, rows: Sequence[int] | np.ndarray, texts: Sequence[np.ndarray], slots: int) -> "Packed":
        """The next tokens i32[:] of each row, in T = `slots`. Raises ValueError where they do not fit."""
        counts = np.array([len(text) for text in texts], np.int32)
        tokens = np.zeros(slots, np.result_type(np.int32, *texts))  # what is not whole `step` refuses
        for start, text in zip(starts_of(counts).tolist(), texts, strict=True):
            if len(text) and start + len(text) > slots:
                raise ValueError(f"chunks of {counts.tolist()} tokens do not fit into {slots} slots")
            tokens[start : start + len(text)] = text
        return cls(np.asarray(rows), tokens, counts)


def packed_slots(count: Any) -> Any:
    """Of a chunk of so many tokens: the next one begins at a multiple of 8."""
    return -(-count // ALIGN) * ALIGN


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
        before = (cache.tokens + cache.tail).at[packed.rows].get(mode="fill", fill_value=0)
        self.positions = before[owner] + within  # i32[T]
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
        shape, pages = (packed.tokens.shape[0], *self._heads), self.row_pages(packed.rows)
        self._attention = ChunkAttention.of_several(
            shape, dtype, pages, self._logits, (places.starts, places.counts)
        )

    def __call__(
        self, layer: int, q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None = None
    ) -> jax.Array:
        """Attention of all chunks' q [T, K, G, D], k and v [T, K, D]: [T, K, G, D]. `sinks` as for `ChunkLayers`."""
        k, v = self._finite(k), self._finite(v)
        if self._attention and self._window_number(layer) is None:
            parts = self._attention(self._config.full_layers.index(layer), q, k, v)
            out, lse = map(self._places.or_zero, parts)
        else:
            qs, ks, vs = map(self._places.apart, (q, k, v))
            each = [chunk.attend(layer, qs[i], ks[i], vs[i]) for i, chunk in enumerate(self._chunks)]
            out, lse = map(self._places.together, zip(*each, strict=True))
        out, lse = with_sinks(out, lse, sinks)
        q = jnp.where(jnp.isfinite(q), q, 0)  # scores leave other chunks' queries out, by zeros
        for chunk in self._chunks:
            chunk.take(layer, q, k, v, lse)
        return out

    @property
    def kept(self) -> list[Any]:
        return [chunk.kept for chunk in self._chunks]

    def write(self, cache: Cache, kept: Sequence[Any]) -> Cache:
        """What the chunks leave, from `kept` of each."""
        for chunk, own in zip(self._chunks, kept, strict=True):
            cache = chunk.write(cache, own)
        return cache
