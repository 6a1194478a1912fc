"""Rows of many tokens: each device adds up some of them and gives the sums to the others, through mailboxes with flags.

A CTA takes N rows a turn, of which every device adds up one. It writes its share of each to the device that adds it up,
and then the turn's number (after a fence, as what is written may come in any order); that device adds, writes the sum to all
others and the number again. So that links are never idle, shares are sent a turn before they are added up, and sums awaited
a turn after they were sent. PLACES turns have places of their own, which is enough: whoever sends shares has had the sums of
three turns before, so that the shares of that turn have been read; and whoever sends sums has had shares whose sender had
read the sums of three turns before.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, scf

from pallas_kernels import row_loads as ops
from pallas_kernels.all_reduce import device_ops as mail
from pallas_kernels.all_reduce.links import PLACES, RELAY_ROW, RELAYS, relay_begins, relay_rows_begin

i32 = jnp.int32
SHARES, SUMS = 0, 1  # what is sent
_NUMBER = plgpu.ShapeDtypeStruct((), jnp.int32, layout=ops.SCALAR)


# Of a row that this device adds up, before the others' shares are awaited: what makes f32[columns], the sum of all shares,
# the result, in the dtype of the shares.
Add = Callable[[Any], Callable[[jax.Array], jax.Array]]
Give = Callable[[Any, jax.Array], None]  # takes the result of a row


def relay_rows(share: Any, links: Any, add: Add, give: Give) -> None:
    """This CTA's part of the sums over all devices' `share` [T, columns]."""
    devices, rows = links.shape[0] - 1, share.shape[0]
    box = _Relay(links, devices, lax.axis_index("cta"))
    # A group of rows for each device is a turn of one CTA: the last ones may have one less.
    groups = pl.cdiv(rows, devices)
    turns = lax.div(groups - lax.axis_index("cta") + (RELAYS - 1), i32(RELAYS))
    first, rank = box.turn(), box.rank()

    def row_of(turn: Any, device: Any) -> Any:
        group = turn * RELAYS + lax.axis_index("cta")
        return jnp.minimum(group * devices + device, rows - 1)

    others = [lax.rem(rank + n, i32(devices)) for n in range(1, devices)]

    def send_shares(turn: Any) -> None:
        for device in others:
            box.store(device, SHARES, first + turn, rank, _load(share, row_of(turn, device)))

    def send_sum(turn: Any) -> jax.Array:
        row = row_of(turn, rank)
        own, added = _load(share, row).astype(jnp.float32), add(row)
        box.wait(others, SHARES, first + turn)
        parts = []
        for sender in range(devices):
            sent = box.load(SHARES, first + turn, i32(sender), share).astype(jnp.float32)
            parts.append(lax.select(jnp.broadcast_to(rank == sender, own.shape), own, sent))
        result = added(functools.reduce(jnp.add, parts))
        for device in others:
            box.store(device, SUMS, first + turn, rank, result)
        return result

    send_shares(i32(0))
    box.fence()
    box.flag(others, SHARES, first, rank)

    @pl.loop(0, turns + 1)
    def _(turn: Any) -> None:
        pl.when(turn + 1 < turns)(lambda: send_shares(turn + 1))

        @pl.when(turn < turns)
        def _() -> None:
            result = send_sum(turn)
            box.fence()
            pl.when(turn + 1 < turns)(lambda: box.flag(others, SHARES, first + turn + 1, rank))
            box.flag(others, SUMS, first + turn, rank)
            give(row_of(turn, rank), result)

        @pl.when(turn > 0)
        def _() -> None:
            @pl.loop(1, devices)
            def _(n: Any) -> None:
                device = lax.rem(rank + n, i32(devices))
                box.wait([device], SUMS, first + turn - 1)
                give(row_of(turn - 1, device), box.load(SUMS, first + turn - 1, device, share))

    box.end(first + turns)


def _load(ref: Any, row: Any) -> jax.Array:
    """A row of [T, columns]."""
    columns = ref.shape[1]

    def address(position: Any, ref: Any, row: Any) -> Any:
        return ops.pointer_of(ref), ops.muladd((position[0], 1), (row, columns))

    return ops.load_vectors((columns,), ref.dtype, (ref, row), address)


class _Relay:
    """The mailboxes of all devices, as to one CTA."""

    def __init__(self, links: Any, devices: int, cta: Any) -> None:
        self._links, self._devices, self._cta = links, devices, cta

    def rank(self) -> jax.Array:
        """The number of this device."""

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=_NUMBER)
        def run(_: Any, links: Any) -> Any:
            return _number(arith.trunci(mail.i32(), mail.rank(links)))

        return run(self._links)

    def turn(self) -> jax.Array:
        """The number of the first turn."""

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), ops.SCALAR), return_type=_NUMBER)
        def run(_: Any, links: Any, cta: Any) -> Any:
            [before] = mail.load(self._turn_at(links, ops.as_operand(cta)), 1)
            return _number(arith.addi(before, mail.constant(1)))

        return run(self._links, self._cta)

    def end(self, turn: Any) -> None:
        """`turn` is the number of the next first turn."""

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), ops.SCALAR, ops.SCALAR))
        def run(_: Any, links: Any, cta: Any, turn: Any) -> None:
            mgpu_utils.warpgroup_barrier()  # all threads have read the number before
            before = arith.subi(turn.registers.item(), mail.constant(1))
            mail.store_once(self._turn_at(links, ops.as_operand(cta)), before)

        run(self._links, self._cta, turn)

    def store(self, device: Any, what: int, turn: Any, sender: Any, value: jax.Array) -> None:
        """A row [columns] into the mailbox of `device`."""
        (columns,) = value.shape
        size = ops.vector_size(columns, columns)
        layout = plgpu.Layout.WG_STRIDED((columns,), vec_size=size)

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *[ops.SCALAR] * 4, layout))
        def run(_: Any, links: Any, device: Any, cta: Any, turn: Any, sender: Any, value: Any) -> None:
            device, cta, turn, sender = (ops.as_operand(x) for x in (device, cta, turn, sender))
            base, place = mail.address(links, device), self._place(cta, what, turn, sender)
            for n, vector in enumerate(value.registers.flat):
                mail.store(mail.pointer(base, place, _of_thread(n, size)), mail.in_words(vector, size // 2))

        run(self._links, device, self._cta, turn, sender, value)

    def load(self, what: int, turn: Any, sender: Any, like: Any) -> jax.Array:
        """A row that `sender` has written into the own mailbox, of the columns and dtype of `like`."""
        columns, dtype = like.shape[1], like.dtype
        size = ops.vector_size(columns, columns)
        layout = plgpu.Layout.WG_STRIDED((columns,), vec_size=size)
        result = plgpu.ShapeDtypeStruct((columns,), dtype, layout=layout)

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *[ops.SCALAR] * 3), return_type=result)
        def run(_: Any, links: Any, cta: Any, turn: Any, sender: Any) -> Any:
            cta, turn, sender = (ops.as_operand(x) for x in (cta, turn, sender))
            base, place = mail.address(links, mail.rank(links)), self._place(cta, what, turn, sender)
            frag = mgpu.WGStridedFragLayout((columns,), size)
            registers = np.empty(frag.registers_shape((columns,)), dtype=object)
            for n in range(registers.size):
                words = mail.load(mail.pointer(base, place, _of_thread(n, size)), size // 2)
                registers.flat[n] = mail.of_words(words, dtype)
            return mgpu.FragmentedArray(_registers=registers, _layout=frag, _is_signed=None)

        return run(self._links, self._cta, turn, sender)

    def fence(self) -> None:
        """What this CTA has stored comes before the flags that follow."""

        @plgpu.inline_mgpu()
        def run(_: Any) -> None:
            mgpu_utils.warpgroup_barrier()
            with mgpu_utils.single_thread(scope=mgpu_utils.ThreadSubset.WARPGROUP):
                mgpu_utils.inline_ptx("fence.acq_rel.sys;", has_side_effects=True)

        run()

    def flag(self, devices: list[Any], what: int, turn: Any, sender: Any) -> None:
        """What this CTA had stored before the last fence is there for `devices` to see. By the thread that fenced."""
        if not devices:
            return

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *[ops.SCALAR] * (3 + len(devices))))
        def run(_: Any, links: Any, cta: Any, turn: Any, sender: Any, *given: Any) -> None:
            number = turn.registers.item()
            cta, turn, sender, *devices = (ops.as_operand(x) for x in (cta, turn, sender, *given))
            for device in devices:
                flag = self._flag(cta, what, turn, sender)
                mail.store_once(mail.pointer(mail.address(links, device), flag), number)

        run(self._links, self._cta, turn, sender, *devices)

    def wait(self, senders: list[Any], what: int, turn: Any) -> None:
        """Until what `senders` have stored for this turn is there."""
        if not senders:
            return

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *[ops.SCALAR] * (2 + len(senders))))
        def run(_: Any, links: Any, cta: Any, turn: Any, *given: Any) -> None:
            number = turn.registers.item()
            cta, turn, *senders = (ops.as_operand(x) for x in (cta, turn, *given))
            base, waits = mail.address(links, mail.rank(links)), mail.waits(links)
            with mgpu_utils.single_thread(scope=mgpu_utils.ThreadSubset.WARPGROUP):
                places = [mail.pointer(base, self._flag(cta, what, turn, sender)) for sender in senders]
                loop = scf.WhileOp([], [])
                with ir.InsertionPoint(loop.before.blocks.append()):
                    late = [arith.xori(_acquire(place), number) for place in places]
                    late = arith.andi(functools.reduce(arith.ori, late), waits)
                    scf.condition(arith.cmpi(arith.CmpIPredicate.ne, late, mail.constant(0)), [])
                with ir.InsertionPoint(loop.after.blocks.append()):
                    scf.yield_([])
            mgpu_utils.warpgroup_barrier()

        run(self._links, self._cta, turn, *senders)

    def _turn_at(self, links: Any, cta: Any) -> Any:
        base = mail.address(links, mail.rank(links))
        return mail.pointer(base, ops.muladd((cta, 4), (ops.constant(relay_begins(self._devices)), 1)))

    def _flag(self, cta: Any, what: int, turn: Any, sender: Any) -> Any:
        flags = relay_begins(self._devices) + 4 * RELAYS
        return ops.muladd((self._number(cta, what, turn, sender), 4), (ops.constant(flags), 1))

    def _place(self, cta: Any, what: int, turn: Any, sender: Any) -> Any:
        rows = relay_rows_begin(self._devices)
        return ops.muladd((self._number(cta, what, turn, sender), RELAY_ROW), (ops.constant(rows), 1))

    def _number(self, cta: Any, what: int, turn: Any, sender: Any) -> Any:
        count, place = self._devices, arith.andi(turn, ops.constant(PLACES - 1))
        return ops.muladd(
            (cta, 2 * PLACES * count), (place, 2 * count), (ops.constant(what), count), (sender, 1)
        )


def _acquire(at: Any) -> Any:
    return mgpu_utils.inline_ptx(
        "ld.acquire.sys.global.u32 $0, [$1];", at, result_types=mail.i32(), has_side_effects=True
    )


def _of_thread(vector: int, size: int) -> Any:
    """Where a thread's vector of `size` elements lies in a row, in bytes."""
    before = 2 * size * ops.WARPGROUP * vector
    return ops.muladd((mail.thread(), 2 * size), (ops.constant(before), 1))


def _number(value: Any) -> Any:
    return mgpu.FragmentedArray.splat(value, (), mgpu.WGSplatFragLayout(()), is_signed=True)
