"""Ragged decode attention: KV bytes per second over the read roof of the same run, on shapes of real models.

  python -m benchmarks.ragged_decode                 a few minutes on one Hopper GPU
  python -m benchmarks.ragged_decode --all           every shape, retention, context and number of requests
  python -m benchmarks.ragged_decode --divisions     the four ways to divide the work
  python -m benchmarks.ragged_decode --plan          the plan of a step of 32 layers
  python -m benchmarks.ragged_decode --bytes         pages of bytes against the same entries in bfloat16

Kernel times come from the profiler, with the L2 swept before every call. `goal` is 6 us plus the bytes at 0.99 of the roof.
`python -m benchmarks.ragged_decode_baselines` compares with FlashInfer, PyTorch and others.
"ragged": budgets of heads are lognormal (sigma 0.8) around the retention; "equal": the same bytes, all heads alike.
"""

import argparse
import csv
import dataclasses
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu_timing import cold_kernel_us, read_roof, trace_kernels
from pallas_kernels import byte_pages
from pallas_kernels import ragged_decode as rd
from pallas_kernels.ragged_decode.shapes import SHAPES, Shape
from pallas_kernels.support import num_sms


@dataclasses.dataclass(frozen=True)
class Row:
    model: str
    requests: int
    context: int
    retention: float
    skew: str  # "ragged" or "equal"
    page: int = 64

    def lengths(self, shape: Shape) -> np.ndarray:
        """i32[B, K]: every head its own group, as after clustering over the whole model."""
        heads = shape.num_kv_heads
        if self.skew == "equal" or self.retention == 1.0:
            kept = np.full((self.requests, heads), self.retention)
        else:
            rng = np.random.default_rng(0)
            kept = rng.lognormal(0.0, 0.8, size=heads)
            for _ in range(20):  # the mean after capping at 1 is the retention
                kept = np.minimum(kept * self.retention / kept.mean(), 1.0)
            kept = np.tile(kept, (self.requests, 1))
        return np.maximum(np.ceil(kept * self.context), 1).astype(np.int32)


DEFAULT_ROWS = [
    *(
        Row("Llama-3.1-8B", requests, context, 0.25, skew)
        for requests, context in ((1, 8192), (16, 8192), (64, 8192), (64, 32768))
        for skew in ("ragged", "equal")
    ),
    *(
        Row("Llama-3.1-8B", requests, context, 1.0, "equal")
        for requests, context in ((1, 1024), (1, 8192), (1, 32768), (32, 8192), (4, 102400))
    ),
    Row("Llama-3.1-8B", 64, 32768, 0.25, "ragged", page=16),
    Row("Llama-3.1-8B", 1, 102400, 0.25, "ragged"),
    Row("Llama-3.1-8B", 128, 1024, 0.25, "ragged"),
    Row("Gemma-3-12B", 16, 32768, 0.25, "ragged"),
    Row("Gemma-3-12B", 1, 8192, 1.0, "equal"),
    Row("Qwen3-4B", 64, 8192, 0.5, "ragged"),
    Row("Qwen3-30B-A3B", 64, 32768, 0.25, "ragged"),
    Row("GPT-OSS-20B", 64, 32768, 0.25, "ragged"),
    Row("GPT-OSS-20B", 1, 8192, 1.0, "equal"),
]


def all_rows() -> list[Row]:
    rows = []
    for model in SHAPES:
        for requests in (1, 4, 16, 64, 128):
            for context in (1024, 8192, 32768, 131072):
                for retention in (1.0, 0.5, 0.25):
                    skews = ("equal",) if retention == 1.0 else ("ragged", "equal")
                    rows += [Row(model, requests, context, retention, skew) for skew in skews]
    return rows


@dataclasses.dataclass
class Inputs:
    q: jax.Array
    pool: jax.Array
    table: jax.Array
    lengths: np.ndarray
    first: np.ndarray
    column: np.ndarray
    shape: Shape
    options: dict[str, Any]

    @property
    def kv_bytes(self) -> int:
        entry = self.shape.head_dim * self.pool.dtype.itemsize + byte_pages.is_bytes(self.pool.dtype)
        return int(self.lengths.sum()) * 2 * entry

    def plan(self, **how: Any) -> rd.DecodePlan:
        plan = rd.plan_decode(
            jnp.asarray(self.lengths), self.table, self.first, self.column,
            page_size=byte_pages.page_size(self.pool), **how,
        )  # fmt: skip
        return jax.tree.map(jnp.asarray, plan.layer(0))


