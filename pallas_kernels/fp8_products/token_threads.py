"""A CTA that brings a token into FP8, within `inline_mgpu`: eight bfloat16s of a thread at a time, two in a word."""

import functools
from collections.abc import Sequence
from typing import Any

from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels import row_loads as ops
from pallas_kernels.fp8_products.tokens import LARGEST, LEAST, RUN
from pallas_kernels.left_operand import constant as bits

WARPS = 4
THREADS = 32 * WARPS
OWN = RUN // 2  # numbers of a thread that lie side by side; those of the next thread follow
STEP = THREADS * OWN  # numbers of a token at a time
AT_ONCE = 8  # steps whose loads are under way together

# In PTX, where a word's numbers in float32 last as long as an operation: LLVM would keep them for the next one.
FLOATS = "shl.b32 {}, {word}, 16; and.b32 {}, {word}, 0xFFFF0000;"
SQUARES = f"""{{
.reg .f32 p, q;
{FLOATS.format("p", "q", word="$1")}
fma.rn.f32 p, p, p, $2; fma.rn.f32 $0, q, q, p;
}}"""
NORMED = f"""{{
.reg .f32 p, q, v, w;
{FLOATS.format("p", "q", word="$1")} {FLOATS.format("v", "w", word="$2")}
add.rn.f32 v, v, $4; add.rn.f32 w, w, $4;
mul.rn.f32 p, p, $3; mul.rn.f32 q, q, $3;
mul.rn.f32 p, p, v; mul.rn.f32 q, q, w;
cvt.rn.bf16x2.f32 $0, q, p;
}}"""
# Four codes, of two words times a factor.
ENCODE = f"""{{
.reg .f32 p, q, r, s; .reg .b16 low, high;
{FLOATS.format("p", "q", word="$1")} {FLOATS.format("r", "s", word="$2")}
mul.rn.f32 p, p, $3; mul.rn.f32 q, q, $3; mul.rn.f32 r, r, $3; mul.rn.f32 s, s, $3;
cvt.rn.satfinite.e4m3x2.f32 low, q, p; cvt.rn.satfinite.e4m3x2.f32 high, s, r;
mov.b32 $0, {{low, high}};
}}"""


