"""What the FP8 kernel needs that Pallas does not offer, written with `inline_mgpu`; for the interpreter a plain path."""

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.fp8_products import packing

TILE = packing.TILE


def unpack(tile: jax.Ref, spare: jax.Ref | None) -> Any:
    """A packed tile i32[32, 32] in shared memory as a matrix instruction's left operand [columns, depth].

    bf16 in registers; under the interpreter, whose products take references, in `spare` [columns, depth] shared memory.
    """
    if spare is not None:
        spare[...] = packing.unpack(tile[...][None, None]).T.astype(spare.dtype)
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

        pointer = mgpu_utils.memref_ptr(tile)
        thread = arith.remui(mgpu_utils.thread_idx(), constant(128))
        own = mgpu_utils.getelementptr(pointer, [arith.muli(thread, constant(4))], i32)
        factor = mgpu_utils.bitcast(constant(packing.FACTOR * 0x10001), pair)
        registers = np.empty(mgpu.WGMMA_LAYOUT.registers_shape((TILE, TILE)), object)
        four = constant(4)
        for half in range(2):
            run_of_four = mgpu_utils.getelementptr(own, [constant(512 * half)], i32)
            words = llvm.load(ir.VectorType.get((4,), i32), run_of_four, alignment=16)
            for number in range(4):
                word = vector.extract(words, dynamic_position=[], static_position=[number])
                ready = arith.andi(word, constant(packing.READY))
                left = arith.andi(arith.shli(word, four), constant(packing.LEFT))
                right = arith.andi(arith.shrui(word, four), constant(packing.RIGHT))
                for i, bits in enumerate((ready, arith.ori(left, right))):
                    value = arith.mulf(mgpu_utils.bitcast(bits, pair), factor)
                    registers[0, 2 * number + i, 0, 0, half, 0, 0, 0, 0] = value
        return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)

    return run(tile)
