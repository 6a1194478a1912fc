"""Models with FP8 weights: they compute what their weights stand for, and these are the nearest to what is loaded."""

import hypothesis
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies as st

from benchmarks.gpu_program import as_on_hopper
from calibrate.identity import compare_weights, weights_identity
from models import products
from models.config import UnsupportedModelError
from models.fp8_weights import dequantised, in_floats, in_fp8, quantised, values_at, with_fp8_weights
from models.params import ParamSpec, abstract_params, init_params, num_parameters, param_specs
from models.products import product
from models.quantisation import CHANNELS, WHOLE, Quantisation
from models.registry import load_model
from models.sharding import ShardingError, pad_heads
from models.testing import (
    random_params,
    tiny_config,
    tiny_gemma2_config,
    tiny_gemma_config,
    tiny_gpt_oss_config,
)
from models.weights import assemble_params
from pallas_kernels import fp8_products as fp8
from tests.models.checkpoints import Tensors, in_mxfp4, random_tensors
from tests.models.gguf_files import logits_of

CONFIG = tiny_config(num_layers=2)
CONFIGS = {
    "llama": CONFIG,
    "biases and a head": CONFIG.replace(qkv_bias=True, attn_out_bias=True, tie_embeddings=False),
    "gemma 2": tiny_gemma2_config(num_layers=2, sliding_layers=(0,)),
    "gemma 3": tiny_gemma_config(num_layers=3, sliding_layers=(0, 1)),
    "gpt-oss": tiny_gpt_oss_config(num_layers=2, sliding_layers=(0,), expert_size=128),
    "experts": CONFIG.replace(num_experts=6, experts_per_token=2, expert_size=64, dense_layers=(0,)),
}
PRODUCTS = ("qkv", "attn_out", "gate_up", "down")
HOW = Quantisation(method="fp8", blocks=((32, 32), CHANNELS, WHOLE))


def same(a, b):
    return jax.tree.all(jax.tree.map(lambda x, y: bool((x == y).all()) and x.dtype == y.dtype, a, b))


def with_whole_scales(params):
    """With scales that are powers of two, which change no rounding wherever they are multiplied."""
    layers = [
        {
            name: leaf._replace(scales=jnp.exp2(jnp.round(jnp.log2(leaf.scales))))
            if isinstance(leaf, fp8.Fp8Weights)
            else leaf
            for name, leaf in layer.items()
        }
        for layer in params["layers"]
    ]
    return params | {"layers": tuple(layers)}


# --- what they compute ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["biases and a head", "gemma 2", "experts", "gpt-oss"])
def test_logits_are_those_of_the_weights_that_they_stand_for(kind):
    params, config = in_fp8(random_params(CONFIGS[kind], 0), CONFIGS[kind])
    assert any(isinstance(leaf, fp8.Fp8Weights) for leaf in params["layers"][0].values())
    params = with_whole_scales(params)
    floats, plain = in_floats(params, config)
    assert plain == CONFIGS[kind]
    np.testing.assert_array_equal(logits_of(params, config), logits_of(floats, plain))


def test_logits_are_near_those_of_the_model():
    """Codes are off by up to 1/16, by 2.6% in the root of the mean square: after 16 products by four times as much."""
    params = init_params(tiny_config(), jax.random.key(0))  # its attention does not make small errors large
    want = np.asarray(logits_of(params, tiny_config()))
    got = np.asarray(logits_of(*in_fp8(params, tiny_config())))
    error = np.linalg.norm(got - want) / np.linalg.norm(want)
    assert 0.05 < error < 0.15


