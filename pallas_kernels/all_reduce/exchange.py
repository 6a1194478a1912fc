"""A row of every device to every device, through mailboxes in which each word has a turn's number beside it.

This is NCCL's protocol LL, with turns for its flags: a word and its number are stored as 8 bytes, which the hardware does at
once, so that nothing else has to say that it is there: no fence, no barrier between devices, no host. The number is one more
in every turn, and turns with odd and with even numbers have places of their own. Where turns are awaited that is enough:
whoever sends in one turn has had all rows of the turn before, whose senders had read all of the turn before that, which are
the words that are overwritten. Each row counts its own turns, the same on all devices as they all make the same calls.

`inline_mgpu`, so not for the interpreter.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf

from pallas_kernels import row_loads as ops
from pallas_kernels.all_reduce.links import ROW, TURNS, most_rows

AWAITED = 96  # registers of a thread for what it awaits at once


def exchange(share: Any, links: Any, row: Any) -> jax.Array:
    """f32[columns]: the sum of a row of all devices' `share` [T, columns], in the devices' order on all of them.

    `links`: i32[1 + N, 2], see `links.links_of`.
    """
    columns, devices = share.shape[1], links.shape[0] - 1
    size = ops.vector_size(columns, columns)
    layout = plgpu.Layout.WG_STRIDED((columns,), vec_size=size)
    element = share.dtype

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType(), ops.SCALAR),
        return_type=plgpu.ShapeDtypeStruct((columns,), jnp.float32, layout=layout),
    )
    def run(_: Any, share: Any, links: Any, row: Any) -> Any:
        row = ops.as_operand(row)
        mail = _Mail(links, devices, row)
        vectors = _load_words(share, row, columns, size)
        for device in range(devices):
            mail.send(device, vectors)
        sums: list[Any] = []
        at_once = max(AWAITED // (2 * sum(map(len, vectors))), 1)
        for first in range(0, devices, at_once):
            senders = range(first, min(first + at_once, devices))
            for words in mail.receive(senders, len(vectors), size // 2):
                floats = [_floats(vector, element) for vector in words]
                sums = [arith.addf(a, b) for a, b in zip(sums, floats, strict=True)] if sums else floats
        mail.end_turn()
        frag = mgpu.WGStridedFragLayout((columns,), size)
        return mgpu.FragmentedArray(_registers=np.array(sums, object), _layout=frag, _is_signed=None)

    return run(share, links, row)


class _Mail:
    """The mailboxes of all devices, as to one row in the turn that comes."""

    def __init__(self, links: Any, devices: int, row: Any) -> None:
        self._i32, self._i64 = (ir.IntegerType.get_signless(bits) for bits in (32, 64))
        self._thread = _thread()
        self._addresses = [self._address(links, ops.constant(n)) for n in range(devices)]
        self._rank = ops.load_index(links, ops.constant(0))
        self._waits = arith.trunci(self._i32, ops.load_index(links, ops.constant(1)))
        self._own = self._address(links, self._rank)
        self._turn_at = _pointer(self._own, ops.muladd((row, 4)))
        [before] = self._load(self._turn_at, 1)
        self._turn = arith.addi(before, self._constant(1))
        odd = arith.extui(self._i64, arith.andi(self._turn, self._constant(1)))
        self._sender = most_rows(devices) * ROW  # bytes of each
        self._place = ops.muladd((ops.constant(TURNS), 1), (odd, devices * self._sender), (row, ROW))

    def send(self, device: int, vectors: list[list[Any]]) -> None:
        """This device's words to `device`."""
        for number, record in enumerate(_records(vectors)):
            words = [x for word in record for x in (word, self._turn)]
            operands = ", ".join(f"${n + 1}" for n in range(len(words)))
            mgpu_utils.inline_ptx(
                f"st.volatile.global.v{len(words)}.u32 [$0], {{{operands}}};",
                self._at(self._addresses[device], self._rank, number, len(words)),
                *words,
                has_side_effects=True,
            )

    def receive(self, senders: Sequence[int], vectors: int, words: int) -> list[list[list[Any]]]:
        """Of each sender so many vectors of so many words, as soon as all are there."""
        sizes = [2 * len(record) for record in _records([[None] * words] * vectors)]
        places = [
            (self._at(self._own, ops.constant(sender), number, size), size)
            for sender in senders
            for number, size in enumerate(sizes)
        ]
        loop = scf.WhileOp([self._i32] * sum(size for _, size in places), [])
        with ir.InsertionPoint(loop.before.blocks.append()):
            loaded = [x for place, size in places for x in self._load(place, size)]
            others = [arith.xori(turn, self._turn) for turn in loaded[1::2]]
            late = arith.andi(functools.reduce(arith.ori, others), self._waits)
            scf.condition(arith.cmpi(arith.CmpIPredicate.ne, late, self._constant(0)), loaded)
        with ir.InsertionPoint(loop.after.blocks.append(*(x.type for x in loop.results))):
            scf.yield_([])
        received = list(itertools.batched(list(loop.results)[::2], words))
        return [[list(x) for x in of_sender] for of_sender in itertools.batched(received, vectors)]

    def end_turn(self) -> None:
        mgpu_utils.warpgroup_barrier()  # all threads have read which turn it was
        mgpu_utils.inline_ptx(
            "st.volatile.global.u32 [$0], $1;",
            self._turn_at,
            self._turn,
            predicate=mgpu_utils.single_thread_predicate(mgpu_utils.ThreadSubset.WARPGROUP),
            has_side_effects=True,
        )

    def _at(self, address: Any, sender: Any, number: int, words: int) -> Any:
        """Where a record of a thread's lies: those with the same number side by side."""
        thread = ops.muladd((self._thread, 4 * words), (ops.constant(4 * words * ops.WARPGROUP * number), 1))
        return _pointer(address, self._place, ops.muladd((sender, self._sender)), thread)

    def _load(self, place: Any, words: int) -> tuple[Any, ...]:
        operands = ", ".join(f"${n}" for n in range(words))
        shape, operands = (f".v{words}", f"{{{operands}}}") if words > 1 else ("", operands)
        return mgpu_utils.inline_ptx(
            f"ld.volatile.global{shape}.u32 {operands}, [${words}];",
            place,
            result_types=[self._i32] * words,
            has_side_effects=True,
        )

    def _address(self, links: Any, device: Any) -> Any:
        at = mgpu_utils.getelementptr(ops.pointer_of(links), [arith.addi(device, ops.constant(1))], self._i64)
        return llvm.load(self._i64, at, alignment=8)

    def _constant(self, value: int) -> Any:
        return mgpu_utils.c(value, self._i32)