class TokenThreads:
    """Of the CTA of a row: its token, or of rows beyond it the last token. Threads beyond its end take its last numbers.

    `shared`: f32[WARPS] of shared memory.
    """

    def __init__(self, row: ir.Value, tokens: int, depth: int, shared: ir.Value) -> None:
        self._i32, self._f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        self._pair = ir.VectorType.get((2,), ir.IntegerType.get_signless(16))
        self.depth, self._shared = depth, shared
        i64 = ir.IntegerType.get_signless(64)
        self._thread = arith.remui(arith.extui(i64, mgpu_utils.thread_idx()), ops.constant(THREADS))
        self._row = row
        self._token = arith.minui(self._row, ops.constant(tokens - 1))
        self.has_token = arith.cmpi(arith.CmpIPredicate.ult, self._row, ops.constant(tokens))
        half = arith.remui(self._thread, ops.constant(2))
        self._last = arith.addi(arith.muli(half, ops.constant(OWN)), ops.constant(depth - RUN))
        self._even = arith.cmpi(arith.CmpIPredicate.eq, half, ops.constant(0))
        # Of the codes that a thread keeps and those that its neighbour gives it: the second half of a run comes first.
        self._orders = [
            arith.select(self._even, bits(even), bits(odd))
            for even, odd in ((0x1504, 0x5140), (0x3726, 0x7362))
        ]

    def groups(self) -> list[range]:
        """The steps of a token, AT_ONCE together."""
        steps = range(-(-self.depth // STEP))
        return [steps[n : n + AT_ONCE] for n in range(0, len(steps), AT_ONCE)]

    # --- memory ---------------------------------------------------------------------------------------------------------

    def load(self, ref: ir.Value, step: int, row: int | None = None) -> list[ir.Value]:
        """A thread's four words of bf16[rows, depth], by default of the token's row."""
        at = self._at(ref, self._token if row is None else ops.constant(row), step, ir.BF16Type.get())
        loaded = llvm.load(ir.VectorType.get((4,), self._i32), at, alignment=16)
        return [vector.extract(loaded, dynamic_position=[], static_position=[n]) for n in range(4)]

    def store(self, ref: ir.Value, step: int, words: Sequence[ir.Value], element: Any = None) -> None:
        """A thread's words, to the row of [rows, depth] of `element`, by default bfloat16."""
        values = vector.from_elements(ir.VectorType.get((len(words),), self._i32), words)
        at = self._at(ref, self._row, step, element or ir.BF16Type.get())
        llvm.store(values, at, alignment=4 * len(words))

    def store_codes(self, ref: ir.Value, step: int, words: Sequence[ir.Value], factor: ir.Value) -> None:
        """The codes of a thread's words times `factor`, in the order of `tokens.in_words`."""
        first, second = (
            mgpu_utils.inline_ptx(ENCODE, *two, factor, result_types=self._i32)
            for two in (words[:2], words[2:])
        )
        # Of two neighbours, with the halves of a run, the even one puts both halves' first codes in order, the odd one the
        # others.
        kept = arith.select(self._even, first, second)
        given = mgpu_utils.shfl_bfly(arith.select(self._even, second, first), 1)
        ordered = [mgpu_utils.prmt(kept, given, order) for order in self._orders]
        self.store(ref, step, ordered, ir.IntegerType.get_signless(8))

    def store_scale(self, ref: ir.Value, scale: ir.Value, rows: int) -> None:
        """In the row's place; the one of the last of all `rows` fills those beyond, too."""
        (scales,) = ir.MemRefType(ref.type).shape

        def store(at: ir.Value) -> None:
            llvm.store(scale, mgpu_utils.getelementptr(ops.pointer_of(ref), [at], self._f32))

        with mgpu_utils.when(arith.cmpi(arith.CmpIPredicate.eq, self._thread, ops.constant(0))):
            store(self._row)
        if scales > rows:
            with mgpu_utils.when(arith.cmpi(arith.CmpIPredicate.eq, self._row, ops.constant(rows - 1))):
                for start in range(rows, scales, THREADS):
                    at = arith.addi(self._thread, ops.constant(start))
                    store(arith.minui(at, ops.constant(scales - 1)))

    def _at(self, ref: ir.Value, row: ir.Value, step: int, element: Any) -> ir.Value:
        own = self._own(step)
        if (step + 1) * STEP > self.depth:
            own = arith.minui(own, self._last)
        start = mgpu_utils.getelementptr(ops.pointer_of(ref), [ops.muladd((row, self.depth))], element)
        return mgpu_utils.getelementptr(start, [own], element)

    def _own(self, step: int) -> ir.Value:
        return arith.addi(arith.muli(self._thread, ops.constant(OWN)), ops.constant(step * STEP))

    # --- numbers --------------------------------------------------------------------------------------------------------

    def f32(self, value: float) -> ir.Value:
        return mgpu_utils.c(float(value), self._f32)

    def added(self, words: Sequence[ir.Value], others: Sequence[ir.Value]) -> list[ir.Value]:
        """Sums of numbers, rounded."""
        both = zip(words, others, strict=True)
        return [
            mgpu_utils.inline_ptx("add.rn.bf16x2 $0, $1, $2;", *two, result_types=self._i32) for two in both
        ]

    def squares(self, words: Sequence[ir.Value]) -> ir.Value:
        """The sum of those of numbers."""
        total = self.f32(0.0)
        for word in words:
            total = mgpu_utils.inline_ptx(SQUARES, word, total, result_types=self._f32)
        return total

    def normed(
        self, words: Sequence[ir.Value], weights: Sequence[ir.Value], scale: ir.Value, offset: ir.Value
    ) -> list[ir.Value]:
        """Numbers times `scale`, times weights and `offset`, rounded."""
        return [
            mgpu_utils.inline_ptx(NORMED, *two, scale, offset, result_types=self._i32)
            for two in zip(words, weights, strict=True)
        ]

    def within(self, step: int, value: ir.Value) -> ir.Value:
        """A float32 of a step's, zero of a thread beyond the token's end."""
        if (step + 1) * STEP <= self.depth:
            return value
        own = arith.cmpi(arith.CmpIPredicate.ult, self._own(step), ops.constant(self.depth))
        return arith.select(own, value, self.f32(0.0))

    def total(self, value: ir.Value) -> ir.Value:
        """Of all threads' float32s."""
        for distance in (1, 2, 4, 8, 16):
            value = arith.addf(value, mgpu_utils.shfl_bfly(value, distance))
        return functools.reduce(arith.addf, self._of_warps(value))

    def _of_warps(self, value: ir.Value) -> list[ir.Value]:
        """The float32s that the warps have, each the same one in all its threads."""

        def place(warp: ir.Value) -> ir.Value:
            return mgpu_utils.getelementptr(mgpu_utils.memref_ptr(self._shared), [warp], self._f32)

        llvm.store(value, place(arith.divui(self._thread, ops.constant(THREADS // WARPS))))
        mgpu_utils.warpgroup_barrier()
        values = [llvm.load(self._f32, place(ops.constant(n))) for n in range(WARPS)]
        mgpu_utils.warpgroup_barrier()  # all have read
        return values

    def divided(self, a: ir.Value, b: ir.Value) -> ir.Value:
        """Exactly rounded, unlike the division that Mosaic makes."""
        return mgpu_utils.inline_ptx("div.rn.f32 $0, $1, $2;", a, b, result_types=self._f32)

    def rsqrt(self, value: ir.Value) -> ir.Value:
        return mgpu_utils.inline_ptx("rsqrt.approx.f32 $0, $1;", value, result_types=self._f32)

    def nothing(self) -> ir.Value:
        """What `largest` begins with."""
        return mgpu_utils.bitcast(bits(0), self._pair)

    def largest(self, words: Sequence[ir.Value], so_far: ir.Value) -> ir.Value:
        """Magnitudes of a thread's numbers, of both places in a word."""
        for word in words:
            # Magnitudes of floats are in the order of their bits; NaN is the largest.
            magnitudes = mgpu_utils.bitcast(arith.andi(word, bits(0x7FFF7FFF)), self._pair)
            so_far = arith.maxui(so_far, magnitudes)
        return so_far

    def scale(self, largest: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Of the token, from what `largest` gives in all threads, and its inverse."""
        both = mgpu_utils.bitcast(largest, self._i32)
        top = arith.maxui(arith.shli(both, bits(16)), arith.andi(both, bits(0xFFFF0000)))
        for distance in (1, 2, 4, 8, 16):
            top = arith.maxui(top, mgpu_utils.shfl_bfly(top, distance))
        tops = self._of_warps(arith.bitcast(self._f32, top))
        top = functools.reduce(arith.maxui, [arith.bitcast(self._i32, each) for each in tops])
        top = arith.bitcast(self._f32, arith.maxui(top, arith.bitcast(self._i32, self.f32(LEAST))))
        scale = arith.mulf(top, self.f32(1 / LARGEST))
        return scale, self.divided(self.f32(1.0), scale)
