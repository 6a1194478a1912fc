"""Words in the mailboxes of devices, read and written past the caches that others do not see. For `inline_mgpu`."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf

from pallas_kernels import row_loads as ops


def i32() -> Any:
    return ir.IntegerType.get_signless(32)


def constant(value: int) -> Any:
    """An i32."""
    return mgpu_utils.c(value, i32())


def address(links: Any, device: Any) -> Any:
    """Of the mailbox of `device`, an i64."""
    i64 = ir.IntegerType.get_signless(64)
    index = arith.addi(device, ops.constant(1))
    return llvm.load(i64, mgpu_utils.getelementptr(ops.pointer_of(links), [index], i64), alignment=8)


def rank(links: Any) -> Any:
    """The number of this device, an i64."""
    return ops.load_index(links, ops.constant(0))


def waits(links: Any) -> Any:
    """An i32: all bits set, or none where nothing is awaited."""
    return arith.trunci(i32(), ops.load_index(links, ops.constant(1)))


def thread() -> Any:
    """Of the warpgroup, an i64."""
    i64 = ir.IntegerType.get_signless(64)
    return arith.remui(arith.extui(i64, mgpu_utils.thread_idx()), ops.constant(ops.WARPGROUP))


def pointer(*terms: Any) -> Any:
    """To the sum of i64s."""
    return llvm.inttoptr(llvm.PointerType.get(), functools.reduce(arith.addi, terms))


def load(at: Any, words: int) -> tuple[Any, ...]:
    """1, 2 or 4 i32s."""
    shape, names = _operands(words, 0)
    return mgpu_utils.inline_ptx(
        f"ld.relaxed.sys.global{shape}.u32 {names}, [${words}];",
        at,
        result_types=[i32()] * words,
        has_side_effects=True,
    )


def receive(
    places: Sequence[tuple[Any, int]], late: Callable[[list[tuple[Any, ...]]], Any]
) -> list[tuple[Any, ...]]:
    """Records, of so many i32s at each place, as they are when of all of them `late` is an i32 of 0."""
    loop = scf.WhileOp([i32()] * sum(size for _, size in places), [])
    with ir.InsertionPoint(loop.before.blocks.append()):
        records = [load(place, size) for place, size in places]
        again = arith.cmpi(arith.CmpIPredicate.ne, late(records), constant(0))
        scf.condition(again, [x for record in records for x in record])
    with ir.InsertionPoint(loop.after.blocks.append(*(x.type for x in loop.results))):
        scf.yield_([])
    results = iter(loop.results)
    return [tuple(itertools.islice(results, size)) for _, size in places]


def store(at: Any, words: Sequence[Any], there: Any = None) -> None:
    """1, 2 or 4 i32s, by all who are `there`; of 4 each half comes as one: the hardware does it, PTX promises nothing."""
    shape, names = _operands(len(words), 1)
    mgpu_utils.inline_ptx(
        f"st.relaxed.sys.global{shape}.u32 [$0], {names};", at, *words, predicate=there, has_side_effects=True
    )


def store_once(at: Any, word: Any) -> None:
    """By one thread of the warpgroup."""
    mgpu_utils.inline_ptx(
        "st.relaxed.sys.global.u32 [$0], $1;",
        at,
        word,
        predicate=mgpu_utils.single_thread_predicate(mgpu_utils.ThreadSubset.WARPGROUP),
        has_side_effects=True,
    )


def in_words(vector: Any, words: int) -> list[Any]:
    """The i32s of a vector in registers."""
    held = llvm.bitcast(ir.VectorType.get((words,), i32()), vector)
    return [llvm.extractelement(held, constant(n)) for n in range(words)]


def of_words(words: Sequence[Any], dtype: Any) -> Any:
    """The vector of elements of 2 bytes that they are."""
    held = llvm.mlir_undef(ir.VectorType.get((len(words),), i32()))
    for n, word in enumerate(words):
        held = llvm.insertelement(held, word, constant(n))
    return llvm.bitcast(ir.VectorType.get((2 * len(words),), mgpu_utils.dtype_to_ir_type(dtype)), held)


def _operands(words: int, first: int) -> tuple[str, str]:
    names = ", ".join(f"${first + n}" for n in range(words))
    return (f".v{words}", f"{{{names}}}") if words > 1 else ("", names)
