"""Layers of a decode step that are one kernel each: what the step hands it, with the reference in its place."""

import dataclasses
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tangram_jax as tj
from benchmarks.gpu_program import as_on_hopper
from models.testing import random_params, tiny_config
from pallas_kernels import decode_layer
from pallas_kernels import layer_products as lp
from pallas_kernels.layer_products import layer_products_reference
from pallas_kernels.layer_products.tuning import TUNING
from tangram_jax.attention import DecodeAttention
from tests.core.two_steps import GEMMA, SHAPE, after_prompts, random_weights, trace_other_steps, two_steps


@pytest.fixture
def whole(monkeypatch):
    """Kernels for any weights and any device; calls of that for a layer: (its number among its kind, whether the last)."""
    least = dataclasses.replace(TUNING["9.0"], least_ctas=0.0, least_weights=0)
    monkeypatch.setitem(TUNING, "9.0", least)
    monkeypatch.setattr(lp, "check_supported", lambda *arrays: None)
    monkeypatch.setitem(
        decode_layer.TUNING, "9.0", dataclasses.replace(decode_layer.TUNING["9.0"], kinds=("",))
    )
    calls = []

    def products(attended, x, weights, counters, *, links, tuning, in_parts, **how):
        return layer_products_reference(attended, x, weights, **how)

    def to_the_end(self, layer, heads, made, sinks, end):
        calls.append((layer, end.last))
        qkv = decode_layer.heads_reference(heads, made)
        attended = self(layer, qkv, sinks).reshape(len(qkv), -1).astype(end.x.dtype)
        x, product = layer_products_reference(attended, end.x, end.weights, **end.how)
        return x, product[None].astype(jnp.float32), qkv[:, :, -2:]

    monkeypatch.setattr(lp, "layer_products", products)
    monkeypatch.setattr(DecodeAttention, "reaches_the_end", lambda self, tuning: True)
    monkeypatch.setattr(DecodeAttention, "to_the_end", to_the_end)
    return calls


def test_a_step_of_whole_layers_is_the_same_step(request):
    changes = GEMMA | {"qkv_bias": True, "num_layers": 4, "sliding_layers": (0, 1, 3)}
    config = tiny_config(**SHAPE | changes)
    params = random_weights(config)
    before = after_prompts(config, params)
    expected, cache = two_steps(config, params, *before)
    calls = request.getfixturevalue("whole")
    got, other = two_steps(config.replace(name="whole"), params, *before)
    kinds = [list(layers) for layers in (config.full_layers, config.sliding_layers)]
    numbers = [next(of.index(i) for of in kinds if i in of) for i in range(config.num_layers)]
    assert calls == [(n, i + 1 == config.num_layers) for i, n in enumerate(numbers)]
    np.testing.assert_allclose(got, expected, rtol=2e-4, atol=2e-4)
    np.testing.assert_allclose(other.pool, cache.pool, rtol=2e-4, atol=2e-4)
    np.testing.assert_array_equal(other.tail, cache.tail)


def test_steps_with_anything_else_have_none(whole):
    trace_other_steps()
    assert not whole


@pytest.mark.slow  # `test_linked_layers` has one without windows by default
@pytest.mark.parametrize(
    ("most_narrow", "changes"),
    [(4, {}), (3, {}), (3, {"num_heads": 32, "num_kv_heads": 1})],
    ids=["gates of 64 columns", "of 128", "most queries"],
)
def test_whole_layers_lower(most_narrow, changes, monkeypatch, caplog):
    """One with a window and one without, the plan of each, and appending."""
    any_size = dataclasses.replace(TUNING["9.0"], least_ctas=0.0, least_weights=0, most_narrow=most_narrow)
    monkeypatch.setitem(TUNING, "9.0", any_size)
    monkeypatch.setitem(
        decode_layer.TUNING, "9.0", dataclasses.replace(decode_layer.TUNING["9.0"], kinds=("",))
    )
    config = tiny_config(**SHAPE | GEMMA | {"num_layers": 2, "sliding_layers": (0,)} | changes)
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), random_params(config))
    profile = tj.BudgetProfile.uniform(len(config.full_layers), config.num_kv_heads, 0.5)
    plan = tj.CachePlan.build(
        profile, min(2, config.num_kv_heads), 32, sliding=tj.SlidingLayers.of(config, 32)
    )
    cache = tj.init_cache(
        plan, config, num_pages=64, max_requests=4, max_tokens=256, max_tail=32, dtype=jnp.bfloat16
    )
    rows = np.arange(4, dtype=np.int32)
    step = partial(tj.decode_step, params, config, plan, rows=rows, tokens=rows)
    with as_on_hopper():
        text = jax.jit(step).trace(cache).lower(lowering_platforms=("cuda",)).as_text()
    assert len(re.findall("kernel_hash = ", text)) == 5
    assert not caplog.records
