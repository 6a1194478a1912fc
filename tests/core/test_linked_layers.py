"""Layers of a decode step that are one kernel on each of two linked devices, which add up their shares within it."""

import dataclasses
import re
from functools import partial
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tangram_jax as tj
from benchmarks.gpu_program import as_on_hopper
from models.params import abstract_params
from models.testing import random_params, tiny_config
from pallas_kernels import decode_layer
from pallas_kernels import layer_products as lp
from pallas_kernels.layer_products.tuning import TUNING
from tangram_jax.attention import DecodeAttention
from tangram_jax.sharding import TensorParallel
from tests.core.test_sharding import SIZES, abstract_mesh, linked_by_xla, ragged_plan, run
from tests.simulated import on_simulated_devices

SLOW = partial(pytest.param, marks=pytest.mark.slow)

SHAPE = {"hidden_size": 256, "intermediate_size": 512, "num_heads": 8, "num_kv_heads": 4, "head_dim": 64}
ANY_SIZE = dataclasses.replace(TUNING["9.0"], least_ctas=0.0, least_weights=0)


def reference(attended, x, weights, links, how):
    return lp.layer_products_reference(attended, x, weights, axis=None if links is None else "tensor", **how)


def check_as_on_one(*, whole: bool, mixed: bool) -> None:
    """With the reference for the kernel of a layer's products, or of all of a layer."""
    calls = []

    def products(attended, x, weights, counters, *, links, tuning, in_parts, **how):
        calls.append(links)
        return reference(attended, x, weights, links, how)

    def to_the_end(self, layer, heads, made, sinks, end):
        calls.append(end.links)
        qkv = decode_layer.heads_reference(heads, made)
        attended = self(layer, qkv, sinks).reshape(len(qkv), -1).astype(end.x.dtype)
        x, product = reference(attended, end.x, end.weights, end.links, end.how)
        return x, product[None].astype(jnp.float32), qkv[:, :, -2:]

    config = tiny_config(num_layers=2, qkv_bias=True, **SHAPE)
    params, plan = random_params(config, 0), ragged_plan(config, 4)
    want = run(params, config, plan, mixed=mixed)
    with (
        mock.patch.dict(TUNING, {"9.0": ANY_SIZE}),
        mock.patch.multiple(lp, check_supported=lambda *arrays: None, layer_products=products),
        mock.patch.multiple(
            DecodeAttention, reaches_the_end=lambda self, tuning: whole, to_the_end=to_the_end
        ),
        linked_by_xla(),
    ):
        np.testing.assert_allclose(run(params, config, plan, 2, mixed=mixed), want, atol=1e-4)
    assert [links is not None for links in calls] == [True] * 2  # of one program, decode tokens alone


def check_products_as_on_one() -> None:
    check_as_on_one(whole=False, mixed=True)


def check_layers_as_on_one() -> None:
    check_as_on_one(whole=True, mixed=False)


def check_layers_beside_chunks() -> None:
    check_as_on_one(whole=True, mixed=True)


@pytest.mark.parametrize(
    "function",
    [SLOW("check_products_as_on_one"), "check_layers_as_on_one", SLOW("check_layers_beside_chunks")],
)
def test_on_simulated_devices(function):
    on_simulated_devices(__file__, function, 2)


@pytest.mark.parametrize(
    ("devices", "page_size", "kernels"),
    [
        (2, 64, ["all_reduce", "decode_layer"]),
        pytest.param(2, 16, ["all_reduce", "layer_products"], marks=pytest.mark.slow),
        pytest.param(4, 64, ["added_norm", "all_reduce"], marks=pytest.mark.slow),
    ],
)
def test_lowered_for_linked_gpus(devices, page_size, kernels, monkeypatch, caplog):
    """As one kernel a layer, as two where pages are small, and over four, where these have not run, by themselves."""
    monkeypatch.setitem(TUNING, "9.0", ANY_SIZE)
    config = tiny_config(num_layers=2, **SHAPE)
    plan = tj.CachePlan.build(tj.BudgetProfile.uniform(2, 4, 0.5), 4, page_size)
    tp = TensorParallel.of(config, plan, devices, mesh=abstract_mesh(devices))
    params = abstract_params(config, jnp.bfloat16)
    params["links"] = jax.ShapeDtypeStruct((devices, 1 + devices, 2), jnp.int32)
    cache = jax.eval_shape(lambda: tj.init_cache(plan, config, **SIZES, dtype=jnp.bfloat16))
    rows = np.zeros(8, np.int32)
    with as_on_hopper():
        traced = jax.jit(tp.step, static_argnums=1).trace(
            params, tj.get_scorer("snapkv"), cache, None, tj.Decode(rows, rows)
        )
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert sorted(set(re.findall(r"@(\w+)_mosaic_gpu\b", text))) == kernels
    assert not caplog.records
