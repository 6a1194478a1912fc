"""On a Hopper GPU: a step done thousands of times over is the same step, bit for bit.

The CTAs of our kernels wait for each other by counters in memory. What is read a moment too soon is wrong once in a long
while: a comparison of a few steps does not find it.
"""

import dataclasses
import os
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tangram_jax as tj
from benchmarks.decode_step import ragged, random_weights
from benchmarks.shapes import SHAPES
from models.config import ModelConfig
from models.fp8_weights import with_fp8_weights
from pallas_kernels import byte_pages
from tangram_jax.sharding import TensorParallel
from tangram_jax.step import compiler_options

REPEATS = int(os.environ.get("TANGRAM_REPEATS", "2000"))
TAIL = 64
LLAMA, GEMMA, GPT_OSS, QWEN3, QWEN3_MOE = (
    SHAPES[name] for name in ("llama-3.1-8b", "gemma-3-12b", "gpt-oss-20b", "qwen3-4b", "qwen3-30b-a3b")
)


@dataclasses.dataclass(frozen=True)
class Case:
    config: ModelConfig
    rows: int
    longest: int  # tokens of a row: the first one has so many, others any number up to it
    retention: float = 0.25
    drafts: int = 0  # of each row
    chunk: int = 0  # of one more row, which has `longest` tokens before it if all of the cache is kept
    dtype: Any = jnp.bfloat16
    devices: int = 1


CASES = {
    "one long request": Case(LLAMA, 1, 32_768, 1.0),
    "many short ones": Case(LLAMA, 64, 600),
    "products by themselves": Case(LLAMA, 120, 1500),
    "FP8": Case(with_fp8_weights(LLAMA), 32, 4000),
    "norms of heads": Case(QWEN3, 7, 8192, 0.5),
    "heads of 256, windows": Case(GEMMA, 16, 4000),
    "a mixture in MXFP4, one request": Case(GPT_OSS, 1, 8192, 1.0),
    "a mixture in MXFP4": Case(GPT_OSS, 48, 3000),
    "a mixture, two requests": Case(QWEN3_MOE, 2, 8192),
    "a mixture": Case(QWEN3_MOE, 100, 1500),
    "drafts": Case(LLAMA, 9, 3000, drafts=3),
    "bytes": Case(LLAMA, 30, 6000, dtype=byte_pages.DTYPE),
    "a chunk": Case(LLAMA, 12, 4000, chunk=640),
    "a chunk over a history": Case(QWEN3, 12, 4000, 1.0, chunk=384),
    "a chunk of a mixture": Case(GPT_OSS, 12, 4000, chunk=320),
    "two GPUs": Case(LLAMA, 6, 4000, devices=2),
    "a mixture over two GPUs": Case(GPT_OSS, 20, 2000, devices=2),
}


def bits(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize])


