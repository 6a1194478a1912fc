"""What attention needs to know of the entries in the pool."""

from typing import Any, NamedTuple

import jax
import numpy as np

from pallas_kernels import byte_pages

NEVER = -1e30  # a score that no softmax notices; finite, so that differences of two are not NaN


class LayerPages(NamedTuple):
    """Where one layer's entries are."""

    pool: jax.Array  # [num_pages, 2, Hp, P, D], or of bytes: see `byte_pages`
    table: jax.Array  # i32[B, R]: one row for each request
    lengths: jax.Array  # i32[B, K]: entries of each KV head
    first: np.ndarray  # i32[K]: column of the table where the pages of each head's group begin
    column: np.ndarray  # i32[K]: each head's column in a page
    skip: jax.Array | None = None  # i32[B]: entries at the front of every head that are out of sight

    @property
    def page_size(self) -> int:
        """P"""
        return byte_pages.page_size(self.pool)

    def gather(
        self, numbers: jax.Array, column: np.ndarray | jax.Array, dtype: Any
    ) -> tuple[jax.Array, jax.Array]:
        """Keys and values [..., P, D] in `dtype` of pages by their `numbers` [...], of heads in `column` [...]."""
        with jax.named_scope("gather_pages"):
            keys, values = (
                byte_pages.entries(self.pool.at[numbers, which, column].get(mode="clip"), dtype)
                for which in (0, 1)
            )
        return keys, values


class StepPages(NamedTuple):
    """Where the entries of all layers are, for the requests of one step."""

    pool: jax.Array  # [num_pages, 2, Hp, P, D]
    table: jax.Array  # i32[rows, R]: every row of the cache
    rows: jax.Array  # i32[B]: the row of each request; a number of no row has no lengths or -1
    lengths: jax.Array  # i32[B, L, K]: entries of each KV head
    first: np.ndarray  # i32[L, K]
    column: np.ndarray  # i32[L, K]
    most: int  # pages that a head can have
    skip: jax.Array | None = None  # i32[B]: entries at the front of every head that are out of sight

    def of_layer(self, layer: int) -> LayerPages:
        """With the table rows of the requests alone."""
        table = self.table.at[self.rows].get(mode="clip")
        return LayerPages(
            self.pool, table, self.lengths[:, layer], self.first[layer], self.column[layer], self.skip
        )
