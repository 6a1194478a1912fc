"""What the MXFP4 kernel needs that Pallas does not offer, written with `inline_mgpu`; for the interpreter a plain path."""

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.expert_products import mxfp4

TILE = mxfp4.TILE


def unpack(tile: jax.Ref, spare: jax.Ref | None) -> Any:
    """A packed tile i32[17, 32] in shared memory as a matrix instruction's left operand [columns, depth].

    bf16 in registers; under the interpreter, whose products take references, in `spare` [columns, depth] shared memory.
    """
    if spare is not None:
        spare[...] = mxfp4.unpack(tile[...][None, None]).T.astype(spare.dtype)
        plgpu.commit_smem()
        return spare
    result = plgpu.ShapeDtypeStruct((TILE, TILE), jnp.bfloat16, layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=result)
    def run(ctx: Any, tile: Any) -> Any:
        del ctx
        i32 = ir.IntegerType.get_signless(32)
        pair = ir.VectorType.get((2,), ir.BF16Type.get())

        def constant(value: int) -> Any:
            return mgpu_utils.c(value - (1 << 32) if value >> 31 else value, i32)

        def rotate(x: Any, right: int) -> Any:
            if not right:
                return x
            return arith.ori(arith.shrui(x, constant(right)), arith.shli(x, constant(32 - right)))

        pointer = mgpu_utils.memref_ptr(tile)
        thread = arith.remui(mgpu_utils.thread_idx(), constant(128))
        own = mgpu_utils.getelementptr(pointer, [arith.muli(thread, constant(4))], i32)
        words = llvm.load(ir.VectorType.get((4,), i32), own, alignment=16)
        # Four threads have the same rows: lane / 4 of a warp, eight of them in each.
        row = arith.addi(arith.divui(thread, constant(4)), constant((mxfp4.ROWS - 1) * mxfp4.WORDS))
        scales = llvm.load(i32, mgpu_utils.getelementptr(pointer, [row], i32))
        registers = np.empty(mgpu.WGMMA_LAYOUT.registers_shape((TILE, TILE)), object)
        for number in range(4):
            block, half = divmod(number, 2)
            word = vector.extract(words, dynamic_position=[], static_position=[number])
            scale = arith.andi(arith.shrui(scales, constant(8 * number)), constant(255))
            scale = mgpu_utils.bitcast(
                arith.muli(scale, constant((1 << 7) + (1 << 23))), pair
            )  # in both halves
            last = arith.muli(arith.andi(word, constant(mxfp4.LAST)), constant(mxfp4.FACTOR))
            for i, moved in enumerate([*(rotate(word, right) for right in mxfp4.ROTATIONS), last]):
                bits = arith.andi(moved, constant(mxfp4.READY))
                value = arith.mulf(mgpu_utils.bitcast(bits, pair), scale)
                registers[0, 4 * block + i, 0, 0, half, 0, 0, 0, 0] = value
        return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)

    return run(tile)


def store_transposed(value: jax.Array, dst: Any, *, interpreted: bool) -> None:
    """Stores [columns, rows] registers to [rows, columns] in shared memory."""
    if interpreted:
        dst[...] = value.T
        return
    value = plgpu.layout_cast(value, plgpu.Layout.WGMMA_TRANSPOSED)
    dst.transpose((1, 0))[...] = value
