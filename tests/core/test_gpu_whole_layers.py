"""On a Hopper GPU: steps whose layers are one kernel each, or whose attention makes the heads, against other ways."""

import contextlib
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tangram_jax as tj
from benchmarks.decode_ways import WAYS, on_any_gpu, without
from benchmarks.shapes import SHAPES
from models.fp8_weights import quantised
from models.params import map_specs, param_specs
from models.products import has_layer_kernel, layer_tuning
from models.sharding import share
from pallas_kernels import decode_layer, layer_products
from tangram_jax.sharding import TensorParallel
from tangram_jax.step import compiler_options

pytestmark = pytest.mark.gpu
ROWS, TOKENS, STEPS = 5, 300, 3


def steps(config, params, slots=6, options=None, devices=1):
    """(Logits of decode steps of some requests after prompts, the cache). slots: decode slots, with the empty ones."""
    profile = tj.BudgetProfile.uniform(len(config.full_layers), config.num_kv_heads, 0.5)
    plan = tj.CachePlan.build(profile, 4, 64, sliding=tj.SlidingLayers.of(config, max_tail=64))
    sizes = {"num_pages": 600, "max_requests": ROWS, "max_tokens": 512, "max_tail": 64, "dtype": jnp.bfloat16}
    if devices > 1:
        parallel = TensorParallel.of(config, plan, devices)
        params, cache, run = parallel.place(params), parallel.init_cache(**sizes), parallel.step
        if "links" not in params:
            pytest.skip("these GPUs do not reach each other's memory")
        with_chunk = options = compiler_options(devices, linked=True)
    else:
        cache, run, with_chunk = tj.init_cache(plan, config, **sizes), partial(one_gpu, config, plan), None
    chunks = jax.jit(run, static_argnums=1, compiler_options=with_chunk)
    step = jax.jit(run, static_argnums=1, compiler_options=options)
    scorer, rows, logits = tj.get_scorer("snapkv"), np.full(slots, ROWS, np.int32), []
    rows[:6] = 2, 0, ROWS, 3, ROWS - 1, 1
    if devices > 1:
        passing, nobody = parallel.in_passing(params), np.full_like(rows, ROWS)
        chunk = tj.Chunk(np.int32(ROWS), np.zeros(TOKENS, np.int32), np.int32(1))
        jax.block_until_ready(chunks(passing, scorer, cache, chunk, None))
        jax.block_until_ready(step(passing, scorer, cache, None, tj.Decode(nobody, rows)))
    for row in range(ROWS - 1):  # the last one is without pages
        cache = tj.reserve(plan, cache, np.int32(row), np.int32(TOKENS), np.int32(8))
        tokens = (np.arange(TOKENS, dtype=np.int32) * (row + 3)) % config.vocab_size
        chunk = tj.Chunk(np.int32(row), tokens, np.int32(TOKENS - 60 * row))
        _, cache = chunks(params, scorer, cache, chunk, None)
    for n in range(STEPS):
        out, cache = step(params, scorer, cache, None, tj.Decode(rows, rows * 7 + n))
        logits.append(out[np.array([0, 1, 3, 5])])
    return jnp.stack(logits), cache


def one_gpu(config, plan, params, scorer, cache, chunk, decode):
    return tj.step(params, config, plan, scorer, cache, chunk, decode)


@pytest.mark.parametrize(
    "changes", [{}, {"qk_norm": True}, {"qkv_bias": True}, {"intermediate_size": 17_408}], ids=str
)
def test_steps_of_whole_layers(changes):
    """Weights as in a model: norms are no ones, and each layer adds as much as there is."""
    config = SHAPES["llama-3.1-8b"].replace(num_layers=3, vocab_size=1024, **changes)
    params = weights_of(config)
    outs = []
    for whole in (True, False):
        with contextlib.ExitStack() as stack:
            stack.enter_context(on_any_gpu(layer_products.TUNING))
            stack.enter_context(on_any_gpu(decode_layer.TUNING) if whole else without(decode_layer))
            of = config.replace(name=f"{config.name}, {whole} {changes}")
            outs.append(steps(of, params))
    check_same(*outs)


@pytest.mark.parametrize(
    ("shape", "changes"),
    [
        ("llama-3.1-8b", {"qkv_bias": True}),
        ("llama-3.1-8b", {"weights_fp8": True}),
        ("qwen3-30b-a3b", {"num_experts": 16}),
        ("gpt-oss-20b-bf16", {"num_experts": 8, "sliding_layers": (0, 2)}),
    ],
    ids=str,
)
def test_steps_with_heads_made(shape, changes):
    config = SHAPES[shape].replace(num_layers=3, vocab_size=1024, **changes)
    params, outs = weights_of(config), []
    for made in (True, False):
        with without(decode_layer), contextlib.nullcontext() if made else WAYS["heads-apart"][0]():
            outs.append(steps(config.replace(name=f"{config.name}, {made} {changes}"), params))
    check_same(*outs)


