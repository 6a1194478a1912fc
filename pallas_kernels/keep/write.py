"""Writing kept entries for Hopper GPUs, in Pallas' Mosaic GPU: rows gathered from where they lie, straight into pages.

A CTA writes one column's keys or values of one page, [P, D] entries that lie together in the pool: each thread loads 16
bytes of as many rows as its registers hold, then stores them. An entry that stays is loaded from its own place.
"""

import functools
from collections.abc import Callable, Sequence
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

ELEMENTS = 8192  # under way at a time: 64 of each thread
i32 = jnp.int32


def write_pages_mosaic_gpu(
    pool: jax.Array,
    keys: Sequence[jax.Array],
    values: Sequence[jax.Array],
    tail: jax.Array,
    *,
    source: jax.Array,
    pages: jax.Array,
    heads: np.ndarray,
    interpret: Any = None,
) -> jax.Array:
    """See `pallas_kernels.keep.write_pages`."""
    held = jnp.asarray(np.maximum(heads, 0).astype(np.int32))
    source, pages = source.astype(i32), pages.astype(i32)
    return _call(pool, keys, values, tail, source, pages, held, interpret=interpret)


# One text for all chunks of a step: the runtime compiles a kernel once for each distinct text.
@functools.partial(jax.jit, static_argnames="interpret")
def _call(
    pool: jax.Array,
    keys: Sequence[jax.Array],
    values: Sequence[jax.Array],
    tail: jax.Array,
    source: jax.Array,
    pages: jax.Array,
    heads: jax.Array,
    *,
    interpret: Any,
) -> jax.Array:
    groups, columns = heads.shape
    body = functools.partial(_kernel, interpret is not None)

    def write_pages(*refs: Any) -> None:  # the name that profiles show
        body(refs[:5], refs[5 : 5 + len(keys)], refs[5 + len(keys) :])

    kernel = plgpu.kernel(
        write_pages,
        grid=(2 * columns, pages.shape[1], groups),
        grid_names=("part", "page", "group"),
        **({} if interpret is None else {"interpret": interpret}),
    )
    ref = jax.new_ref(pool)
    kernel(ref, tail, source, pages, heads, *keys, *values)
    return jax.freeze(ref)


def _kernel(interpreted: bool, refs: Any, keys: Any, values: Any) -> None:
    pool, tail, source, pages, heads = refs
    num_pages, _, _, _, head_dim = pool.shape
    size = byte_pages.page_size(pool)
    part, page, group = (lax.axis_index(name) for name in ("part", "page", "group"))
    which, column = lax.rem(part, i32(2)), lax.div(part, i32(2))
    number, head = pages[group, page], heads[group, column]
    step = max(n for n in range(1, size + 1) if size % n == 0 and n * head_dim <= ELEMENTS)

    @pl.when((number >= 0) & (number < num_pages))
    def _write() -> None:
        for entry in range(0, size, step):
            if interpreted:
                _copy_plainly(
                    pool, tail, source, keys, values, group, column, which, number, head, page, entry, step
                )
                continue
            place = (entry, group, column, which, number, head, page)
            if byte_pages.is_bytes(pool.dtype):
                _store_bytes(step, pool, tail, source, keys, values, place)
                continue
            rows = _load((step, head_dim), pool, tail, source, keys, values, place)
            pool.at[number, which, column, pl.ds(entry, step)][...] = rows


def _load(
    shape: tuple[int, ...], pool: Any, tail: Any, source: Any, keys: Any, values: Any, place: tuple[Any, ...]
) -> jax.Array:
    """[step, D]: the entries from `entry` on of one page, column, and keys or values."""
    _, _, columns, size, head_dim = pool.shape
    entry, *given = place
    find = _finder(len(keys), keys[0].shape, tail.shape[3], columns, size, entry)

    def address(position: Any, *given: Any) -> Any:
        row, d = position
        candidate, pointer, offset = find(row, *given)
        _, column, which, number, _, _, pool, *_ = given
        in_pool = ops.muladd((number, 2 * columns * size), (which, columns * size), (column, size), (row, 1))
        in_pool = ops.muladd((in_pool, 1), (ops.constant(entry), 1))
        old = arith.cmpi(arith.CmpIPredicate.slt, candidate, ops.constant(0))
        pointer = arith.select(old, ops.pointer_of(pool), pointer)
        offset = arith.select(old, arith.muli(in_pool, ops.constant(head_dim)), offset)
        return pointer, arith.addi(offset, d)

    return ops.load_vectors(shape, pool.dtype, (*given, pool, tail, source, *keys, *values), address)


