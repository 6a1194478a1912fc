"""Biases of attention, which `attention_bias` gives Llama, Qwen 3 and Gemma: where they are read, and what they add to."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.gpu_program import as_on_hopper
from models.attention import dense_attend
from models.config import config_from_huggingface
from models.fp8_weights import with_fp8_weights
from models.products import layer_tuning, may_add
from models.testing import random_params, tiny_config, tiny_gemma_config
from models.transformer import forward
from models.weights import WeightMismatchError, assemble_params
from tests.models.checkpoints import GOLDEN, Tensors, golden_tensors, random_tensors

WITH_BIASES = {
    "tiny_tied",
    "tiny_untied_llama3",
    "tiny_qwen3",
    "tiny_qwen3_moe",
    "tiny_gemma2",
    "tiny_gemma3",
}


def config_of(name, **changes):
    said = json.loads((GOLDEN / name / "config.json").read_text())
    return config_from_huggingface(said | changes, name)


@pytest.mark.parametrize("name", sorted(WITH_BIASES))
def test_a_file_says_whether_there_are_any(name):
    for given, found in ((True, True), (False, False), (None, False)):
        config = config_of(name, attention_bias=given)
        assert (config.qkv_bias, config.attn_out_bias, config.expert_bias) == (found, found, False)


@pytest.mark.parametrize(
    ("name", "changes", "qkv"),
    [
        ("tiny_tied", {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}, False),
        ("tiny_mixtral", {}, False),
        ("tiny_qwen2", {}, True),
    ],
)
def test_families_whose_files_need_not_say_it(name, changes, qkv):
    """transformers does not look: neither with nor without it is anything else read."""
    for given in (True, False):
        config = config_of(name, **changes, attention_bias=given)
        assert (config.qkv_bias, config.attn_out_bias) == (qkv, False)


@pytest.mark.parametrize("name", ["tiny_tied", "tiny_qwen3_moe", "tiny_gemma3"])
def test_they_are_read_into_their_heads(name):
    config = config_of(name, attention_bias=True)
    tensors = random_tensors(config)
    params = assemble_params(Tensors(tensors), config, jnp.float32, progress=False)
    K, G, D = config.num_kv_heads, config.group_size, config.head_dim
    for i, layer in enumerate(params["layers"]):
        q, k, v, out = (tensors[f"model.layers.{i}.self_attn.{x}_proj.bias"] for x in "qkvo")
        heads = np.concatenate([q.reshape(K, G, D), k.reshape(K, 1, D), v.reshape(K, 1, D)], axis=1)
        np.testing.assert_array_equal(layer["qkv_bias"], heads)
        np.testing.assert_array_equal(layer["attn_out_bias"], out)
    plain = {name: x for name, x in tensors.items() if not name.endswith("_proj.bias")}
    with pytest.raises(WeightMismatchError, match=r"o_proj.bias: missing \(expected shape"):
        assemble_params(Tensors(plain), config, jnp.float32, progress=False)
    without = config_of(name, attention_bias=False)
    with pytest.raises(WeightMismatchError, match=r"q_proj.bias: unexpected"):
        assemble_params(Tensors(tensors), without, jnp.float32, progress=False)


def test_weights_in_fp8_leave_them_as_they_are():
    config = tiny_config(num_layers=1, qkv_bias=True, attn_out_bias=True)
    source = Tensors(random_tensors(config))
    wanted, found = (
        assemble_params(source, x, jnp.float32, progress=False) for x in (config, with_fp8_weights(config))
    )
    for name in ("qkv_bias", "attn_out_bias"):
        np.testing.assert_array_equal(found["layers"][0][name], wanted["layers"][0][name])


def logits_of(params, config, tokens):
    positions = jnp.arange(len(tokens), dtype=jnp.int32)
    tokens = jnp.asarray(tokens, jnp.int32)
    return np.asarray(
        forward(params, config, tokens, positions, dense_attend(positions, config=config), None)[0]
    )


@pytest.mark.parametrize("gemma", [False, True])
def test_what_they_add_to(gemma):
    """Of one token attention gives its value, whatever queries and keys are: the rest is a product in NumPy."""
    changes = {"num_layers": 1, "qkv_bias": True, "attn_out_bias": True}
    if gemma:  # the norm of what attention gives is of product and bias together
        changes |= {"sliding_layers": (), "sliding_window": None, "rope_scaling": None}
    config = (tiny_gemma_config if gemma else tiny_config)(**changes)
    params = random_params(config)
    layer = params["layers"][0]
    layer |= {"down": jnp.zeros_like(layer["down"])}
    got = logits_of(params | {"layers": (layer,)}, config, [77])[0]

    def norm(x):
        return x / np.sqrt((x * x).mean() + config.norm_eps)  # the weights are ones

    x = np.asarray(params["embed"], np.float64)[77] * config.embed_scale
    G = config.group_size
    value = np.einsum("e,ekd->kd", norm(x), np.asarray(layer["qkv"], np.float64)[:, :, G + 1])
    value += np.asarray(layer["qkv_bias"])[:, G + 1]
    out = np.einsum("nd,nde->e", np.repeat(value, G, axis=0), np.asarray(layer["attn_out"], np.float64))
    out += np.asarray(layer["attn_out_bias"])
    x = x + (norm(out) if gemma else out)
    np.testing.assert_allclose(got, np.asarray(params["embed"], np.float64) @ norm(x), rtol=1e-4, atol=1e-4)


def test_zeros_are_no_biases_and_others_are():
    """A bias of the keys alone changes nothing without RoPE and norms; with them, as here, each of the four does."""
    source, plain = golden_tensors("tiny_qwen3")
    config = plain.replace(qkv_bias=True, attn_out_bias=True)
    names = [name for name in random_tensors(config) if name not in source.tensors]
    shapes = {name: random_tensors(config)[name].shape for name in names}
    tokens = np.arange(8, 32)

    def logits(**values):
        biases = {
            name: np.full(shape, values.get(name.split(".")[-2][0], 0), np.float32)
            * np.sign(np.arange(shape[0]) % 3 - 1)
            for name, shape in shapes.items()
        }
        params = assemble_params(Tensors(source.tensors | biases), config, jnp.float32, progress=False)
        return logits_of(params, config, tokens)

    without = logits_of(assemble_params(source, plain, jnp.float32, progress=False), plain, tokens)
    np.testing.assert_array_equal(logits(), without)
    for kind in "qkvo":
        assert np.abs(logits(**{kind: 0.5}) - without).max() > 0.05


def test_kernels_that_add_no_bias_are_not_asked():
    """Those that go from attention's result to the next norm, by themselves or with all else in a layer."""
    shape = {
        "num_layers": 2,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_heads": 32,
        "num_kv_heads": 8,
    }
    config = tiny_config(**shape, head_dim=128)
    x = jax.ShapeDtypeStruct((64, 4096), jnp.bfloat16)
    biased = config.replace(attn_out_bias=True)
    assert may_add(x, config) and not may_add(x, biased)
    with as_on_hopper():
        assert layer_tuning(8, config) and layer_tuning(8, biased) is None