def _records(vectors: list[list[Any]]) -> list[tuple[Any, ...]]:
    """Words that are stored at once: two of a vector, or the only one."""
    return [record for vector in vectors for record in itertools.batched(vector, 2)]


def _load_words(share: Any, row: Any, columns: int, size: int) -> list[list[Any]]:
    """The words, i32, of each of a thread's vectors."""
    i32 = ir.IntegerType.get_signless(32)
    words, out = size // 2, []
    for start in range(0, columns // 2, ops.WARPGROUP * words):
        offset = ops.muladd((row, columns // 2), (_thread(), words), (ops.constant(start), 1))
        at = mgpu_utils.getelementptr(ops.pointer_of(share), [offset], i32)
        vector = llvm.load(ir.VectorType.get((words,), i32), at, alignment=4 * words)
        out.append([llvm.extractelement(vector, mgpu_utils.c(n, i32)) for n in range(words)])
    return out


def _floats(words: list[Any], dtype: Any) -> Any:
    """Words of two elements each as a vector of float32."""
    i32, size = ir.IntegerType.get_signless(32), 2 * len(words)
    vector = llvm.mlir_undef(ir.VectorType.get((len(words),), i32))
    for n, word in enumerate(words):
        vector = llvm.insertelement(vector, word, mgpu_utils.c(n, i32))
    elements = llvm.bitcast(ir.VectorType.get((size,), mgpu_utils.dtype_to_ir_type(dtype)), vector)
    return arith.extf(ir.VectorType.get((size,), ir.F32Type.get()), elements)


def _thread() -> Any:
    i64 = ir.IntegerType.get_signless(64)
    return arith.remui(arith.extui(i64, mgpu_utils.thread_idx()), ops.constant(ops.WARPGROUP))


def _pointer(*terms: Any) -> Any:
    return llvm.inttoptr(llvm.PointerType.get(), functools.reduce(arith.addi, terms))
