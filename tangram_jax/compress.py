"""Which candidates each head keeps after a chunk, and writing them into their reserved pages.

Candidates are what a row has not locked yet: its previous tail (trailing window and generated tokens), then the chunk.
Of these each head locks its own best, as many as the plan's law adds, and keeps the new trailing window whole after
them. All heads of all layers are done at once, after the forward pass, which only read the pool.
"""

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tangram_jax.cache import NO_PAGE, Cache
from tangram_jax.plan import CachePlan


class Candidates(NamedTuple):
    """The candidates of one row: C = tail capacity + T, the tail right-aligned, so that positions are contiguous."""

    row: jax.Array  # i32[]
    before: jax.Array  # i32[]: tokens of the row before the chunk, p0
    valid_tokens: jax.Array  # i32[]: of the chunk
    positions: jax.Array  # i32[C], true positions
    valid: jax.Array  # bool[M, C]: exists, in each group


def tail_capacity(plan: CachePlan, cache: Cache) -> int:
    """Most entries that a row has unlocked: the trailing window and a whole tail."""
    return plan.window + cache.layout.max_tail


def candidates(plan: CachePlan, cache: Cache, row: jax.Array, chunk: int, count: jax.Array) -> Candidates:
    """What a chunk of `chunk` token slots, `count` of them valid, lays open for decision in `row`."""
    capacity = tail_capacity(plan, cache)
    tokens, tail = cache.tokens[row], cache.tail[row]
    unlocked = plan.lengths(tokens) - plan.locked(tokens) + tail  # [M]
    c = np.arange(capacity + chunk)
    valid = (c >= capacity - unlocked[:, None]) & (c < capacity + count)
    before = tokens + tail
    return Candidates(row, before, count, before - capacity + c, valid)


def read_tail(plan: CachePlan, cache: Cache, row: jax.Array) -> jax.Array:
    """The unlocked entries of `row` in every page column: [2, M, Hp, tail capacity, D], right-aligned.

    Columns of entries that do not exist hold whatever lies in some page.
    """
    capacity, layout = tail_capacity(plan, cache), cache.layout
    length = plan.lengths(cache.tokens[row]) + cache.tail[row]  # [M]
    entry = length[:, None] - capacity + np.arange(capacity)  # [M, W]
    entry = jnp.clip(entry, 0, np.asarray(layout.capacity)[:, None] * plan.page_size - 1)
    page = cache.table[row][layout.first[:, None] + entry // plan.page_size]
    taken = cache.pool[page, :, :, entry % plan.page_size]  # [M, W, 2, Hp, D]
    return taken.transpose(2, 0, 3, 1, 4)


def keep(plan: CachePlan, cache: Cache, what: Candidates, scores: jax.Array, kv: jax.Array) -> Cache:
    """Lock the best candidates of every head, write them and the trailing window, and set the row's counts.

    `scores` f32[M, Hp, C] (higher = keep), `kv` [2, M, Hp, C, D]. Ties go to the earlier position. Entries beyond what
    the pages hold are never written: the plan's law gives the count, the reservation the pages.
    """
    size, layout = plan.page_size, cache.layout
    row, slots = what.row, what.positions.shape[0]
    after = what.before + what.valid_tokens
    locked_before = plan.locked(cache.tokens[row])  # [M]
    locked_after, length = plan.locked(after), plan.lengths(after)
    adds = jnp.maximum(locked_after - locked_before, 0)
    window = length - locked_after

    with jax.named_scope("select"):
        open_ = what.valid & (what.positions < after - window[:, None])  # [M, C]
        scores = jnp.where(what.positions < plan.sinks, jnp.inf, scores.astype(jnp.float32))
        scores = jnp.where(open_[:, None], scores, -jnp.inf)
        # One stable sort: invalid candidates come last, whatever their scores (also where a score is -inf or NaN).
        badness = jnp.where(jnp.isnan(scores), jnp.inf, -scores)
        rank = (~open_[:, None]).astype(jnp.int32) + jnp.zeros(scores.shape, jnp.int32)
        iota = lax.broadcasted_iota(jnp.int32, scores.shape, 2)
        order = lax.sort((rank, badness, iota), dimension=-1, is_stable=True, num_keys=2)[2]

    with jax.named_scope("write"):
        # Destination j of a group is entry locked_before + j; pages are written whole, so walk over pages.
        pages = slots // size + 2
        page = locked_before[:, None] // size + np.arange(pages)  # [M, pages]
        entry = page[:, :, None] * size + np.arange(size)
        j = (entry - locked_before[:, None, None]).reshape(len(adds), -1)  # [M, pages * P]
        newest = j - adds[:, None] + (after - window - what.positions[0])[:, None]
        best = jnp.take_along_axis(order, jnp.clip(j, 0, slots - 1)[:, None], axis=2)
        source = jnp.where((j < adds[:, None])[:, None], best, jnp.clip(newest, 0, slots - 1)[:, None])
        groups, columns = np.ogrid[: source.shape[0], : source.shape[1]]
        fresh = kv[:, groups[..., None], columns[..., None], source]  # [2, M, Hp, pages * P, D]
        fresh = fresh.reshape(*fresh.shape[:3], pages, size, -1).transpose(1, 3, 0, 2, 4, 5)

        inside = page < np.asarray(layout.capacity)[:, None]
        number = cache.table[row][jnp.where(inside, layout.first[:, None] + page, 0)]
        touched = inside & (page * size < length[:, None]) & (number != NO_PAGE)
        # The first page begins with entries that are locked already: those stay.
        old = cache.pool[number[:, 0]]  # [M, 2, Hp, P, D]
        stays = (np.arange(size) < (locked_before % size)[:, None])[:, None, None, :, None]
        fresh = fresh.at[:, 0].set(jnp.where(stays, old, fresh[:, 0]))
        target = jnp.where(touched, number, cache.num_pages)
        pool = cache.pool.at[target].set(fresh.astype(cache.pool.dtype), mode="drop")

    return replace(
        cache,
        pool=pool,
        tokens=cache.tokens.at[row].set(after),
        tail=cache.tail.at[row].set(0),
    )
