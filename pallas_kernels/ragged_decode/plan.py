"""How the work of a decode step is divided among the CTAs of a GPU.

The entries of all (request, KV head) items of one layer form one line, counted in units of `unit` entries. A share is an
interval of that line; share `w` is the work of CTA `w`, whatever items it crosses. An item that a border cuts is put
together again by the CTA that holds its end, or by several that hold nothing else. So every way of dividing the work is a
choice of borders, and one kernel serves them all:

* equal shares (the default): as many shares as SMs, all equal, whatever the skew between heads or requests. The line goes
  through the first columns of all pages, then the second ones, and so on: if SMs divide by columns, those of a page are read
  at the same time, by as many CTAs, which is up to 2% faster than one after another. Where a tile for each SM is enough,
  the line is cut where items end;
* splits of every item, a constant number (FlashDecoding) or the split map of the paper (Algorithm 1);
* borders given by the caller, for a plan made on the host.

In the last two the line is ordered by request, then head.

`plan_decode` is made on the device, once per step for all layers: a handful of array operations, and one kernel of equal
shares on a GPU (`plan_gpu`).
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import support
from pallas_kernels.layered_plan import LayeredPlan
from pallas_kernels.support import num_sms

# Columns of `DecodePlan.shares`. The data of a share's last item, which a CTA does first, and the first pages to load
# stand in its row: it loads keys after one read (row) instead of a chain of three (row, item, page number).
START, END, FIRST_ITEM, LAST_ITEM = range(4)
BEGIN, STOP, LENGTH, OFFSET, COLUMN, NUMBER = range(4, 10)  # of the last item
# The share where the last item ends, the share where the first item begins.
HAND_TO, FIRST_SHARE = range(10, 12)
EMPTY = 12  # number of items that hold nothing
SKIP = 13  # of the last item
FIRST_PAGES, MAX_FIRST_PAGES = 16, 16
SHARE_COLUMNS = FIRST_PAGES + MAX_FIRST_PAGES
# Columns of `DecodePlan.items`. The first six speak of the items that hold entries, packed to the front; ITEM_EMPTY lists
# those of requests that hold none. NUMBER is the item's place in the batch, b * K + k.
ITEM_BEGIN, ITEM_LENGTH, ITEM_OFFSET, ITEM_COLUMN, ITEM_NUMBER, ITEM_SKIP, ITEM_EMPTY = range(7)
ITEM_COLUMNS = 8
HEAD_LENGTH, HEAD_OFFSET, HEAD_COLUMN, HEAD_SKIP = range(4)  # columns of `DecodePlan.heads`
SYNC_STRIDE = 8  # one counter per 32 bytes
# Entries of an equal share at least: with fewer an item has more pieces than it pays to put together.
LEAST_SHARE = 128
MOST_ITEMS = 4096  # of a layer, in the kernel of equal shares


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodePlan(LayeredPlan):
    """The division of one decode step."""

    shares: jax.Array  # i32[L, W, SHARE_COLUMNS]
    items: jax.Array  # i32[L, B * K + 1, ITEM_COLUMNS]
    heads: jax.Array  # i32[L, B * K, 4], in the batch's order, for the reference
    # Zero between kernels: the kernel counts in it and leaves it at zero.
    sync: jax.Array  # i32[L, W, SYNC_STRIDE]
    table: jax.Array  # i32[rows, R], the same for all layers
    page_size: int = dataclasses.field(metadata={"static": True})
    unit: int = dataclasses.field(metadata={"static": True})
    skips: bool = dataclasses.field(metadata={"static": True})  # whether items may begin out of sight

    @property
    def num_shares(self) -> int:
        return self.shares.shape[-2]


def default_unit(page_size: int) -> int:
    """Entries to which borders of shares are rounded: small enough for balance, no smaller than a page."""
    return max(page_size, 32)


def plan_decode(
    lengths: jax.Array,
    table: jax.Array,
    first: jax.Array | np.ndarray,
    column: jax.Array | np.ndarray,
    *,
    page_size: int,
    num_layers: int = 1,
    rows: jax.Array | None = None,
    skip: jax.Array | None = None,
    num_shares: int | None = None,
    splits: int | Sequence[int] | np.ndarray | None = None,
    borders: jax.Array | None = None,
    unit: int | None = None,
) -> DecodePlan:
    """Divides a decode step, for all layers at once.

    Args:
      lengths: i32[B, H] entries of each head's group, H = L * K heads in (layer, head) order. 0: nothing to read. Less: no
        request is there; what its output holds is not said.
      table: i32[rows, R] flat rows of page numbers.
      first: i32[H] position of each head's group in a flat table row.
      column: i32[H] column of each head within its pages.
      page_size: entries in a page.
      num_layers: L.
      rows: i32[B] table row of each request; `arange(B)` if None.
      skip: i32[B] entries at the front of every head of a request that are out of sight (a sliding window that begins
        within a page), less than a page and at most the lengths. Of a head that has no others, no sinks and no new tokens
        anything comes out.
      num_shares: equal shares to make; by default one per SM, or fewer that hold LEAST_SHARE entries. A layer's units times
        shares must fit in 31 bits, as they do unless rows of more than 2^29 entries in all share pages.
      splits: instead of equal shares, parts of every item: one number, or one per head (i32[H], static; a split map).
      borders: instead of both, i32[L, W + 1] borders in units, nondecreasing from 0 to each layer's total, of a line by
        request and head; shares that hold nothing must not lie between the pieces of one item.
      unit: entries to which borders are rounded; a multiple of `page_size`. The kernel takes the default; larger ones only
        where they are what a step of it holds.
    """
    unit = default_unit(page_size) if unit is None else unit
    if unit % page_size:
        raise ValueError(f"unit must be a multiple of page_size, got {unit} and {page_size}")
    if splits is not None and (borders is not None or num_shares is not None):
        raise ValueError("give splits, or borders, or num_shares, not several of them")
    batch, heads = lengths.shape
    if heads % num_layers:
        raise ValueError(f"{heads} heads do not divide into {num_layers} layers")
    kv_heads = heads // num_layers
    num_items = batch * kv_heads

    def by_layer(x: jax.Array) -> jax.Array:  # [B, H] -> [L, B * K]
        return x.reshape(batch, num_layers, kv_heads).swapaxes(0, 1).reshape(num_layers, num_items)

    given = by_layer(lengths.astype(jnp.int32))
    length, empty = jnp.maximum(given, 0), given == 0
    table_row = jnp.arange(batch, dtype=jnp.int32) if rows is None else rows.astype(jnp.int32)
    offset = by_layer(table_row[:, None] * table.shape[1] + jnp.asarray(first, jnp.int32)[None])
    columns = by_layer(jnp.broadcast_to(jnp.asarray(column, jnp.int32)[None], (batch, heads)))
    request_skips = jnp.zeros(batch, jnp.int32) if skip is None else skip.astype(jnp.int32)
    skips = by_layer(jnp.broadcast_to(request_skips[:, None], (batch, heads)))
    order = jnp.broadcast_to(jnp.arange(num_items, dtype=jnp.int32), length.shape)
    least = least_share(unit) if num_shares is None else 1
    wanted = num_shares or num_sms()
    equal = borders is None and splits is None
    if equal:
        page_columns = jnp.max(jnp.asarray(column, jnp.int32)) + 1
        order = _by_column(column, num_layers, batch)
    if equal and _has_kernel(num_items):
        from pallas_kernels.ragged_decode.plan_gpu import equal_shares

        shares, items, sync = equal_shares(
            lengths, table, jnp.asarray(first), jnp.asarray(column), table_row, request_skips, order, page_columns,
            page_size=page_size, unit=unit, num_shares=wanted, least=least,
        )  # fmt: skip
    else:
        units = -(-length // unit)
        if equal:
            units = whole_shares(units, wanted, least)
            borders = equal_borders(units.sum(axis=1), wanted, least, page_columns)
        elif borders is None:
            parts = np.broadcast_to(np.asarray(splits, np.int32), (heads,))
            borders = _split_borders(units, parts.reshape(num_layers, kv_heads), batch)
        assert borders is not None
        taken = units, empty, length, offset, columns, skips
        items = _pack_items(order, *[jnp.take_along_axis(x, order, axis=1) for x in taken])
        shares = _describe_shares(borders, items, num_empty=empty.sum(axis=1, dtype=jnp.int32))
        shares = jnp.concatenate([shares, _first_pages(shares, table, page_size, unit)], axis=-1)
        # Zeros that the compiler cannot know, so that no other constant shares their memory: the kernel writes there.
        zero = jnp.minimum(length[:, :1, None], 0)
        sync = jnp.broadcast_to(zero, (num_layers, shares.shape[1], SYNC_STRIDE))
    return DecodePlan(
        shares=shares,
        items=items,
        heads=jnp.stack([length, offset, columns, skips], axis=-1),
        sync=sync,
        table=table,
        index=None,
        page_size=page_size,
        unit=unit,
        skips=skip is not None,
    )


def _has_kernel(num_items: int) -> bool:
    """Whether equal shares of so many items of a layer are made by one kernel."""
    try:
        support.check_device()
    except NotImplementedError:
        return False
    return num_items <= MOST_ITEMS


def _first_pages(shares: jax.Array, table: jax.Array, page_size: int, unit: int) -> jax.Array:
    """i32[L, W, MAX_FIRST_PAGES]: from where the piece of each share's last item begins; past its end, its last page."""
    start, end, begin, stop = (shares[..., column] for column in (START, END, BEGIN, STOP))
    page = (jnp.maximum(start, begin) - begin) * (unit // page_size)
    limit = jnp.minimum((jnp.minimum(end, stop) - begin) * unit, shares[..., LENGTH])
    at = jnp.minimum(page[..., None] + jnp.arange(MAX_FIRST_PAGES), ((limit - 1) // page_size)[..., None])
    return table.reshape(-1)[jnp.clip(shares[..., OFFSET, None] + at, 0, table.size - 1)].astype(jnp.int32)


def _by_column(column: jax.Array | np.ndarray, num_layers: int, batch: int) -> jax.Array:
    """i32[L, B * K]: items by their heads' columns, then in the batch's order."""
    xp = jnp if isinstance(column, jax.core.Tracer) else np  # what is known needs no sorting in every step
    columns = xp.tile(xp.asarray(column).reshape(num_layers, -1), batch)
    return jnp.asarray(xp.argsort(columns, axis=1, stable=True), jnp.int32)


def _pack_items(
    number: jax.Array,
    units: jax.Array,
    empty: jax.Array,
    length: jax.Array,
    offset: jax.Array,
    columns: jax.Array,
    skips: jax.Array,
) -> jax.Array:
    """i32[L, items + 1, ITEM_COLUMNS] of items in the line's order, with their numbers in the batch.

    Rows after the last item that holds entries begin at the total.
    """
    num_layers, num_items = units.shape
    full = units > 0
    begin = jnp.cumsum(units, axis=1, dtype=jnp.int32) - units
    rows = jnp.stack([begin, length, offset, columns, number, skips], axis=-1)
    packed = jnp.zeros((num_layers, num_items + 1, ITEM_COLUMNS), jnp.int32)
    packed = packed.at[:, :, ITEM_BEGIN].set(units.sum(axis=1, dtype=jnp.int32)[:, None])
    layer = jnp.arange(num_layers)[:, None]
    place = jnp.where(full, jnp.cumsum(full, axis=1) - 1, num_items + 1)  # beyond the end: dropped
    packed = packed.at[layer, place, :ITEM_EMPTY].set(rows, mode="drop")
    place = jnp.where(empty, jnp.cumsum(empty, axis=1) - 1, num_items + 1)
    return packed.at[layer, place, ITEM_EMPTY].set(number, mode="drop")


def _describe_shares(borders: jax.Array, items: jax.Array, num_empty: jax.Array) -> jax.Array:
    """i32[L, W, FIRST_PAGES] from i32[L, W + 1] borders."""

    def find(table: jax.Array, value: jax.Array) -> jax.Array:
        """The last interval that begins at or before `value`."""

        def search(a: jax.Array, v: jax.Array) -> jax.Array:
            return jnp.searchsorted(a, v, side="right", method="compare_all").astype(jnp.int32) - 1

        return jax.vmap(search)(table, value)

    def of_item(column: int, item: jax.Array) -> jax.Array:
        return jnp.take_along_axis(items[:, :, column], item, axis=1)

    begin = items[:, :, ITEM_BEGIN]
    most = items.shape[1] - 2
    start, end = borders[:, :-1], borders[:, 1:]
    first = jnp.clip(find(begin, start), 0, most)
    last = jnp.clip(find(begin, end - 1), first, most)
    stop = of_item(ITEM_BEGIN, last + 1)
    values = {
        START: start,
        END: end,
        FIRST_ITEM: first,
        LAST_ITEM: last,
        BEGIN: of_item(ITEM_BEGIN, last),
        STOP: stop,
        LENGTH: of_item(ITEM_LENGTH, last),
        OFFSET: of_item(ITEM_OFFSET, last),
        COLUMN: of_item(ITEM_COLUMN, last),
        NUMBER: of_item(ITEM_NUMBER, last),
        HAND_TO: find(borders, stop - 1),
        FIRST_SHARE: find(borders, of_item(ITEM_BEGIN, first)),
        EMPTY: jnp.broadcast_to(num_empty[:, None], start.shape),
        SKIP: of_item(ITEM_SKIP, last),
    }
    zero = jnp.zeros_like(start)
    return jnp.stack([values.get(column, zero) for column in range(FIRST_PAGES)], axis=-1).astype(jnp.int32)


def least_share(unit: int) -> int:
    """Units of an equal share at least."""
    return -(-LEAST_SHARE // unit)


def whole_shares(units: jax.Array, num_shares: int, least: int) -> jax.Array:
    """i32[L, items]: each a multiple of `least`, in layers where `num_shares` allows that: no share has parts of two items.

    A share that has takes a tile and an end for each, as long as a whole share of `least` units.
    """
    rounded = -(-units // least) * least
    return jnp.where(rounded.sum(axis=1, keepdims=True) <= num_shares * least, rounded, units)


def equal_borders(total: jax.Array, num_shares: int, least: int, parts: jax.Array | int = 1) -> jax.Array:
    """i32[L, num_shares + 1]: as few equal shares as hold ceil(total / num_shares) units or `least`, and empty ones.

    Of a line of so many equal `parts` each has as many of them, if `num_shares` allows that. Shares of just `least` units
    stay so: see `whole_shares`.
    """
    largest = jnp.maximum(-(-total // num_shares), least)
    count = -(-total // largest)
    rounded = jnp.minimum(-(-count // parts) * parts, num_shares)
    count = jnp.where(count * least == total, count, rounded)
    count = jnp.maximum(jnp.minimum(count, total), 1)[:, None]  # the empty ones are the last
    whole, rest = total[:, None] // count, total[:, None] % count
    at = jnp.minimum(jnp.arange(num_shares + 1, dtype=jnp.int32)[None], count)
    return at * whole + at * rest // count


def _split_borders(units: jax.Array, parts: np.ndarray, batch: int) -> jax.Array:
    """Item (b, k) of layer l is cut into `parts[l, k]` pieces of equal size; short layers end in empty shares."""
    end = jnp.cumsum(units, axis=1, dtype=jnp.int32)
    width = batch * int(parts.sum(axis=1).max())
    borders = []
    for layer, counts in enumerate(parts):
        count = np.tile(counts, batch)
        item = np.repeat(np.arange(count.size), count)
        part = np.arange(item.size) - np.repeat(np.cumsum(count) - count, count)
        size = -(-units[layer] // count)
        begin = end[layer] - units[layer]
        at = jnp.minimum(begin[item] + part * size[item], end[layer][item])
        borders.append(jnp.concatenate([at, jnp.broadcast_to(end[layer][-1:], (width + 1 - item.size,))]))
    return jnp.stack(borders).astype(jnp.int32)
