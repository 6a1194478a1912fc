"""Score, keep and append: the kernels against the same steps as XLA operations and against a layer of prefill.

  python -m benchmarks.keep                    a minute on one Hopper GPU
  python -m benchmarks.keep --pool-gib 60      the same in a pool of 60 GiB: none of it is copied
  python -m benchmarks.keep --step             also whole prefill steps of the model; without kernels for attention neither

Llama-3.1-8B's shape, a chunk of 2048 tokens (`--chunk`) after 8192, budgets lognormal (sigma 0.8) around 0.25, groups of
four heads, pages of 64, room for a tail of 256: once with nothing in the tail but the trailing window (a prompt under
way), once with a whole tail (the next turn of a conversation). Times are of all 32 layers, from the profiler, all kernels
of a part together. The layer of prefill is its matrix products and its attention over the kept history and the chunk.
"""

import argparse
import json
import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import tangram_jax as tj
from benchmarks.decode_step import ragged, random_weights
from benchmarks.gpu_timing import check_gpu, temporary_bytes, trace_kernels
from benchmarks.options import add_heads_per_page
from benchmarks.shapes import LLAMA_8B
from models.config import ModelConfig
from models.logits import AttentionLogits
from models.params import ParamSpec, map_specs, param_specs
from models.rope import rope_tables
from models.transformer import _after_attention, _attention_inputs
from pallas_kernels import support
from tangram_jax import compress
from tangram_jax.attention import ChunkAttention
from tangram_jax.chunk_scores import ChunkScores
from tangram_jax.pages import StepPages
from tangram_jax.scorers import Scorer

HISTORY, TAIL, PAGE, BATCH = 8192, 256, 64, 32
ROW = BATCH  # the row that is prefilled; the others decode
CALLS = 4


class Case:
    """One cache and the inputs of every part."""

    def __init__(
        self, config: ModelConfig, pool_gib: float, chunk: int, heads_per_page: int | None = None
    ) -> None:
        self.config, self.chunk = config, chunk
        self.plan = tj.CachePlan.build(ragged(config, 0.25), heads_per_page, PAGE)
        num_pages = int(pool_gib * 2**30) // self.plan.page_bytes(config.head_dim, jnp.bfloat16)
        self.cache = tj.init_cache(
            self.plan, config, num_pages=num_pages, max_requests=BATCH + 1,
            max_tokens=HISTORY + chunk + TAIL, max_tail=TAIL, dtype=jnp.bfloat16,
        )  # fmt: skip
        for row in range(BATCH + 1):
            tokens = HISTORY + (chunk if row == ROW else 0)
            self.cache = tj.reserve(self.plan, self.cache, np.int32(row), np.int32(tokens), np.int32(TAIL))
        self.keys, self.values = (self._draw(chunk, config.num_kv_heads, seed=i) for i in (1, 2))
        self.queries = self._draw(chunk, config.num_heads, seed=3)
        self.lse = [jnp.full((chunk, config.num_heads), 9.0) + i for i in range(config.num_layers)]
        self.new = self._draw(BATCH, config.num_kv_heads, config.group_size + 2, seed=4)

    def _draw(self, *shape: int, seed: int) -> list[jax.Array]:
        draw = jax.jit(lambda key: jax.random.normal(key, (*shape, self.config.head_dim), jnp.bfloat16))
        return [draw(key) for key in jax.random.split(jax.random.key(seed), self.config.num_layers)]

    def set_counts(self, tail: int) -> None:
        """Every row at HISTORY tokens under the plan, and `tail` whole ones."""
        self.cache = replace(
            self.cache,
            tokens=jnp.full(BATCH + 1, HISTORY, jnp.int32),
            tail=jnp.full(BATCH + 1, tail, jnp.int32),
        )