@hypothesis.given(
    st.integers(0, 2**32 - 1), st.sampled_from([1e-6, 1.0, 1e6]), st.sampled_from([0.1, 1.0, 3.0])
)
@hypothesis.settings(max_examples=20)
def test_products_are_within_half_a_code_of_every_weight(seed, size, spread):
    """Half a step of the last of four bits, or of the smallest codes where a weight is tiny beside its column's largest."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((3, 64)).astype(np.float32)
    # Far from even, and a column of zeros.
    w = (size * rng.lognormal(0, spread, (64, 64)) * rng.choice([-1, 1], (64, 64))).astype(np.float32)
    w[:, 7] = 0
    weights = quantised(w.reshape(64, 2, 32), ParamSpec((64, 2, 32), (None,) * 3, 64))
    got = np.asarray(product(x, weights, (2, 32), CONFIG)).reshape(3, 64)
    off = np.abs(w) / 16 + np.asarray(weights.scales) / 1024
    most = np.abs(x) @ off + 1e-5 * (np.abs(x) @ np.abs(w))
    assert (np.abs(got - x.astype(np.float64) @ w) <= most).all()
    assert (got[:, 7] == 0).all()


def test_many_tokens_become_fp8_too_where_that_is_asked_for():
    """Each by itself: padding, and what is not finite, changes none of the others."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((fp8.LEAST_NARROW, 64)), jnp.float32).at[5, 3].set(jnp.nan)
    weights = quantised(
        rng.standard_normal((64, 128)).astype(np.float32), ParamSpec((64, 128), (None,) * 2, 64)
    )
    dynamic = CONFIG.replace(activations_fp8=True)
    exact, narrow = product(x, weights, (128,), CONFIG), product(x, weights, (128,), dynamic)
    assert narrow.dtype == x.dtype and jnp.isnan(narrow[5]).all()
    error = np.delete(np.asarray(narrow - exact), 5, axis=0)
    assert 0.01 < np.linalg.norm(error) / np.linalg.norm(np.delete(np.asarray(exact), 5, axis=0)) < 0.05
    np.testing.assert_array_equal(product(x.at[5].set(9.0), weights, (128,), dynamic)[:5], narrow[:5])
    np.testing.assert_array_equal(product(x[:-1], weights, (128,), dynamic), exact[:-1])


def test_a_hopper_gpu_has_a_kernel_for_bfloat16(monkeypatch, caplog):
    """And what it has none for is said once."""
    asked = []
    monkeypatch.setattr(
        fp8,
        "fp8_products",
        lambda *given, gate: asked.append((*given, gate)) or fp8.fp8_products_reference(*given, gate=gate),
    )
    products._warn.cache_clear()
    params, config = in_fp8(random_params(CONFIG, 0, jnp.bfloat16), CONFIG)
    with as_on_hopper():
        jax.eval_shape(lambda params: logits_of(params, config.replace(name="traced for a GPU")), params)
        assert [gate for *_, gate in asked] == [None, None, "silu", None, None]
        # Of the first layer, which adds nothing before its norm, then of what is new in the others.
        hidden, heads, inner = CONFIG.hidden_size, 128, CONFIG.intermediate_size
        assert [x.shape[1] for x, *_ in asked] == [hidden, heads, hidden, inner, hidden]
        assert not caplog.records
        for dtype in (jnp.float32, jnp.float32, jnp.float16):
            product(jnp.ones((2, 64), dtype), params["layers"][0]["qkv"], (256,), CONFIG)
    assert len(asked) == 5
    slower = "FP8 weights are unpacked for every product, many times slower: "
    assert [record.getMessage() for record in caplog.records] == [
        f"{slower}tokens of {dtype} for FP8 weights: the kernel takes bfloat16"
        for dtype in ("float32", "float16")
    ]


def test_a_cpu_says_nothing(caplog):
    product(
        jnp.ones((2, 64)), quantised(jnp.ones((64, 64)), ParamSpec((64, 64), (None,) * 2, 64)), (64,), CONFIG
    )
    assert not caplog.records


# --- what is loaded ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", CONFIGS)
def test_loaded_leaf_by_leaf(kind):
    source, config = Tensors(random_tensors(CONFIGS[kind])), with_fp8_weights(CONFIGS[kind])
    params = assemble_params(source, config, "float32", progress=False)
    assert jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params) == abstract_params(
        config, "float32"
    )
    floats = assemble_params(source, CONFIGS[kind], "float32", progress=False)
    assert same(params, in_fp8(floats, CONFIGS[kind])[0])
    for layer, spec in zip(params["layers"], param_specs(config)["layers"], strict=True):
        for name in set(PRODUCTS) & layer.keys():
            weights = layer[name]
            whole = fp8.quantise(np.asarray(dequantised(weights, spec[name])).reshape(spec[name].matrix))
            assert same(weights.codes, whole.codes)  # each column's largest is the largest code


