"""Which candidates each head keeps after a chunk, and writing them into their reserved pages.

Candidates are what a row has not locked yet: its previous tail (trailing window and generated tokens), then the chunk.
Of these each head locks its own best, as many as the plan's law adds, and keeps the new trailing window whole after
them. All heads of all layers are done at once, after the forward pass, which only read the pool.

`write` and `append` are the two places where the pool changes: kernels on a Hopper GPU, XLA operations elsewhere.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import append as kernels
from pallas_kernels import byte_pages, keep
from tangram_jax.cache import NO_PAGE, Cache
from tangram_jax.plan import CachePlan
from tangram_jax.rings import RingChunk, chunk_pages

log = logging.getLogger("tangram")


class Candidates(NamedTuple):
    """The candidates of one row: C = tail capacity + T, the tail right-aligned, so that positions are contiguous."""

    row: jax.Array  # i32[]
    before: jax.Array  # i32[]: tokens of the row before the chunk, p0
    valid_tokens: jax.Array  # i32[]: of the chunk
    positions: jax.Array  # i32[C], true positions
    valid: jax.Array  # bool[M, C]: exists, in each group
    unlocked: jax.Array  # i32[M]: candidates from before the chunk


def kernel_or(kernel: Callable, reference: Callable, what: str) -> Callable:
    """`kernel` where it supports its arguments, else `reference`, with a warning where a kernel would be expected."""

    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return kernel(*args, **kwargs)
        except NotImplementedError as reason:
            if jax.default_backend() == "gpu":
                log.warning("%s runs as XLA operations, several times slower: %s", what, reason)
            return reference(*args, **kwargs)

    return run


def tail_capacity(plan: CachePlan, cache: Cache) -> int:
    """Most entries that a row has unlocked: the trailing window and a whole tail."""
    return plan.window + cache.layout.max_tail


def candidates(plan: CachePlan, cache: Cache, row: jax.Array, chunk: int, count: jax.Array) -> Candidates:
    """What a chunk of `chunk` token slots, `count` of them valid, lays open for decision in `row`."""
    capacity = tail_capacity(plan, cache)
    _, tokens, tail, budgets = cache.row(row)
    unlocked = plan.lengths(tokens, budgets) - plan.locked(tokens, budgets) + tail  # [M]
    c = np.arange(capacity + chunk)
    valid = (c >= capacity - unlocked[:, None]) & (c < capacity + count)
    before = tokens + tail
    return Candidates(row, before, count, before - capacity + c, valid, unlocked)


def read_tail(plan: CachePlan, cache: Cache, row: jax.Array, dtype: Any) -> jax.Array:
    """The unlocked entries of `row` in every page column: [2, M, Hp, tail capacity, D] in `dtype`, right-aligned.

    Columns of entries that do not exist hold whatever lies in some page.
    """
    capacity, layout = tail_capacity(plan, cache), cache.layout
    numbers, tokens, tail, budgets = cache.row(row)
    length = plan.lengths(tokens, budgets) + tail  # [M]
    entry = length[:, None] - capacity + np.arange(capacity)  # [M, W]
    groups = slice(0, plan.num_groups)
    entry = jnp.clip(entry, 0, np.asarray(layout.capacity)[groups, None] * plan.page_size - 1)
    page = numbers[layout.first[groups, None] + entry // plan.page_size]
    columns = page, slice(None), slice(None)
    taken = byte_pages.entries_at(cache.pool, columns, entry % plan.page_size, dtype)  # [M, W, 2, Hp, D]
    return taken.transpose(2, 0, 3, 1, 4)


class Slots(NamedTuple):
    """Where the new tokens of a decode step go."""

    rows: Any  # i32[B]; a number of no row is an empty slot
    lengths: jax.Array  # i32[B, M], 0 in an empty slot
    tokens: jax.Array  # i32[B]: tokens of each row, 0 in an empty slot


class Counts(NamedTuple):
    """What the plan's law says of each group's entries, before and after a chunk."""

    locked_before: jax.Array  # i32[M]
    adds: jax.Array  # i32[M]: candidates to lock
    window: jax.Array  # i32[M]: trailing window, kept whole after the locked entries
    length: jax.Array  # i32[M]: all entries afterwards


def counts(plan: CachePlan, cache: Cache, what: Candidates) -> Counts:
    """The counts of the row and chunk of `what`."""
    after = what.before + what.valid_tokens
    _, tokens, _, budgets = cache.row(what.row)
    before = plan.locked(tokens, budgets)
    locked, length = plan.locked(after, budgets), plan.lengths(after, budgets)
    return Counts(before, jnp.maximum(locked - before, 0), length - locked, length)


def by_group(plan: CachePlan, x: jax.Array) -> jax.Array:
    """[L, K, ...] -> [M, Hp, ...]; empty columns repeat some head."""
    return x.reshape(-1, *x.shape[2:])[np.maximum(plan.head_at, 0)]


def select(plan: CachePlan, cache: Cache, what: Candidates, scores: jax.Array) -> jax.Array:
    """i32[M, Hp, C]: the candidates of each head, best first, by `scores` f32[M, Hp, C] (higher = keep).

    Ties go to the earlier position. Candidates that cannot be locked come last, whatever their scores.
    """
    after = what.before + what.valid_tokens
    window = counts(plan, cache, what).window
    with jax.named_scope("select"):
        open_ = what.valid & (what.positions < after - window[:, None])  # [M, C]
        scores = jnp.where(what.positions < plan.sinks, jnp.inf, scores.astype(jnp.float32))
        scores = jnp.where(open_[:, None], scores, -jnp.inf)
        iota = lax.broadcasted_iota(jnp.int32, scores.shape, 2)
        return lax.sort((_badness(scores, open_), iota), dimension=-1, is_stable=True, num_keys=1)[1]


def _badness(scores: jax.Array, open_: jax.Array) -> jax.Array:
    """u32[M, Hp, C], smaller is better: -scores in order of floats, the worst score for NaN, then what is not open.

    One integer key, because a sort by it takes half the time of one by (open, score). Both zeros are equal.
    """
    bad = jnp.where(jnp.isnan(scores), jnp.inf, -scores)
    bits = lax.bitcast_convert_type(jnp.where(bad == 0, 0.0, bad), jnp.uint32)
    sign = jnp.uint32(1 << 31)
    key = jnp.where(bits >= sign, ~bits, bits | sign)
    return jnp.where(open_[:, None], key, jnp.uint32(0xFFFFFFFF))


def write(
    plan: CachePlan,
    cache: Cache,
    what: Candidates,
    order: jax.Array,
    tail_kv: jax.Array,
    keys: Sequence[jax.Array],
    values: Sequence[jax.Array],
    start: jax.Array | None = None,
) -> Cache:
    """Write the first candidates of `order` and the trailing window into the row's pages, and set its counts.

    `order` i32[M, Hp, C] from `select`, `tail_kv` [2, M, Hp, tail capacity, D] from `read_tail`, `keys` and `values` of
    each layer [T, K, D], in which the chunk begins at `start` i32[] (None: 0). Entries beyond what the pages hold are never
    written: the plan's law gives the count, the reservation the pages.
    """
    size, layout = plan.page_size, cache.layout
    row, slots = what.row, what.positions.shape[0]
    after = what.before + what.valid_tokens
    locked_before, adds, window, length = counts(plan, cache, what)

    with jax.named_scope("write"):
        # Destination j of a group is entry locked_before + j; pages are written whole, so walk over pages.
        count = slots // size + 2
        page = locked_before[:, None] // size + np.arange(count)  # [M, J]
        entry = page[:, :, None] * size + np.arange(size)
        j = (entry - locked_before[:, None, None]).reshape(len(adds), -1)  # [M, J * P]
        newest = j - adds[:, None] + (after - window - what.positions[0])[:, None]
        best = jnp.take_along_axis(order, jnp.clip(j, 0, slots - 1)[:, None], axis=2)
        source = jnp.where((j < adds[:, None])[:, None], best, jnp.clip(newest, 0, slots - 1)[:, None])
        # The first page begins with locked entries: those stay.
        if start is not None:  # the last ones may go beyond the chunk's, where nothing is written
            tail_slots = tail_kv.shape[3]
            source = jnp.where(source < tail_slots, source, jnp.minimum(source + start, slots - 1))
        source = jnp.where((j < 0)[:, None], -1, source)

        groups = slice(0, plan.num_groups)
        inside = page < np.asarray(layout.capacity)[groups, None]
        number = cache.row(row).pages[jnp.where(inside, layout.first[groups, None] + page, 0)]
        touched = inside & (page * size < length[:, None]) & (number != NO_PAGE)
        pages = jnp.where(touched, number, -1)
        chunk = slots - tail_kv.shape[3]
        given = (cache.pool, keys, values, tail_kv)
        run = kernel_or(keep.write_pages, keep.write_pages_reference, "Writing kept entries")
        pool = run(*given, source=source, pages=pages, heads=plan.head_at, chunk=chunk)

    return replace(
        cache,
        pool=pool,
        tokens=cache.tokens.at[row].set(after, mode="drop"),
        tail=cache.tail.at[row].set(0, mode="drop"),
    )


def write_rings(
    plan: CachePlan,
    cache: Cache,
    chunk: RingChunk,
    keys: Sequence[jax.Array],
    values: Sequence[jax.Array],
    start: jax.Array | None = None,
) -> Cache:
    """Write the end of a chunk into the row's rings; `keys` and `values` of each sliding-window layer [T, K, D].

    Of these the chunk's begin at `start` i32[].
    """
    assert plan.rings
    heads, size = plan.rings.head_at, keys[0].shape[0]
    with jax.named_scope("write_rings"):
        pages, rows = chunk_pages(plan.rings, chunk, size)
        # All candidates lie in the chunk: the tail that the kernel knows is one row that nobody asks for.
        tail = jnp.zeros((2, *heads.shape, 1, keys[0].shape[-1]), keys[0].dtype)
        first = 1 if start is None else 1 + start
        source = jnp.where(rows < 0, -1, jnp.minimum(rows + first, size))
        source = jnp.broadcast_to(source, (*heads.shape, len(rows)))
        run = kernel_or(keep.write_pages, keep.write_pages_reference, "Writing rings")
        pool = run(cache.pool, keys, values, tail, source=source, pages=pages, heads=heads, chunk=size)
    return replace(cache, pool=pool)


def append(
    plan: CachePlan,
    cache: Cache,
    slots: Slots,
    new: Sequence[jax.Array],
) -> Cache:
    """Write one token of every layer into the pages of its row and count it.

    `new` of each layer [B, K, G + 2, D], keys and values last in a head, sliding-window layers after the others. Empty
    slots and tokens beyond a row's capacity are dropped.
    """
    layout, lengths, heads = cache.layout, slots.lengths, plan.head_at
    if rings := plan.rings:
        slot = (slots.tokens % rings.slots)[:, None]
        lengths = jnp.concatenate([lengths, jnp.broadcast_to(slot, (len(slot), rings.num_groups))], axis=1)
        in_rings = np.where(rings.head_at < 0, -1, plan.group_of.size + rings.head_at)
        heads = np.concatenate([heads, in_rings])
    run = kernel_or(kernels.append, kernels.append_reference, "Appending")
    pool = run(
        cache.pool,
        new,
        lengths=lengths,
        rows=slots.rows,
        table=cache.table,
        first=layout.first,
        capacity=np.asarray(layout.capacity, np.int32),
        heads=heads,
    )
    return replace(cache, pool=pool, tail=cache.tail.at[slots.rows].add(1, mode="drop"))
