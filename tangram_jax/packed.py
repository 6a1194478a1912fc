"""Chunks of several rows in one run of tokens, one after another, so that the model's matrix products see no padding.

Only attention, scores and writing are done chunk by chunk, each as if it were alone in as many token slots as all have.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from models.config import ModelConfig
from tangram_jax.cache import Cache
from tangram_jax.plan import CachePlan
from tangram_jax.scorers import Scorer
from tangram_jax.step_layers import Chunk, ChunkLayers


class Packed(NamedTuple):
    """The next tokens of several rows. Arrays of the host or the device."""

    rows: Any  # i32[S]; a number of no row makes an empty chunk
    tokens: Any  # i32[T]: the first counts[0] are of rows[0], the next of rows[1], then padding
    counts: Any  # i32[S]: tokens of each, at least 1, of an empty chunk 0; T together at most


class Places:
    """Where the tokens of each chunk lie. The same in all layers."""

    def __init__(self, packed: Packed, cache: Cache) -> None:
        size, slots = packed.tokens.shape[0], packed.rows.shape[0]
        # Those of a chunk that is left out keep their places, so that the chunks behind it have their own.
        there, ends = packed.rows < cache.num_rows, jnp.cumsum(packed.counts)
        self.counts = jnp.where(there, packed.counts, 0)
        at, self._starts = np.arange(size), ends - packed.counts
        owner = jnp.minimum((at[:, None] >= ends).sum(1), slots - 1)
        self.there = (at < ends[-1]) & there[owner]
        within = at - self._starts[owner]
        before = (cache.tokens + cache.tail).at[packed.rows].get(mode="fill", fill_value=0)
        self.positions = before[owner] + within  # i32[T]
        self.last = jnp.maximum(ends - 1, 0)  # i32[S]
        # Of each chunk's tokens among all, beyond them for padding; and of each token among those of all chunks.
        self._apart = jnp.where(at < self.counts[:, None], self._starts[:, None] + at, size)  # [S, T]
        self._together = owner * size + within  # [T]

    def apart(self, x: jax.Array) -> jax.Array:
        """[T, ...] -> [S, T, ...]: each chunk's own first, then zeros, so that nothing of one gets into another."""
        return x.at[self._apart].get(mode="fill", fill_value=0)

    def together(self, parts: Sequence[jax.Array]) -> jax.Array:
        """Of each chunk [T, ...] -> [T, ...]."""
        return jnp.concatenate(parts)[self._together]


class PackedLayers:
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
        self._places = Places(packed, cache)
        self._chunks = [
            ChunkLayers(plan, config, scorer, cache, Chunk(row, packed.tokens, count), dtype)
            for row, count in zip(packed.rows, jnp.maximum(self._places.counts, 1), strict=True)
        ]

    def __call__(
        self, layer: int, q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None = None
    ) -> jax.Array:
        """Attention of all chunks' q [T, K, G, D], k and v [T, K, D]: [T, K, G, D]. `sinks` as for `ChunkLayers`."""
        qs, ks, vs = map(self._places.apart, (q, k, v))
        parts = [chunk(layer, qs[i], ks[i], vs[i], sinks) for i, chunk in enumerate(self._chunks)]
        return self._places.together(parts)

    @property
    def kept(self) -> list[Any]:
        return [chunk.kept for chunk in self._chunks]

    def write(self, cache: Cache, kept: Sequence[Any]) -> Cache:
        """What the chunks leave, from `kept` of each."""
        for chunk, own in zip(self._chunks, kept, strict=True):
            cache = chunk.write(cache, own)
        return cache
