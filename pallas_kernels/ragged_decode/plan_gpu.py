"""Equal shares as one kernel for Hopper GPUs: XLA takes some 15 small ones for what `plan.plan_decode` says of them.

A layer is a CTA, and an item or a share a number of each of its vectors (`pallas_kernels.numbers`).
"""

import functools
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import numbers
from pallas_kernels.ragged_decode import plan as p

i32 = jnp.int32


@functools.partial(jax.jit, static_argnames=("page_size", "unit", "num_shares", "least", "interpret"))
def equal_shares(
    lengths: jax.Array,
    table: jax.Array,
    first: jax.Array,
    column: jax.Array,
    rows: jax.Array,
    skip: jax.Array,
    order: jax.Array,
    columns: jax.Array,
    *,
    page_size: int,
    unit: int,
    num_shares: int,
    least: int,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`shares`, `items` and `sync` of a plan with equal shares (see `plan.DecodePlan`).

    Args, all i32:
      lengths [B, H], table [rows, R], first [H], column [H], rows [B]: as for `plan.plan_decode`.
      skip: [B], zeros where nothing is out of sight.
      order: [L, B * K] the line's items, B * K at most `plan.MOST_ITEMS` (a thread holds 32 of them).
      columns: [] of a page; as many shares, or a multiple, are made if `num_shares` allows that.
      least: units of a share at least.
    """
    layers, items = order.shape
    shapes = (num_shares, p.SHARE_COLUMNS), (items + 1, p.ITEM_COLUMNS), (num_shares, p.SYNC_STRIDE)

    def plan_decode(*refs: Any) -> None:  # the name that profiles show
        layer = lax.axis_index("layer")
        plan = _Plan(
            *refs, layer=layer, page_size=page_size, unit=unit, width=table.shape[1], interpreted=interpret is not None
        )  # fmt: skip
        num_empty, total = plan.pack_items(num_shares, least)
        plan.describe_shares(total, num_empty, num_shares, least)

    size = numbers.padded(items + 1)
    out = plgpu.kernel(
        plan_decode,
        out_type=[jax.ShapeDtypeStruct((layers, rows * width), i32) for rows, width in shapes],
        grid=(layers,),
        grid_names=("layer",),
        scratch_types=[plgpu.SMEM((size,), i32), *[plgpu.SMEM((size // numbers.LANES,), i32)] * 4],
        **({} if interpret is None else {"interpret": interpret}),
    )(*[x.astype(i32).reshape(-1) for x in (lengths, rows, skip, first, column, columns, table)], order)
    shares, packed, sync = (x.reshape(layers, *shape) for x, shape in zip(out, shapes, strict=True))
    return shares, packed, sync


class _Plan:
    """One layer's, within the kernel."""

    def __init__(
        self,
        lengths: Any, rows: Any, skips: Any, first: Any, column: Any, columns: Any, table: Any, order: Any,
        shares: Any, items: Any, sync: Any, begins: Any, *sums: Any,
        layer: Any, page_size: int, unit: int, width: int, interpreted: bool,
    ) -> None:  # fmt: skip
        """References: as `equal_shares` has them, but flat and of this layer; begins i32[items + 1] and `sums` in SMEM."""
        self._lengths, self._rows, self._skips, self._table = lengths, rows, skips, table
        self._first, self._column, self._columns, self._begins = first, column, columns, begins
        self._order, self._shares, self._items, self._sync = (
            x.at[layer] for x in (order, shares, items, sync)
        )
        self._layer, self._page_size, self._unit, self._width = layer, page_size, unit, width
        self._num_items = order.shape[1]
        self._sums: list[Any] = [
            functools.partial(numbers.running_sum, scratch=x, interpreted=interpreted) for x in sums
        ]
        self._gather: Any = functools.partial(numbers.gather, interpreted=interpreted)
        self._scatter: Any = functools.partial(numbers.scatter, interpreted=interpreted)
        self._barrier: Any = functools.partial(numbers.barrier, interpreted=interpreted)

    def pack_items(self, num_shares: int, least: int) -> tuple[Any, Any]:
        """Stores the items in the line's order, those that hold entries before the others.

        Returns how many hold nothing, and the line's units.
        """
        batch = self._rows.shape[0]
        kv_heads, heads = self._num_items // batch, self._lengths.shape[0] // batch
        at = numbers.count_up(self._num_items + 1)  # one more, which is none and the last
        there = at < self._num_items
        number = self._gather(self._order, jnp.minimum(at, self._num_items - 1))
        request = lax.div(number, i32(kv_heads))
        head = self._layer * kv_heads + lax.rem(number, i32(kv_heads))
        given = jnp.where(there, self._gather(self._lengths, request * heads + head), -1)
        length = jnp.maximum(given, 0)
        units = lax.div(length + (self._unit - 1), i32(self._unit))
        rounded = lax.div(units + (least - 1), i32(least)) * least
        sum_of_rounded, *sums_of = self._sums
        _, total = sum_of_rounded(rounded)
        there_is_room = jnp.full_like(units, total) <= num_shares * least
        units = jnp.where(there_is_room, rounded, units)  # see `plan.whole_shares`
        full, empty = (x.astype(i32) for x in (units > 0, given == 0))
        sums = (of(x) for of, x in zip(sums_of, (units, full, empty), strict=True))
        (ends, total), (fulls, num_full), (empties, num_empty) = sums

        def places(chosen: Any, up_to: Any, count: Any) -> Any:
            """What is chosen one after another, the rest behind it."""
            place = jnp.where(chosen > 0, up_to - 1, count + at - up_to)
            return jnp.where(at <= self._num_items, place, -1)

        place = places(full, fulls, num_full)
        begin = jnp.where(full > 0, ends - units, total)
        self._scatter(self._begins, place, begin)
        values = {
            p.ITEM_BEGIN: begin,
            p.ITEM_LENGTH: length,
            p.ITEM_OFFSET: self._gather(self._rows, request) * self._width + self._gather(self._first, head),
            p.ITEM_COLUMN: self._gather(self._column, head),
            p.ITEM_NUMBER: number,
            p.ITEM_SKIP: self._gather(self._skips, request),
        }
        for name, value in values.items():
            kept = value if name == p.ITEM_BEGIN else value * full
            self._scatter(self._items, _row(place, p.ITEM_COLUMNS, name), kept)
        place = places(empty, empties, num_empty)
        for name in range(len(values), p.ITEM_COLUMNS):
            kept = number * empty if name == p.ITEM_EMPTY else 0
            self._scatter(self._items, _row(place, p.ITEM_COLUMNS, name), kept)
        self._barrier()
        return num_empty, total

    def describe_shares(self, total: Any, num_empty: Any, num_shares: int, least: int) -> None:
        """Stores the shares, a vector's number each, and zeros to count in."""
        count = _num_shares(total, num_shares, least, self._columns[0])
        whole, rest, line = lax.div(total, count), lax.rem(total, count), jnp.maximum(total, 1)

        def border(share: Any) -> Any:
            share = jnp.minimum(share, count)
            return share * whole + lax.div(share * rest, jnp.full_like(share, count))

        def share_of(place: Any) -> Any:
            """The last share whose border is at or before a place; past the line's end the last border.

            A layer's units times shares fit in 32 bits: 16 million units are more pages than a GPU holds of a layer.
            """
            found = lax.div((place + 1) * count + (line - 1), jnp.full_like(place, line)) - 1
            return jnp.where(place < total, found, num_shares)

        share = numbers.count_up(num_shares)
        start, end = border(share), border(share + 1)
        begins = self._item_of(start)
        last = jnp.maximum(self._item_of(end - 1), begins)
        begin, stop = self._gather(self._begins, last), self._gather(self._begins, last + 1)
        length, offset, column, number, skip = (
            self._gather(self._items, last * p.ITEM_COLUMNS + name)
            for name in (p.ITEM_LENGTH, p.ITEM_OFFSET, p.ITEM_COLUMN, p.ITEM_NUMBER, p.ITEM_SKIP)
        )
        values = {
            p.START: start,
            p.END: end,
            p.FIRST_ITEM: begins,
            p.LAST_ITEM: last,
            p.BEGIN: begin,
            p.STOP: stop,
            p.LENGTH: length,
            p.OFFSET: offset,
            p.COLUMN: column,
            p.NUMBER: number,
            p.HAND_TO: share_of(stop - 1),
            p.FIRST_SHARE: share_of(self._gather(self._begins, begins)),
            p.EMPTY: jnp.where(share < num_shares, num_empty, 0),
            p.SKIP: skip,
        }
        place = jnp.where(share < num_shares, share, -1)
        for name in range(p.FIRST_PAGES):
            self._scatter(self._shares, _row(place, p.SHARE_COLUMNS, name), values.get(name, 0))
        # The first pages: from where the piece of the last item begins; past its end, its last page.
        size = i32(self._page_size)
        page = (jnp.maximum(start, begin) - begin) * (self._unit // self._page_size)
        limit = jnp.minimum((jnp.minimum(end, stop) - begin) * self._unit, length)
        last_page = lax.div(limit + (size - 1), size) - 1
        entries = [
            jnp.clip(offset + jnp.minimum(page + i, last_page), 0, self._table.shape[0] - 1)
            for i in range(p.MAX_FIRST_PAGES)
        ]
        found = [
            self._gather(self._table, entry) for entry in entries
        ]  # all under way before the first is stored
        for i, number in enumerate(found):
            self._scatter(self._shares, _row(place, p.SHARE_COLUMNS, p.FIRST_PAGES + i), number)
        for i in range(p.SYNC_STRIDE):
            self._scatter(self._sync, _row(place, p.SYNC_STRIDE, i), 0)

    def _item_of(self, place: Any) -> Any:
        """The last item that begins at or before a place, of those that there may be."""
        step = 1
        while 2 * step <= self._num_items + 1:
            step *= 2
        found = jnp.where(self._begins[step - 1] <= place, i32(step), i32(0))
        while step > 1:
            step //= 2
            further = found + step
            begin = self._gather(self._begins, jnp.minimum(further - 1, self._num_items))
            found = jnp.where((further <= self._num_items + 1) & (begin <= place), further, found)
        return jnp.clip(found - 1, 0, self._num_items - 1)


def _row(place: Any, columns: int, name: int) -> Any:
    """Where a column of a row lies; still negative where there is no row."""
    return jnp.where(place < 0, -1, place * columns + name)


def _num_shares(total: Any, num_shares: int, least: int, parts: Any) -> Any:
    """See `plan.equal_borders`."""
    largest = jnp.maximum(lax.div(total + (num_shares - 1), i32(num_shares)), least)
    count = lax.div(total + (largest - 1), largest)
    rounded = jnp.minimum(lax.div(count + (parts - 1), parts) * parts, num_shares)
    count = jnp.where(count * least == total, count, rounded)
    return jnp.maximum(jnp.minimum(count, total), 1)
