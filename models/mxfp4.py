"""MXFP4, the 4-bit floats in which GPT-OSS's experts are published (OCP Microscaling Formats, version 1.0)."""

from __future__ import annotations

import functools
import os
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

BLOCK = 32  # values that share a scale
ROWS = 64  # rows of a matrix at a time: more do not fit into a processor's cache, whose columns they become

_MAGNITUDES = (
    0.0,
    0.5,
    1.0,
    1.5,
    2.0,
    3.0,
    4.0,
    6.0,
)  # of a value's three low bits (E2M1); the fourth is its sign


class Mxfp4(NamedTuple):
    """Matrices [X, R, C] in MXFP4.

    `blocks` u8[X, R, C / 32, 16] holds two values in each byte, the first in its low bits; `scales` u8[X, R, C / 32]
    exponents of two with a bias of 127.
    """

    blocks: np.ndarray
    scales: np.ndarray

    @classmethod
    def from_gguf(cls, data: np.ndarray) -> Mxfp4:
        """Of u8[X, R, C / 32 * 17], blocks after their scales, whose bytes hold values 0 and 16, 1 and 17, and so on."""
        parts = data.reshape(*data.shape[:-1], -1, 1 + BLOCK // 2)
        even, odd = parts[..., 1::2], parts[..., 2::2]
        halves = [even & 15 | odd << 4, even >> 4 | odd & 0xF0]
        return cls(np.concatenate(halves, axis=-1), np.ascontiguousarray(parts[..., 0]))


def dequantize_into(out: np.ndarray, blocks: np.ndarray, scales: np.ndarray) -> None:
    """Writes the values of matrices to `out` [X, R, ..., C], floats of 16 or 32 bits in a view with any strides.

    `blocks` and `scales` as in `Mxfp4`, their rows of as many axes as out's. Every value is exact, but in float16 those
    below 2^-24.
    """
    table = _pairs(out.dtype.name)
    # Bits instead of floats: NumPy copies a bfloat16 one by one.
    bits = out.view(f"u{out.dtype.itemsize}")

    def one(expert: int) -> None:
        for first in range(0, out.shape[1], ROWS):
            rows = slice(first, first + ROWS)
            both = scales[expert, rows, ..., None].astype(np.uint16) << 8 | blocks[expert, rows]
            values = table.take(both.reshape(-1)).view(bits.dtype)
            bits[expert, rows] = values.reshape(bits[expert, rows].shape)

    # NumPy lets go of the interpreter's lock for nearly all of it.
    with ThreadPoolExecutor(min(len(out), os.cpu_count() or 1, 16)) as pool:
        list(pool.map(one, range(len(out))))


@functools.cache
def _pairs(dtype: str) -> np.ndarray:
    """Entry 256 * scale + byte: the bits of the two values of a byte side by side, as one number."""
    values = np.asarray([*_MAGNITUDES, *(-x for x in _MAGNITUDES)])
    with np.errstate(over="ignore", under="ignore"):  # no model has such scales
        scaled = np.ldexp(values, np.arange(256)[:, None] - 127).astype(np.dtype(dtype))  # [256, 16]
    byte = np.arange(256)
    pairs = np.stack([scaled[:, byte & 15], scaled[:, byte >> 4]], axis=-1)
    return pairs.view(f"u{2 * scaled.dtype.itemsize}").reshape(-1)
