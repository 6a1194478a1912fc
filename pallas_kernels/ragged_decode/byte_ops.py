"""Tiles of byte pages as a matrix instruction's left operand: bytes to 16-bit floats on their way into registers.

An instruction takes 64 rows of its left operand, of which a thread holds rows g and g + 8 of its warp's 16 and columns
2 j, 2 j + 1, 2 j + 8, 2 j + 9 of every 16 (lane 4 g + j). What a row or column stands for is ours to choose, as long as the
other side of the product chooses the same. So the head dimension is permuted, differently for keys and values, until the
bytes of a thread lie side by side: keys are loaded 16 at a time, values as many as a thread has rows of the output. Two
bytes
become two floats by a permutation that puts 0x64 above each, which is 1024 plus the byte, and a subtraction.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, vector

from pallas_kernels import byte_pages
from pallas_kernels.ragged_decode.device_ops import Dimension

f16, f32, i32 = jnp.float16, jnp.float32, jnp.int32
ABOVE = 0x64646464  # 0x64 above a byte: 1024 plus it, in float16
SUBTRACT = float(1024 + byte_pages.ZERO)
SLAB = 64  # rows of an instruction, and columns of the operand that are unpacked at a time


@dataclasses.dataclass(frozen=True)
class Paged:
    """How a tile of pages lies in its rows: of each page those of its scales, then those of its entries."""

    entries: int  # of the tile
    page: int  # entries of a page
    scale_rows: int
    width: int  # bytes of a row

    @property
    def stride(self) -> int:
        """Rows from page to page: loads go to multiples of 128 bytes."""
        return -(-(self.scale_rows + self.page) * self.width // 128) * 128 // self.width

    @property
    def rows(self) -> int:
        """Of the tile, rounded up so that a swizzle begins anew after them."""
        return -(-self.entries // self.page * self.stride // 8) * 8

    def row(self, entry: int) -> int:
        """Of an entry."""
        return entry // self.page * self.stride + self.scale_rows + entry % self.page

    def _by_page(self, tile: jax.Ref) -> jax.Array:
        """u8[pages, rows of a page, D] of a tile u8[D / width, rows, width], for the interpreter."""
        pages = self.entries // self.page
        held = tile[...][:, : pages * self.stride].swapaxes(0, 1).reshape(pages, self.stride, -1)
        return held[:, : self.scale_rows + self.page]

    def floats(self, tile: jax.Ref) -> jax.Array:
        """What the bytes of a tile's entries count, f32[entries, D], for the interpreter."""
        held = self._by_page(tile)[:, self.scale_rows :]
        return held.reshape(self.entries, -1).astype(f32) - byte_pages.ZERO

    def scales(self, tile: jax.Ref) -> jax.Array:
        """The scale bytes of a tile i32[entries], for the interpreter."""
        held = self._by_page(tile)[:, : self.scale_rows]
        return held.reshape(len(held), -1)[:, : self.page].reshape(-1).astype(i32)


def lines(tile: tuple[int, ...]) -> tuple[Any, ...]:
    """How a tile lies in shared memory."""
    return (plgpu.SwizzleTransform(tile[-1]),)  # type: ignore[abstract]


def key_dimension(head_dim: int) -> Dimension:
    """Which dimension of the head a row of the transposed queries stands for, beside `unpack_keys`."""
    per_half = min(head_dim, 128) // 64
    # of a row: the slab's half of the dimensions and which part of a half, step, upper eight, lane, odd
    return _mapped(
        [
            (64 * per_half, None, 128),
            (64, per_half, 16),
            (16, 4, 4),
            (8, 2, 2),
            (2, 4, 16 * per_half),
            (1, 2, 1),
        ]
    )


