"""Pages of bytes: keys and values as 8-bit integers, each entry with a scale of its own that lies beside it in the page.

A pool of uint8 has pages [2, Hp, ceil(P / D) + P, D]: of every column P scale bytes, then P rows of entries, so that a load
of the first entries brings their scales too. An element x of an entry whose largest magnitude is A is the byte
128 + round(127 x / A), A first rounded up to a float of eight steps per octave, which is the entry's scale byte: unsigned,
5 bits of exponent and 3 of mantissa, from 2**-17 to 2**15. Scales lie in the page, so whatever moves, shares or shards pages
need not know of them.

Rounding is within A / 254 of each element. Bytes are biased, not signed, because a kernel then makes 16-bit floats of two of
them with a permutation of bytes and a subtraction.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

DTYPE = jnp.uint8
ZERO = 128  # the byte of 0
STEPS = 127  # bytes on either side of it that are used
SHIFT = 20  # bits of a float's mantissa that a scale byte leaves out
OFFSET = (127 - 17) << 3  # scale byte 0 stands for 2**-17
ROUND = 1.5 * 2**23  # added to a float32, leaves its nearest integer (ties to even) in the low bits


def is_bytes(dtype: Any) -> bool:
    """Whether a pool of `dtype` has pages of bytes."""
    return jnp.dtype(dtype) == DTYPE


def page_rows(dtype: Any, page_size: int, head_dim: int) -> int:
    """Rows of a page's column: in a pool of bytes those that hold the scales, and its entries."""
    return page_size + (-(-page_size // head_dim) if is_bytes(dtype) else 0)


def scale_rows(pool: Any) -> int:
    """Rows of a column before those of its entries, from the shape and dtype of a pool [num_pages, 2, Hp, rows, D]."""
    rows, head_dim = pool.shape[-2:]
    return -(-rows // (head_dim + 1)) if is_bytes(pool.dtype) else 0


def page_size(pool: Any) -> int:
    """P, from the same (or anything that has both)."""
    return pool.shape[-2] - scale_rows(pool)


def scale_at(pool: Any, slot: Any) -> tuple[Any, Any]:
    """(row, place in it) of the scale bytes that belong to entries `slot` of a column."""
    return slot // pool.shape[-1], slot % pool.shape[-1]


def quantise(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Finite entries [..., D] to (bytes u8[..., D], scale bytes u8[...])."""
    x = x.astype(jnp.float32)
    bits = lax.bitcast_convert_type(jnp.abs(x).max(-1), jnp.int32)
    scale = jnp.clip(((bits + ((1 << SHIFT) - 1)) >> SHIFT) - OFFSET, 0, 255)
    largest = _largest(scale)[..., None]
    rounded = jnp.clip(x * (STEPS / largest), -STEPS, STEPS) + (ROUND + ZERO)
    return lax.bitcast_convert_type(rounded, jnp.int32).astype(DTYPE), scale.astype(DTYPE)


def dequantise(values: jax.Array, scales: jax.Array, dtype: Any) -> jax.Array:
    """Bytes [..., D] and scale bytes [...] to entries [..., D] in `dtype`."""
    step = _largest(scales.astype(jnp.int32)) * (1 / STEPS)
    return ((values.astype(jnp.float32) - ZERO) * step[..., None]).astype(dtype)


def _largest(scale: jax.Array) -> jax.Array:
    """The magnitude that scale bytes i32[...] stand for, f32[...]."""
    return lax.bitcast_convert_type((scale + OFFSET) << SHIFT, jnp.float32)


def split(pages: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Columns of pages u8[..., rows, D] to (bytes [..., P, D], scale bytes [..., P])."""
    first = scale_rows(pages)
    scales = pages[..., :first, :]
    return pages[..., first:, :], scales.reshape(*scales.shape[:-2], -1)[..., : page_size(pages)]


def join(values: jax.Array, scales: jax.Array) -> jax.Array:
    """Bytes [..., P, D] and scale bytes [..., P] to columns of pages [..., rows, D]."""
    size, head_dim = values.shape[-2:]
    rows = page_rows(DTYPE, size, head_dim) - size
    spare = [(0, 0)] * (scales.ndim - 1) + [(0, rows * head_dim - size)]
    beside = jnp.pad(scales, spare).reshape(*scales.shape[:-1], rows, head_dim)
    return jnp.concatenate([beside, values], axis=-2)


def entries(pages: jax.Array, dtype: Any) -> jax.Array:
    """Columns of pages [..., rows, D] of any pool to their entries [..., P, D] in `dtype`."""
    return dequantise(*split(pages), dtype) if is_bytes(pages.dtype) else pages.astype(dtype)


def entries_at(pool: jax.Array, columns: tuple[Any, ...], slot: Any, dtype: Any) -> jax.Array:
    """Single entries [..., D] of any pool in `dtype`: `columns` and `slot` index its first three axes and the fourth."""
    found = pool.at[*columns, scale_rows(pool) + slot].get(mode="clip")
    if not is_bytes(pool.dtype):
        return found.astype(dtype)
    return dequantise(found, pool.at[*columns, *scale_at(pool, slot)].get(mode="clip"), dtype)