@pytest.mark.parametrize("slots", [6, 40])
@pytest.mark.parametrize("shape", ["qwen3-30b-a3b", "gpt-oss-20b-bf16"])
def test_steps_of_mixtures(shape, slots):
    """Experts chosen and added up by kernels and by XLA. All are chosen: which are best may change with rounding."""
    changes: dict[str, Any] = {"num_layers": 3, "vocab_size": 1024, "num_experts": 8, "experts_per_token": 8}
    config = SHAPES[shape].replace(**changes, sliding_layers=(0, 2) if SHAPES[shape].sliding_layers else ())
    params, outs = weights_of(config), []
    for apart in (False, True):
        with WAYS["dispatch-apart"][0]() if apart else contextlib.nullcontext():
            outs.append(steps(config.replace(name=f"{config.name}, {apart} {slots}"), params, slots))
    check_same(*outs)


@pytest.mark.parametrize("slots", [40, 72, 128])
def test_steps_with_norms_behind_products(slots):
    config = SHAPES["llama-3.1-8b"].replace(num_layers=3, vocab_size=1024, qk_norm=True)
    params, outs = weights_of(config), []
    for behind in (True, False):
        with (
            without(decode_layer, layer_products),
            contextlib.nullcontext() if behind else WAYS["norms-apart"][0](),
        ):
            outs.append(steps(config.replace(name=f"{config.name}, {behind} {slots}"), params, slots))
    check_same(*outs)


@pytest.mark.parametrize(
    ("shape", "changes"),
    [
        ("llama-3.1-8b", {}),
        ("qwen3-30b-a3b", {"num_experts": 16}),
        ("gemma-3-12b", {"sliding_layers": (0, 1)}),
    ],
    ids=str,
)
@pytest.mark.parametrize("slots", [6, 128])
def test_kernels_side_by_side_change_nothing(shape, changes, slots):
    config = SHAPES[shape].replace(num_layers=3, vocab_size=1024, **changes)
    params = weights_of(config)
    options = [compiler_options(alone=alone) for alone in (False, True)]
    assert options[0] != options[1]
    one, other = (steps(config, params, slots, each) for each in options)
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(
    ("shape", "slots", "changes"),
    [
        ("llama-3.1-8b", 6, {}),
        ("llama-3.1-8b", 32, {"qk_norm": True, "qkv_bias": True}),
        ("llama-3.1-70b", 6, {"weights_fp8": True}),
        ("gemma-3-12b", 6, {"sliding_layers": (0, 2)}),
    ],
    ids=str,
)
def test_steps_of_shares(shape, slots, changes):
    """Over two GPUs, each with a share of every layer: as kernels that add up what both give, and by themselves.

    By themselves `test_gpu_parallel` has them against one GPU.
    """
    if jax.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    config = SHAPES[shape].replace(num_layers=3, vocab_size=1024, **changes)
    assert layer_tuning(max(slots, 8), share(config, 2), jnp.zeros((3, 2)))
    params = weights_of(config)  # copied: some of what is placed is used up
    copied = jax.tree.map(jnp.copy, params)
    got = steps(config.replace(name=f"{config.name}, shares, {slots}"), copied, slots, devices=2)
    with without(layer_products):
        apart = steps(config.replace(name=f"{config.name}, apart, {slots}"), params, slots, devices=2)
    check_same(got, apart)


def test_steps_in_fp8():
    """A layer's products as one kernel, and by themselves."""
    config = SHAPES["llama-3.1-8b"].replace(num_layers=3, vocab_size=1024, weights_fp8=True)
    params, outs = weights_of(config), []
    for left_out in ((), (layer_products,)):
        with without(*left_out):
            of = config.replace(name=f"{config.name}, {len(left_out)}")
            assert has_layer_kernel(params["layers"], params["embed"][:8], of) == (not left_out)
            outs.append(steps(of, params))
    check_same(*outs)


def weights_of(config):
    """As in a model: norms are no ones."""
    keys = iter(jax.random.split(jax.random.key(0), 100))

    def draw(spec):
        scale = config.hidden_size**-0.5 if len(spec.shape) > 1 else 0.3
        array = jax.random.normal(next(keys), spec.shape, jnp.bfloat16) * scale + (len(spec.shape) == 1)
        return quantised(array, spec) if spec.fp8 else array

    return map_specs(draw, param_specs(config))


def check_same(got, wanted):
    (logits, cache), (expected, other) = got, wanted
    assert jnp.linalg.norm(logits - expected) < 0.03 * jnp.linalg.norm(expected)
    pools = cache.pool.astype(jnp.float32), other.pool.astype(jnp.float32)
    assert jnp.linalg.norm(pools[0] - pools[1]) < 0.02 * jnp.linalg.norm(pools[1])
    np.testing.assert_array_equal(cache.tail, other.tail)
