"""Routing and the MLP of a mixture of experts, and what configurations say of it."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.config import UnsupportedModelError, config_from_huggingface
from models.experts import expert_mlp
from models.fp8_weights import in_fp8
from models.params import init_params, num_parameters
from models.routing import COMPARED, expert_weights, likeliest, parts_to_choose_from, router_logits
from models.testing import tiny_config
from pallas_kernels import expert_products as ep
from pallas_kernels.expert_products import LEAST_NARROW
from tests.one_program import in_one

GOLDEN = Path(__file__).parent / "golden"

mlp = jax.jit(expert_mlp, static_argnames="config")


@pytest.mark.parametrize("tokens", [50, COMPARED + 1])
@pytest.mark.parametrize("normalize", [True, False])
def test_routing(normalize, tokens):
    logits = np.random.default_rng(0).standard_normal((tokens, 17)).astype(np.float32) * 30
    largest, experts = likeliest(jnp.asarray(logits), 4)
    np.testing.assert_array_equal(experts, np.argsort(-logits, axis=1)[:, :4])
    np.testing.assert_array_equal(largest, np.take_along_axis(logits, np.asarray(experts), axis=1))
    weights, whole = expert_weights(jnp.asarray(logits), largest, normalize)
    weights = np.concatenate(weights, axis=1) / np.asarray(whole)
    exact = np.exp(logits.astype(np.float64) - logits.max(1, keepdims=True))
    exact = np.take_along_axis(exact / exact.sum(1, keepdims=True), np.asarray(experts), axis=1)
    if normalize:
        exact /= exact.sum(1, keepdims=True)
    np.testing.assert_allclose(weights, exact, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("tokens", [2, COMPARED + 1])
def test_equal_logits_go_to_the_first_experts(tokens):
    np.testing.assert_array_equal(likeliest(jnp.zeros((tokens, 6)), 3)[1], [[0, 1, 2]] * tokens)


@pytest.mark.parametrize("tokens", [1, 5, 300])
def test_mlp_is_the_weighted_sum_of_the_chosen(tokens):
    config = tiny_config(num_layers=1, num_experts=6, experts_per_token=2, expert_size=48)
    layer = init_params(config, jax.random.key(1))["layers"][0]
    x = np.random.default_rng(2).standard_normal((tokens, 64)).astype(np.float32)
    got = mlp(layer, x, config)
    router, gate_up, down = (
        np.asarray(layer[name], np.float64) for name in ("router", "expert_gate_up", "expert_down")
    )
    want = np.zeros((tokens, 64))
    for t, row in enumerate(x.astype(np.float64)):
        logits = row @ router
        chosen = np.argsort(-logits)[:2]
        weights = np.exp(logits[chosen] - logits[chosen].max())
        for expert, weight in zip(chosen, weights / weights.sum(), strict=True):
            gate, up = row @ gate_up[expert, :, 0], row @ gate_up[expert, :, 1]
            want[t] += weight * ((gate / (1 + np.exp(-gate)) * up) @ down[expert])
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_many_tokens_go_to_experts_in_fp8():
    """Those of which experts get enough, and nothing but rounding changes."""
    config = tiny_config(num_layers=1, num_experts=4, experts_per_token=2, expert_size=64)
    params, config = in_fp8(init_params(config, jax.random.key(1)), config)
    layer, dynamic = params["layers"][0], config.replace(activations_fp8=True)
    x = np.random.default_rng(2).standard_normal((2 * LEAST_NARROW, 64)).astype(np.float32)
    there = np.arange(len(x)) % 7 != 3
    want = mlp(layer, x, config, there)
    got = mlp(layer, x, dynamic, there)
    np.testing.assert_array_equal(got[~there], 0)
    assert 0.002 < np.linalg.norm(got - want) / np.linalg.norm(want) < 0.06
    few = x[:-8]
    np.testing.assert_array_equal(mlp(layer, few, dynamic), mlp(layer, few, config))


def test_padding_goes_through_no_expert():
    config = tiny_config(num_layers=1, num_experts=6, experts_per_token=2, expert_size=48)
    layer = init_params(config, jax.random.key(1))["layers"][0]
    x = np.random.default_rng(2).standard_normal((9, 64)).astype(np.float32)
    there = np.arange(9) % 3 != 1
    got = np.asarray(mlp(layer, x, config, there))
    np.testing.assert_array_equal(got[~there], 0)
    np.testing.assert_allclose(got[there], mlp(layer, x[there], config), atol=1e-6)
    assert not mlp(layer, np.full_like(x, np.nan), config, np.zeros(9, bool)).any()


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(
    "there",
    [[True], pytest.param([True, False], marks=pytest.mark.slow), [False, True], [True, False, True, True]],
    ids=str,
)
def test_few_tokens_go_to_their_experts_directly(there, normalize, monkeypatch):
    """What comes out is what comes out of sorted rows."""
    config = tiny_config(
        num_layers=1, num_experts=32, experts_per_token=2, expert_size=48, normalize_experts=normalize
    )
    layer = init_params(config, jax.random.key(1))["layers"][0]
    x = np.random.default_rng(2).standard_normal((len(there), 64)).astype(np.float32)
    x[-1] = x[0]  # the same experts
    how = {"config": config, "there": np.array(there)}
    got = in_one(expert_mlp, layer, x, **how)
    monkeypatch.setattr(ep, "plan_directly", None)
    monkeypatch.setattr(ep, "goes_directly", lambda *_, **__: False)
    np.testing.assert_allclose(got, in_one(expert_mlp, layer, x, **how), rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(np.asarray(got)[~np.array(there)], 0)


def test_a_token_of_no_numbers_harms_no_other():
    config = tiny_config(num_layers=1, num_experts=6, experts_per_token=2, expert_size=48)
    layer = init_params(config, jax.random.key(1))["layers"][0]
    x = np.random.default_rng(2).standard_normal((2, 64)).astype(np.float32)
    want = mlp(layer, x, config)[1]
    x[0] = np.nan
    assert likeliest(jnp.full((1, 6), np.nan), 2)[1].max() < 6  # what a kernel reads is there
    np.testing.assert_array_equal(mlp(layer, x, config)[1], want)


def test_layers_without_experts_have_an_mlp():
    config = tiny_config(num_experts=6, experts_per_token=2, expert_size=48, dense_layers=(1, 2))
    layers = init_params(config, jax.random.key(0))["layers"]
    assert ["router" in layer for layer in layers] == [True, False, False, True]
    assert ["gate_up" in layer for layer in layers] == [False, True, True, False]
    dense = num_parameters(tiny_config())
    assert num_parameters(config) - dense == 2 * (64 * 6 + (6 * 48 - 128) * 64 * 3)


def config_of(name, **changes):
    fields = json.loads((GOLDEN / name / "config.json").read_text())
    return config_from_huggingface(fields | changes, "x")


def test_fields_of_qwen():
    config = config_of("tiny_qwen3_moe")
    assert (config.num_experts, config.experts_per_token, config.expert_size) == (8, 3, 24)
    assert config.dense_layers == (1,) and not config.normalize_experts and config.qk_norm
    assert config_of("tiny_qwen3_moe", mlp_only_layers=[], decoder_sparse_step=2).dense_layers == (0, 2)
    fields = {"architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 10, "num_hidden_layers": 2}
    fields |= {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4}
    published = config_from_huggingface(fields, "x")  # what transformers takes where the file says nothing
    assert (published.num_experts, published.experts_per_token, published.expert_size) == (128, 8, 768)
    assert published.num_kv_heads == 4 and published.dense_layers == ()


def test_fields_of_mixtral():
    config = config_of("tiny_mixtral")
    assert (config.num_experts, config.experts_per_token, config.expert_size) == (4, 2, 48)
    assert config.normalize_experts and not config.qk_norm
    fields = {"architectures": ["MixtralForCausalLM"], "vocab_size": 10, "num_hidden_layers": 2}
    fields |= {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 8}
    published = config_from_huggingface(fields, "x")  # what transformers takes where the file says nothing
    assert (published.rope_theta, published.num_kv_heads, published.num_experts) == (1e6, 8, 8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 0}, "num_experts_per_tok=0"),
        ({"num_experts_per_tok": 9}, "expected 1 to 8 experts a token"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size=None"),
        ({"mlp_only_layers": "1"}, "mlp_only_layers='1'"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step=0"),
        ({"use_sliding_window": True, "sliding_window": 0}, "sliding_window=0"),
    ],
    ids=str,
)
def test_what_is_refused(changes, message):
    with pytest.raises(UnsupportedModelError, match=message):
        config_of("tiny_qwen3_moe", **changes)


def test_experts_with_gelu_are_refused():
    with pytest.raises(ValueError, match="experts whose gate is GELU"):
        tiny_config(num_experts=2, experts_per_token=1, expert_size=8, gelu=True)


def test_a_router_s_product_that_is_split(monkeypatch):
    rng = np.random.default_rng(0)
    x, router, bias = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((5, 192), (192, 8), (8,)))
    whole = router_logits(x, router, bias)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    split = jax.make_jaxpr(router_logits)(x, router, bias)
    assert "5,3,64" in str(split)
    np.testing.assert_allclose(router_logits(x, router, bias), whole, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(router_logits(x, router, None), whole - bias, rtol=1e-5, atol=1e-5)


def test_parts_of_a_router_s_product_for_a_kernel():
    """As many as the depth has for few tokens; for more as many as each CTA may read, or one."""
    assert parts_to_choose_from(2, 2880, 32, directly=True) == 45
    assert parts_to_choose_from(32, 2880, 32, directly=False) == 15
    assert parts_to_choose_from(128, 2880, 32, directly=False) == 1
    assert parts_to_choose_from(32, 2048, 128, directly=False) == 1
    assert parts_to_choose_from(2, 100, 8, directly=True) == 1
