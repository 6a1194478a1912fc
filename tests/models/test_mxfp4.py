"""4-bit weights: the values of the format, and where they go."""

import gguf
import ml_dtypes
import numpy as np
import pytest

from models.mxfp4 import ROWS, Mxfp4, dequantize_into
from tests.models.checkpoints import GOLDEN


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32, np.float16], ids=["bf16", "f32", "f16"])
def test_values_agree_with_transformers(dtype):
    golden = np.load(GOLDEN / "mxfp4.npz")
    leaf = np.zeros(golden["values"].shape, dtype)  # [X, C, R]
    dequantize_into(leaf.swapaxes(1, 2), golden["blocks"], golden["scales"])
    np.testing.assert_array_equal(leaf.astype(np.float32), golden["values"])
    assert len(np.unique(np.abs(golden["values"]))) > 20


def test_every_value_with_every_scale():
    """Sign, two bits of exponent, one of mantissa (E2M1), times a power of two (E8M0)."""
    nibble = np.arange(16)
    exponent, mantissa = nibble >> 1 & 3, nibble & 1
    values = np.where(exponent == 0, mantissa / 2, (1 + mantissa / 2) * 2.0 ** (exponent - 1))
    values = np.where(nibble & 8, -values, values)
    scales = np.arange(253, dtype=np.uint8)  # beyond that float32 ends
    byte = np.arange(256, dtype=np.uint8).reshape(16, 16)
    out = np.empty((1, len(scales), 16 * 32), np.float32)
    blocks = np.broadcast_to(byte, (1, len(scales), 16, 16))
    dequantize_into(out, blocks, np.broadcast_to(scales[None, :, None], (1, len(scales), 16)))
    pairs = np.stack([values[byte & 15], values[byte >> 4]], axis=-1).reshape(-1)
    want = pairs * 2.0 ** (scales.astype(np.float64)[:, None] - 127)
    np.testing.assert_array_equal(out[0], want.astype(np.float32))


@pytest.mark.parametrize("experts", [1, 5])
def test_rows_of_several_axes_in_a_strided_view(experts):
    rng = np.random.default_rng(1)
    blocks = rng.integers(0, 256, (experts, ROWS + 3, 2, 3, 16), np.uint8)
    scales = rng.integers(110, 130, (experts, ROWS + 3, 2, 3), np.uint8)
    leaf = np.zeros((experts, 96, 2, ROWS + 3), ml_dtypes.bfloat16)
    dequantize_into(leaf.transpose(0, 3, 2, 1), blocks, scales)
    flat = np.zeros((experts * (ROWS + 3) * 2, 1, 96), np.float32)
    dequantize_into(flat, blocks.reshape(-1, 1, 3, 16), scales.reshape(-1, 1, 3))
    np.testing.assert_array_equal(
        leaf.astype(np.float32), flat.reshape(experts, ROWS + 3, 2, 96).transpose(0, 3, 2, 1)
    )


def test_blocks_of_gguf_files():
    """Whose bytes hold values 0 and 16, 1 and 17, ..., as the gguf package reads them."""
    values = np.random.default_rng(2).standard_normal((2, 5, 96)).astype(np.float32)
    data = gguf.quants.quantize(values, gguf.GGMLQuantizationType.MXFP4)
    out = np.empty_like(values)
    dequantize_into(out, *Mxfp4.from_gguf(data))
    np.testing.assert_array_equal(out, gguf.quants.dequantize(data, gguf.GGMLQuantizationType.MXFP4))
    assert np.abs(out - values).max() < 0.6  # and near what was stored
