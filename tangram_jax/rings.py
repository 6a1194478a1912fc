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
from pallas_kernels import byte_pages
from pallas_kernels.chunk_prefill import aligned
from tangram_jax.pages import StepPages
from tangram_jax.row_numbers import at_least


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
        count, window = at_least(1, **{"sliding.count": sliding.count, "sliding.window": sliding.window})
        (max_tail,) = at_least(0, **{"sliding.max_tail": sliding.max_tail})
        held = window - 1 + max_tail + trailing
        return cls(
            layers=count,
            kv_heads=kv_heads,
            heads_per_page=heads_per_page,
            page_size=page_size,
            window=window,
            max_tail=max_tail,
            pages=-(-held // page_size) + 1,
        )

    @property
    def num_groups(self) -> int:
        return -(-self.layers * self.kv_heads // self.heads_per_page)

    @property
    def slots(self) -> int:
        """Entries of a group's ring."""
        return self.pages * self.page_size

    @property
    def group_of(self) -> np.ndarray:
        """int32[layers, K]. Heads fill the columns as they come: groups of all layers hold the same positions."""
        head = np.arange(self.layers * self.kv_heads, dtype=np.int32)
        return (head // self.heads_per_page).reshape(self.layers, self.kv_heads)

    @property
    def column_of(self) -> np.ndarray:
        """int32[layers, K]"""
        head = np.arange(self.layers * self.kv_heads, dtype=np.int32)
        return (head % self.heads_per_page).reshape(self.layers, self.kv_heads)

    @property
    def head_at(self) -> np.ndarray:
        """int32[groups, Hp]: the head (sliding layer * K + KV head) of each column, -1 where a column is empty."""
        heads = self.layers * self.kv_heads
        table = np.full(self.num_groups * self.heads_per_page, -1, np.int32)
        table[:heads] = np.arange(heads)
        return table.reshape(-1, self.heads_per_page)

    def seen_before(self, columns: int) -> int:
        """Entries before a chunk that its first query sees at most, of rows with so many columns for each ring."""
        return min(self.window - 1, columns * self.page_size)

    def page_at(self, position: jax.Array, numbers: jax.Array) -> jax.Array:
        """Which of the pages i32[..., C] of a ring holds each position."""
        return position // self.page_size % numbers.shape[-1]

    def group_pages(self, tokens: Any) -> Any:
        """Pages of each group for `tokens` tokens int32[...]: int32[...]. NumPy in, NumPy out; JAX in, JAX out."""
        pages = tokens // self.page_size + (tokens % self.page_size > 0)
        return pages * (pages < self.pages) + self.pages * (pages >= self.pages)


# A row of the cache that is never as long as a ring has fewer columns for it: C is how many there are, from here on.


def row_rings(rings: Rings, table: jax.Array, layout: Any) -> jax.Array:
    """The pages of the rings i32[..., groups, C] from rows of the table i32[..., R]; `layout` is the cache's."""
    first = len(layout.capacity) - rings.num_groups
    columns = layout.capacity[first]
    return table[..., int(layout.first[first]) :].reshape(*table.shape[:-1], rings.num_groups, columns)


def visible_pages(
    rings: Rings, pool: jax.Array, numbers: jax.Array, tokens: jax.Array, ahead: Any = 0
) -> StepPages:
    """What the next token of each request sees of its rings, in order of positions.

    `numbers` i32[B, groups, C] the requests' pages, `tokens` i32[B] how many each has, -1 in an empty slot; `ahead` i32[B]:
    the token so many places after the next. The first pages begin with `skip` entries that are out of sight.
    """
    size, (batch, _, columns) = rings.page_size, numbers.shape
    oldest = jnp.maximum(tokens + ahead - (rings.window - 1), 0)
    page = oldest // size
    # Turned, so that the page with the oldest entry comes first.
    at = (page[:, None] + np.arange(columns)) % columns  # [B, C]
    turned = jnp.take_along_axis(numbers, at[:, None], axis=2)
    return StepPages(
        pool=pool,
        table=turned.reshape(batch, -1),
        rows=jnp.arange(batch, dtype=jnp.int32),
        lengths=jnp.broadcast_to(
            (tokens - page * size)[:, None, None], (batch, rings.layers, rings.kv_heads)
        ),
        first=rings.group_of * columns,
        column=rings.column_of,
        most=columns,
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

    `layer`: which sliding one; k and v [T, K, D] -> both [H + T, K, D] and up to seven rows more, where H is the window
    less one, or what a row can hold if that is less: first the min(before, H) that are there, then at once the chunk's.
    Rows past the chunk are finite and mean nothing.
    """
    most = rings.seen_before(chunk.numbers.shape[1])
    behind = jnp.minimum(chunk.before, most)
    position = chunk.before - behind + np.arange(most)
    number = chunk.numbers[rings.group_of[layer], rings.page_at(position, chunk.numbers)[:, None]]
    held = _entries(rings, pool, number, layer, position, k.dtype)

    def joined(held: jax.Array, new: jax.Array) -> jax.Array:
        # As many rows as the kernel's copies take, or it would have to copy them all into such an array.
        total = aligned(most + len(new))
        rows = jnp.concatenate([held, jnp.zeros((total - most, *new.shape[1:]), new.dtype)])
        return jax.lax.dynamic_update_slice_in_dim(rows, new, behind, 0)

    return joined(held[0], k), joined(held[1], v)


class RingChunks:
    """Chunks of several rows, as their rings see them: keys of each in a segment of one array. The same in all layers."""

    def __init__(
        self, rings: Rings, numbers: jax.Array, before: jax.Array, starts: jax.Array, size: int
    ) -> None:
        """`numbers` i32[S, groups, C] the rows' pages, `before` i32[S] tokens of each before its chunk.

        `starts` i32[S]: where the chunks begin among `size` tokens, multiples of 8.
        """
        most = rings.seen_before(numbers.shape[2])
        self._rings, self._numbers = rings, numbers
        self.behind = jnp.minimum(before, most)  # i32[S]
        # Of each segment, with room for what lies between two chunks among the tokens.
        self.key_starts = starts + np.arange(len(numbers), dtype=np.int32) * aligned(most)
        row = np.arange(len(numbers) * aligned(most) + aligned(size))
        self._chunk = (row[:, None] >= self.key_starts[1:]).sum(1)  # i32[rows]
        within = row - self.key_starts[self._chunk]
        self._position = before[self._chunk] - self.behind[self._chunk] + within
        self._ahead = within - self.behind[self._chunk]  # tokens after the chunk's first
        self._token = jnp.clip(starts[self._chunk] + self._ahead, 0, size - 1)

    def with_history(
        self, pool: jax.Array, layer: int, k: jax.Array, v: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """As `with_history` for one, of each chunk in its segment: k and v [T, K, D] -> [S * H + T, K, D] and a few more."""
        rings, at = self._rings, self._rings.page_at(self._position, self._numbers)
        number = self._numbers[self._chunk[:, None], rings.group_of[layer], at[:, None]]
        held = _entries(rings, pool, number, layer, self._position, k.dtype)
        new = (self._ahead >= 0)[:, None, None]
        keys, values = (jnp.where(new, x[self._token], h) for x, h in zip((k, v), held, strict=True))
        return keys, values


def _entries(
    rings: Rings, pool: jax.Array, number: jax.Array, layer: int, position: jax.Array, dtype: Any
) -> tuple[jax.Array, jax.Array]:
    """Keys and values [n, K, D] of a sliding layer at `position` i32[n], in pages i32[n, K]."""
    column, slot = rings.column_of[layer], (position % rings.page_size)[:, None]
    keys, values = (byte_pages.entries_at(pool, (number, which, column), slot, dtype) for which in range(2))
    return keys, values


def chunk_pages(rings: Rings, chunk: RingChunk, size: int) -> tuple[jax.Array, jax.Array]:
    """Where a chunk of `size` rows goes: (i32[groups, J] page numbers, i32[J * P] row of the chunk for each entry).

    A negative page is not written; an entry with a negative row stays as it is. Of a chunk longer than the ring only
    its end is written.
    """
    page_size, columns = rings.page_size, chunk.numbers.shape[1]
    count = min(-(-size // page_size) + 1, columns)
    last = (chunk.before + chunk.valid - 1) // page_size
    page = jnp.maximum(chunk.before // page_size, last - columns + 1) + np.arange(count)  # [J]
    numbers = jnp.where(page <= last, chunk.numbers[:, page % columns], -1)
    position = (page[:, None] * page_size + np.arange(page_size)).reshape(-1)
    return numbers, jnp.clip(position - chunk.before, -1, size - 1)
