"""Products with the weights of experts on a Hopper GPU, against float64 NumPy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.experts import expert_mlp
from models.testing import tiny_config
from pallas_kernels import expert_products as ep
from pallas_kernels.expert_products.tuning import (
    FEW,
    FP8_FEW,
    FP8_TUNING,
    MANY,
    NARROW_MANY,
    PACKED_FEW,
    PACKED_TUNING,
)
from pallas_kernels.support import record_for
from tests.kernels.expert_cases import make_case, random_rows, relative_error

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("tuning", [FEW, MANY], ids=["few", "many"])
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ((1, 8, 16, 512, 256), {}),
        ((33, 8, 128, 256, 64), {"dtype": jnp.float16}),
        ((700, 4, 32, 192, 320), {}),
        ((500, 2, 60, 128, 128), {"busy": 2}),
        ((64, 1, 64, 128, 576), {}),
        ((90, 4, 32, 320, 192), {"like_gpt_oss": True}),
    ],
    ids=str,
)
def test_products(tuning, sizes, options):
    options = {"dtype": jnp.bfloat16, **options}
    case = make_case(*sizes, **options)
    plan = ep.plan_experts(jnp.asarray(case.experts), case.num_experts, tuning.rows)
    out = case.products(ep.expert_products, plan, tuning=tuning)
    assert relative_error(out, case.expected()) < (2e-3 if case.x.dtype == jnp.float16 else 1.5e-2)


@pytest.mark.parametrize("number", range(4), ids=["few", "some", "more", "many"])
@pytest.mark.parametrize("packed", ["mxfp4", "fp8"])
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ((1, 8, 16, 512, 256), {}),
        ((33, 4, 32, 320, 192), {"like_gpt_oss": True}),
        ((700, 4, 32, 192, 384), {"like_gpt_oss": True}),
        ((500, 2, 60, 128, 128), {"busy": 2}),
    ],
    ids=str,
)
def test_products_of_packed_weights(packed, number, sizes, options):
    tuning = record_for({"mxfp4": PACKED_TUNING, "fp8": FP8_TUNING}[packed])[number]
    case = make_case(*sizes, dtype=jnp.bfloat16, packed=packed, **options)
    plan = ep.plan_experts(jnp.asarray(case.experts), case.num_experts, tuning.rows)
    out = case.products(ep.expert_products, plan, tuning=tuning)
    assert relative_error(out, case.expected()) < 1.5e-2


@pytest.mark.parametrize(
    ("changes", "sizes", "options"),
    [
        ({}, (700, 4, 16, 512, 256), {}),
        ({}, (900, 4, 12, 192, 320), {"like_gpt_oss": True}),
        ({"rows": 64, "warpgroups": 3}, (700, 4, 16, 256, 384), {}),
        ({"rows": 64, "per_sm": 3, "warpgroups": 1, "deep": 4}, (500, 2, 60, 512, 128), {"busy": 2}),
        ({"rows": 96}, (600, 4, 12, 128, 64), {"busy": 5}),
    ],
    ids=str,
)
def test_products_of_rows_in_fp8(changes, sizes, options):
    tuning = dataclasses.replace(NARROW_MANY, **changes)
    case = make_case(*sizes, dtype=jnp.bfloat16, packed="fp8", **options)
    plan = ep.plan_experts(jnp.asarray(case.experts), case.num_experts, tuning.rows)
    # With a limit results are three times smaller than the sums, of which the tensor cores' error is a part.
    bound = 2e-2 if case.limit else 8e-3
    assert max(case.errors_in_fp8(ep.expert_products, plan, tuning=tuning)) < bound


@pytest.mark.parametrize(
    "options",
    [{}, {"like_gpt_oss": True}, {"packed": "mxfp4", "like_gpt_oss": True}, {"packed": "fp8"}],
    ids=str,
)
@pytest.mark.parametrize("there", [[True], [True, False], [False, True, True, False, True]], ids=str)
@pytest.mark.parametrize("sizes", [(8, 16, 512, 256), (4, 32, 2880, 192), (4, 5, 192, 2880)], ids=str)
def test_products_of_a_direct_plan(sizes, there, options):
    """Of tokens between which some are not there, and of experts that several tokens have."""
    tuning = {"mxfp4": PACKED_FEW, "fp8": FP8_FEW}.get(options.get("packed"), FEW)
    case = make_case(len(there), *sizes, dtype=jnp.bfloat16, **options)
    there = np.array(there)
    case = dataclasses.replace(case, x=case.x.at[np.flatnonzero(~there)].set(np.nan))
    plan = ep.plan_directly(jnp.asarray(case.experts), jnp.asarray(there))
    out = case.products(ep.expert_products, plan, tuning=tuning)
    assert relative_error(out[there], case.expected()[there]) < 1.5e-2


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn])
@pytest.mark.parametrize(("count", "size"), [(8000, 2048), (333, 2880), (7, 16), (130, 4112)])
def test_rows(count, size, dtype):
    x, rows = random_rows(count, size, dtype)
    assert (ep.gather_rows(x, rows) == x[rows]).all()


def _config(num_experts, per_token, packed):
    config = tiny_config(
        hidden_size=128, num_experts=num_experts, experts_per_token=per_token, expert_size=64
    )
    return config.replace(experts_mxfp4=packed == "mxfp4", weights_fp8=packed == "fp8")


def _params(case, packed):
    """Of a layer whose hidden size is 128."""
    return {
        "router": jax.random.normal(jax.random.key(0), (128, case.num_experts), jnp.bfloat16),
        "expert_gate_up": case.gate_up,
        "expert_down": case.down if packed else case.down[:, :, 0],
    }


@pytest.mark.parametrize("packed", [None, "mxfp4", "fp8"])
@pytest.mark.parametrize(
    "there", [[True, False], [False, True], [True] * 2, [True, False, True, True]], ids=str
)
def test_mlp_of_few_tokens(there, packed, monkeypatch):
    """By a direct plan as by a sorted one."""
    config = _config(32, 2, packed)
    case = make_case(len(there), 2, 32, 128, 64, dtype=jnp.bfloat16, packed=packed)
    params = _params(case, packed)
    direct = jax.jit(expert_mlp, static_argnames="config")(
        params, case.x, config=config, there=np.array(there)
    )
    monkeypatch.setattr(ep, "goes_directly", lambda *_: False)
    mlp = jax.jit(lambda *args: expert_mlp(*args, config, np.array(there)))  # not the one traced before
    want = mlp(params, case.x)
    assert relative_error(direct.astype(jnp.float32), want.astype(jnp.float32)) < 1e-2


@pytest.mark.parametrize("packed", [None, "mxfp4", "fp8"])
@pytest.mark.parametrize("tokens", [1, 40, 1000])
def test_mlp(tokens, packed):
    """The whole MLP, by the kernel and expert by expert."""
    config = _config(12, 3, packed)
    case = make_case(tokens, 3, 12, 128, 64, dtype=jnp.bfloat16, packed=packed)
    params = _params(case, packed)
    mlp = jax.jit(expert_mlp, static_argnames="config")
    traced = str(mlp.trace(params, case.x, config=config).jaxpr)
    assert "expert_products" in traced and ("expert_dispatch" in traced) == (tokens == 40)
    got = mlp(params, case.x, config=config)
    wide = jax.tree.map(lambda x: x if x.dtype == jnp.int32 else x.astype(jnp.float32), (params, case.x))
    want = mlp(*wide, config=config)
    assert relative_error(got.astype(jnp.float32), want) < 2e-2
