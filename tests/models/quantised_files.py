"""Weights packed in the plainest way, by arithmetic on whole numbers of any size, and what they stand for."""

import json

import ml_dtypes
import numpy as np

DTYPES = {
    "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "float8_e8m0fnu": "F8_E8M0",
    "int8": "I8", "int32": "I32", "int64": "I64", "uint8": "U8", "bool": "BOOL", "complex64": "C64", "float64": "F64",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
}  # fmt: skip


def write_safetensors(path, tensors):
    """Of dtypes that safetensors does not know in NumPy as well."""
    header, data = {}, b""
    for name, x in tensors.items():
        new = data + np.ascontiguousarray(x).tobytes()
        header[name] = {
            "dtype": DTYPES[x.dtype.name],
            "shape": x.shape,
            "data_offsets": [len(data), len(new)],
        }
        data = new
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def words(codes, bits, axis=1, less=0):
    """Codes [R, C] packed along an axis into int32, the first in the low bits; `less` is subtracted from every word."""
    if axis == 0:
        return np.ascontiguousarray(words(codes.T, bits, less=less).T)
    rows = []
    for row in codes.tolist():
        number = sum(code << bits * i for i, code in enumerate(row))
        count = -(-len(row) * bits // 32)
        each = [(number >> 32 * i) % 2**32 for i in range(count)]
        rows.append([(word - less) % 2**32 for word in each])
    return np.asarray(rows, np.uint32).view(np.int32)


def blocks(
    module, weight, block, dtype=ml_dtypes.float8_e4m3fn, scale_dtype=np.float32, end="_scale", zeros=False
):
    """Codes of 8 bits beside scales of blocks; `zeros` are of integers."""
    out, inputs = weight.shape
    rows, columns = (min(size or whole, whole) for size, whole in zip(block, weight.shape, strict=True))
    shape = (-(-out // rows), -(-inputs // columns))
    scales, zero = np.empty(shape, scale_dtype), np.zeros(shape, np.int8)
    codes, values = np.empty(weight.shape, dtype), np.empty(weight.shape, np.float32)
    for i in range(shape[0]):
        for j in range(shape[1]):
            part = np.s_[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
            w = weight[part]
            scales[i, j] = np.abs(w).max() / 100
            zero[i, j] = 7 * zeros - i + j if zeros else 0
            code = w / np.float32(scales[i, j]) + zero[i, j]
            codes[part] = code.round() if np.dtype(dtype).kind == "i" else code
            values[part] = (codes[part].astype(np.float32) - zero[i, j]) * np.float32(scales[i, j])
    tensors = {f"{module}.weight": codes, f"{module}.weight{end}": scales}
    if zeros:
        tensors[f"{module}.weight_zero_point"] = zero
    return tensors, values


def grouped(rng, weight, groups, bits, symmetric=False):
    """(codes [out, in], scales f16[out, groups], zeros [out, groups], values [out, in]) for the group of each input."""
    count, most = groups.max() + 1, 2**bits - 1
    scales = (rng.uniform(0.5, 1, (len(weight), count)) * np.abs(weight).max() * 2 / most).astype(np.float16)
    middle = 2 ** (bits - 1)
    zeros = np.full(scales.shape, middle) if symmetric else rng.integers(0, most + 1, scales.shape)
    wide = scales.astype(np.float32)
    codes = np.clip(np.round(weight / wide[:, groups]) + zeros[:, groups], 0, most).astype(int)
    return codes, scales, zeros, (codes - zeros[:, groups]).astype(np.float32) * wide[:, groups]


def pack_quantized(rng, module, weight, size, bits, symmetric=True, ordered=True):
    inputs = weight.shape[1]
    groups = np.arange(inputs) // (size or inputs)
    groups = groups if ordered else rng.permutation(groups)
    codes, scales, zeros, values = grouped(rng, weight, groups, bits, symmetric)
    tensors = {
        f"{module}.weight_packed": words(codes, bits),
        f"{module}.weight_scale": scales,
        f"{module}.weight_shape": np.asarray(weight.shape),
    }
    if not symmetric:
        tensors[f"{module}.weight_zero_point"] = words(zeros, bits, axis=0)
    if not ordered:
        tensors[f"{module}.weight_g_idx"] = groups.astype(np.int32)
    return tensors, values


def awq(rng, module, weight, size):
    codes, scales, zeros, values = grouped(rng, weight, np.arange(weight.shape[1]) // size, 4)
    order = [8 * word + i for word in range(len(weight) // 8) for i in (0, 2, 4, 6, 1, 3, 5, 7)]
    tensors = {
        f"{module}.qweight": words(codes.T[:, order], 4),
        f"{module}.qzeros": words(zeros.T[:, order], 4),
        f"{module}.scales": np.ascontiguousarray(scales.T),
    }
    return tensors, values


def gptq(rng, module, weight, size, bits, version=1, ordered=True, index=True):
    inputs = weight.shape[1]
    groups = np.arange(inputs) // (size or inputs)
    groups = groups if ordered else rng.permutation(groups)
    codes, scales, zeros, values = grouped(rng, weight, groups, bits)
    less = sum(1 << i for i in range(0, 32, bits)) if version == 1 else 0
    tensors = {
        f"{module}.qweight": words(codes.T, bits, axis=0),
        f"{module}.qzeros": words(zeros.T, bits, less=less),
        f"{module}.scales": np.ascontiguousarray(scales.T),
    }
    if index:
        tensors[f"{module}.g_idx"] = groups.astype(np.int32)
    return tensors, values
