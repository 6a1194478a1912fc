"""What packed codes stand for, exactly: against packers that work on whole numbers, and against the formats' own tools."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models import dequantise
from models.quantisation import read_quantisation
from models.quantised import DequantisedTensors
from models.testing import tiny_config
from tests.models.checkpoints import GOLDEN, Tensors
from tests.models.quantised_files import awq, blocks, gptq, pack_quantized

SIZES = st.integers(1, 90)  # of more than one run of rows
SEEDS = st.integers(0, 2**32 - 1)
BITS = st.sampled_from([2, 4, 8])


def random_weight(seed, out, inputs):
    rng = np.random.default_rng(seed)
    return rng, rng.standard_normal((out, inputs)).astype(np.float32)


@settings(deadline=None, max_examples=40)
@given(
    SEEDS, SIZES, SIZES, st.tuples(SIZES, SIZES),
    st.sampled_from([(ml_dtypes.float8_e4m3fn, False), (np.int8, False), (np.int8, True)]),
)  # fmt: skip
def test_blocks(seed, out, inputs, block, kind):
    _, weight = random_weight(seed, out, inputs)
    block = (min(block[0], out), min(block[1], inputs))
    tensors, values = blocks("m", weight, block, dtype=kind[0], zeros=kind[1])
    zeros = tensors.get("m.weight_zero_point")
    found = dequantise.of_blocks(tensors["m.weight"], tensors["m.weight_scale"], block, zeros)
    np.testing.assert_array_equal(found, values)
    assert found.dtype == np.float32 and found.T.flags.c_contiguous


@settings(deadline=None, max_examples=40)
@given(SEEDS, SIZES, SIZES, st.integers(1, 40), BITS, st.booleans(), st.booleans())
def test_pack_quantized(seed, out, inputs, size, bits, symmetric, ordered):
    rng, weight = random_weight(seed, out, inputs)
    tensors, values = pack_quantized(rng, "m", weight, size, bits, symmetric, ordered)
    packed, scales = tensors["m.weight_packed"], tensors["m.weight_scale"]
    groups = tensors.get("m.weight_g_idx", np.arange(inputs) // size)
    found = dequantise.of_packed(packed, scales, groups, bits, tensors.get("m.weight_zero_point"))
    np.testing.assert_array_equal(found, values)


@settings(deadline=None, max_examples=20)
@given(SEEDS, st.integers(1, 12), st.integers(1, 12), st.integers(1, 12))
def test_awq(seed, out_words, groups, size):
    rng, weight = random_weight(seed, 8 * out_words, groups * size)
    tensors, values = awq(rng, "m", weight, size)
    np.testing.assert_array_equal(
        dequantise.of_awq(*(tensors[f"m.{x}"] for x in ("qweight", "qzeros", "scales"))), values
    )


@settings(deadline=None, max_examples=40)
@given(SEEDS, SIZES, SIZES, st.integers(1, 40), BITS, st.sampled_from([1, 2]), st.booleans())
def test_gptq(seed, out, inputs, size, bits, version, ordered):
    """Zero points of 0 too, of which version 1 borrows from their neighbours."""
    rng, weight = random_weight(seed, out, inputs)
    tensors, values = gptq(rng, "m", weight, size, bits, version, ordered)
    parts = (tensors[f"m.{x}"] for x in ("qweight", "qzeros", "scales", "g_idx"))
    np.testing.assert_array_equal(dequantise.of_gptq(*parts, bits, version == 1), values)


def test_large_ones_by_several_threads(monkeypatch):
    monkeypatch.setattr(dequantise, "_LARGE", 1000)
    monkeypatch.setattr(dequantise.os, "cpu_count", lambda: 3)
    for out, inputs in ((64, 500), (500, 64), (1, 2000)):
        rng, weight = random_weight(0, out, inputs)
        tensors, values = blocks("m", weight, (1, inputs))
        found = dequantise.of_blocks(tensors["m.weight"], tensors["m.weight_scale"], (1, inputs))
        np.testing.assert_array_equal(found, values)
        tensors, values = gptq(rng, "m", weight, 16, 4)
        parts = (tensors[f"m.{x}"] for x in ("qweight", "qzeros", "scales", "g_idx"))
        np.testing.assert_array_equal(dequantise.of_gptq(*parts, 4, True), values)


def test_every_8_bit_float():
    codes = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).reshape(2, 128)
    found = dequantise.of_blocks(codes, np.asarray([[2.0]]), (2, 128)).reshape(-1)
    for code, value in enumerate(found.tolist()):
        exponent, mantissa = code >> 3 & 15, code & 7
        size = (8 + mantissa) * 2.0 ** (exponent - 10) if exponent else mantissa * 2.0**-9
        if code & 127 == 127:
            assert np.isnan(value)
        else:
            assert value == 2 * (-size if code >> 7 else size)


GOLDEN_CASES = {
    "fp8": ("fp8", {"weight_block_size": [16, 32]}),
    "float_tensor": ("float-quantized", {"strategy": "tensor"}),
    "float_channel": ("float-quantized", {"strategy": "channel"}),
    "float_block": ("float-quantized", {"strategy": "block", "block_structure": [24, 40]}),
    "int_channel": ("int-quantized", {"strategy": "channel", "num_bits": 8}),
    "pack": ("pack-quantized", {"num_bits": 4, "group_size": 16}),
    "pack_8": ("pack-quantized", {"num_bits": 8, "group_size": 16}),
    "pack_zeros": ("pack-quantized", {"num_bits": 4, "group_size": 16, "symmetric": False}),
    "awq": ("awq", {"bits": 4}),
    "gptq_2": ("gptq", {"bits": 2, "group_size": 16}),
    "gptq_4": ("gptq", {"bits": 4, "group_size": 16}),
    "gptq_8": ("gptq", {"bits": 8, "group_size": 16}),
    "gptq_order": ("gptq", {"bits": 4, "group_size": 16, "desc_act": True}),
}


@pytest.mark.parametrize("case", GOLDEN_CASES)
def test_as_the_tools_of_the_formats_have_it(case):
    golden = np.load(GOLDEN / "quantised.npz")
    tensors = {
        name.replace(f"{case}/", "m."): golden[name] for name in golden.files if name.startswith(f"{case}/")
    }
    values = tensors.pop("m.values")
    if tensors.get("m.weight", np.zeros(0)).dtype == np.uint8:
        tensors["m.weight"] = tensors["m.weight"].view(ml_dtypes.float8_e4m3fn)
    form, fields = GOLDEN_CASES[case]
    if "-" in form:
        fields = {"format": form, "config_groups": {"group_0": {"targets": ["Linear"], "weights": fields}}}
        form = "compressed-tensors"
    quantisation, problems = read_quantisation({"quant_method": form, **fields})
    assert problems == []
    found = DequantisedTensors(Tensors(tensors), quantisation, tiny_config())
    assert found.shapes == {"m.weight": (32, 64)}
    np.testing.assert_array_equal(found.read("m.weight"), values)