def value_dimension(head_dim: int) -> Dimension:
    """Which dimension of the head a row of `unpack_values` stands for."""
    # of a row: slab, warp, upper eight, g
    return _mapped([(64, None, 2), (16, 4, head_dim // 4), (8, 2, 1), (1, 8, head_dim // 32)])


def _mapped(digits: list[tuple[int, int | None, int]]) -> Dimension:
    """Sums factor * (row // unit % count) over (unit, count, factor)."""

    def dimension(row: ir.Value) -> ir.Value:
        result = mgpu_utils.c(0, row.type)
        for unit, count, factor in digits:
            digit = arith.divui(row, mgpu_utils.c(unit, row.type))
            if count is not None:
                digit = arith.remui(digit, mgpu_utils.c(count, row.type))
            result = arith.addi(result, arith.muli(digit, mgpu_utils.c(factor, row.type)))
        return result

    return dimension


def unpack_keys(tile: jax.Ref, slab: int, paged: Paged) -> jax.Array:
    """Columns 64 `slab` and on, of the permuted dimensions, of a tile u8[D / width, rows, width]: f16[entries, 64].

    A row of the tile takes all `width` bytes of a swizzled line.
    """
    _, rows, width = tile.shape

    def run(base: Any, lane: "_Lane") -> np.ndarray:
        per_half = width // 64
        half, piece = divmod(slab, per_half)
        registers = np.empty((paged.entries // 64, 8, 2), object)
        for part in range(paged.entries // 64):
            for eight in range(2):
                row = lane.plus(lane.row(paged, 64 * part + 8 * eight), half * rows)
                column = lane.plus(lane.times(lane.j, 16 * per_half), 16 * piece)
                words = lane.load(base, row, column, width, 4)
                for step, word in enumerate(words):
                    registers[part, 2 * step, eight] = lane.floats(word, 0x4140)
                    registers[part, 2 * step + 1, eight] = lane.floats(word, 0x4342)
        return registers

    return _unpacked(tile, (paged.entries, SLAB), run)


def unpack_values(tile: jax.Ref, slab: int, paged: Paged) -> jax.Array:
    """Entries 64 `slab` to 64 `slab` + 63 of a tile u8[D / width, rows, width]: f16[D, 64], dimensions permuted."""
    halves, rows, width = tile.shape
    head_dim = halves * width

    def run(base: Any, lane: "_Lane") -> np.ndarray:
        registers = np.empty((head_dim // 64, 8, 2), object)
        own = head_dim // 32  # bytes of an entry that are this thread's
        if halves == 1:
            half, column = lane.times(lane.warp, 0), lane.times(lane.warp, 8 * own)
        else:  # two warps in each
            half, column = lane.over(lane.warp, 2), lane.times(lane.beyond(lane.warp, 2), 8 * own)
        column = arith.addi(column, lane.times(lane.g, own))
        for number in range(8):  # each: two entries side by side
            words = []
            for odd in range(2):
                # All within 16 entries, which are of one page.
                entry = 64 * slab + 8 * number + odd
                row = lane.plus(lane.times(lane.j, 2), paged.row(entry))
                row = arith.addi(row, lane.times(half, rows))
                words.append(lane.load(base, row, column, width, own / 4))
            for word, (first, second) in enumerate(zip(*words, strict=True)):
                low = lane.permute(first, second, 0x5140)
                registers[2 * word, number, 0] = lane.floats(low, 0x4140)
                registers[2 * word, number, 1] = lane.floats(low, 0x4342)
                if own > 2:
                    high = lane.permute(first, second, 0x7362)
                    registers[2 * word + 1, number, 0] = lane.floats(high, 0x4140)
                    registers[2 * word + 1, number, 1] = lane.floats(high, 0x4342)
        return registers

    return _unpacked(tile, (head_dim, SLAB), run)


def read_steps(tile: jax.Ref, paged: Paged, *, interpreted: bool) -> jax.Array:
    """What the elements of each entry of a tile are multiples of, f32[entries]."""
    held = paged.scales(tile) if interpreted else _read_scales(tile, paged)
    return lax.bitcast_convert_type((held + byte_pages.OFFSET) << byte_pages.SHIFT, f32) * (
        1 / byte_pages.STEPS
    )


def _read_scales(tile: jax.Ref, paged: Paged) -> jax.Array:
    layout, width = plgpu.Layout.WGMMA.reduce(1), tile.shape[-1]
    result = plgpu.ShapeDtypeStruct((paged.entries,), i32, layout=layout)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(lines(tile.shape)),), return_type=result)
    def run(_: Any, tile: Any) -> Any:
        word, byte = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(8)
        base, lane = mgpu_utils.memref_ptr(tile), _Lane()

        def at(position: Any) -> Any:
            entry = arith.index_cast(word, position[0])
            place = lane.beyond(entry, paged.page)
            row = lane.times(lane.over(entry, paged.page), paged.stride)
            if paged.scale_rows > 1:
                row = arith.addi(row, lane.over(place, width))
                place = lane.beyond(place, width)
            return arith.extui(word, llvm.load(byte, lane.address(base, row, place, width)))

        return _by_element((paged.entries,), layout.to_mgpu(), word, at)

    return run(tile)


def load_row(src: jax.Ref, dimension: Dimension) -> jax.Array:
    """A row [D] in global memory, as f32[D] by rows of a product of which row r stands for dimension(r)."""
    layout = plgpu.Layout.WGMMA.reduce(1)
    result = plgpu.ShapeDtypeStruct(src.shape, src.dtype, layout=layout)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=result)
    def run(_: Any, src: Any) -> Any:
        memory = ir.MemRefType(src.type)
        at = lambda position: memref.load(src, [dimension(position[0])])  # noqa: E731
        return _by_element(tuple(memory.shape), layout.to_mgpu(), memory.element_type, at)

    return run(src).astype(f32)


def _by_element(shape: tuple[int, ...], layout: Any, element: ir.Type, at: Callable) -> Any:
    """An array of `at(position)`."""
    zero = mgpu_utils.c(0 if isinstance(element, ir.IntegerType) else 0.0, element)
    signed = False if isinstance(element, ir.IntegerType) else None
    start = mgpu.FragmentedArray.splat(zero, shape, layout=layout, is_signed=signed)
    return start.foreach(lambda _, position: at(position), create_array=True, is_signed=signed)


def _unpacked(tile: jax.Ref, shape: tuple[int, int], run: Callable) -> jax.Array:
    """f16 `shape` in the layout of left operands, from registers [rows / 64, columns / 8, 2] that `run` gives."""
    result = plgpu.ShapeDtypeStruct(shape, f16, layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(lines(tile.shape)),), return_type=result)
    def unpack(_: Any, tile: Any) -> Any:
        registers = np.empty(mgpu.WGMMA_LAYOUT.registers_shape(shape), object)
        registers[:, :, 0, 0, :, 0, 0, 0, 0] = run(mgpu_utils.memref_ptr(tile), _Lane())
        return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)

    return unpack(tile)


class _Lane:
    """One thread of a warpgroup, while a kernel is built."""

    def __init__(self) -> None:
        self._i32 = ir.IntegerType.get_signless(32)
        thread = arith.remui(mgpu_utils.thread_idx(), self._constant(128))
        lane = arith.remui(thread, self._constant(32))
        self.warp = arith.divui(thread, self._constant(32))
        self.g, self.j = arith.divui(lane, self._constant(4)), arith.remui(lane, self._constant(4))

    def _constant(self, value: int) -> ir.Value:
        return mgpu_utils.c(value, self._i32)

    def plus(self, x: ir.Value, value: int) -> ir.Value:
        return arith.addi(x, self._constant(value))

    def times(self, x: ir.Value, value: int) -> ir.Value:
        return arith.muli(x, self._constant(value))

    def row(self, paged: Paged, first: int) -> ir.Value:
        """The row in a tile of entry g of this warp's 16, of the 64 from `first` on."""
        of_warp = self.plus(self.times(self.warp, 16), first)  # the 16 are of one page
        page, place = self.over(of_warp, paged.page), self.beyond(of_warp, paged.page)
        row = arith.addi(self.times(page, paged.stride), self.plus(place, paged.scale_rows))
        return arith.addi(row, self.g)

    def over(self, x: ir.Value, value: int) -> ir.Value:
        return arith.divui(x, self._constant(value))

    def beyond(self, x: ir.Value, value: int) -> ir.Value:
        return arith.remui(x, self._constant(value))

    def address(self, base: Any, row: Any, column: Any, width: int) -> Any:
        """Of a byte at a row and column of swizzled lines."""
        turn = self.beyond(self.over(row, 128 // width), width // 16)
        place = arith.xori(self.over(column, 16), turn)
        offset = arith.addi(self.times(row, width), self.times(place, 16))
        offset = arith.addi(offset, self.beyond(column, 16))
        return mgpu_utils.getelementptr(base, [offset], ir.IntegerType.get_signless(8))

    def load(self, base: Any, row: Any, column: Any, width: int, words: float) -> list[ir.Value]:
        """`words` words (or half a one) at a row and column of swizzled lines."""
        at = self.address(base, row, column, width)
        if words < 1:
            half = llvm.load(ir.IntegerType.get_signless(16), at, alignment=2)
            return [arith.extui(self._i32, half)]
        count = int(words)
        if count == 1:
            return [llvm.load(self._i32, at, alignment=4)]
        loaded = llvm.load(ir.VectorType.get((count,), self._i32), at, alignment=4 * count)
        return [vector.extract(loaded, dynamic_position=[], static_position=[n]) for n in range(count)]

    def permute(self, low: Any, high: Any, selection: int) -> ir.Value:
        """Four of the eight bytes of two words: 0 to 3 are those of `low`."""
        return mgpu_utils.prmt(low, high, self._constant(selection))

    def floats(self, word: Any, selection: int) -> ir.Value:
        """Two bytes of a word, less the bias, as f16[2]."""
        element = ir.F16Type.get()
        pair = ir.VectorType.get((2,), element)
        above = mgpu_utils.bitcast(self.permute(word, self._constant(ABOVE), selection), pair)
        return arith.subf(above, vector.broadcast(pair, mgpu_utils.c(SUBTRACT, element)))
