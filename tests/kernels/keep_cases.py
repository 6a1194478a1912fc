"""Inputs for the tests of the kernels that score a chunk's candidates and write the cache, and what NumPy makes of them."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels import byte_pages


@dataclasses.dataclass
class Case:
    """Two layers and more; groups of heads of any layers, the last column of the last group empty."""

    pool: Any
    keys: list[Any]  # per layer [T, K, D]
    values: list[Any]
    heads: np.ndarray  # [M, Hp]
    rng: np.random.Generator
    dtype: Any  # of keys and values

    @property
    def groups(self) -> int:
        return self.heads.shape[0]

    def new(self, tokens: int) -> list[Any]:
        """Of each layer [tokens, K, 5, D]: three queries of each head that nobody wants, its key, its value."""
        return [
            jnp.concatenate(
                [self.draw(tokens, k.shape[1], 3, k.shape[2]), k[:tokens, :, None], v[:tokens, :, None]], 2
            )
            for k, v in zip(self.keys, self.values, strict=True)
        ]

    def draw(self, *shape: int) -> Any:
        return jnp.asarray(self.rng.normal(size=shape).astype(np.float32).astype(self.dtype))

    @property
    def page_size(self) -> int:
        return byte_pages.page_size(self.pool)

    def put(self, column: np.ndarray, entry: int, row: np.ndarray) -> None:
        """Writes an entry [D] into a column [rows, D] of a page, in NumPy; into bytes by what their format says."""
        if not byte_pages.is_bytes(self.pool.dtype):
            column[entry] = row
            return
        row = row.astype(np.float32)
        mantissa, exponent = np.frexp(np.abs(row).max())  # in [0.5, 1): eight steps are sixteenths
        largest = np.ldexp(np.ceil(mantissa * 16) / 16, exponent).astype(np.float32)
        before = len(column) - self.page_size
        column[before + entry] = np.rint(row * (np.float32(127) / largest)) + 128
        beside = column[:before].reshape(-1)  # a view
        beside[entry] = (largest.view(np.int32) >> 20) - (110 << 3)

    def row(self, head: int, which: int, token: int) -> np.ndarray:
        kv_heads = self.keys[0].shape[1]
        layer = (self.keys, self.values)[which][head // kv_heads]
        return np.asarray(layer)[token, head % kv_heads]


def make_case(
    *,
    layers: int = 3,
    kv_heads: int = 2,
    tokens: int = 24,
    page_size: int = 16,
    heads_per_page: int = 2,
    head_dim: int = 64,
    num_pages: int = 40,
    dtype: Any = jnp.bfloat16,
    seed: int = 0,
    packed: bool = False,
) -> Case:
    rng = np.random.default_rng(seed)
    total = layers * kv_heads
    groups = -(-(total + 1) // heads_per_page)  # one empty column at least
    heads = np.full(groups * heads_per_page, -1, np.int32)
    heads[:total] = rng.permutation(total)
    case = Case(jnp.zeros((1,)), [], [], heads.reshape(groups, heads_per_page), rng, dtype)
    case.pool = case.draw(num_pages, 2, heads_per_page, page_size, head_dim)
    if packed:
        rows = byte_pages.page_rows(jnp.uint8, page_size, head_dim)
        shape = (num_pages, 2, heads_per_page, rows, head_dim)
        case.pool = jnp.asarray(rng.integers(0, 256, shape), jnp.uint8)
    case.keys, case.values = (
        [case.draw(tokens, kv_heads, head_dim) for _ in range(layers)] for _ in range(2)
    )
    return case


def append_arguments(case: Case, batch: int) -> dict[str, Any]:
    """Requests in rows of a table in any order: an empty slot, a full group and a missing page among them."""
    size = case.page_size
    capacity = case.rng.integers(2, 4, case.groups).astype(np.int32)
    first = np.concatenate([[0], np.cumsum(capacity)[:-1]]).astype(np.int32)
    width = int(capacity.sum()) + 1
    num_rows = batch + 1
    num_pages = case.pool.shape[0]
    table = case.rng.permutation(num_rows * width).reshape(num_rows, width).astype(np.int32)
    assert table.max() < num_pages, (table.max(), num_pages)
    rows = case.rng.permutation(num_rows)[:batch].astype(np.int32)
    lengths = case.rng.integers(0, 2 * size, (batch, case.groups)).astype(np.int32)
    lengths[-1, 0] = capacity[0] * size  # full
    table[rows[0], first[-1]] = -1
    lengths[0, -1] = 3  # no page there
    if batch > 2:
        rows[1] = num_rows + 6  # an empty slot
    return dict(
        lengths=jnp.asarray(lengths), rows=jnp.asarray(rows), table=jnp.asarray(table),
        first=first, capacity=capacity, heads=case.heads,
    )  # fmt: skip


def appended(case: Case, x: dict[str, Any]) -> np.ndarray:
    """The pool after the loop that `append` stands for."""
    pool, size = np.array(case.pool), case.page_size
    lengths, table = np.asarray(x["lengths"]), np.asarray(x["table"])
    for b, row in enumerate(np.asarray(x["rows"])):
        for m in range(case.groups):
            index = lengths[b, m] // size
            if row >= len(table) or index >= x["capacity"][m]:
                continue
            page = table[row, x["first"][m] + index]
            if page < 0:
                continue
            for column, head in enumerate(case.heads[m]):
                for which in range(2):
                    entry = case.row(max(head, 0), which, b)
                    case.put(pool[page, which, column], lengths[b, m] % size, entry)
    return pool


def write_arguments(case: Case, capacity: int, chunk: int, pages: int) -> dict[str, Any]:
    """Any candidates for `pages` pages of every group; some entries of the first stay, some pages are not written."""
    size = case.page_size
    shape = (*case.heads.shape, pages * size)
    source = case.rng.integers(0, capacity + chunk, shape).astype(np.int32)
    for m in range(case.groups):
        source[m, :, : case.rng.integers(0, size)] = -1
    numbers = case.rng.permutation(case.pool.shape[0])[: case.groups * pages].reshape(case.groups, pages)
    numbers[0, -1] = -1
    tail = case.draw(2, *case.heads.shape, capacity, case.pool.shape[4])
    return dict(
        tail=tail, source=jnp.asarray(source), pages=jnp.asarray(numbers, jnp.int32),
        heads=case.heads, chunk=chunk,
    )  # fmt: skip


def written(case: Case, x: dict[str, Any]) -> np.ndarray:
    """The pool after the loop that `write_pages` stands for."""
    pool, size, tail = np.array(case.pool), case.page_size, np.asarray(x["tail"])
    source, capacity = np.asarray(x["source"]), tail.shape[3]
    for m, numbers in enumerate(np.asarray(x["pages"])):
        for j, page in enumerate(numbers):
            if page < 0:
                continue
            for column, head in enumerate(case.heads[m]):
                for entry in range(size):
                    c = source[m, column, j * size + entry]
                    if c < 0:
                        continue
                    for which in range(2):
                        held = tail[which, m, column, c] if c < capacity else None
                        row = case.row(max(head, 0), which, c - capacity) if held is None else held
                        case.put(pool[page, which, column], entry, row)
    return pool


@dataclasses.dataclass
class WindowCase:
    arrays: tuple[Any, ...]  # q, keys, tail, lse
    options: dict[str, Any]

    def expected(self) -> tuple[np.ndarray, np.ndarray]:
        """(sums f64[K, W + T], which candidates exist), query by query."""
        q, keys, tail, lse = (np.asarray(x, np.float64) for x in self.arrays)
        o, kv_heads = self.options, keys.shape[1]
        group, capacity, count = q.shape[1] // kv_heads, tail.shape[3], int(o["count"])
        place, unlocked = o["place"][int(o["layer"])], np.asarray(o["unlocked"])
        out = np.zeros((kv_heads, capacity + keys.shape[0]))
        there = np.zeros(out.shape, bool)
        for k, (m, column) in enumerate(place):
            candidates = np.concatenate([tail[0, m, column], keys[:, k]])
            there[k, capacity - unlocked[m] : capacity + count] = True
            for t in range(max(count - o["window"], 0), count):
                for n in range(k * group, (k + 1) * group):
                    logits = candidates @ q[t, n] * o["scale"]
                    if (cap := o["soft_cap"]) is not None:
                        logits = cap * np.tanh(logits / cap)
                    p = np.exp(o["power"] * (logits - lse[t, n]))
                    p[capacity + t + 1 :] = 0
                    out[k] += np.where(there[k], p, 0)
        return out, there


def make_window(
    *,
    chunk: int = 128,
    capacity: int = 64,
    kv_heads: int = 2,
    group: int = 2,
    head_dim: int = 64,
    window: int = 32,
    count: int | None = None,
    power: int = 1,
    soft_cap: float | None = None,
    dtype: Any = jnp.bfloat16,
    seed: int = 0,
) -> WindowCase:
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> Any:
        return jnp.asarray(rng.normal(size=shape).astype(np.float32).astype(dtype))

    groups, columns, layers = 3, 2, 3
    at = np.stack(np.unravel_index(rng.permutation(groups * columns), (groups, columns)), axis=-1)
    place = np.stack([at[rng.permutation(len(at))[:kv_heads]] for _ in range(layers)]).astype(np.int32)
    lse = jnp.asarray(rng.normal(size=(chunk, kv_heads * group)).astype(np.float32) + 4)
    arrays = (
        draw(chunk, kv_heads * group, head_dim),
        draw(chunk, kv_heads, head_dim),
        draw(2, groups, columns, capacity, head_dim),
        lse,
    )
    options = dict(
        place=place, layer=jnp.int32(1), unlocked=jnp.asarray(rng.integers(0, capacity + 1, groups), jnp.int32),
        count=jnp.int32(chunk if count is None else count), window=window, scale=head_dim**-0.5, power=power,
        soft_cap=soft_cap,
    )  # fmt: skip
    return WindowCase(arrays, options)


def window_error(got: Any, case: WindowCase) -> float:
    """Largest error over the candidates that exist, relative to the largest sum of the head."""
    want, there = case.expected()
    error = np.where(there, np.abs(np.asarray(got, np.float64) - want), 0)
    return float((error.max(axis=1) / want.max(axis=1)).max())
