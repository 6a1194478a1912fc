"""Unpacking pages of bytes for Hopper GPUs, in Pallas' Mosaic GPU.

The CTAs of a head take its pages in turn: each thread loads eight bytes of as many entries as its registers hold, and stores
them as eight floats.
"""

import functools
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels import byte_pages
from pallas_kernels import row_loads as ops

CTAS = 1056  # eight on each multiprocessor
VECTOR = 8  # bytes of a thread
AT_ONCE = 8  # entries of a thread under way
MAGIC = 0x4B000000  # with a byte in its place: the float 2**23 plus the byte
i32 = jnp.int32


def unpack_pages_mosaic_gpu(
    pool: jax.Array,
    table: jax.Array,
    lengths: jax.Array,
    first: jax.Array | np.ndarray,
    column: jax.Array | np.ndarray,
    *,
    most: int,
    dtype: jax.typing.DTypeLike,
    interpret: Any = None,
) -> jax.Array:
    """See `pallas_kernels.unpack.unpack_pages`."""
    heads = jnp.stack([jnp.asarray(x, i32) for x in (lengths, first, column)])
    return _call(pool, table.astype(i32), heads, most=most, dtype=jnp.dtype(dtype), interpret=interpret)


@functools.partial(jax.jit, static_argnames=("most", "dtype", "interpret"))
def _call(
    pool: jax.Array, table: jax.Array, heads: jax.Array, *, most: int, dtype: Any, interpret: Any
) -> jax.Array:
    # One jitted function, so that all layers of a step call one kernel.
    kv_heads = heads.shape[1]
    parts = min(most, -(-CTAS // kv_heads))
    size, head_dim = byte_pages.page_size(pool), pool.shape[-1]

    def unpack_pages(pool: Any, table: Any, heads: Any, out: Any) -> None:  # the name that profiles show
        head, part = lax.axis_index("head"), lax.axis_index("part")
        length, first, column = (heads[n, head] for n in range(3))
        pages = jnp.minimum(lax.div(length + (size - 1), i32(size)), most)

        def one_page(n: Any, _: Any) -> tuple[()]:
            page = part + n * parts
            number = table[jnp.clip(first + page, 0, table.shape[0] - 1)]
            number = jnp.clip(number, 0, pool.shape[0] - 1)
            place = head * most + page
            if interpret is not None:
                for which in range(2):
                    packed = byte_pages.split(pool.at[number, which, column][...])
                    out.at[place, which, 0][...] = byte_pages.dequantise(*packed, dtype)
            else:
                _unpack(pool, out, number, column, place)
            return ()

        mine = lax.div(jnp.maximum(pages - part, 0) + (parts - 1), i32(parts))
        lax.fori_loop(0, mine, one_page, ())

    kernel = plgpu.kernel(
        unpack_pages,
        out_type=jax.ShapeDtypeStruct((kv_heads * most, 2, 1, size, head_dim), dtype),
        grid=(kv_heads, parts),
        grid_names=("head", "part"),
        **({} if interpret is None else {"interpret": interpret}),
    )
    return kernel(pool, table, heads)


def _unpack(pool: Any, out: Any, number: Any, column: Any, place: Any) -> None:
    """Keys and values of a column of page `number` to page `place`."""
    _, _, columns, rows, head_dim = pool.shape
    size, dtype = byte_pages.page_size(pool), out.dtype
    lanes = head_dim // VECTOR
    types = (plgpu.RefType(), plgpu.RefType(), ops.SCALAR, ops.SCALAR, ops.SCALAR)

    @plgpu.inline_mgpu(arg_types=types)
    def run(_: Any, *arguments: Any) -> None:
        pool, out, number, column, place = (ops.as_operand(x) for x in arguments)
        i64, byte = (ir.IntegerType.get_signless(bits) for bits in (64, 8))
        element = mgpu_utils.dtype_to_ir_type(dtype)
        thread = arith.remui(arith.extui(i64, mgpu_utils.thread_idx()), ops.constant(ops.WARPGROUP))
        own, lane = arith.divui(thread, ops.constant(lanes)), arith.remui(thread, ops.constant(lanes))
        at_once = ops.WARPGROUP // lanes  # entries of all threads
        entries = [(which, first) for which in range(2) for first in range(0, size, at_once)]
        for start in range(0, len(entries), AT_ONCE):
            loaded = []
            for which, first in entries[start : start + AT_ONCE]:
                # Pages smaller than what the threads take at once: the last do the last entry again.
                entry = arith.minui(arith.addi(own, ops.constant(first)), ops.constant(size - 1))
                top = ops.muladd((number, 2 * columns), (ops.constant(which), columns), (column, 1))
                top = arith.muli(top, ops.constant(rows * head_dim))
                at = ops.muladd(
                    (top, 1), (ops.constant(rows - size), head_dim), (entry, head_dim), (lane, VECTOR)
                )
                at = mgpu_utils.getelementptr(ops.pointer_of(pool), [at], byte)
                bits = llvm.load(ir.VectorType.get((2,), ir.IntegerType.get_signless(32)), at, alignment=8)
                beside = ops.muladd((top, 1), (entry, 1))
                beside = mgpu_utils.getelementptr(ops.pointer_of(pool), [beside], byte)
                loaded.append((which, entry, bits, llvm.load(byte, beside)))
            for which, entry, bits, scale in loaded:
                floats = _floats(bits, scale, element)
                at = ops.muladd((place, 2 * size), (ops.constant(which), size), (entry, 1))
                at = ops.muladd((at, head_dim), (lane, VECTOR))
                at = mgpu_utils.getelementptr(ops.pointer_of(out), [at], element)
                llvm.store(floats, at, alignment=2 * VECTOR)

    run(pool, out, number, column, place)


def _floats(bits: ir.Value, scale: ir.Value, element: ir.Type) -> ir.Value:
    """Eight bytes, given as two words, times their scale: `element`[8]."""
    f32, i32 = ir.F32Type.get(), ir.IntegerType.get_signless(32)

    def c(value: int) -> ir.Value:
        return mgpu_utils.c(value, i32)

    step = arith.shli(arith.addi(arith.extui(i32, scale), c(byte_pages.OFFSET)), c(byte_pages.SHIFT))
    step = arith.mulf(arith.bitcast(f32, step), mgpu_utils.c(1 / byte_pages.STEPS, f32))
    bias = mgpu_utils.c(float(2**23 + byte_pages.ZERO), f32)
    values = []
    for n in range(VECTOR):
        word = vector.extract(bits, dynamic_position=[], static_position=[n // 4])
        whole = mgpu_utils.prmt(word, c(MAGIC), c(0x7540 | n % 4))
        values.append(arith.mulf(arith.subf(arith.bitcast(f32, whole), bias), step))
    wide = vector.from_elements(ir.VectorType.get((VECTOR,), f32), values)
    return arith.truncf(ir.VectorType.get((VECTOR,), element), wide)
