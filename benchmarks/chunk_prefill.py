"""Chunk prefill attention: our kernel against the composition with cuDNN, on shapes of real models.

  python -m benchmarks.chunk_prefill            some seven minutes on one Hopper GPU
  python -m benchmarks.chunk_prefill --chunk 32 only the chunks that compress a generation's tail
  python -m benchmarks.chunk_prefill --all      every chunk, history and retention
  python -m benchmarks.chunk_prefill --model Gemma-3-12B --csv rows.csv

A chunk of T queries over a history of `context` tokens of which each KV head keeps its share (`retention`; below 1 lognormal
over the heads, sigma 0.8, every head a group of its own, pages of 64 in random order), and over itself, causally. Times are
those of all kernels of a call, from the profiler: "us" ours ("kernel"), with a layer's part of the plan of the tiles, which
is made for 32 layers at once ("plan"), and the laying out of queries whose group does not divide 64 rows ("layout").
"comp us" is the composition of `tangram_jax.gpu_attention` (pages gathered, a KV head per batch row, merged by log-sum-exp),
"cudnn us" its cuDNN kernels alone: what a composition that gathers and merges for nothing would take. Without a history that
is dense causal attention by cuDNN alone. TFLOP/s count 4 D operations per query and visible entry.
"""

import argparse
import csv
import dataclasses
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu_timing import trace_kernels
from benchmarks.ragged_decode import show
from pallas_kernels import chunk_prefill as cp
from pallas_kernels.ragged_decode.shapes import SHAPES, Shape
from tangram_jax import gpu_attention
from tangram_jax.pages import LayerPages


@dataclasses.dataclass(frozen=True)
class Row:
    model: str
    chunk: int
    context: int
    retention: float = 1.0
    page: int = 64

    def lengths(self, shape: Shape) -> np.ndarray:
        """i32[K]"""
        heads = shape.num_kv_heads
        if self.retention == 1.0:
            kept = np.ones(heads)
        else:
            kept = np.random.default_rng(0).lognormal(0.0, 0.8, size=heads)
            for _ in range(20):  # the mean after capping at 1 is the retention
                kept = np.minimum(kept * self.retention / kept.mean(), 1.0)
        return np.ceil(kept * self.context).astype(np.int32)

    def flops(self, shape: Shape) -> float:
        own = self.chunk * (self.chunk + 1) / 2
        history = self.chunk * int(self.lengths(shape).sum())
        return 4 * shape.head_dim * shape.group * (history + shape.num_kv_heads * own)


LAYERS = 32
MODELS = ("Llama-3.1-8B", "Gemma-3-12B", "GPT-OSS-20B")
PACKED_MODELS = ("Llama-3.2-3B", "Qwen3-14B")  # groups of three and of five query heads
HISTORIES = [(0, 1.0), (25600, 1.0), (102400, 0.25), (102400, 1.0)]
DEFAULT_ROWS = [
    Row(model, chunk, context, retention)
    for model in MODELS
    for chunk in (512, 2048, 8192)
    for context, retention in HISTORIES
    if chunk < 8192 or (context, retention) != (102400, 1.0)
]
ALL_ROWS = [
    Row(model, chunk, context, retention)
    for model in MODELS + PACKED_MODELS
    for chunk in (512, 1024, 2048, 4096, 8192)
    for context, retention in [*HISTORIES, (2048, 1.0), (8192, 1.0), (8192, 0.25), (25600, 0.25)]
]
PACKED_ROWS = [
    Row(model, chunk, context, retention)
    for model in PACKED_MODELS
    for chunk in (512, 2048, 8192)
    for context, retention in ((0, 1.0), (25600, 1.0), (102400, 0.25))
]
SHORT_ROWS = [
    Row(model, chunk, context, retention)
    for model in MODELS
    for chunk in (32, 128)
    for context, retention in ((8192, 1.0), (8192, 0.25), (102400, 0.25), (102400, 1.0))
]
PAGE_ROWS = [Row("Llama-3.1-8B", 2048, 25600, page=page) for page in (16, 32, 128)]


