"""Loads of rows that lie in one of many arrays, the array chosen while the kernel runs: for the layers of a model.

Every layer's keys and values are an array of their own, and stacking them would be a copy of them all. A kernel takes
them all as operands and picks by the layer's number. `inline_mgpu`, so not for the interpreter: the kernels have a plain
path beside each.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

SCALAR = plgpu.Layout.WG_SPLAT(())
WARPGROUP = 128


def vector_size(elements: int, head_dim: int) -> int:
    """Most 16-bit elements, up to 8 (16 bytes), that each thread of a warpgroup can load at once of `elements`."""
    size = 8
    while size and (elements % (WARPGROUP * size) or head_dim % size):
        size //= 2
    if not size:
        raise NotImplementedError(f"{elements} elements do not divide among {WARPGROUP} threads")
    return size


def load_vectors(
    shape: tuple[int, ...],
    dtype: Any,
    arguments: Sequence[Any],
    address: Callable[..., tuple[ir.Value, ir.Value]],
) -> jax.Array:
    """An array of `shape` in a strided layout, each thread's vectors from where `address` says.

    `arguments`: Refs in global memory and scalars. `address(position, *arguments)`: position is one i64 per dimension of
    `shape`, arguments are the Refs' memrefs and the scalars as i64; it returns a pointer and an element offset.
    """
    size = vector_size(int(np.prod(shape)), shape[-1])
    layout = plgpu.Layout.WG_STRIDED(shape, vec_size=size)
    types = tuple(plgpu.RefType() if is_ref(x) else SCALAR for x in arguments)

    @plgpu.inline_mgpu(arg_types=types, return_type=plgpu.ShapeDtypeStruct(shape, dtype, layout=layout))
    def run(_: Any, *arguments: Any) -> Any:
        i64 = ir.IntegerType.get_signless(64)
        element = mgpu_utils.dtype_to_ir_type(dtype)
        given = [as_operand(x) for x in arguments]
        frag = mgpu.WGStridedFragLayout(shape, size)
        registers = np.empty(frag.registers_shape(shape), dtype=object)
        for n, position in enumerate(frag.thread_idxs(shape)):
            pointer, offset = address([arith.index_cast(i64, x) for x in position], *given)
            at = mgpu_utils.getelementptr(pointer, [offset], element)
            bits = llvm.load(ir.VectorType.get((size,), element), at, alignment=2 * size)
            registers[n] = bits
        return mgpu.FragmentedArray(_registers=registers, _layout=frag, _is_signed=None)

    return run(*arguments)


def load_index(ref: ir.Value, offset: ir.Value) -> ir.Value:
    """An i32 of a Ref as i64."""
    i32, i64 = (ir.IntegerType.get_signless(bits) for bits in (32, 64))
    at = mgpu_utils.getelementptr(mgpu_utils.memref_ptr(ref), [offset], i32)
    return arith.extsi(i64, llvm.load(i32, at))


def pick_pointer(refs: Sequence[ir.Value], index: ir.Value) -> ir.Value:
    """The address of refs[index], by halves: as many selections as there are refs, whatever the index."""
    pointers = [mgpu_utils.memref_ptr(ref) for ref in refs]
    bit = 0
    i1 = ir.IntegerType.get_signless(1)
    while len(pointers) > 1:
        odd = arith.trunci(i1, arith.shrui(index, constant(bit)))
        pairs = [pointers[n : n + 2] for n in range(0, len(pointers), 2)]
        pointers = [arith.select(odd, pair[1], pair[0]) if len(pair) == 2 else pair[0] for pair in pairs]
        bit += 1
    return pointers[0]


def as_operand(x: Any) -> Any:
    """A scalar as i64, a Ref's memref as it is."""
    if isinstance(x, mgpu.FragmentedArray):
        return arith.extsi(ir.IntegerType.get_signless(64), x.registers.item())
    return x


def pointer_of(ref: ir.Value) -> ir.Value:
    return mgpu_utils.memref_ptr(ref)


def constant(value: int) -> ir.Value:
    return mgpu_utils.c(value, ir.IntegerType.get_signless(64))


def muladd(*terms: tuple[ir.Value, int | ir.Value]) -> ir.Value:
    """The sum of products of i64."""
    products = [arith.muli(x, constant(factor) if isinstance(factor, int) else factor) for x, factor in terms]
    return functools.reduce(arith.addi, products)


def is_ref(x: Any) -> bool:
    """Of an argument of a kernel's: whether it is a Ref, or else a scalar."""
    return not isinstance(jax.typeof(x), jax.core.ShapedArray)