def _store_bytes(
    step: int, pool: Any, tail: Any, source: Any, keys: Any, values: Any, place: tuple[Any, ...]
) -> None:
    """The same entries into a pool of bytes; what stays is not touched."""
    _, _, columns, rows, head_dim = pool.shape
    size, before = byte_pages.page_size(pool), byte_pages.scale_rows(pool) * head_dim
    entry, *given = place
    find = _finder(len(keys), keys[0].shape, tail.shape[3], columns, size, entry)

    def come_from(row: Any, *given: Any) -> Any:
        candidate, pointer, offset = find(row, *given)
        stays = arith.cmpi(arith.CmpIPredicate.slt, candidate, ops.constant(0))
        return pointer, arith.select(stays, ops.constant(0), offset)

    def target(row: Any, *given: Any) -> Any:
        candidate, *_ = find(row, *given)
        _, column, which, number, _, _, pool, *_ = given
        at = arith.addi(row, ops.constant(entry))
        first = ops.muladd((number, 2 * columns * rows), (which, columns * rows), (column, rows))
        place = ops.muladd((first, head_dim), (at, head_dim), (ops.constant(before), 1))
        beside = ops.muladd((first, head_dim), (at, 1))
        written = arith.cmpi(arith.CmpIPredicate.sge, candidate, ops.constant(0))
        return written, ops.pointer_of(pool), place, beside

    arguments = (*given, pool, tail, source, *keys, *values)
    byte_stores.store_rows(step, head_dim, keys[0].dtype, arguments, come_from, target)


def _finder(
    layers: int, shape: tuple[int, ...], window: int, columns: int, size: int, entry: int
) -> Callable[..., tuple[Any, Any, Any]]:
    """Of entry `entry` + row of a page: its candidate, and the pointer and offset of that (of none, anything of the tail's).

    `shape` [T, K, D] of a layer's keys, `window` entries of a tail, pages of `columns` and `size` entries.
    """
    _, kv_heads, head_dim = shape

    def find(
        row: Any, group: Any, column: Any, which: Any, number: Any, head: Any, page: Any, *refs: Any
    ) -> tuple[Any, Any, Any]:
        _, tail, source, *layers_kv = refs
        row = arith.addi(row, ops.constant(entry))
        per_head = source.type.shape[2]
        at = ops.muladd((group, columns * per_head), (column, per_head), (page, size), (row, 1))
        candidate = ops.load_index(source, at)
        layer = arith.divui(head, ops.constant(kv_heads))
        is_key = arith.cmpi(arith.CmpIPredicate.eq, which, ops.constant(0))
        key, value = (ops.pick_pointer(x, layer) for x in (layers_kv[:layers], layers_kv[layers:]))
        token = arith.subi(candidate, ops.constant(window))
        inner = arith.remui(head, ops.constant(kv_heads))
        in_chunk = ops.muladd((token, kv_heads * head_dim), (inner, head_dim))
        kv_group = ops.muladd((which, tail.type.shape[1]), (group, 1))
        in_tail = ops.muladd((kv_group, columns * window), (column, window), (candidate, 1))
        new = arith.cmpi(arith.CmpIPredicate.sge, candidate, ops.constant(window))
        pointer = arith.select(new, arith.select(is_key, key, value), ops.pointer_of(tail))
        return candidate, pointer, arith.select(new, in_chunk, arith.muli(in_tail, ops.constant(head_dim)))

    return find


def _copy_plainly(
    pool: Any, tail: Any, source: Any, keys: Any, values: Any,
    group: Any, column: Any, which: Any, number: Any, head: Any, page: Any, entry: int, step: int,
) -> None:  # fmt: skip
    kv_heads, window, size = keys[0].shape[1], tail.shape[3], byte_pages.page_size(pool)
    layer, inner = lax.div(head, i32(kv_heads)), lax.rem(head, i32(kv_heads))

    def one(r: Any, _: Any) -> tuple[()]:
        candidate = source[group, column, page * size + entry + r]
        place = functools.partial(byte_stores.store_plainly, pool.at[number, which, column], entry + r)

        @pl.when((candidate >= 0) & (candidate < window))
        def _from_tail() -> None:
            place(tail.at[which, group, column, jnp.clip(candidate, 0, window - 1)][...])

        token = jnp.maximum(candidate - window, 0)
        for n, layers in enumerate((keys, values)):
            for index, x in enumerate(layers):

                @pl.when((candidate >= window) & (which == n) & (layer == index))
                def _from_chunk(x: Any = x) -> None:
                    place(x.at[token, inner][...])

        return ()

    lax.fori_loop(0, step, one, ())
