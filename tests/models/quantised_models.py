"""Golden checkpoints with their projections quantised, in every way that is read."""

import json

import ml_dtypes
import numpy as np

from models.testing import tiny_tokenizer
from tests.models.checkpoints import GOLDEN, golden_tensors
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
