"""Rows of the cache out of the device's memory and back: blocks of whole pages, and the row's two numbers.

A block holds the pages of some columns of a row of the table. What lies in them (entries, rings, bytes with their scales)
does not matter, nor does which pages of the pool they are: a row may come back as another row, in other pages. Blocks have
few sizes, so that nothing compiles later on.
"""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from tangram_jax.cache import NO_PAGE, Cache, RowLayout


@dataclass(frozen=True)
class BlockSizes:
    """Pages of a large and of a small block. A row goes in large ones, its end in small ones, so that little is empty."""

    large: int
    small: int

    @classmethod
    def of(cls, most: int) -> "BlockSizes":
        """Large ones of at most `most` pages, which several small ones fill."""
        small = max(1, most // 8)
        return cls(max(1, most // small) * small, small)

    def split(self, count: int) -> list[int]:
        """The sizes of the blocks that hold `count` pages."""
        whole, rest = divmod(count, self.large)
        return [self.large] * whole + [self.small] * -(-rest // self.small)

    def columns(self, layout: RowLayout, pages: np.ndarray) -> list[np.ndarray]:
        """i32[size] for each block of a row that has `pages` [page lists] of each group: the columns of its pages.

        The last ones may go on past the end of the row, where there is no page.
        """
        held = np.minimum(pages, layout.capacity)
        total = int(held.sum())
        before = np.cumsum(held) - held
        sizes = self.split(total)
        columns = np.full(sum(sizes), layout.width, np.int32)
        columns[:total] = np.repeat(layout.first - before, held) + np.arange(total)
        ends = np.cumsum(sizes, dtype=int)
        return [columns[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def _pages(cache: Cache, row: jax.Array, columns: jax.Array) -> jax.Array:
    """i32[n]: the pages of `columns` of `row`; past the end of the pool where it has none."""
    pages = cache.row(row).pages.at[columns].get(mode="fill", fill_value=NO_PAGE)
    return jnp.where(pages == NO_PAGE, cache.num_pages, pages)


@jax.jit
def read_block(cache: Cache, row: jax.Array, columns: jax.Array) -> jax.Array:
    """The pages of `columns` i32[n] of `row`, [n, *page]; zeros where it has none."""
    return cache.pool.at[_pages(cache, row, columns)].get(mode="fill", fill_value=0)


@partial(jax.jit, donate_argnums=0)
def write_block(cache: Cache, row: jax.Array, columns: jax.Array, block: jax.Array) -> Cache:
    """Put what `read_block` gave into the pages of `columns` i32[n] of `row`, which owns them alone; others stay."""
    return replace(cache, pool=cache.pool.at[_pages(cache, row, columns)].set(block, mode="drop"))


@partial(jax.jit, donate_argnums=0)
def set_counts(cache: Cache, row: jax.Array, tokens: jax.Array, tail: jax.Array) -> Cache:
    """Let `row` hold `tokens` under the plan's law and `tail` more: those of the row whose pages were written into it."""
    row = cache.known(row)
    return replace(cache, tokens=cache.tokens.at[row].set(tokens), tail=cache.tail.at[row].set(tail))
