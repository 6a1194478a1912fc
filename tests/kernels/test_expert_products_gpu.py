"""Products with the weights of experts on a Hopper GPU, against float64 NumPy."""

import jax
import jax.numpy as jnp
import pytest

from models.experts import expert_mlp
from models.testing import tiny_config
from pallas_kernels import expert_products as ep
from pallas_kernels.expert_products.tuning import FEW, FP8_TUNING, MANY, PACKED_TUNING
from pallas_kernels.support import record_for
from tests.kernels.expert_cases import make_case, relative_error

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


@pytest.mark.parametrize("number", range(4), ids=["one", "few", "some", "many"])
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


@pytest.mark.parametrize("packed", [None, "mxfp4", "fp8"])
@pytest.mark.parametrize("tokens", [1, 40, 1000])
def test_mlp(tokens, packed):
    """The whole MLP, by the kernel and expert by expert."""
    config = tiny_config(hidden_size=128, num_experts=12, experts_per_token=3, expert_size=64)
    config = config.replace(experts_mxfp4=packed == "mxfp4", weights_fp8=packed == "fp8")
    case = make_case(tokens, 3, 12, 128, 64, dtype=jnp.bfloat16, packed=packed)
    params = {
        "router": jax.random.normal(jax.random.key(0), (128, 12), jnp.bfloat16),
        "expert_gate_up": case.gate_up,
        "expert_down": case.down if packed else case.down[:, :, 0],
    }
    mlp = jax.jit(expert_mlp, static_argnames="config")
    assert "expert_products" in str(mlp.trace(params, case.x, config=config).jaxpr)
    got = mlp(params, case.x, config=config)
    wide = jax.tree.map(lambda x: x if x.dtype == jnp.int32 else x.astype(jnp.float32), (params, case.x))
    want = mlp(*wide, config=config)
    assert relative_error(got.astype(jnp.float32), want) < 2e-2