def make_inputs(row: Row, packed: bool = False) -> Inputs:
    """One head per page (the hardest layout for memory), pages in random order. `packed`: pages of bytes."""
    shape = SHAPES[row.model]
    lengths = row.lengths(shape)
    pages = -(-lengths // row.page)
    rng = np.random.default_rng(1)
    room = pages.max(axis=0)
    first = np.concatenate([[0], np.cumsum(room)[:-1]]).astype(np.int32)
    order = rng.permutation(int(pages.sum())).astype(np.int32)
    table = np.zeros((row.requests, int(room.sum())), np.int32)
    at = 0
    for b in range(row.requests):
        for k, n in enumerate(pages[b]):
            table[b, first[k] : first[k] + n] = order[at : at + n]
            at += n
    rows = byte_pages.page_rows(jnp.uint8 if packed else jnp.bfloat16, row.page, shape.head_dim)
    pool_shape = (int(pages.sum()), 2, 1, rows, shape.head_dim)
    width = jnp.uint8 if packed else jnp.uint16
    pool = jax.jit(lambda: jax.random.bits(jax.random.PRNGKey(0), pool_shape, width))()
    if not packed:  # sign, 7 mantissa bits, exponent of [0.5, 1): finite and cheap to draw, whatever the size
        pool = jax.jit(
            lambda x: jax.lax.bitcast_convert_type((x & 0x807F) | 0x3F00, jnp.bfloat16), donate_argnums=0
        )(pool)
    q = jax.random.normal(
        jax.random.PRNGKey(1), (row.requests, shape.num_kv_heads, shape.group, shape.head_dim), jnp.bfloat16
    )
    options = {"sinks": jnp.ones((shape.num_kv_heads, shape.group))} if shape.sinks else {}
    return Inputs(
        q, pool, jnp.asarray(table), lengths, first, np.zeros(shape.num_kv_heads, np.int32), shape, options
    )


def kernel_us(x: Inputs, **how: Any) -> tuple[float, float]:
    def call(q: jax.Array, pool: jax.Array, plan: rd.DecodePlan) -> Any:
        return rd.ragged_decode(q, pool, plan, scale=x.shape.head_dim**-0.5, **x.options)

    return cold_kernel_us(call, (x.q, x.pool, x.plan(**how)), "ragged_decode")


def measure(row: Row, roof: float, divisions: bool, packed: bool = False) -> dict[str, Any]:
    x = make_inputs(row, packed)
    us, least = kernel_us(x)
    bytes_us = x.kv_bytes / roof / 1e3
    result = dataclasses.asdict(row) | {
        "MB": x.kv_bytes / 1e6,
        "us": us,
        "least": least,
        "GB/s": x.kv_bytes / us / 1e3,
        "of roof": bytes_us / us,
        "goal us": 6 + bytes_us / 0.99,
        "over bytes": us - bytes_us / 0.99,
    }
    if packed:
        result["bfloat16 us"] = kernel_us(make_inputs(row))[0]
        result["times as fast"] = result["bfloat16 us"] / us
    return result | divided(x) if divisions else result


def divided(x: Inputs) -> dict[str, float]:
    """The same kernel under other plans: uniform splits and the paper's split map."""
    ctas = num_sms()
    batch, heads = x.lengths.shape
    uniform = max(1, round(ctas / (batch * heads)))
    budgets = x.lengths.mean(axis=0)
    split_map = np.maximum(1, np.round(ctas / batch * budgets / budgets.sum())).astype(int)
    return {
        "uniform splits": kernel_us(x, splits=uniform)[0],
        "split map": kernel_us(x, splits=split_map)[0],
    }


def plan_us(requests: int, layers: int = 32) -> tuple[float, int]:
    """Time and number of the kernels that plan a step for all layers."""
    heads = 8
    rng = np.random.default_rng(0)
    lengths = jnp.asarray(rng.integers(100, 8000, size=(requests, layers * heads)), jnp.int32)
    table = jnp.zeros((requests, layers * heads * 125), jnp.int32)
    first, column = np.arange(layers * heads) * 125, np.zeros(layers * heads)

    @jax.jit
    def run(lengths: jax.Array, table: jax.Array) -> Any:
        plan = rd.plan_decode(lengths, table, first, column, page_size=64, num_layers=layers)
        return plan.shares, plan.items, plan.sync

    jax.block_until_ready(run(lengths, table))
    kernels = trace_kernels(lambda: run(lengths, table))
    return sum(map(sum, kernels.values())), sum(map(len, kernels.values()))


def show(results: list[dict[str, Any]]) -> None:
    columns = list(dict.fromkeys(key for r in results for key in r))

    def text(value: Any) -> str:
        if isinstance(value, float):
            return f"{value:.3f}" if abs(value) < 2 else f"{value:.1f}"
        return str(value)

    table = [columns, *([text(r.get(c, "")) for c in columns] for r in results)]
    widths = [max(len(line[i]) for line in table) for i in range(len(columns))]
    for line in table:
        print("  ".join(cell.rjust(w) for cell, w in zip(line, widths, strict=True)), flush=True)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--divisions", action="store_true")
    parser.add_argument("--plan", action="store_true")
    parser.add_argument("--bytes", action="store_true")
    parser.add_argument("--model", help="only rows of this model")
    parser.add_argument("--csv", help="write the rows there too")
    options = parser.parse_args(argv)
    if options.plan:
        for requests in (1, 32, 128):
            us, kernels = plan_us(requests)
            print(
                f"plan of 32 layers of 8 heads, {requests} requests: {us:.0f} us in {kernels} kernels",
                flush=True,
            )
        return
    roof = read_roof()
    print(f"{jax.devices()[0].device_kind}, read roof {roof:.0f} GB/s", flush=True)
    results = []
    for row in all_rows() if options.all else DEFAULT_ROWS:
        if options.model not in (None, row.model):
            continue
        if int(row.lengths(SHAPES[row.model]).sum()) * 4 * SHAPES[row.model].head_dim > 60e9:
            continue
        results.append(measure(row, roof, options.divisions, options.bytes))
        print(".", end="", file=sys.stderr, flush=True)
    show(results)
    if options.csv:
        with open(options.csv, "w", newline="") as f:
            writer = csv.DictWriter(f, list(dict.fromkeys(key for r in results for key in r)))
            writer.writeheader()
            writer.writerows(results)


if __name__ == "__main__":
    main()
