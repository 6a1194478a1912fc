"""What a quantization_config says, and what of it is refused, by name."""

import pytest

from models.config import UnsupportedModelError, config_from_huggingface
from models.quantisation import Quantisation, read_quantisation
from tests.models.quantised_models import AWQ, FP8, GPTQ, compressed, scheme
from tests.models.test_weights import HF_CONFIG

BLOCKS = FP8 | {"weight_block_size": [128, 128]}
INT4 = {"kind": "int", "bits": 4, "group_size": 128}
PACKED = compressed("pack-quantized", scheme("group", **INT4))
MIXED = PACKED | {
    "format": "mixed-precision",
    "config_groups": {
        "0": {"weights": scheme("tensor"), "format": "float-quantized"},
        "1": {"weights": scheme("group", **INT4), "format": "pack-quantized"},
        "2": {"weights": None, "targets": ["Qwen3Attention"]},
    },
}


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (BLOCKS, {"method": "fp8", "blocks": ((128, 128), (1, None), (None, None))}),
        (AWQ, {"method": "awq", "bits": (4,)}),
        (GPTQ, {"method": "gptq", "bits": (4,), "group_size": 8, "zeros_less_one": True}),
        (
            GPTQ | {"checkpoint_format": "gptq_v2", "group_size": -1, "bits": 8, "dynamic": {"-:.*": {}}},
            {"method": "gptq", "bits": (8, 2, 4)},
        ),
        (PACKED, {"method": "compressed-tensors", "blocks": ((1, 128),), "bits": (4,)}),
        (
            MIXED,
            {"method": "compressed-tensors", "blocks": ((None, None), (1, 128)), "bits": (8, 4)},
        ),
    ],
)  # fmt: skip
def test_what_is_said(given, found):
    assert read_quantisation(given) == (Quantisation(**found), [])
    assert config_from_huggingface(HF_CONFIG | {"quantization_config": given}, "x").num_layers == 2


PUBLISHED = {  # as in checkpoints on the hub
    "Qwen3-8B-FP8": {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
    },
    "FP8-dynamic": compressed("float-quantized", scheme("channel")) | {
        "quantization_status": "frozen", "global_compression_ratio": 1.46,
        "sparsity_config": {
            "format": "dense", "global_sparsity": 0.14, "ignore": [], "registry_requires_subclass": False,
            "sparsity_structure": "unstructured", "targets": [],
        },
    },
    "kv cache": compressed("pack-quantized", scheme("group", **INT4)) | {
        "kv_cache_scheme": scheme("tensor"), "transform_config": {"config_groups": {}}, "version": "0.12.0",
    },
    "Qwen2.5-7B-Instruct-AWQ": {
        "bits": 4, "group_size": 128, "modules_to_not_convert": None, "quant_method": "awq", "version": "gemm",
        "zero_point": True,
    },
    "Qwen2.5-7B-Instruct-GPTQ-Int8": {
        "bits": 8, "dataset": None, "desc_act": False, "exllama_config": {"version": 1}, "group_size": 128,
        "pad_token_id": None, "quant_method": "gptq", "sym": True, "tokenizer": None, "true_sequential": True,
        "use_cuda_fp16": False, "use_exllama": True,
    },
    "GPTQModel": {
        "bits": 4, "checkpoint_format": "gptq", "desc_act": False, "dynamic": None, "group_size": 128, "lm_head": False,
        "meta": {"quantizer": ["gptqmodel:4.0"]}, "pack_dtype": "int32", "quant_method": "gptq", "sym": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_as_published(name):
    found, problems = read_quantisation(PUBLISHED[name])
    assert found is not None and problems == []


@pytest.mark.parametrize("given", [None, {}, ""])
def test_nothing(given):
    assert read_quantisation(given) == (None, [])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quantised weights by bitsandbytes not supported"),
        ({"quant_method": "modelopt"}, "quantised weights by modelopt"),
        ({"quant_method": ["awq"]}, r"quantised weights by \['awq'\]"),
        ({"bits": 4}, r"quantised weights without quant_method \(quantization_config={'bits': 4}\)"),
        (4, "quantised weights .quantization_config=4"),
        (FP8 | {"weight_block_size": [128]}, r"fp8 with weight_block_size=\[128\]"),
        (FP8 | {"weight_block_size": [0, 128]}, "fp8 with weight_block_size="),
        (AWQ | {"version": "gemv"}, "awq with version='gemv'"),
        (AWQ | {"bits": 8, "zero_point": False}, "awq with bits=8; awq with zero_point=False"),
        (GPTQ | {"bits": 3}, "gptq with bits=3 not supported"),
        (GPTQ | {"bits": 4.0}, "gptq with bits=4.0"),
        (GPTQ | {"group_size": 0}, "gptq with group_size=0"),
        (GPTQ | {"checkpoint_format": "marlin"}, "gptq with checkpoint_format='marlin'"),
        (GPTQ | {"is_marlin_format": True}, "gptq with is_marlin_format=True"),
        (GPTQ | {"pack_dtype": "int16"}, "gptq with pack_dtype='int16'"),
        (compressed("nvfp4-pack-quantized", scheme("tensor_group", bits=4)), "format='nvfp4-pack-quantized'"),
        (compressed("mxfp4-pack-quantized", scheme("group", bits=4, group_size=32)), "format='mxfp4-pack"),
        (compressed("marlin-24", scheme("group", **INT4)), "compressed-tensors with format='marlin-24'"),
        (compressed("pack-quantized", scheme("group", **INT4 | {"bits": 3})), "3 bits of type 'int' in pack-quantized"),
        (compressed("pack-quantized", scheme("group", **INT4 | {"kind": "float"})), "4 bits of type 'float'"),
        (compressed("pack-quantized", scheme("group", **INT4 | {"group_size": None})), "group_size=None"),
        (compressed("float-quantized", scheme("token")), "compressed-tensors with strategy='token'"),
        (compressed("float-quantized", scheme("block")), "block_structure=None"),
        (compressed("int-quantized", 8), "compressed-tensors with weights=8"),
        (PACKED | {"config_groups": [1]}, r"config_groups=\[1\]"),
        (PACKED | {"transform_config": {"config_groups": {"R1": {"type": "hadamard"}}}}, "a transform_config"),
        (PACKED | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "a sparsity_config"),
    ],
)  # fmt: skip
def test_what_is_refused(given, message):
    assert read_quantisation(given)[0] is None
    with pytest.raises(
        UnsupportedModelError, match=f"{message}.*Supported: .*quantised by fp8, comp.*or not at all"
    ):
        config_from_huggingface(HF_CONFIG | {"quantization_config": given}, "x")


def test_models_of_text_and_images_say_it_of_the_whole():
    whole = {
        "text_config": HF_CONFIG | {"quantization_config": None},
        "quantization_config": {"quant_method": "hqq"},
    }
    with pytest.raises(UnsupportedModelError, match="by hqq"):
        config_from_huggingface(whole | {"architectures": HF_CONFIG["architectures"]}, "x")
