"""Chunk prefill attention: our kernel against compositions around cuDNN, on shapes of real models.

  python -m benchmarks.chunk_prefill --csv FILE --minutes 8    the sets below; again, until no row is left
  python -m benchmarks.chunk_prefill --sets main,windows       some of them
  python -m benchmarks.chunk_prefill --chunk 32                only the chunks that compress a generation's tail
  python -m benchmarks.chunk_prefill --all                     every chunk, history and retention

Sets: main (512 to 8192 tokens over 0 to 100K), more (a quarter of 25K, 8K, 1024 and 4096 tokens), windows (the layers of
Gemma 3 and GPT-OSS that have one), requests (eight chunks of 256 in one call), groups (of three and five query heads), short
(32 and 128 tokens), pages (of 16, 32 and 128).

A chunk of T queries over a history of `context` tokens of which each KV head keeps its share (`retention`; below 1 lognormal
over the heads, sigma 0.8, every head a group of its own, pages of 64 in random order), and over itself, causally. Times are
those of all kernels of a call, from the profiler: "us" ours ("kernel"), with a layer's part of the plan of the tiles, which
is made for 32 layers at once ("plan"), and what else a call does ("rest").

* "gather": pages gathered at once in bfloat16, cuDNN with a KV head per batch row, merged by log-sum-exp with the chunk's
  own part; "of it cudnn": its cuDNN kernels alone, what it would take if gathering and merging were for nothing;
* "parts": what `tangram_jax.gpu_attention` falls back to (gathered in parts of 8192 entries, merged in float32), in a
  window `window_composition`;
* "cudnn": without a history, dense causal attention by cuDNN alone, without log-sum-exp.

"fastest / ours" is the least of these three over ours. TFLOP/s count 4 D operations per query and visible entry.
"""

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import chunk_compositions
from benchmarks.chunk_rows import ALL_ROWS, SETS, Row
from benchmarks.gpu_timing import kernels_of
from benchmarks.measured import add_options, check_memory, measure_rows
from pallas_kernels import chunk_prefill as cp
from tangram_jax import gpu_attention
from tangram_jax.pages import LayerPages

