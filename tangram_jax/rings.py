"""Sliding-window layers in the cache: each group keeps a ring of pages with the last positions, never compressed.

The entry of position p lies in slot p % (pages * P) of its group's ring, so positions are known without being stored. A
ring is longer than the window by what a row may take back (`rollback`) and by a page, so that what is visible survives
that. All groups of all these layers hold the same positions: one count of tokens describes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from models.config import ModelConfig
from tangram_jax.pages import StepPages


@dataclass(frozen=True)
class SlidingLayers:
    """What a cache plan must know of a model's sliding-window layers."""

    count: int
    window: int  # tokens that a query sees, itself included
    max_tail: int = 256  # most tokens that a row keeps whole, all of which may be taken back: `init_cache`'s

    @classmethod
    def of(cls, config: ModelConfig, max_tail: int = 256) -> SlidingLayers | None:
        """Those of a model, None where it has none."""
        if not config.sliding_layers or config.sliding_window is None:
            return None
        return cls(len(config.sliding_layers), config.sliding_window, max_tail)


@dataclass(frozen=True)
class Rings:
    """The rings of all sliding-window layers. Their groups follow the compressed ones in a row of the table."""

    layers: int
    kv_heads: int  # K
    heads_per_page: int  # Hp
    page_size: int  # P
    window: int
    max_tail: int
    pages: int  # of each group's ring

    @classmethod
    def build(
        cls, sliding: SlidingLayers, kv_heads: int, heads_per_page: int, page_size: int, trailing: int
    ) -> Rings:
        """`trailing`: compressed tokens that a row may take back after its tail, the plan's window."""
        for name in ("count", "window", "max_tail"):
            if getattr(sliding, name) < (name != "max_tail"):
                raise ValueError(f"sliding layers: {name} is {getattr(sliding, name)}")
        held = sliding.window - 1 + sliding.max_tail + trailing
        return cls(
            layers=sliding.count,
            kv_heads=kv_heads,
            heads_per_page=heads_per_page,
            page_size=page_size,
            window=sliding.window,
            max_tail=sliding.max_tail,
            pages=-(-held // page_size) + 1,
        )

    @property
    def groups_per_layer(self) -> int:
        return -(-self.kv_heads // self.heads_per_page)

    @property
    def num_groups(self) -> int:
        return self.layers * self.groups_per_layer

    @property
    def slots(self) -> int:
        """Entries of a group's ring."""
        return self.pages * self.page_size

    @property
    def head_at(self) -> np.ndarray:
        """int32[groups, Hp]: the head (sliding layer * K + KV head) of each column, -1 where a column is empty."""
        table = np.full((self.layers, self.groups_per_layer * self.heads_per_page), -1, np.int32)
        table[:, : self.kv_heads] = np.arange(self.layers * self.kv_heads).reshape(self.layers, -1)
        return table.reshape(-1, self.heads_per_page)

    def group_pages(self, tokens: Any) -> Any:
        """Pages of each group for `tokens` tokens int32[...]: int32[...]. NumPy in, NumPy out; JAX in, JAX out."""
        pages = -(-tokens // self.page_size)
        return pages + (pages > self.pages) * (self.pages - pages)


def visible_pages(
    rings: Rings, pool: jax.Array, table: jax.Array, first: int, tokens: jax.Array
) -> StepPages:
    """What the next token of each request sees of its rings, in order of positions.

    `table` i32[B, R] the rows of the requests, `first` where their rings begin, `tokens` i32[B] how many each has, 0 in
    an empty slot. The first pages begin with `skip` entries that are out of sight.
    """
    size = rings.page_size
    oldest = jnp.maximum(tokens - (rings.window - 1), 0)
    page = oldest // size
    # Rotated: the page with the oldest entry first. The last one may be the first once more, at most.
    at = (page[:, None] + np.arange(rings.pages)) % rings.pages  # [B, C]
    numbers = table[:, first:].reshape(len(tokens), rings.num_groups, rings.pages)
    turned = jnp.take_along_axis(numbers, at[:, None], axis=2)
    shape = (len(tokens), rings.layers, rings.kv_heads)
    head = np.arange(rings.kv_heads)
    group = np.arange(rings.layers)[:, None] * rings.groups_per_layer + head // rings.heads_per_page
    return StepPages(
        pool=pool,
        table=turned.reshape(len(tokens), -1),
        rows=jnp.arange(len(tokens), dtype=jnp.int32),
        lengths=jnp.broadcast_to((tokens - page * size)[:, None, None], shape),
        first=(group * rings.pages).astype(np.int32),
        column=np.broadcast_to(head % rings.heads_per_page, group.shape).astype(np.int32),
        skip=oldest - page * size,
    )


class RingChunk(NamedTuple):
    """A chunk of one row, as its rings see it."""

    numbers: jax.Array  # i32[groups, C]: the row's pages
    before: jax.Array  # i32[]: tokens of the row before the chunk
    valid: jax.Array  # i32[]: of the chunk


def with_history(
    rings: Rings, pool: jax.Array, chunk: RingChunk, layer: int, k: jax.Array, v: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """A chunk's keys and values after those that its first query still sees.

    `layer`: which sliding one; k and v [T, K, D] -> both [window - 1 + T, K, D]: first the min(before, window - 1) that
    are there, then at once the chunk's. Rows past the chunk are finite and mean nothing.
    """
    size, most, heads = rings.page_size, rings.window - 1, k.shape[1]
    behind = jnp.minimum(chunk.before, most)
    row = np.arange(most + k.shape[0])
    position = chunk.before - behind + row
    groups = chunk.numbers.reshape(rings.layers, rings.groups_per_layer, rings.pages)[layer]
    head = np.arange(heads)
    number = groups[(head // rings.heads_per_page)[None], (position // size % rings.pages)[:, None]]
    in_chunk = jnp.clip(row - behind, 0, k.shape[0] - 1)

    def joined(which: int, new: jax.Array) -> jax.Array:
        old = pool.at[number, which, (head % rings.heads_per_page)[None], (position % size)[:, None]]
        held = old.get(mode="clip").astype(new.dtype)
        return jnp.where((row < behind)[:, None, None], held, new[in_chunk])

    return joined(0, k), joined(1, v)


def chunk_pages(rings: Rings, chunk: RingChunk, size: int) -> tuple[jax.Array, jax.Array]:
    """Where a chunk of `size` rows goes: (i32[groups, J] page numbers, i32[J * P] row of the chunk for each entry).

    A negative page is not written; an entry with a negative row stays as it is. Of a chunk longer than the ring only
    its end is written.
    """
    page_size = rings.page_size
    count = min(-(-size // page_size) + 1, rings.pages)
    last = (chunk.before + chunk.valid - 1) // page_size
    page = jnp.maximum(chunk.before // page_size, last - rings.pages + 1) + np.arange(count)  # [J]
    numbers = jnp.where(page <= last, chunk.numbers[:, page % rings.pages], -1)
    position = (page[:, None] * page_size + np.arange(page_size)).reshape(-1)
    return numbers, jnp.clip(position - chunk.before, -1, size - 1)
