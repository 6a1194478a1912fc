"""Quantised checkpoints of whole models load as the dense ones that they stand for, whatever the format."""

import json
import logging

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from models.attention import dense_attend
from models.huggingface import HuggingFaceDirectory
from models.quantised import DequantisedTensors
from models.registry import load_model
from models.testing import tiny_tokenizer
from models.transformer import forward
from models.weights import WeightMismatchError, assemble_params
from tests.models.checkpoints import GOLDEN, Tensors, golden_tensors
from tests.models.quantised_files import awq, blocks, gptq, pack_quantized, write_safetensors

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "modules_to_not_convert": ["lm_head"]}
AWQ = {"quant_method": "awq", "version": "GEMM", "bits": 4, "group_size": 8, "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 8, "desc_act": False, "sym": False}


def compressed(form, *weights):
    """Its quantization_config."""
    scheme = {"targets": ["Linear"], "input_activations": {"num_bits": 8}, "format": None}
    groups = {f"group_{i}": scheme | {"weights": given} for i, given in enumerate(weights)}
    common = {"kv_cache_scheme": None, "sparsity_config": {}, "transform_config": {}, "ignore": ["lm_head"]}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups} | common


def scheme(strategy, bits=8, kind="float", **more):
    return {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": False, **more}


def floats(block, **options):
    return lambda rng, module, weight: blocks(module, weight, block, **options)


def with_scales_of_activations(rng, module, weight):
    tensors, values = blocks(module, weight, (None, None))
    tensors[f"{module}.weight_scale"] = tensors[f"{module}.weight_scale"].reshape(())
    more = {f"{module}.input_scale": np.float32([3]), f"{module.rpartition('.')[0]}.k_scale": np.float32([2])}
    return tensors | more, values


def of_one_element(rng, module, weight):
    tensors, values = blocks(module, weight, (None, None))
    return tensors | {f"{module}.weight_scale": tensors[f"{module}.weight_scale"].reshape(1)}, values


def of_two_sizes(rng, module, weight):
    if "mlp" in module:
        return pack_quantized(rng, module, weight, 16, 8)
    return pack_quantized(rng, module, weight, 8, 4)


def of_two_bits(rng, module, weight):
    return gptq(rng, module, weight, 8, 8 if "mlp" in module else 4)


def with_zeros_for_biases(rng, module, weight):
    tensors, values = gptq(rng, module, weight, 8, 4)
    return {f"{module}.bias": np.zeros(len(weight), np.float16)} | tensors, values


def packed(function, *arguments, **options):
    return lambda rng, module, weight: function(rng, module, weight, *arguments, **options)


INT4 = {"bits": 4, "kind": "int", "group_size": 8}
CASES = {
    "fp8 in blocks": (
        "tiny_qwen3_moe", FP8 | {"weight_block_size": [24, 20]}, floats((24, 20), end="_scale_inv"),
    ),
    "fp8 in blocks, scales of 16 bits": (
        "tiny_qwen3", FP8 | {"weight_block_size": [20, 24]},
        floats((20, 24), end="_scale_inv", scale_dtype=ml_dtypes.bfloat16),
    ),
    "fp8 in blocks, scales of 8 bits": (
        "tiny_qwen3", FP8 | {"weight_block_size": [128, 128]},
        floats((128, 128), end="_scale_inv", scale_dtype=ml_dtypes.float8_e8m0fnu),
    ),
    "fp8 whole": ("tiny_tied", FP8 | {"weight_block_size": None}, with_scales_of_activations),
    "float-quantized, tensor": (
        "tiny_gemma3", compressed("float-quantized", scheme("tensor")), of_one_element,
    ),
    "float-quantized, channel": (
        "tiny_qwen2", compressed("float-quantized", scheme("channel")), floats((1, None), scale_dtype=np.float16),
    ),
    "float-quantized, block": (
        "tiny_qwen3", compressed("float-quantized", scheme("block", block_structure=[24, 20])), floats((24, 20)),
    ),
    "naive-quantized": ("tiny_tied", compressed("naive-quantized", scheme("tensor")), floats((None, None))),
    "int-quantized": (
        "tiny_tied", compressed("int-quantized", scheme("channel", kind="int")), floats((1, None), dtype=np.int8),
    ),
    "int-quantized, asymmetric": (
        "tiny_tied", compressed("int-quantized", scheme("channel", kind="int", symmetric=False)),
        floats((1, None), dtype=np.int8, zeros=True),
    ),
    "pack-quantized": (
        "tiny_qwen3_moe", compressed("pack-quantized", scheme("group", **INT4)), packed(pack_quantized, 8, 4),
    ),
    "pack-quantized, channel": (
        "tiny_tied", compressed("pack-quantized", scheme("channel", kind="int")), packed(pack_quantized, None, 8),
    ),
    "pack-quantized, asymmetric": (
        "tiny_tied", compressed("pack-quantized", scheme("group", symmetric=False, **INT4)),
        packed(pack_quantized, 8, 4, symmetric=False),
    ),
    "pack-quantized, in another order": (
        "tiny_tied", compressed("pack-quantized", scheme("group", actorder="group", **INT4)),
        packed(pack_quantized, 8, 4, ordered=False),
    ),
    "pack-quantized, of two sizes": (
        "tiny_tied",
        compressed("pack-quantized", scheme("group", **INT4), scheme("group", kind="int", group_size=16)),
        of_two_sizes,
    ),
    "awq": ("tiny_qwen2", AWQ, packed(awq, 8)),
    "awq of experts": ("tiny_mixtral", AWQ, packed(awq, 8)),
    "gptq": ("tiny_qwen2", GPTQ, packed(gptq, 8, 4)),
    "gptq without indices": ("tiny_tied", GPTQ, packed(gptq, 8, 4, index=False)),
    "gptq 2": ("tiny_tied", GPTQ | {"checkpoint_format": "gptq_v2"}, packed(gptq, 8, 4, version=2)),
    "gptq of 2 bits": ("tiny_tied", GPTQ | {"bits": 2}, packed(gptq, 8, 2)),
    "gptq of 8 bits in one group": (
        "tiny_qwen3_moe", GPTQ | {"bits": 8, "group_size": -1}, packed(gptq, None, 8),
    ),
    "gptq in another order": ("tiny_tied", GPTQ | {"desc_act": True}, packed(gptq, 8, 4, ordered=False)),
    "gptq of two widths": ("tiny_tied", GPTQ | {"dynamic": {"+:.*mlp.*": {"bits": 8}}}, of_two_bits),
    "gptq with biases of zeros": ("tiny_qwen2", GPTQ, with_zeros_for_biases),
}  # fmt: skip


def quantised(tmp_path, golden, quantization, function):
    """(directory of a golden checkpoint with its projections quantised, the tensors of the dense one, its configuration)"""
    source, config = golden_tensors(golden)
    rng, stored, dense = np.random.default_rng(0), {}, {}
    for name, x in source.tensors.items():
        stored[name] = dense[name] = x
        if name.endswith(("proj.weight", "w1.weight", "w2.weight", "w3.weight")):
            del stored[name]
            tensors, dense[name] = function(rng, name.removesuffix(".weight"), x.astype(np.float32))
            stored |= {
                key: np.asarray(tensor)
                for key, tensor in tensors.items()
                if key not in source.tensors or key == name
            }
    contents = json.loads((GOLDEN / golden / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(contents | {"quantization_config": quantization}))
    tiny_tokenizer().save(str(tmp_path))
    write_safetensors(tmp_path / "model.safetensors", stored)
    return tmp_path, stored, dense, config


def logits_of(params, config):
    positions = jnp.arange(24, dtype=jnp.int32)
    attend = dense_attend(positions, config=config)
    return np.asarray(forward(params, config, positions + 5, positions, attend, None)[0])


def same(a, b):
    return jax.tree.all(jax.tree.map(lambda x, y: bool((x == y).all()) and x.dtype == y.dtype, a, b))


PRODUCTS = (
    "fp8 in blocks",
    "int-quantized",
    "awq",
    "gptq",
)  # enough for logits: parameters are compared in all cases


@pytest.mark.parametrize("case", CASES)
def test_whole_models(case, tmp_path):
    directory, stored, dense, config = quantised(tmp_path, *CASES[case])
    as_published = golden_tensors(CASES[case][0])[0].tensors
    assert not any((dense[name] == as_published[name]).all() for name in dense if name not in stored)
    dtypes = ["float32", "bfloat16"] if case in PRODUCTS else ["float32"]
    for dtype in dtypes:
        found = load_model(directory, dtype=dtype, progress=False)
        wanted = assemble_params(Tensors(dense), config, dtype, progress=False)
        assert same(found.params, wanted)
    if case in PRODUCTS:
        np.testing.assert_array_equal(logits_of(found.params, found.config), logits_of(wanted, config))


def test_the_log_says_what_becomes_of_them(tmp_path, caplog):
    directory = quantised(tmp_path, *CASES["awq"])[0]
    with caplog.at_level(logging.WARNING, "tangram"):
        load_model(directory, dtype="bfloat16", progress=False)
    (message,) = [record.getMessage() for record in caplog.records]
    assert message == "The weights, quantised by awq, become bfloat16 as they are read: 5.2e-05 GB"


K = "model.layers.1.self_attn.k_proj"


def without(*names):
    return lambda tensors: {
        name: x for name, x in tensors.items() if name not in [f"{K}.{end}" for end in names]
    }


def replaced(name, change):
    return lambda tensors: tensors | {f"{K}.{name}": change(tensors[f"{K}.{name}"])}


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        ("awq", without("scales", "qzeros"), f"2.*{K}.qzeros: missing beside {K}.qweight\n  {K}.scales: missing"),
        ("awq", without("qweight"), f"{K}.weight: missing .expected shape .32, 32.*{K}.qzeros: unexpected"),
        ("awq", replaced("qzeros", lambda x: x[1:]), rf"{K}.qzeros: expected shape \(4, 4\), found \(3, 4\)"),
        ("awq", replaced("scales", lambda x: x[:, 1:]), rf"{K}.scales: expected shape \(4, 32\), found \(4, 31\)"),
        ("gptq", without("scales"), f"{K}.scales: missing beside {K}.qweight"),
        ("gptq", replaced("qzeros", lambda x: x[:, 1:]), rf"{K}.qzeros: expected shape \(4, 4\) \(4 bits\), found"),
        ("gptq", replaced("g_idx", lambda x: x + 1), f"{K}.g_idx: groups 1 to 4, there are 4"),
        ("gptq", replaced("g_idx", lambda x: x[8:]), rf"{K}.qweight: expected shape \(3, 32\), found"),
        ("gptq", replaced("qweight", lambda x: x[0]), f"{K}.qweight: expected a matrix"),
        ("gptq with biases of zeros", replaced("bias", np.ones_like), ""),
        ("fp8 in blocks", without("weight_scale_inv"), f"{K}.weight: stored as float8_e4m3fn, without a scale"),
        ("fp8 in blocks", without("weight"), f"{K}.weight: missing.*{K}.weight_scale_inv: unexpected"),
        (
            "fp8 in blocks", replaced("weight_scale_inv", lambda x: x[:, 1:]),
            rf"{K}.weight_scale_inv: \(2, 1\) scales of a matrix \(32, 32\), expected those of blocks of 24 x 20 or 1 x 32",
        ),
        ("int-quantized", replaced("weight", lambda x: x.astype(np.float16)), f"{K}.weight: stored as float16, exp"),
        ("pack-quantized", without("weight_shape"), f"{K}.weight_shape: missing beside {K}.weight_packed"),
        ("pack-quantized", replaced("weight_packed", lambda x: x[:, 1:]), r"\(32, 4\) \(4 bits\), found \(32, 3\)"),
        ("pack-quantized", replaced("weight_scale", lambda x: x[:, 1:]), "3 groups of 32 inputs, expected groups of 8"),
        ("pack-quantized", replaced("weight_shape", lambda x: x + np.asarray([0, 8])), f"{K}.weight_packed: expected shape"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_named(case, change, message, tmp_path):
    directory, stored, _, _ = quantised(tmp_path, *CASES[case])
    write_safetensors(directory / "model.safetensors", {k: np.asarray(x) for k, x in change(stored).items()})
    if not message:  # a bias of queries, keys and values is one of the model's own
        load_model(directory, progress=False)
        return
    with pytest.raises(WeightMismatchError, match=f"(?s){message}"):
        load_model(directory, progress=False)


def test_a_bias_that_the_model_lacks_must_be_zero(tmp_path):
    directory, stored, _, _ = quantised(tmp_path, *CASES["gptq with biases of zeros"])
    stored["model.layers.0.mlp.up_proj.bias"][3] = 0.5
    write_safetensors(directory / "model.safetensors", stored)
    with pytest.raises(
        WeightMismatchError, match=r"1 mismatches:\n  model.layers.0.mlp.up_proj.bias: unexpected"
    ):
        load_model(directory, progress=False)


def test_one_weight_is_read_at_a_time(tmp_path):
    """Nothing but what says a shape is read before a weight is asked for."""
    directory = HuggingFaceDirectory(quantised(tmp_path, *CASES["gptq"])[0])
    directory.open()
    read = []
    plain = directory.read
    directory.read = lambda name: read.append(name) or plain(name)
    tensors = DequantisedTensors(directory, directory.quantisation, directory.config)
    assert read == []
    assert tensors.shapes[f"{K}.weight"] == (32, 32) and f"{K}.qweight" not in tensors.shapes
    assert tensors.read(f"{K}.weight").dtype == np.float32
    assert sorted(read) == sorted(f"{K}.{end}" for end in ("qweight", "qzeros", "scales", "g_idx"))