LAYERS = 32
CALLS = 3
BASELINES = ("gather", "parts", "cudnn")


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """The arrays of a row, and what is called with them."""

    row: Row
    arrays: tuple[jax.Array, ...]  # q [T, K, G, D], k and v [behind + T, K, D], pool, table, lengths
    first: np.ndarray
    column: np.ndarray

    @property
    def scale(self) -> float:
        return self.row.shape.head_dim**-0.5

    def plan(self, table: jax.Array, lengths: jax.Array) -> cp.ChunkPlan:
        """Of all layers."""
        row, layers = self.row, 1 if self.row.window else LAYERS  # in windows all layers have one plan
        behind = lengths[:, 0] + row.behind  # which the compiler does not know
        return cp.plan_chunk(
            jnp.tile(lengths, layers), table, np.tile(self.first, layers), np.tile(self.column, layers),
            q_shape=self.arrays[0].shape, page_size=row.page, num_layers=layers,
            window=row.window or None, behind=behind if row.window else None,
        )  # fmt: skip

    def ours(self, q: jax.Array, k: jax.Array, v: jax.Array, pool: jax.Array, plan: cp.ChunkPlan) -> Any:
        layer = 0 if self.row.window else LAYERS // 2
        return cp.chunk_prefill(q, k, v, pool, plan.layer(layer), scale=self.scale)

    def gather(self, q: jax.Array, k: jax.Array, v: jax.Array, *pages: jax.Array) -> Any:
        most = -(-int(self.row.lengths().max()) // self.row.page)
        return chunk_compositions.one_gather(q, k, v, self._pages(*pages), self.scale, most)

    def parts(self, q: jax.Array, k: jax.Array, v: jax.Array, *pages: jax.Array) -> Any:
        if self.row.window:
            behind = pages[2][0, 0] + self.row.behind
            return gpu_attention.window_composition(q, k, v, behind, self.row.window, self.scale)
        return chunk_compositions.in_parts(q, k, v, self._pages(*pages), self.scale)

    def cudnn(self, q: jax.Array, k: jax.Array, v: jax.Array, *pages: jax.Array) -> Any:
        return chunk_compositions.causal(q, k, v, self.scale, self.row.requests)

    def _pages(self, pool: jax.Array, table: jax.Array, lengths: jax.Array) -> LayerPages:
        return LayerPages(pool, table, lengths, self.first, self.column)

    def baselines(self) -> list[str]:
        """Which of them apply."""
        if self.row.window:
            return ["parts"]
        return ["gather", "parts"] if self.row.context else ["gather", "parts", "cudnn"]


def make_case(row: Row) -> Case:
    """Raises `DoesNotFitError`."""
    shape, lengths = row.shape, row.lengths()
    heads, head_dim = shape.num_kv_heads, shape.head_dim
    pages = -(-lengths // row.page)
    num_pages = max(int(pages.sum()), row.requests)
    gathered = row.requests * heads * int(pages.max(initial=1))
    # In float32, of two parts and what they come to, and once more.
    queries = row.tokens * shape.num_heads * head_dim
    check_memory(((num_pages + gathered) * row.page * head_dim * 4 + queries * 4 * 5) / 1e9 + 1)
    first = (np.cumsum(pages[0]) - pages[0]).astype(np.int32)
    table = np.random.default_rng(1).permutation(num_pages).astype(np.int32).reshape(row.requests, -1)
    keys = jax.random.split(jax.random.PRNGKey(0), 4)
    keys_and_values = -(-(row.behind + row.tokens) // cp.ALIGN) * cp.ALIGN  # as the engine gives them
    shapes = (
        (row.tokens, heads, shape.group, head_dim),
        (keys_and_values, heads, head_dim),
        (keys_and_values, heads, head_dim),
        (num_pages, 2, 1, row.page, head_dim),
    )
    arrays = [jax.random.normal(key, s, jnp.bfloat16) for key, s in zip(keys, shapes, strict=True)]
    arrays += [jnp.asarray(table), jnp.asarray(lengths)]
    return Case(row, tuple(arrays), first, np.zeros(heads, np.int32))


def busy_us(program: Callable[..., Any], args: tuple[Any, ...], name: str = "") -> tuple[float, float]:
    """Time of all kernels of a compiled call, and of those whose name contains `name`."""
    kernels = kernels_of(program, args, CALLS)
    named = sum(sum(times) for key, times in kernels.items() if name in key)
    return sum(map(sum, kernels.values())) / CALLS, named / CALLS


def measure(row: Row) -> dict[str, Any]:
    case = make_case(row)
    make_plan = jax.jit(case.plan)
    plan = busy_us(make_plan, case.arrays[4:])[0] / LAYERS
    us, kernel = busy_us(jax.jit(case.ours), (*case.arrays[:4], make_plan(*case.arrays[4:])), "chunk_prefill")
    whole, flops = us + plan, row.flops()
    result: dict[str, Any] = {
        "us": whole,
        "kernel": kernel,
        "plan": plan,
        "rest": us - kernel,
        "TFLOP/s": flops / whole / 1e6,
    }
    for name in BASELINES:
        took, part = baseline_us(case, name) if name in case.baselines() else (None, None)
        result |= {f"{name} us": took, f"{name} TFLOP/s": took and flops / took / 1e6}
        result[f"{name} / ours"] = took and took / whole
        if name == "gather":
            result["of it cudnn"] = part
    times = [took for name in BASELINES if (took := result[f"{name} us"])]
    return result | {"fastest / ours": min(times) / whole if times else None}


def baseline_us(case: Case, name: str) -> tuple[float | None, float | None]:
    """Time of all its kernels, and of cuDNN's; nothing, with a printed line, if it fails."""
    try:
        return busy_us(jax.jit(getattr(case, name)), case.arrays, "cudnn")
    except Exception as error:  # ours is worth its line without it
        print(f"{name}: {case.row}: {type(error).__name__} {str(error)[:1000]}", flush=True)
        return None, None


def rows_of(sets: str | None, chunk: int | None) -> list[Row]:
    """Rows of sets by name, or of all sets. Raises SystemExit for a name that is none, and if no row is left."""
    names = list(SETS) if sets is None else [name.strip() for name in sets.split(",")]
    if unknown := [name for name in names if name not in SETS]:
        raise SystemExit(f"no set {', '.join(unknown)}: there are {', '.join(SETS)}")
    return with_chunk([row for name in names for row in SETS[name]], chunk)


def with_chunk(rows: list[Row], chunk: int | None) -> list[Row]:
    chosen = [row for row in rows if chunk in (None, row.chunk)]
    if not chosen:
        sizes = ", ".join(map(str, sorted({row.chunk for row in rows})))
        raise SystemExit(f"no rows with --chunk {chunk}: there are {sizes}")
    return chosen


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--all", action="store_true")
    which.add_argument("--sets", help=f"only some of: {', '.join(SETS)}")
    parser.add_argument("--chunk", type=int, help="only rows with chunks of so many tokens")
    add_options(parser)
    options = parser.parse_args(argv)
    rows = with_chunk(ALL_ROWS, options.chunk) if options.all else rows_of(options.sets, options.chunk)
    print(jax.devices()[0].device_kind, flush=True)
    measure_rows(rows, measure, options)


if __name__ == "__main__":
    main()
