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
    per_cta = min(batch, REQUESTS)
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
    num_pages, _, columns, size, head_dim = pool.shape
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
    loaded = _load((2, columns, head_dim), layout, group, new, [b for b, *_ in entries])
    for entry, (_, there, number, slot) in zip(loaded, entries, strict=True):

        @pl.when(there)
        def _(entry: Any = entry, number: Any = number, slot: Any = slot) -> None:
            pool.at[number, :, :, slot][...] = entry


def _load(shape: tuple[int, ...], layout: Any, group: Any, new: Any, requests: list[Any]) -> list[jax.Array]:
    """[2, Hp, D] of each request: keys and values of the group's heads."""
    _, kv_heads, slots, head_dim = new[0].shape

    def address(position: Any, request: Any, group: Any, layout: Any, *new: Any) -> Any:
        which, column, d = position
        row = ops.muladd((group, layout.type.shape[1]), (column, 1), (ops.constant(2), 1))
        head = ops.load_index(layout, row)
        pointer = ops.pick_pointer(new, arith.divui(head, ops.constant(kv_heads)))
        inner = arith.remui(head, ops.constant(kv_heads))
        head_size = slots * head_dim
        which = arith.addi(which, ops.constant(slots - 2))
        offset = ops.muladd((request, kv_heads * head_size), (inner, head_size), (which, head_dim), (d, 1))
        return pointer, offset

    return [ops.load_vectors(shape, new[0].dtype, (b, group, layout, *new), address) for b in requests]


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
                        pool.at[number, which, column, slot][...] = row[...]
