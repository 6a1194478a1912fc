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
from jaxlib.mlir.dialects import arith

from pallas_kernels import row_loads as ops
from pallas_kernels.all_reduce import device_ops as mail
from pallas_kernels.all_reduce.links import ROW, TURNS, most_rows

AWAITED = 96  # registers of a thread for what it awaits at once


def exchange(share: jax.Array, links: Any, row: Any, size: int) -> jax.Array:
    """f32[columns]: the sum of all devices' `share` [columns] of a row, in the devices' order on all of them.

    `links`: i32[1 + N, 2], see `links.links_of`. `size`: of the share's elements that a thread has side by side.
    """
    (columns,), devices, dtype = share.shape, links.shape[0] - 1, share.dtype
    layout = plgpu.Layout.WG_STRIDED((columns,), vec_size=size)

    @plgpu.inline_mgpu(
        arg_types=(layout, plgpu.RefType(), ops.SCALAR),
        return_type=plgpu.ShapeDtypeStruct((columns,), jnp.float32, layout=layout),
    )
    def run(_: Any, share: Any, links: Any, row: Any) -> Any:
        post = _Post(links, devices, ops.as_operand(row))
        vectors = [mail.in_words(vector, size // 2) for vector in share.registers]
        for device in range(devices):
            post.send(device, vectors)
        sums: list[Any] = []
        at_once = max(AWAITED // (2 * sum(map(len, vectors))), 1)
        wide = ir.VectorType.get((size,), ir.F32Type.get())
        for first in range(0, devices, at_once):
            senders = range(first, min(first + at_once, devices))
            for words in post.receive(senders, len(vectors), size // 2):
                floats = [arith.extf(wide, mail.of_words(vector, dtype)) for vector in words]
                sums = [arith.addf(a, b) for a, b in zip(sums, floats, strict=True)] if sums else floats
        post.end_turn()
        frag = mgpu.WGStridedFragLayout((columns,), size)
        return mgpu.FragmentedArray(_registers=np.array(sums, object), _layout=frag, _is_signed=None)

    return run(share, links, row)


class _Post:
    """The mailboxes of all devices, as to one row in the turn that comes."""

    def __init__(self, links: Any, devices: int, row: Any) -> None:
        i64 = ir.IntegerType.get_signless(64)
        self._thread = mail.thread()
        self._addresses = [mail.address(links, ops.constant(n)) for n in range(devices)]
        self._rank, self._waits = mail.rank(links), mail.waits(links)
        self._own = mail.address(links, self._rank)
        self._turn_at = mail.pointer(self._own, ops.muladd((row, 4)))
        [before] = mail.load(self._turn_at, 1)
        self._turn = arith.addi(before, mail.constant(1))
        odd = arith.extui(i64, arith.andi(self._turn, mail.constant(1)))
        self._sender = most_rows(devices) * ROW  # bytes of each
        self._place = ops.muladd((ops.constant(TURNS), 1), (odd, devices * self._sender), (row, ROW))

    def send(self, device: int, vectors: list[list[Any]]) -> None:
        """This device's words to `device`."""
        for number, record in enumerate(_records(vectors)):
            words = [x for word in record for x in (word, self._turn)]
            mail.store(self._at(self._addresses[device], self._rank, number, len(words)), words)

    def receive(self, senders: Sequence[int], vectors: int, words: int) -> list[list[list[Any]]]:
        """Of each sender so many vectors of so many words, as soon as all are there."""
        sizes = [2 * len(record) for record in _records([[None] * words] * vectors)]
        places = [
            (self._at(self._own, ops.constant(sender), number, size), size)
            for sender in senders
            for number, size in enumerate(sizes)
        ]

        def late(records: list[tuple[Any, ...]]) -> Any:
            others = [arith.xori(turn, self._turn) for record in records for turn in record[1::2]]
            return arith.andi(functools.reduce(arith.ori, others), self._waits)

        loaded = [x for record in mail.receive(places, late) for x in record]
        received = list(itertools.batched(loaded[::2], words))
        return [[list(x) for x in of_sender] for of_sender in itertools.batched(received, vectors)]

    def end_turn(self) -> None:
        mgpu_utils.warpgroup_barrier()  # all threads have read which turn it was
        mail.store_once(self._turn_at, self._turn)

    def _at(self, address: Any, sender: Any, number: int, words: int) -> Any:
        """Where a record of a thread's lies: those with the same number side by side."""
        bytes_of_all = 4 * words * ops.WARPGROUP
        thread = ops.muladd((self._thread, 4 * words), (ops.constant(bytes_of_all * number), 1))
        return mail.pointer(address, self._place, ops.muladd((sender, self._sender)), thread)


def _records(vectors: list[list[Any]]) -> list[tuple[Any, ...]]:
    """Words that are stored at once: two of a vector, or the only one."""
    return [record for vector in vectors for record in itertools.batched(vector, 2)]
