"""Quantised checkpoints of whole models load as the dense ones that they stand for, whatever the format."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.attention import dense_attend
from models.huggingface import HuggingFaceDirectory
from models.quantised import DequantisedTensors
from models.registry import load_model
from models.transformer import forward
from models.weights import WeightMismatchError, assemble_params
from tests.models.checkpoints import Tensors, golden_tensors
from tests.models.quantised_files import write_safetensors
from tests.models.quantised_models import CASES, quantised


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
        (
            "awq", lambda tensors: tensors | {"model.norm.weight": np.ones(32, np.int32)},
            "model.norm.weight: stored as int32, without a scale",
        ),
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


def test_what_sees_images_is_not_looked_at(tmp_path):
    directory, stored, _, _ = quantised(tmp_path, *CASES["awq"])
    stored |= {"model.vision_tower.layer.qweight": np.zeros((3, 3), np.int32)}
    write_safetensors(directory / "model.safetensors", stored)
    load_model(directory, progress=False)


def test_floats_of_8_bits_in_several_files(tmp_path):
    directory, stored, dense, config = quantised(tmp_path, *CASES["fp8 in blocks, scales of 8 bits"])
    names = list(stored)
    (directory / "model.safetensors").unlink()
    write_safetensors(directory / "one.safetensors", {name: stored[name] for name in names[::2]})
    write_safetensors(directory / "more.safetensors", {name: stored[name] for name in names[1::2]})
    wanted = assemble_params(Tensors(dense), config, "float32", progress=False)
    assert same(load_model(directory, progress=False).params, wanted)


def test_indices_of_inputs_that_say_nothing(tmp_path):
    """compressed-tensors writes -1 where groups are in the order of the inputs."""
    directory, stored, dense, config = quantised(tmp_path, *CASES["pack-quantized"])
    stored[f"{K}.weight_g_idx"] = np.full(32, -1, np.int32)
    write_safetensors(directory / "model.safetensors", stored)
    wanted = assemble_params(Tensors(dense), config, "float32", progress=False)
    assert same(load_model(directory, progress=False).params, wanted)


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
