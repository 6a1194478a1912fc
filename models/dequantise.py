"""From codes of 8 bits or fewer to the weights that they stand for, (code - zero) * scale, for several layouts.

All is computed in float32: exact, but for scales of more than 16 bits, where a product is rounded once. What comes out is
[out, in], a view of memory that is [in, out], as the parameters are.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np

ROWS = 64  # at a time: more do not fit into a processor's cache
_LARGE = 1 << 20  # weights that are worth several threads
_AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # the columns whose codes an AWQ word has, from its low bits on

Codes = Callable[[int, int], np.ndarray]  # (first, last) -> the codes of these rows


def of_blocks(
    codes: np.ndarray, scales: np.ndarray, block: tuple[int, int], zeros: np.ndarray | None = None
) -> np.ndarray:
    """Of codes [out, in], 8-bit floats or integers.

    Args:
      scales: [ceil(out / block[0]), ceil(in / block[1])], and so are `zeros`.
    """
    rows, columns = (np.arange(size) // step for size, step in zip(codes.shape, block, strict=True))
    out = np.empty(codes.shape[::-1], np.float32).T
    some = _floats(codes) if codes.dtype.kind not in "iu" else lambda first, last: codes[first:last]
    return _scaled(out, some, _wide(scales), None if zeros is None else _wide(zeros), rows, columns)


def of_packed(
    words: np.ndarray, scales: np.ndarray, groups: np.ndarray, bits: int, zeros: np.ndarray | None = None
) -> np.ndarray:
    """Of compressed-tensors' words i32[out, ceil(in * bits / 32)], the codes of successive inputs from their low bits on.

    Args:
      scales: [out, groups].
      groups: int[in], the group of each input.
      zeros: i32[ceil(out * bits / 32), groups], packed along the outputs; None: the middle of the codes' range.
    """
    size = (len(words), len(groups))
    middle = np.full((1, 1), 1 << (bits - 1))
    zero = middle if zeros is None else in_rows(zeros, bits)(0, len(scales))
    out = np.empty(size[::-1], np.float32).T
    some = in_columns(words, bits, len(groups))
    zero = np.broadcast_to(_wide(zero), scales.shape)
    return _scaled(out, some, _wide(scales), zero, np.arange(len(words)), groups)


def of_awq(words: np.ndarray, zeros: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Of AWQ's 4-bit words i32[in, out / 8], zeros i32[groups, out / 8] and scales [groups, out]."""

    def ordered(packed: np.ndarray) -> Codes:
        some = in_columns(packed, 4, 8 * packed.shape[1])

        def codes(first: int, last: int) -> np.ndarray:
            found = some(first, last)
            out = np.empty_like(found)
            out.reshape(len(out), -1, 8)[..., _AWQ_ORDER] = found.reshape(len(out), -1, 8)
            return out

        return codes

    inputs, groups = len(words), len(scales)
    zero = _wide(ordered(zeros)(0, groups))
    out = np.empty((inputs, scales.shape[1]), np.float32)
    return _scaled(out, ordered(words), _wide(scales), zero, np.arange(inputs) // (inputs // groups)).T


def of_gptq(
    words: np.ndarray,
    zeros: np.ndarray,
    scales: np.ndarray,
    groups: np.ndarray,
    bits: int,
    zeros_less_one: bool,
) -> np.ndarray:
    """Of GPTQ's words i32[ceil(in * bits / 32), out].

    Args:
      zeros: i32[groups, ceil(out * bits / 32)].
      scales: [groups, out].
      groups: int[in], the group of each input.
      zeros_less_one: one was subtracted from the zero points, from whole words: what a zero borrows comes back so.
    """
    if zeros_less_one:
        zeros = zeros.view(np.uint32) + np.uint32(sum(1 << i for i in range(0, 32, bits)))
    zero = in_columns(zeros, bits, scales.shape[1])(0, len(zeros))
    out = np.empty((len(groups), scales.shape[1]), np.float32)
    return _scaled(out, in_rows(words, bits), _wide(scales), _wide(zero), groups).T


def in_columns(words: np.ndarray, bits: int, columns: int) -> Codes:
    """Codes u8[R, columns] that are packed along the rows of 32-bit words, the first in the low bits."""
    packed = np.ascontiguousarray(words).view(np.uint8).reshape(len(words), -1)
    table = _codes_of_byte(bits)

    def codes(first: int, last: int) -> np.ndarray:
        return table.take(packed[first:last]).view(np.uint8)[:, :columns]

    return codes


def in_rows(words: np.ndarray, bits: int) -> Codes:
    """Codes [R, C] that are packed along the columns of 32-bit words. The first row asked for begins a word."""
    packed, each = words.view(np.uint32), 32 // bits
    shifts = np.arange(0, 32, bits, dtype=np.uint32)[:, None]
    mask = np.uint32((1 << bits) - 1)

    def codes(first: int, last: int) -> np.ndarray:
        found = packed[first // each : -(-last // each), None] >> shifts & mask
        return found.reshape(-1, words.shape[1])[: last - first]

    return codes


def _scaled(
    out: np.ndarray,
    codes: Codes,
    scales: np.ndarray,
    zeros: np.ndarray | None,
    rows: np.ndarray,
    columns: np.ndarray | None = None,
) -> np.ndarray:
    """Fills `out` f32[R, C], a view with any strides, and returns it.

    `rows` and `columns` say which of `scales` and `zeros` each row and column has; no `columns`: these have their own.
    """

    def spread(table: np.ndarray, some: slice) -> np.ndarray:
        found = table[rows[some]]
        return found if columns is None or table.shape[1] == 1 else found[:, columns]

    def fill(start: int, end: int) -> None:
        for first in range(start, end, ROWS):
            last = min(first + ROWS, end)
            values = codes(first, last).astype(np.float32)
            if zeros is not None:
                values -= spread(zeros, slice(first, last))
            values *= spread(scales, slice(first, last))
            out[first:last] = values

    threads = min(os.cpu_count() or 1, 16) if out.size >= _LARGE else 1
    step = -(-len(out) // (threads * ROWS)) * ROWS
    starts = range(0, len(out), step)
    if len(starts) == 1:
        fill(0, len(out))
        return out
    # NumPy lets go of the interpreter's lock for nearly all of it.
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(fill, starts, (min(start + step, len(out)) for start in starts)))
    return out


def _wide(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32)


def _floats(codes: np.ndarray) -> Codes:
    table, numbers = _values(codes.dtype), codes.view(np.uint8)
    return lambda first, last: table.take(numbers[first:last])


@cache
def _values(dtype: np.dtype) -> np.ndarray:
    """The values of all 8-bit floats of a dtype."""
    return np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)


@cache
def _codes_of_byte(bits: int) -> np.ndarray:
    """Entry b: the codes in the bits of byte b side by side, as one number."""
    byte = np.arange(256, dtype=np.uint8)
    codes = np.stack([byte >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)], axis=-1)
    return codes.view(f"u{codes.shape[1]}").reshape(-1)
