"""Queries, pages, tables and plans of a row, and the time that the decode kernel takes over them."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.gpu_timing import cold_calls, cold_times
from benchmarks.measured import DoesNotFitError, check_memory
from benchmarks.ragged_rows import MAX_CONTEXT, Row
from pallas_kernels import byte_pages
from pallas_kernels import ragged_decode as rd
from pallas_kernels.ragged_decode.shapes import Shape

SPARE_GB = 2  # for what lies beside the pool: what is read to sweep the L2, tables, results


@dataclasses.dataclass
class Inputs:
    q: jax.Array  # [B, K, G, D], with `new` [B, K, G + 2, D]
    pool: jax.Array  # [num_pages, 2, 1, P, D]: those of the row, and perhaps more behind them
    table: np.ndarray  # i32[B, R]
    lengths: np.ndarray  # i32[B, K]
    first: np.ndarray  # i32[K]
    column: np.ndarray  # i32[K]
    shape: Shape
    options: dict[str, Any]  # sinks, where the model has them
    new: bool = False

    @property
    def page_size(self) -> int:
        return byte_pages.page_size(self.pool)

    @property
    def num_pages(self) -> int:
        """That hold entries: the first of the pool."""
        return int((-(-self.lengths // self.page_size)).sum())

    @property
    def kv_bytes(self) -> int:
        """That the entries are."""
        entry = self.shape.head_dim * self.pool.dtype.itemsize + byte_pages.is_bytes(self.pool.dtype)
        return int(np.maximum(self.lengths, 0).sum()) * 2 * entry

    def plan(self, splits: int | Sequence[int] | None = None) -> rd.DecodePlan:
        """Equal shares, or `splits` of every head."""
        return make_plan(
            self.lengths, self.table, self.first, self.column, page_size=self.page_size, splits=splits
        ).layer(0)


@functools.partial(jax.jit, static_argnames=("page_size", "splits", "num_layers"))
def make_plan(
    lengths: Any,
    table: Any,
    first: Any,
    column: Any,
    *,
    page_size: int,
    splits: int | tuple[int, ...] | None = None,
    num_layers: int = 1,
) -> rd.DecodePlan:
    """See `plan_decode`."""
    return rd.plan_decode(
        lengths, table, first, column, page_size=page_size, splits=splits, num_layers=num_layers
    )


def pool_shape(pages: int, page: int, head_dim: int, packed: bool) -> tuple[int, ...]:
    """One head per page."""
    return pages, 2, 1, byte_pages.page_rows(jnp.uint8 if packed else jnp.bfloat16, page, head_dim), head_dim


@functools.partial(jax.jit, static_argnums=(0, 1))
def random_pool(shape: tuple[int, ...], packed: bool = False) -> jax.Array:
    """bfloat16 numbers of either sign, 0.5 to 1 in size, or bytes: drawn in place, whatever the size."""
    number = jnp.zeros(shape, jnp.uint32)
    for axis in range(len(shape)):
        number = number * jnp.uint32(shape[axis]) + lax.broadcasted_iota(jnp.uint32, shape, axis)
    for _ in range(2):
        number = number * jnp.uint32(0x9E3779B1)
        number = number ^ (number >> 15)
    if packed:
        return (number >> 11).astype(jnp.uint8)
    bits = (number >> 7).astype(jnp.uint16)
    return lax.bitcast_convert_type((bits & 0x807F) | 0x3F00, jnp.bfloat16)


class Pools:
    """One pool for rows whose pages are of one size, as large as any of them needs.

    So rows that differ in their lengths alone share a compiled program, and no pool is drawn for each.
    """

    def __init__(self, rows: Sequence[Row], packed: bool = False) -> None:
        self._packed = packed
        self._pool: Any = None
        self._pages: dict[tuple[int, int], int] = {}
        for row in rows:
            key, pages = (row.page, row.shape.head_dim), row.pages()
            try:
                check_memory(self._gigabytes(pages, *key))
            except DoesNotFitError:  # that row's own turn says so
                continue
            self._pages[key] = max(self._pages.get(key, 0), pages)

    def _gigabytes(self, pages: int, page: int, head_dim: int) -> float:
        width = 1 if self._packed else 2
        return np.prod(pool_shape(pages, page, head_dim, self._packed)) * width / 1e9 + SPARE_GB

    def of(self, row: Row) -> jax.Array:
        """Raises `DoesNotFitError`."""
        key, pages = (row.page, row.shape.head_dim), row.pages()
        check_memory(self._gigabytes(pages, *key))
        shape = pool_shape(self._pages[key], *key, self._packed)
        if self._pool is None or self._pool.shape != shape:
            self._pool = None  # before another takes its place
            self._pool = self._make(shape)
        return self._pool

    def _make(self, shape: tuple[int, ...]) -> Any:
        return random_pool(shape, self._packed)


def make_inputs(row: Row, pools: Pools | None = None) -> Inputs:
    """One head per page (the hardest layout for memory), pages in random order, room for the longest context."""
    shape, lengths = row.shape, row.lengths()
    pages = -(-lengths // row.page)
    room = MAX_CONTEXT // row.page
    first = np.arange(shape.num_kv_heads, dtype=np.int32) * room
    order = np.random.default_rng(1).permutation(int(pages.sum())).astype(np.int32)
    table = np.zeros((row.batch, room * shape.num_kv_heads), np.int32)
    at = 0
    for b in range(row.batch):
        for k, n in enumerate(pages[b]):
            table[b, first[k] : first[k] + n] = order[at : at + n]
            at += n
    held = shape.group + 2 * row.new
    return Inputs(
        q=jax.random.normal(
            jax.random.PRNGKey(1), (row.batch, shape.num_kv_heads, held, shape.head_dim), jnp.bfloat16
        ),
        pool=(pools or Pools([row])).of(row),
        table=table,
        lengths=lengths,
        first=first,
        column=np.zeros(shape.num_kv_heads, np.int32),
        shape=shape,
        options={"sinks": jnp.ones((shape.num_kv_heads, shape.group))} if shape.sinks else {},
        new=row.new,
    )


@functools.cache
def _decode_calls(head_dim: int, new: bool) -> Callable[..., Any]:
    def call(q: jax.Array, pool: jax.Array, plan: rd.DecodePlan, options: dict[str, Any]) -> Any:
        return rd.ragged_decode(q, pool, plan, scale=head_dim**-0.5, has_new=new, **options)

    return cold_calls(call)


def kernel_us(x: Inputs, plan: rd.DecodePlan | None = None) -> tuple[float, float]:
    """Median and least time of the kernel with a cold L2, in equal shares unless there is a plan."""
    args = x.q, x.pool, x.plan() if plan is None else plan, x.options
    return cold_times(_decode_calls(x.shape.head_dim, x.new), args, "ragged_decode")
