"""Parts of tiles of every device to every device, within a kernel whose CTAs have other work before and after.

The protocol of `exchange`, with turns for each part, which one CTA has at a time: another may have it next, once it knows
(by a barrier over the grid, or as kernels follow each other) that the one before has ended its turn. Tokens come in pieces
of four, a warp each, of 128 columns, four for each thread: 16 bytes of a mailbox, with two turns' numbers. What this device
has itself it need not send.

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
from pallas_kernels.all_reduce.links import MOST_PIECES, PART_TURNS, PARTS, PIECE, tiles_begin

ROWS, COLUMNS, WARP = 4, 128, 32  # of a piece
VECTOR = COLUMNS // WARP
LAYOUT = plgpu.Layout.WG_STRIDED((ROWS, COLUMNS), VECTOR)
AWAITED = 96  # registers of a thread for what it awaits at once
_NUMBER = plgpu.ShapeDtypeStruct((), jnp.int32, layout=ops.SCALAR)


def next_turn(links: Any, part: Any) -> jax.Array:
    """i32: the number of a part's turn that comes. `links`: i32[1 + N, 2], see `links.links_of`."""
    devices = links.shape[0] - 1

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), ops.SCALAR), return_type=_NUMBER)
    def run(_: Any, links: Any, part: Any) -> Any:
        [before] = mail.load(_turn_at(links, devices, ops.as_operand(part)), 1)
        turn = arith.addi(before, mail.constant(1))
        return mgpu.FragmentedArray.splat(turn, (), mgpu.WGSplatFragLayout(()), is_signed=True)

    return run(links, part)


def exchange(
    pieces: Sequence[jax.Array], links: Any, part: Any, turn: Any, first: Any, tokens: int
) -> list[jax.Array]:
    """f32[4, 128] each: the sums of all devices' pieces of a part, in the devices' order on all of them.

    Args:
      pieces: [4, 128] each in LAYOUT, bf16 or f16, of tokens from `first` on; what is past the last of `tokens` stays here.
      turn: what `next_turn` gave for the part.
    """
    if len(pieces) > MOST_PIECES:
        raise ValueError(f"{len(pieces)} pieces: a mailbox has places for {MOST_PIECES}")
    devices, dtype = links.shape[0] - 1, pieces[0].dtype
    result = plgpu.ShapeDtypeStruct((ROWS, COLUMNS), jnp.float32, layout=LAYOUT)
    kinds = [LAYOUT] * len(pieces)

    @plgpu.inline_mgpu(
        arg_types=(kinds, plgpu.RefType(), *[ops.SCALAR] * 3), return_type=[result] * len(pieces)
    )
    def run(_: Any, pieces: Any, links: Any, part: Any, turn: Any, first: Any) -> Any:
        post = _Post(
            links, devices, ops.as_operand(part), turn.registers.item(), first.registers.item(), tokens
        )
        own = [mail.in_words(piece.registers.item(), VECTOR // 2) for piece in pieces]
        for device in range(devices):
            for number, words in enumerate(own):
                post.send(device, number, words)
        sums: list[Any] = []
        at_once = max(AWAITED // (VECTOR * devices), 1)  # as many words as turns' numbers
        for some in itertools.batched(enumerate(own), at_once):
            for of_senders in post.receive(some):
                floats = [
                    arith.extf(ir.VectorType.get((VECTOR,), ir.F32Type.get()), mail.of_words(words, dtype))
                    for words in of_senders
                ]
                sums.append(functools.reduce(arith.addf, floats))
        post.end_turn()
        return [_piece(numbers) for numbers in sums]

    return run(list(pieces), links, part, turn, first)


class _Post:
    """The mailboxes of all devices, as to one part in the turn that comes."""

    def __init__(self, links: Any, devices: int, part: Any, turn: Any, first: Any, tokens: int) -> None:
        i64 = ir.IntegerType.get_signless(64)
        self._devices, self._turn, self._tokens = devices, turn, tokens
        self._addresses = [mail.address(links, ops.constant(n)) for n in range(devices)]
        self._rank, self._waits = mail.rank(links), mail.waits(links)
        self._own = mail.address(links, self._rank)
        self._turn_at = _turn_at(links, devices, part)
        thread = mail.thread()
        self._token = arith.addi(first, arith.trunci(mail.i32(), arith.divui(thread, ops.constant(WARP))))
        odd = arith.extui(i64, arith.andi(turn, mail.constant(1)))
        self._sender = PARTS * MOST_PIECES * PIECE  # bytes of each
        self._place = ops.muladd(
            (ops.constant(tiles_begin(devices) + PART_TURNS), 1),
            (odd, devices * self._sender),
            (part, MOST_PIECES * PIECE),
            (thread, PIECE // ops.WARPGROUP),
        )

    def send(self, device: int, number: int, words: Sequence[Any]) -> None:
        """This device's words of a piece to `device`, if that is another."""
        there = arith.andi(self._is_there(number), self._is_other(device))
        at = self._at(self._addresses[device], self._rank, number)
        mail.store(at, [x for word in words for x in (word, self._turn)], there)

    def receive(self, pieces: Sequence[tuple[int, Sequence[Any]]]) -> list[list[list[Any]]]:
        """Of some pieces, each (its number, this device's words), the words of every device, as soon as all are there."""
        size = 2 * len(pieces[0][1])
        awaited = list(itertools.product(pieces, range(self._devices)))
        places, masks = [], []
        for (number, _), sender in awaited:
            places.append((self._at(self._own, ops.constant(sender), number), size))
            there = arith.andi(self._is_there(number), self._is_other(sender))
            masks.append(arith.select(there, self._waits, mail.constant(0)))

        def late(records: list[tuple[Any, ...]]) -> Any:
            others = [
                arith.andi(arith.xori(turn, self._turn), mask)
                for record, mask in zip(records, masks, strict=True)
                for turn in record[1::2]
            ]
            return functools.reduce(arith.ori, others)

        received = [record[::2] for record in mail.receive(places, late)]
        words = [
            [
                arith.select(self._is_other(sender), theirs, mine)
                for theirs, mine in zip(record, own, strict=True)
            ]
            for ((_, own), sender), record in zip(awaited, received, strict=True)
        ]
        return [list(of_senders) for of_senders in itertools.batched(words, self._devices)]

    def end_turn(self) -> None:
        mgpu_utils.warpgroup_barrier()  # all threads have read which turn it was
        mail.store_once(self._turn_at, self._turn)

    def _is_there(self, number: int) -> Any:
        """Whether a thread has a token of a piece."""
        token = arith.addi(self._token, mail.constant(ROWS * number))
        return arith.cmpi(arith.CmpIPredicate.slt, token, mail.constant(self._tokens))

    def _is_other(self, device: int) -> Any:
        return arith.cmpi(arith.CmpIPredicate.ne, self._rank, ops.constant(device))

    def _at(self, address: Any, sender: Any, number: int) -> Any:
        return mail.pointer(
            address, self._place, ops.muladd((sender, self._sender), (ops.constant(PIECE * number), 1))
        )


def _turn_at(links: Any, devices: int, part: Any) -> Any:
    own = mail.address(links, mail.rank(links))
    return mail.pointer(own, ops.muladd((ops.constant(tiles_begin(devices)), 1), (part, 4)))


def _piece(numbers: Any) -> Any:
    registers = np.empty((1,), dtype=object)
    registers[0] = numbers
    layout = mgpu.WGStridedFragLayout(shape=(ROWS, COLUMNS), vec_size=VECTOR)
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)