def filled_cache(
    case: Case, config: ModelConfig, plan: tj.CachePlan, parallel: TensorParallel | None, tokens: np.ndarray
) -> tj.Cache:
    """With room for `tokens` of each row, the last one's chunk and a tail, and random entries everywhere."""
    sizes = {"max_requests": len(tokens), "max_tokens": case.longest + case.chunk + TAIL, "max_tail": TAIL}
    sizes["num_pages"] = len(tokens) * plan.pages(sizes["max_tokens"], TAIL)
    if parallel:
        cache = parallel.init_cache(**sizes, dtype=case.dtype)
    else:
        cache = tj.init_cache(plan, config, **sizes, dtype=case.dtype)
    for row, count in enumerate(tokens):
        cache = tj.reserve(plan, cache, np.int32(row), np.int32(count + case.chunk), np.int32(TAIL))

    @jax.jit
    def entries(key: jax.Array) -> jax.Array:
        shape = (*cache.pool.shape[:3], plan.page_size, config.head_dim)
        if byte_pages.is_bytes(case.dtype):
            return byte_pages.join(*byte_pages.quantise(jax.random.normal(key, shape)))
        return jax.random.normal(key, shape, case.dtype)

    return cache.replace(pool=jax.device_put(entries(jax.random.key(0)), cache.pool.sharding))


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_every_step_is_the_same(name: str, caplog: pytest.LogCaptureFixture) -> None:
    case = CASES[name]
    if case.devices > jax.device_count():
        pytest.skip(f"needs {case.devices} GPUs")
    config = case.config.replace(num_layers=3, vocab_size=4096, sliding_layers=case.config.sliding_layers[:1])
    params = random_weights(config, case.devices)
    sliding = tj.SlidingLayers.of(config, max_tail=TAIL)
    plan = tj.CachePlan.build(ragged(config, case.retention), case.devices, 64, sliding=sliding)
    random = np.random.default_rng(0)
    tokens = np.r_[
        case.longest, random.integers(1, case.longest, case.rows - 1), case.longest * (case.retention == 1)
    ]
    tails = np.r_[random.integers(0, TAIL - 8, case.rows), 0]
    parallel = TensorParallel.of(config, plan, case.devices) if case.devices > 1 else None
    params = parallel.linked(params) if parallel else params
    cache = filled_cache(case, config, plan, parallel, tokens)
    counts = cache.tokens.sharding, cache.tail.sharding
    begin = jax.device_put((tokens.astype(np.int32), tails.astype(np.int32)), counts)
    given = random.integers(8, config.vocab_size, (case.rows + case.chunk, 1 + case.drafts), np.int32)
    of_rows = given[: case.rows] if case.drafts else given[: case.rows, 0]
    decode = tj.Decode(np.arange(case.rows, dtype=np.int32), of_rows)
    # A part of the chunk is padding.
    chunk = (
        tj.Chunk(np.int32(case.rows), given[case.rows :, 0], np.int32(case.chunk - 5)) if case.chunk else None
    )
    options = compiler_options(case.devices, linked="links" in params, alone=not chunk)

    @partial(jax.jit, donate_argnums=1, compiler_options=options)
    def again(params: Any, cache: tj.Cache, begin: Any, want: jax.Array, wrong: jax.Array) -> Any:
        cache = cache.replace(tokens=begin[0], tail=begin[1])
        scorer = tj.get_scorer("snapkv")
        if parallel:
            logits, cache = parallel.step(params, scorer, cache, chunk, decode)
        else:
            logits, cache = tj.step(params, config, plan, scorer, cache, chunk, decode)
        return cache, logits, wrong + (bits(logits) != bits(want)).any(axis=1)

    every = parallel.everywhere if parallel else None
    nothing = jax.device_put(
        np.zeros((case.rows * (1 + case.drafts) + bool(chunk), config.vocab_size), np.float32), every
    )
    wrong = jax.device_put(np.zeros(len(nothing), np.int32), every)
    if parallel:
        cache, *_ = jax.block_until_ready(again(parallel.in_passing(params), cache, begin, nothing, wrong))
    # A chunk chooses among the last entries before it, too, and puts them in order: soon they are as it would leave them.
    for _ in range(20 if chunk else 1):
        cache, want, _ = again(params, cache, begin, nothing, wrong)
    pool, rows = jnp.copy(cache.pool), [np.asarray(x) for x in (cache.tokens, cache.tail)]
    assert np.isfinite(want).all() and np.ptp(np.asarray(want), axis=1).min() > 0
    for n in range(REPEATS):
        cache, _, wrong = again(params, cache, begin, want, wrong)
        if n % 500 == 499:
            jax.block_until_ready(wrong)
    assert not np.asarray(wrong).any(), np.asarray(wrong)
    assert bool((bits(pool) == bits(cache.pool)).all())
    np.testing.assert_array_equal(rows, [np.asarray(x) for x in (cache.tokens, cache.tail)])
    assert not caplog.records  # nothing was left to XLA with a warning
