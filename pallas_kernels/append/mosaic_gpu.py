"""Appending a token for Hopper GPUs, in Pallas' Mosaic GPU: one small kernel for all layers, the pool changed in place.

A CTA writes one group's entries (keys and values of the heads in its columns) of a few requests: all their loads are
under way before the first store.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jaxlib.mlir.dialects import arith

from pallas_kernels import byte_pages, byte_stores
from pallas_kernels import row_loads as ops

REQUESTS = 4  # of one CTA
i32 = jnp.int32


def append_mosaic_gpu(
    pool: jax.Array,
    new: Sequence[jax.Array],
    *,
    lengths: jax.Array,
    rows: jax.Array,
    table: jax.Array,
    first: np.ndarray,
    capacity: np.ndarray,
    heads: np.ndarray,
    interpret: Any = None,
) -> jax.Array:
    """See `pallas_kernels.append.append`."""
    groups = heads.shape[0]
    layout = np.stack([first, capacity, *np.maximum(heads, 0).T], axis=1).astype(np.int32)  # [M, 2 + Hp]
    batch = lengths.shape[0]
    # Bytes are quantised between load and store: no request's wait for another's.
    per_cta = 1 if byte_pages.is_bytes(pool.dtype) else min(batch, REQUESTS)
    body = functools.partial(_kernel, per_cta, interpret is not None)

    def append(*refs: Any) -> None:  # the name that profiles show
        body(refs[:5], refs[5:])

    kernel = plgpu.kernel(
        append,
        grid=(groups, pl.cdiv(batch, per_cta)),
        grid_names=("group", "part"),
        **({} if interpret is None else {"interpret": interpret}),
    )
    ref = jax.new_ref(pool)
    kernel(ref, lengths.astype(i32), jnp.asarray(rows, i32), table, jnp.asarray(layout), *new)
    return jax.freeze(ref)


def _kernel(per_cta: int, interpreted: bool, refs: Any, new: Any) -> None:
    pool, lengths, rows, table, layout = refs
    num_pages, _, columns, _, head_dim = pool.shape
    size = byte_pages.page_size(pool)
    batch, num_rows = lengths.shape[0], table.shape[0]
    group, part = lax.axis_index("group"), lax.axis_index("part")
    first, capacity = layout[group, 0], layout[group, 1]
    entries = []
    for u in range(per_cta):
        b = part * per_cta + u
        inside = b < batch
        b = jnp.minimum(b, batch - 1)
        length, row = lengths[b, group], rows[b]
        index = lax.div(length, i32(size))
        there = inside & (index < capacity) & (row < num_rows) & (row >= 0)
        number = table[jnp.where(there, row, 0), jnp.where(there, first + index, 0)]
        there = there & (number >= 0) & (number < num_pages)
        entries.append((b, there, number, lax.rem(length, i32(size))))
    if interpreted:
        _copy_plainly(pool, layout, group, new, entries)
        return
    if byte_pages.is_bytes(pool.dtype):
        for b, there, number, slot in entries:
            _store_bytes(pool, layout, group, new, b, there, number, slot)
        return
    loaded = _load((2, columns, head_dim), layout, group, new, [b for b, *_ in entries])
    for entry, (_, there, number, slot) in zip(loaded, entries, strict=True):

        @pl.when(there)
        def _(entry: Any = entry, number: Any = number, slot: Any = slot) -> None:
            pool.at[number, :, :, slot][...] = entry


def _load(shape: tuple[int, ...], layout: Any, group: Any, new: Any, requests: list[Any]) -> list[jax.Array]:
    """[2, Hp, D] of each request: keys and values of the group's heads."""

    def address(position: Any, request: Any, group: Any, layout: Any, *refs: Any) -> Any:
        which, column, d = position
        pointer, offset = _entry(new[0].shape, which, column, request, group, layout, refs)
        return pointer, arith.addi(offset, d)

    return [ops.load_vectors(shape, new[0].dtype, (b, group, layout, *new), address) for b in requests]


def _entry(
    shape: tuple[int, ...], which: Any, column: Any, request: Any, group: Any, layout: Any, new: Sequence[Any]
) -> tuple[Any, Any]:
    """Pointer and offset of the key (0) or value (1) of a column's head; `shape` of a layer's entries in `new`."""
    _, kv_heads, slots, head_dim = shape
    row = ops.muladd((group, layout.type.shape[1]), (column, 1), (ops.constant(2), 1))
    head = ops.load_index(layout, row)
    pointer = ops.pick_pointer(new, arith.divui(head, ops.constant(kv_heads)))
    inner = arith.remui(head, ops.constant(kv_heads))
    which = arith.addi(which, ops.constant(slots - 2))
    head_size = slots * head_dim
    return pointer, ops.muladd((request, kv_heads * head_size), (inner, head_size), (which, head_dim))


def _store_bytes(
    pool: Any, layout: Any, group: Any, new: Any, request: Any, there: Any, number: Any, slot: Any
) -> None:
    _, _, columns, rows, head_dim = pool.shape
    before = byte_pages.scale_rows(pool) * head_dim

    def place(row: Any) -> tuple[Any, Any]:  # keys of all columns, then values
        return arith.divui(row, ops.constant(columns)), arith.remui(row, ops.constant(columns))

    def source(row: Any, request: Any, group: Any, *refs: Any) -> Any:
        layout, *layers = refs[4:]
        return _entry(new[0].shape, *place(row), request, group, layout, layers)

    def target(
        row: Any, request: Any, group: Any, there: Any, number: Any, slot: Any, pool: Any, *_: Any
    ) -> Any:
        which, column = place(row)
        first = ops.muladd((number, 2 * columns * rows), (which, columns * rows), (column, rows))
        entry = ops.muladd((first, head_dim), (slot, head_dim), (ops.constant(before), 1))
        beside = ops.muladd((first, head_dim), (slot, 1))
        written = arith.cmpi(arith.CmpIPredicate.ne, there, ops.constant(0))
        return written, ops.pointer_of(pool), entry, beside

    given = (request, group, there.astype(i32), number, slot, pool, layout, *new)
    byte_stores.store_rows(2 * columns, head_dim, new[0].dtype, given, source, target)


def _copy_plainly(pool: Any, layout: Any, group: Any, new: Any, entries: list[Any]) -> None:
    _, kv_heads, slots, _ = new[0].shape
    for b, there, number, slot in entries:
        for column in range(pool.shape[2]):
            head = layout[group, 2 + column]
            for layer in range(len(new)):

                @pl.when(there & (lax.div(head, i32(kv_heads)) == layer))
                def _(
                    b: Any = b, number: Any = number, slot: Any = slot, column: int = column,
                    layer: int = layer, head: Any = head,
                ) -> None:  # fmt: skip
                    for which in range(2):
                        row = new[layer].at[b, lax.rem(head, i32(kv_heads)), slots - 2 + which]
                        byte_stores.store_plainly(pool.at[number, which, column], slot, row[...])