def parts(case: Case, scorer: Scorer) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Name -> (function of (cache, *arguments) that returns (output, cache), arguments)."""
    plan, config, chunk = case.plan, case.config, case.chunk

    def what(cache: tj.Cache) -> compress.Candidates:
        return compress.candidates(plan, cache, jnp.int32(ROW), chunk, jnp.int32(chunk))

    def tail(cache: tj.Cache) -> Any:
        return compress.read_tail(plan, cache, jnp.int32(ROW), jnp.bfloat16), cache

    def score(cache: tj.Cache, tail_kv: Any, queries: Any, keys: Any, values: Any, lse: Any) -> Any:
        scores = ChunkScores(plan, config, scorer, what(cache), tail_kv)
        for layer, given in enumerate(zip(queries, keys, values, lse, strict=True)):
            scores.add(layer, *given)
        return scores.result(), cache

    def select(cache: tj.Cache, scores: Any) -> Any:
        return compress.select(plan, cache, what(cache), scores), cache

    def write(cache: tj.Cache, order: Any, tail_kv: Any, keys: Any, values: Any) -> Any:
        after = compress.write(plan, cache, what(cache), order, tail_kv, keys, values)
        return (), replace(after, tokens=cache.tokens, tail=cache.tail)

    def append(cache: tj.Cache, new: Any) -> Any:
        rows = jnp.arange(len(new[0]))
        lengths = plan.lengths(cache.tokens[rows]) + cache.tail[rows, None]
        slots = compress.Slots(rows, lengths, cache.tokens[rows] + cache.tail[rows])
        after = compress.append(plan, cache, slots, new)
        return (), replace(after, tail=cache.tail)

    def output(function: Callable[..., Any], *arguments: Any) -> Any:  # without the cache: it would be a copy
        return jax.jit(lambda *given: function(*given)[0])(case.cache, *arguments)

    tail_kv = output(tail)
    scores = output(score, tail_kv, case.queries, case.keys, case.values, case.lse)
    order = output(select, scores)
    one = [x[:1] for x in case.new]
    return {
        "tail read": (tail, ()),
        "score": (score, (tail_kv, case.queries, case.keys, case.values, case.lse)),
        "select": (select, (scores,)),
        "write": (write, (order, tail_kv, case.keys, case.values)),
        f"append x{BATCH}": (append, (case.new,)),
        "append x1": (append, (one,)),
    }


def busy(
    case: Case, function: Callable[..., Any], arguments: tuple[Any, ...], names: bool
) -> tuple[float, float]:
    """(us of all kernels of a call, GiB of temporary memory); the cache is donated."""
    program = jax.jit(function, donate_argnums=0).lower(case.cache, *arguments).compile()
    _, case.cache = program(case.cache, *arguments)

    def run() -> Any:
        for _ in range(CALLS):
            out, case.cache = program(case.cache, *arguments)
        return out, case.cache.tail

    kernels = trace_kernels(run)
    if names:
        for name, times in sorted(kernels.items(), key=lambda item: -sum(item[1]))[:20]:
            print(f"      {sum(times) / CALLS:9.1f} us {len(times) / CALLS:6.1f} x  {name[:90]}")
    temporary = temporary_bytes(program) / 2**30
    return sum(sum(times) for times in kernels.values()) / CALLS, temporary


def step_us(case: Case, params: Any, scorer: Scorer, names: bool) -> tuple[float, float]:
    """(us of all kernels, GiB of temporary memory) of a whole prefill step."""
    tokens = jnp.arange(case.chunk, dtype=jnp.int32)

    def run(cache: tj.Cache, params: Any, tokens: jax.Array) -> Any:
        out, after = tj.prefill_chunk(
            params, case.config, case.plan, cache,
            scorer=scorer, row=jnp.int32(ROW), tokens=tokens, count=jnp.int32(case.chunk),
        )  # fmt: skip
        return out, replace(after, tokens=cache.tokens, tail=cache.tail)

    return busy(case, run, (params, tokens), names)


def layer_us(case: Case) -> tuple[float, float]:
    """us of a layer's matrix products, and of them with the attention of the chunk."""
    config, plan, chunk = case.config, case.plan, case.chunk
    keys = iter(jax.random.split(jax.random.key(7), 64))

    def draw(spec: ParamSpec) -> jax.Array:
        return jax.jit(lambda key: jax.random.normal(key, spec.shape, jnp.bfloat16) * 0.02)(next(keys))

    layer = map_specs(draw, param_specs(config.replace(num_layers=1))["layers"][0])
    hidden = jax.random.normal(next(keys), (chunk, config.hidden_size), jnp.bfloat16)
    group, column = plan.group_of[:1], plan.column_of[:1]

    def run(cache: tj.Cache, layer: Any, x: jax.Array, attend: bool) -> jax.Array:
        cos, sin = rope_tables(jnp.arange(chunk), config)
        x, q, k, v = _attention_inputs(layer, x, None, None, cos, sin, config)
        q = q.reshape(chunk, config.num_kv_heads, config.group_size, config.head_dim)
        if not attend:
            x = x + (k.sum() + v.sum())
            return jnp.add(*_after_attention(layer, None, x, q, None, None, None, config)[:2])
        lengths = plan.lengths(cache.tokens[ROW])[None, group]
        first = cache.layout.first[group]
        most = max(cache.layout.capacity)
        pages = StepPages(cache.pool, cache.table, jnp.array([ROW]), lengths, first, column, most)
        attention = ChunkAttention(q.shape, q.dtype, pages, AttentionLogits.of(config))
        out, lse = attention(0, q, k, v)
        return jnp.add(
            *_after_attention(layer, None, x, out.astype(x.dtype), None, None, None, config)[:2]
        ) + lse.sum().astype(x.dtype)

    def kernels_us(attend: bool) -> float:
        program = jax.jit(run, static_argnums=3).lower(case.cache, layer, hidden, attend).compile()
        jax.block_until_ready(program(case.cache, layer, hidden))
        kernels = trace_kernels(lambda: [program(case.cache, layer, hidden) for _ in range(CALLS)])
        return sum(sum(times) for times in kernels.values()) / CALLS

    return kernels_us(False), kernels_us(True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pool-gib", type=float, default=16.0)
    parser.add_argument("--layers", type=int, default=LLAMA_8B.num_layers)
    parser.add_argument("--chunk", type=int, default=2048)
    parser.add_argument("--step", action="store_true", help="also a whole prefill step, 16 GB of weights")
    parser.add_argument("--scorer", default="snapkv")
    parser.add_argument("--names", action="store_true", help="print the kernels of every part")
    parser.add_argument("--xla-only", action="store_true")
    add_heads_per_page(parser)
    parser.add_argument("--out", help="write the rows to this JSON file")
    args = parser.parse_args()
    check_gpu()
    case = Case(LLAMA_8B.replace(num_layers=args.layers), args.pool_gib, args.chunk, args.heads_per_page)
    case.set_counts(0)
    products, layer = layer_us(case)
    print(
        f"{jax.devices()[0].device_kind}: a layer of prefill {layer:.0f} us, its products {products:.0f} us"
    )
    rows: list[dict[str, Any]] = []
    for tail in (0, TAIL - 1):
        case.set_counts(tail)
        for path, forced in (("xla", xla_path), ("kernels", nullcontext)):
            if path == "kernels" and args.xla_only:
                continue
            with forced():
                for name, (function, arguments) in parts(case, tj.get_scorer(args.scorer)).items():
                    us, temporary = busy(case, function, arguments, args.names)
                    rows.append({"tail": tail, "path": path, "part": name, "us": us, "temp_gib": temporary})
                    print(f"  tail {tail:3} {path:8} {name:12} {us:9.1f} us, {temporary:.3f} GiB", flush=True)
    summarise(rows, layer, args.layers)
    if args.step:
        case.set_counts(0)
        params = random_weights(case.config)
        for path, forced in (("xla", xla_path), ("kernels", nullcontext)):
            with forced():
                us, temporary = step_us(case, params, tj.get_scorer(args.scorer), args.names)
            rows.append({"tail": 0, "path": path, "part": "whole step", "us": us, "temp_gib": temporary})
            print(f"whole prefill step, {path:8} {us:9.1f} us, {temporary:.3f} GiB")
    if args.out:
        with open(args.out, "w") as file:
            json.dump({"device": jax.devices()[0].device_kind, "layer_us": layer, "products_us": products,
                       "layers": args.layers, "rows": rows}, file, indent=1)  # fmt: skip


def xla_path() -> Any:
    """Makes the engine fall back to XLA operations while it is open."""

    def refuse(*_: Any, **__: Any) -> None:
        raise NotImplementedError("the baseline")

    logging.getLogger("tangram").setLevel(logging.ERROR)
    return mock.patch.object(support, "check_device", refuse)


def summarise(rows: list[dict[str, Any]], layer: float, layers: int) -> None:
    for tail in sorted({row["tail"] for row in rows}):
        for path in ("xla", "kernels"):
            chosen = [
                r for r in rows if r["tail"] == tail and r["path"] == path and "append" not in r["part"]
            ]
            if chosen:
                total = sum(r["us"] for r in chosen)
                share = total / (layer * layers) if layer else 0.0  # no kernel times without a GPU
                print(
                    f"tail {tail:3} {path:8} {total:9.1f} us for {layers} layers, {share:.2%} of their prefill"
                )


if __name__ == "__main__":
    main()