def test_codes_do_not_depend_on_the_dtype_of_the_others():
    """They are rounded once: numbers of a checkpoint in float32 do not become bfloat16 before, and those in bfloat16 can."""
    config = with_fp8_weights(CONFIG)
    tensors = random_tensors(CONFIG)
    rounded = {name: x.astype(ml_dtypes.bfloat16) for name, x in tensors.items()}
    found = []
    for given, dtype in ((tensors, "float32"), (tensors, "bfloat16"), (rounded, "float32")):
        layers = assemble_params(Tensors(given), config, dtype, progress=False)["layers"]
        found.append([layer[name] for layer in layers for name in PRODUCTS])
    assert same(found[0], found[1]) and not same(found[0], found[2])


def test_beside_experts_in_mxfp4():
    plain = tiny_gpt_oss_config(num_layers=1, sliding_layers=(), sliding_window=None, expert_size=128)
    config = with_fp8_weights(plain.replace(experts_mxfp4=True))
    source = Tensors(in_mxfp4(random_tensors(plain))[0])
    params = assemble_params(source, config, "bfloat16", progress=False)
    expected = abstract_params(config, "bfloat16")
    assert jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params) == expected
    assert [params["layers"][0][name].dtype for name in ("expert_down", "router")] == [
        jnp.int32,
        jnp.bfloat16,
    ]


# --- what cannot be ------------------------------------------------------------------------------------------------------


def test_sizes_that_are_no_multiples_of_64():
    config = CONFIG.replace(intermediate_size=96, head_dim=6)
    with pytest.raises(UnsupportedModelError) as refused:
        with_fp8_weights(config)
    with pytest.raises(
        UnsupportedModelError, match="FP8: expert_gate_up is 64 x 48, expert_down is 48 x 64, exp"
    ):
        with_fp8_weights(CONFIGS["experts"].replace(expert_size=48))
    assert str(refused.value) == (
        "the weights of tiny cannot be in FP8: qkv is 64 x 96, attn_out is 48 x 64, down is 96 x 64, expected multiples of "
        "64. Load them without quantization"
    )


def test_other_kinds_and_more_heads_are_refused():
    with pytest.raises(ValueError, match="quantization must be one of fp8, fp8-dynamic, or None, got 'int4'"):
        load_model("any", quantization="int4")
    params, config = in_fp8(random_params(CONFIG), CONFIG)
    with pytest.raises(
        ShardingError, match="tiny has FP8 weights, whose heads cannot be padded: load it without"
    ):
        pad_heads(params, config, 16, 8)


# --- what they are -------------------------------------------------------------------------------------------------------


def test_random_weights_have_the_deviation_of_others():
    config = with_fp8_weights(CONFIG)
    assert num_parameters(config) == num_parameters(CONFIG)
    params = init_params(config, jax.random.key(0), jnp.bfloat16)
    assert jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params) == abstract_params(
        config, jnp.bfloat16
    )
    for name, spec in param_specs(config)["layers"][1].items():
        if spec.fp8:
            deviation = np.asarray(dequantised(params["layers"][1][name], spec)).std()
            assert 0.9 < deviation * spec.fan_in**0.5 < 1.1


def test_single_values():
    spec = ParamSpec((192, 2, 64), (None,) * 3, 192)
    weights = quantised(np.random.default_rng(0).standard_normal(spec.shape).astype(np.float32), spec)
    rows, columns = np.divmod(np.arange(0, 192 * 128, 97), 128)
    floats = np.asarray(dequantised(weights, spec)).reshape(192, 128)
    np.testing.assert_array_equal(values_at(weights, rows, columns), floats[rows, columns])


def test_they_are_the_model_that_they_were():
    """A profile that was measured on floats is taken for them, and the other way round."""
    plain, (params, config) = random_params(CONFIG), in_fp8(random_params(CONFIG), CONFIG)
    then, now = weights_identity(plain, CONFIG), weights_identity(params, config)
    assert now == weights_identity(*in_floats(params, config))
    sameness, difference = compare_weights(then, now)
    assert sameness in ("same", "quantised") and 0.01 < difference < 0.06
