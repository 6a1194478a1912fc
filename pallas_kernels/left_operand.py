"""Packed weights as a matrix instruction's left operand, made in registers with `inline_mgpu`.

The interpreter, whose products take references, has a plain path.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

TILE = 64  # columns, and depth


def left_operand(
    tile: jax.Ref,
    spare: jax.Ref | None,
    unpack: Callable[[jax.Array], jax.Array],
    registers_of: Callable[[Any, Any], Iterator[tuple[int, int, Any]]],
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    depth: int = TILE,
    by_warp: bool = False,
) -> Any:
    """A packed tile, or several along the depth, as a matrix instruction's left operand [columns, depth].

    Packed in 32-bit words in shared memory, made in registers; under the interpreter in `spare` [columns, depth] shared
    memory.

    Args:
      unpack: the words -> [depth, columns].
      registers_of: of a pointer to the words and a thread's number (0 to 127), what that thread holds: (which 8 of the
        depth, half of its warp's columns, two bfloat16s side by side along the depth), or (which 16, half, four e4m3).
      dtype: bfloat16 or float8_e4m3fn.
      by_warp: for `add_product`, of bfloat16.
    """
    if spare is not None:
        spare[...] = unpack(tile[...]).T.astype(spare.dtype)
        plgpu.commit_smem()
        return spare
    dtype = jnp.dtype(dtype)
    layout: Any = plgpu.Layout.WGMMA if dtype.itemsize > 1 else plgpu.Layout.WGMMA_8BIT
    if by_warp:
        layout = plgpu.Layout.MMA_LHS(dtype)
    result = plgpu.ShapeDtypeStruct((TILE, depth), dtype, layout=layout)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=result)
    def run(ctx: Any, tile: Any) -> Any:
        del ctx
        pointer = mgpu_utils.memref_ptr(tile)
        thread = arith.remui(mgpu_utils.thread_idx(), constant(128))
        in_mgpu = layout.to_mgpu()
        registers = np.empty(in_mgpu.registers_shape((TILE, depth)), object)
        for part, half, values in registers_of(pointer, thread):
            place = (part // 2, 0, part % 2) if by_warp else (part, 0, 0)
            registers[0, *place, half, 0, 0, 0, 0] = values
        return mgpu.FragmentedArray(_registers=registers, _layout=in_mgpu, _is_signed=None)

    return run(tile)


def right_operand(rows: Any, *, interpreted: bool) -> jax.Array:
    """bf16[rows, depth] in shared memory as what `add_product` multiplies with."""
    if interpreted:
        return rows[...].T
    return plgpu.load(rows.transpose((1, 0)), layout=plgpu.Layout.MMA_RHS(jnp.bfloat16))


def no_sums(shape: tuple[int, int], *, interpreted: bool) -> jax.Array:
    """Zeros f32[columns, rows] for `add_product`."""
    zeros = jnp.zeros(shape, jnp.float32)
    return zeros if interpreted else plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)


def add_product(sums: jax.Array, left: Any, right: jax.Array, *, interpreted: bool) -> jax.Array:
    """f32[columns, rows], of operands in registers, by matrix instructions of each warp, which are done at once."""
    if interpreted:
        return sums + jnp.dot(left[...], right, preferred_element_type=jnp.float32)
    return plgpu.mma(sums, left, right)


def constant(value: int) -> Any:
    """32 bits."""
    return mgpu_utils.c(value - (1 << 32) if value >> 31 else value, ir.IntegerType.get_signless(32))


def four_words(pointer: Any, thread: Any, first: int = 0) -> list[Any]:
    """Those of a thread, which lie side by side after those of the threads before it."""
    i32 = ir.IntegerType.get_signless(32)
    own = mgpu_utils.getelementptr(pointer, [arith.muli(thread, constant(4))], i32)
    own = mgpu_utils.getelementptr(own, [constant(first)], i32) if first else own
    words = llvm.load(ir.VectorType.get((4,), i32), own, alignment=16)
    return [vector.extract(words, dynamic_position=[], static_position=[number]) for number in range(4)]


def word(pointer: Any, at: Any) -> Any:
    """One of the tile's."""
    i32 = ir.IntegerType.get_signless(32)
    return llvm.load(i32, mgpu_utils.getelementptr(pointer, [at], i32))


def bfloat16s(bits: Any) -> Any:
    """Two, of 32 bits."""
    return mgpu_utils.bitcast(bits, ir.VectorType.get((2,), ir.BF16Type.get()))


def e4m3s(bits: Any) -> Any:
    """Four, of 32 bits."""
    return mgpu_utils.bitcast(bits, ir.VectorType.get((4,), ir.Float8E4M3FNType.get()))


def store_transposed(value: jax.Array, dst: Any, *, interpreted: bool) -> None:
    """Stores [columns, rows] registers to [rows, columns] in shared memory."""
    if interpreted:
        dst[...] = value.T
        return
    dst.transpose((1, 0))[...] = in_transposed(value, interpreted=False)


def load_transposed(src: Any, *, interpreted: bool) -> jax.Array:
    """[rows, columns] in shared memory as [columns, rows] registers, as `in_transposed` has them."""
    if interpreted:
        return src[...].T
    return plgpu.load(src.transpose((1, 0)), layout=plgpu.Layout.WGMMA_TRANSPOSED)


def in_transposed(value: jax.Array, *, interpreted: bool) -> jax.Array:
    """[columns, rows] in the registers that `store_transposed` stores from."""
    return value if interpreted else plgpu.layout_cast(value, plgpu.Layout.WGMMA_TRANSPOSED)
