"""Decode attention whose equal shares go through one column of all pages after another, against request after request.

  python -m benchmarks.page_columns                    a layer of Llama-3.1-8B's shape, four heads in a page, one Hopper GPU
  python -m benchmarks.page_columns --csv rows.csv

Kernel times with a cold L2, us, the better median of two turns each, and their ratio; the floor is the entries' bytes at
the roof, measured in the same run. By columns four CTAs read the four heads of a page at the same time. Pages of a request
lie one after another in memory, as in a new pool, or anywhere.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu_timing import cold_calls, cold_times
from benchmarks.measured import main_of_rows
from benchmarks.ragged_inputs import random_pool
from benchmarks.shapes import LLAMA_8B
from pallas_kernels import ragged_decode as rd
from pallas_kernels.ragged_decode.plan import default_unit, equal_borders, least_share
from pallas_kernels.support import num_sms

PAGE, COLUMNS = 64, 4
GROUPS = LLAMA_8B.num_kv_heads // COLUMNS
NUM_PAGES = 1 << 14  # 2.1 GB
CASES = (
    (32, 8192, "equal"),
    (64, 8192, "equal"),
    (4, 100_000, "equal"),
    (32, 8192, "ragged"),
    (32, 2048, "ragged"),
)


@dataclasses.dataclass(frozen=True)
class Row:
    """Attention of one layer, one token per request."""

    model: str
    requests: int
    context: int  # entries of a head, on average
    lengths: str  # "equal" or "ragged" over requests and groups of heads
    pages: str  # "in order" or "anywhere"


@dataclasses.dataclass(frozen=True)
class Inputs:
    lengths: np.ndarray  # i32[B, K]
    table: np.ndarray  # i32[B, R]
    first: np.ndarray  # i32[K]
    column: np.ndarray  # i32[K]

    @classmethod
    def of(cls, row: Row) -> "Inputs":
        rng = np.random.default_rng(3)
        shape = row.requests, GROUPS
        lengths = np.full(shape, row.context)
        if row.lengths == "ragged":
            lengths = np.rint(rng.lognormal(np.log(row.context) - 0.32, 0.8, shape)).astype(int) + 1
        pages = -(-lengths // PAGE)
        room = int(pages.max())
        numbers = iter(np.arange(NUM_PAGES) if row.pages == "in order" else rng.permutation(NUM_PAGES))
        table = np.zeros((row.requests, GROUPS, room), np.int32)
        for at, count in np.ndenumerate(pages):
            table[at][:count] = [next(numbers) for _ in range(count)]
        group, column = np.divmod(np.arange(LLAMA_8B.num_kv_heads, dtype=np.int32), np.int32(COLUMNS))
        by_head = lengths[:, group].astype(np.int32)
        return cls(by_head, table.reshape(row.requests, -1), group * np.int32(room), column)

    def plan(self, by_columns: bool) -> rd.DecodePlan:
        return _plan(self, by_columns)(self.lengths, self.table).layer(0)


def _plan(inputs: Inputs, by_columns: bool) -> Callable[..., rd.DecodePlan]:
    def make(lengths: jax.Array, table: jax.Array) -> rd.DecodePlan:
        borders, unit = None, default_unit(PAGE)
        if not by_columns:  # the same shares of a line that is in the batch's order
            total = (-(-lengths // unit)).sum()[None]
            borders = equal_borders(total, num_sms(), least_share(unit))
        return rd.plan_decode(lengths, table, inputs.first, inputs.column, page_size=PAGE, borders=borders)

    return jax.jit(make)


@functools.cache
def _pool() -> jax.Array:
    return random_pool((NUM_PAGES, 2, COLUMNS, PAGE, LLAMA_8B.head_dim), False)


@functools.cache
def _calls() -> Callable[..., Any]:
    scale = LLAMA_8B.head_dim**-0.5
    return cold_calls(lambda q, pool, plan: rd.ragged_decode(q, pool, plan, scale=scale, has_new=True))


def measure(row: Row, roof: float) -> dict[str, Any]:
    inputs = Inputs.of(row)
    rows = LLAMA_8B.group_size + 2  # queries, and the new token's key and value
    shape = row.requests, LLAMA_8B.num_kv_heads, rows, LLAMA_8B.head_dim
    q = jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)
    us: dict[bool, float] = {}
    for by_columns in (True, False, True, False):
        taken, _ = cold_times(_calls(), (q, _pool(), inputs.plan(by_columns)), "ragged_decode")
        us[by_columns] = min(taken, us.get(by_columns, taken))
    floor = int(inputs.lengths.sum()) * 2 * LLAMA_8B.head_dim * 2 / roof / 1e3
    return {
        "floor us": floor,
        "by columns us": us[True],
        "by requests us": us[False],
        "by requests / by columns": us[False] / us[True],
    }


def main(argv: list[str] | None = None) -> None:
    rows = [Row("llama-3.1-8b", *case, pages) for case in CASES for pages in ("in order", "anywhere")]
    main_of_rows(__doc__, rows, measure, argv)


if __name__ == "__main__":
    main()
