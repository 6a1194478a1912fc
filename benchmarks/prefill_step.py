"""Time of a whole step with a chunk of a prompt against the FLOPs it must do: a model's shape, random weights.

  python -m benchmarks.prefill_step                       eight cases on one Hopper GPU, the last ones of packed chunks
  python -m benchmarks.prefill_step --cases 0 --profile   where the time of the first goes, by kernel
  python -m benchmarks.prefill_step --fp8 dynamic         each case with FP8 weights after it: `times as fast`
  python -m benchmarks.prefill_step --cases 5 6 7 --apart       packed chunks after the same ones with calls of their own

The FLOPs are the dense products' and attention's, of what is visible; the roof is the best of several bfloat16 products of
8192 x 8192 matrices in the same run. Short runs: over seconds a GPU may clock down, which `sustained` shows, the time of a
step after three seconds of them. The cache keeps a quarter, of lognormal budgets, ranked by Expected Attention.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import tangram_jax as tj
from benchmarks.decode_step import first_layers, print_profile, ragged, random_weights
from benchmarks.gpu_timing import kernels_of
from benchmarks.options import add_fp8, add_heads_per_page
from benchmarks.shapes import LLAMA_8B, SHAPES
from models.config import ModelConfig
from models.fp8_weights import with_fp8_weights
from tangram_jax.attention import ChunkAttention, WindowAttention
from tangram_jax.chunk_scores import Gaussians
from tangram_jax.packed import Packed
from tangram_jax.step import Chunk, Decode, compiler_options, step

CASES = (  # tokens of the chunk, of its row before, requests that decode beside it, rows that share the chunk
    (8192, 0, 0, 1),
    (8192, 24_576, 0, 1),
    (2048, 0, 0, 1),
    (2048, 8192, 32, 1),
    (512, 8192, 32, 1),
    (512, 0, 29, 4),
    (128, 8192, 29, 4),
    (128, 65_536, 29, 4),
)
DECODING = 8192  # tokens of each request that decodes


@contextmanager
def calls_of_their_own() -> Iterator[None]:
    """Each packed chunk has its own calls of the kernels of attention and scores, as where these take one at a time."""
    with (
        mock.patch.object(ChunkAttention, "of_several", return_value=None),
        mock.patch.object(WindowAttention, "of_several", return_value=None),
        mock.patch.object(Gaussians, "of_several", return_value=None),
    ):
        yield


def matrix_roof(size: int = 8192) -> float:
    """FLOP/s of a large bfloat16 product."""
    a, b = (jax.random.normal(jax.random.key(n), (size, size), jnp.bfloat16) for n in range(2))
    times = kernels_of(jax.jit(jnp.matmul), (a, b), calls=8)
    return 2e6 * size**3 / min(max(times.values(), key=sum))


def step_flops(
    config: ModelConfig, plan: tj.CachePlan, chunk: int, history: int, decoding: int, rows: int = 1
) -> float:
    """Of the layers: every product's, and attention's over what each token sees."""
    weights = sum(columns * depth for columns, depth in _matrices(config))
    window, all_heads = config.sliding_window or 0, config.num_heads
    each = chunk // rows
    at = np.arange(history, history + each) + 1.0
    in_windows = rows * np.minimum(at, window).sum() + decoding * min(DECODING, window)
    own = rows * each * (each + 1) / 2
    kept = chunk * plan.entries(history) + decoding * plan.entries(DECODING)
    # Of a query and a key, of all query heads.
    pairs = len(config.sliding_layers) * all_heads * in_windows
    pairs += len(config.full_layers) * all_heads * own + config.group_size * kept
    return 2.0 * weights * config.num_layers * (chunk + decoding) + 4.0 * config.head_dim * pairs


def _matrices(config: ModelConfig) -> list[tuple[int, int]]:
    """(columns, depth) of what a token passes in a layer."""
    hidden, heads = config.hidden_size, config.num_heads * config.head_dim
    held = [((config.num_heads + 2 * config.num_kv_heads) * config.head_dim, hidden), (hidden, heads)]
    inner = config.experts_per_token * config.expert_size if config.num_experts else config.intermediate_size
    return [*held, (2 * inner, hidden), (hidden, inner)]


def measure(
    params: Any, config: ModelConfig, case: tuple[int, int, int, int], roof: float, args: Any
) -> dict:
    chunk, history, decoding, rows = case
    each = chunk // rows
    sliding = tj.SlidingLayers.of(config, max_tail=64)
    plan = tj.CachePlan.build(ragged(config, 0.25), args.heads_per_page, 64, sliding=sliding)
    most = max(each + history, DECODING + 64)
    num_pages = rows * plan.pages(each + history, 0) + decoding * plan.pages(DECODING, 64) + 1000
    cache = tj.init_cache(
        plan,
        config,
        num_pages=num_pages,
        max_requests=decoding + rows,
        max_tokens=most,
        max_tail=64,
        dtype=jnp.bfloat16,
    )
    for row in range(decoding):
        cache = tj.reserve(plan, cache, np.int32(row), np.int32(DECODING), np.int32(64))
    for row in range(decoding, decoding + rows):
        cache = tj.reserve(plan, cache, np.int32(row), np.int32(each + history), np.int32(0))
    held = jnp.asarray([DECODING] * decoding + [history] * rows, jnp.int32)
    scorer = tj.get_scorer("expected_attention")

    @partial(jax.jit, donate_argnums=1)
    def steps(params: Any, cache: tj.Cache, first: jax.Array) -> tuple[jax.Array, tj.Cache]:
        cache = replace(cache, tokens=held, tail=jnp.zeros_like(held))  # as it was before the last one
        prompt = (jnp.arange(chunk) * 37 + first[0]) % config.vocab_size
        part: Any = Chunk(jnp.int32(decoding), prompt.astype(jnp.int32), jnp.int32(chunk))
        if rows > 1:
            numbers = decoding + jnp.arange(rows, dtype=jnp.int32)
            part = Packed(numbers, part.tokens, jnp.full(rows, each, jnp.int32))
        rest = Decode(jnp.arange(decoding), first[:decoding]) if decoding else None
        logits, cache = step(params, config, plan, scorer, cache, part, rest)
        return jnp.argmax(logits, -1).astype(jnp.int32), cache

    chosen = jnp.arange(decoding + rows, dtype=jnp.int32)
    began = time.perf_counter()
    program = steps.lower(params, cache, chosen).compile(compiler_options())
    compiled = time.perf_counter() - began
    state: list[Any] = [chosen, cache]
    run = partial(_run, program, params, state)
    run(2)
    took = float(np.median([run(4) for _ in range(3)]))
    sustained = None
    if args.sustained:
        run(int(3 / took))
        sustained = round(run(8) * 1e3, 2)
    if args.profile:
        print_profile(program, params, state[1], state[0])
    flops = step_flops(config, plan, *case)
    return {
        "chunk": chunk,
        "history": history,
        "decoding": decoding,
        "rows": rows,
        "weights": "fp8" if config.weights_fp8 else "bfloat16",
        "ms": round(took * 1e3, 2),
        "sustained_ms": sustained,
        "tokens_per_s": round(chunk / took),
        "TFLOPs": round(flops / took / 1e12, 1),
        "of_roof": round(flops / took / roof, 3),
        "compile_s": round(compiled, 1),
    }


def _run(program: Callable[..., Any], params: Any, state: list[Any], steps: int) -> float:
    """Seconds of each of so many steps in a row."""
    began = time.perf_counter()
    for _ in range(steps):
        state[:] = program(params, state[1], state[0])
    state[0].block_until_ready()
    return (time.perf_counter() - began) / steps


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default=LLAMA_8B.name)
    parser.add_argument("--layers", type=int, help="default: all of the shape")
    parser.add_argument("--cases", type=int, nargs="*", default=list(range(len(CASES))))
    parser.add_argument("--profile", action="store_true", help="print where a step's time goes, by kernel")
    parser.add_argument("--sustained", action="store_true", help="once more after three seconds of steps")
    parser.add_argument(
        "--apart", action="store_true", help="packed chunks with calls of their own first: `times as fast`"
    )
    add_heads_per_page(parser)
    parser.add_argument("--out", help="write the rows to this JSON file")
    add_fp8(parser)
    args = parser.parse_args()
    if args.apart and args.fp8:
        parser.error("--apart and --fp8 compare with different things: one at a time")
    config = first_layers(SHAPES[args.shape], args.layers)
    roof = matrix_roof()
    device = jax.devices()[0].device_kind
    print(f"{device}: {roof / 1e12:.0f} TFLOP/s, {config.name}, {config.num_layers} layers", flush=True)
    kinds = [(config, random_weights(config), "at once")]
    if args.apart:
        kinds.insert(0, (*kinds[0][:2], "apart"))
    if args.fp8:
        narrow = with_fp8_weights(config, dynamic=args.fp8 == "dynamic")
        kinds.append((narrow, random_weights(narrow), "at once"))
    rows: list[dict[str, Any]] = []
    for index in args.cases:
        first = len(rows)
        for kind, params, calls in kinds:
            with calls_of_their_own() if calls == "apart" else nullcontext():
                row = measure(params, kind, CASES[index], roof, args) | {"calls": calls}
            if len(rows) > first:
                row["times as fast"] = round(rows[first]["ms"] / row["ms"], 3)
            rows.append(row)
            print(row, flush=True)
    if args.out:
        with open(args.out, "w") as file:
            json.dump({"device": device, "roof_TFLOPs": roof / 1e12, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