def make_inputs(row: Row) -> tuple[tuple[jax.Array, ...], np.ndarray, np.ndarray, float]:
    """(q, k, v, pool, table, lengths), first, column, scale."""
    shape = SHAPES[row.model]
    heads, head_dim = shape.num_kv_heads, shape.head_dim
    lengths = row.lengths(shape)
    pages = -(-lengths // row.page)
    first = (np.cumsum(pages) - pages).astype(np.int32)
    num_pages = max(int(pages.sum()), 1)
    table = np.random.default_rng(1).permutation(num_pages).astype(np.int32)[None]
    keys = jax.random.split(jax.random.PRNGKey(0), 4)
    shapes = (
        (row.chunk, heads, shape.group, head_dim),
        (row.chunk, heads, head_dim),
        (row.chunk, heads, head_dim),
        (num_pages, 2, 1, row.page, head_dim),
    )
    arrays = [jax.random.normal(key, s, jnp.bfloat16) for key, s in zip(keys, shapes, strict=True)]
    arrays += [jnp.asarray(table), jnp.asarray(lengths[None])]
    return tuple(arrays), first, np.zeros(heads, np.int32), head_dim**-0.5


def busy_us(call: Any, args: tuple[Any, ...], name: str, calls: int = 3) -> tuple[float, float]:
    """Time of all kernels of a call, and of those whose name contains `name`."""
    run = jax.jit(call)
    jax.block_until_ready(run(*args))
    kernels = trace_kernels(lambda: [run(*args) for _ in range(calls)][-1])
    named = sum(sum(times) for key, times in kernels.items() if name in key)
    return sum(map(sum, kernels.values())) / calls, named / calls


def measure(row: Row, tuning: cp.Tuning = cp.DEFAULT) -> dict[str, Any]:
    shape = SHAPES[row.model]
    args, first, column, scale = make_inputs(row)

    def divide(lengths: Any, table: Any) -> cp.ChunkPlan:
        return cp.plan_chunk(
            jnp.tile(lengths, LAYERS), table, np.tile(first, LAYERS), np.tile(column, LAYERS),
            q_shape=args[0].shape, page_size=row.page, num_layers=LAYERS, tuning=tuning,
        )  # fmt: skip

    def ours(q: Any, k: Any, v: Any, pool: Any, plan: cp.ChunkPlan) -> Any:
        return cp.chunk_prefill(q, k, v, pool, plan.layer(LAYERS // 2), scale=scale, tuning=tuning)

    def composition(q: Any, k: Any, v: Any, pool: Any, table: Any, lengths: Any) -> Any:
        return gpu_attention.chunk_composition(
            q, k, v, LayerPages(pool, table, lengths, first, column), scale
        )

    table, lengths = args[4:]
    plan = busy_us(divide, (lengths, table), "")[0] / LAYERS
    us, kernel = busy_us(ours, (*args[:4], jax.jit(divide)(lengths, table)), "chunk_prefill")
    layout = us - kernel
    us += plan
    comp, cudnn = busy_us(composition, args, "cudnn")
    flops = row.flops(shape)
    return dataclasses.asdict(row) | {
        "us": us,
        "kernel": kernel,
        "plan": plan,
        "layout": layout,
        "TFLOP/s": flops / us / 1e6,
        "comp us": comp,
        "comp TFLOP/s": flops / comp / 1e6,
        "comp / ours": comp / us,
        "cudnn us": cudnn,
        "cudnn / ours": cudnn / us,
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--model", help="only rows of this model")
    parser.add_argument("--chunk", type=int, help="only rows with chunks of so many tokens")
    parser.add_argument("--csv", help="write the rows there too")
    options = parser.parse_args(argv)
    print(jax.devices()[0].device_kind, flush=True)
    results = []
    for row in SHORT_ROWS + (ALL_ROWS if options.all else DEFAULT_ROWS + PACKED_ROWS + PAGE_ROWS):
        if options.model not in (None, row.model) or options.chunk not in (None, row.chunk):
            continue
        results.append(measure(row))
        print(".", end="", file=sys.stderr, flush=True)
        if options.csv:
            with open(options.csv, "w", newline="") as f:
                writer = csv.DictWriter(f, list(results[0]))
                writer.writeheader()
                writer.writerows(
                    {k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()} for row in results
                )
    show(results)


if __name__ == "__main__":
    main()
