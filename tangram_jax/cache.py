"""The page pool and its block tables: one pytree, updated by pure functions under jit, the buffers donated.

One pool serves all layers and groups. A request (or a stored session) is a row of the flat ragged table, with a fixed
stretch of columns for each group. Two numbers say what a row holds: `tokens`, the count that has been compressed under
the plan, and `tail`, how many came after and are kept whole; group m holds plan.lengths(tokens, budgets)[m] + tail
entries, where the row's `budgets` are the plan's unless it was given others while it was empty (`set_budgets`). The
last ones, min(window, length) + tail of them, are the most recent positions in order, the same for every head. The groups
of sliding-window layers stand at the end of a row and keep rings instead (`rings.py`).

The host never reads any of this back: it keeps the same two numbers and counts pages with the plan.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from pallas_kernels import byte_pages
from tangram_jax.plan import MAX_TOKENS, CachePlan
from tangram_jax.rings import SlidingLayers
from tangram_jax.row_numbers import at_least, known_rows, one_row, whole

POOL_AXES = ("pages", None, "kv_heads", None, None)  # logical axes, see models.sharding
NO_PAGE = -1


@dataclass(frozen=True)
class RowLayout:
    """Where each group's page numbers lie in a row of the table. Hashable: part of the cache's static structure."""

    capacity: tuple[int, ...]  # pages of each group
    max_tokens: int
    max_tail: int
    plan: str = ""  # its identity

    @property
    def width(self) -> int:
        return sum(self.capacity)

    @property
    def first(self) -> np.ndarray:
        """int32[page lists]: column of each group's first page."""
        return np.concatenate([[0], np.cumsum(self.capacity)[:-1]]).astype(np.int32)

    @property
    def group(self) -> np.ndarray:
        """int32[R]: the group of each column."""
        return np.repeat(np.arange(len(self.capacity), dtype=np.int32), self.capacity)

    @property
    def index(self) -> np.ndarray:
        """int32[R]: which page of its group each column is."""
        return (np.arange(self.width) - self.first[self.group]).astype(np.int32)


@struct.dataclass
class Cache:
    """The whole KV state of the engine. Build it with `init_cache`; every function returns a new one."""

    pool: jax.Array  # [num_pages, 2, Hp, P, D]: keys, values; or of bytes: see `byte_pages`
    table: jax.Array  # i32[rows, R]: page numbers, NO_PAGE where none is owned
    free: jax.Array  # i32[num_pages]: a stack of free pages
    num_free: jax.Array  # i32[]
    owners: jax.Array  # i32[num_pages]: how many rows own each page
    tokens: jax.Array  # i32[rows]: tokens under the plan's law
    tail: jax.Array  # i32[rows]: tokens since, kept whole (down to -window after a rollback)
    budgets: jax.Array  # i32[rows, M]: of each group, in parts per million
    layout: RowLayout = struct.field(pytree_node=False)

    @property
    def num_pages(self) -> int:
        return self.pool.shape[0]

    @property
    def num_rows(self) -> int:
        return self.table.shape[0]

    def known(self, rows: Any) -> jax.Array:
        """See `known_rows`."""
        return known_rows(rows, self.num_rows)

    def row(self, row: Any) -> "Row":
        """What is known of `row` i32[...]; of a number of no row that it is empty."""
        row = self.known(row)
        return Row(
            pages=self.table.at[row].get(mode="fill", fill_value=NO_PAGE),
            tokens=self.tokens.at[row].get(mode="fill", fill_value=0),
            tail=self.tail.at[row].get(mode="fill", fill_value=0),
            budgets=self.budgets.at[row].get(mode="clip"),
        )


class Row(NamedTuple):
    """One row of the cache, or several."""

    pages: jax.Array  # i32[..., R]
    tokens: jax.Array  # i32[...]
    tail: jax.Array  # i32[...]
    budgets: jax.Array  # i32[..., M]


def row_layout(
    plan: CachePlan, max_tokens: int, max_tail: int, budgets: np.ndarray | None = None
) -> RowLayout:
    """Columns for rows that hold up to `max_tokens` tokens, at most `max_tail` of them in the tail.

    `budgets` i32[M]: the rows' own, by default the largest that any may have.
    """
    budgets = plan.most_ppm if budgets is None else budgets
    entries = np.minimum(plan.lengths(max_tokens, budgets) + max_tail, max_tokens)
    rings = plan.group_pages(max_tokens)[plan.num_groups :]
    pages = [*-(-entries // plan.page_size), *rings]
    return RowLayout(tuple(int(p) for p in pages), max_tokens, max_tail, plan.identity)


def init_cache(
    plan: CachePlan,
    model_config: Any,
    *,
    num_pages: int,
    max_requests: int,
    max_tokens: int | None = None,
    max_tail: int = 256,
    dtype: Any = jnp.float32,
) -> Cache:
    """An empty cache of `num_pages` pages and `max_requests` rows.

    `max_tokens`: longest conversation of a row (default: the model's positions, at most plan.MAX_TOKENS); `max_tail`: most
    tokens that a row keeps whole before they must be compressed; `dtype`: of the parameters, as the GPU kernels take
    16-bit pages of the activations' dtype alone, or uint8 for 8-bit keys and values with a scale for each entry
    (`pallas_kernels.byte_pages`), whatever the parameters are. Raises ValueError when the plan is for another model, for
    other dtypes, and for sizes that are no whole numbers or out of range.
    """
    if jnp.dtype(dtype) not in ("float32", "bfloat16", "float16") and not byte_pages.is_bytes(dtype):
        raise ValueError(
            f"a cache of {jnp.dtype(dtype)}: write float32, bfloat16 or float16, or uint8 for 8-bit keys and values"
        )
    check_model(plan, model_config)
    num_pages, max_requests = at_least(1, num_pages=num_pages, max_requests=max_requests)
    (max_tail,) = at_least(0, max_tail=max_tail)
    if plan.rings and max_tail > plan.rings.max_tail:
        raise ValueError(
            f"max_tail is {max_tail}, the plan's rings hold {plan.rings.max_tail}: "
            f"build it with sliding=SlidingLayers.of(model_config, {max_tail})"
        )
    if max_tokens is None:
        max_tokens = min(model_config.max_positions, MAX_TOKENS)
    (max_tokens,) = at_least(1, max_tokens=max_tokens)
    if max_tokens > MAX_TOKENS:
        raise ValueError(f"max_tokens must lie between 1 and {MAX_TOKENS}; got {max_tokens}")
    layout = row_layout(plan, max_tokens, max_tail)
    if not layout.width:
        raise ValueError("no group may keep anything: raise the budgets, min_entries or max_tail")
    return Cache(
        pool=jnp.zeros((num_pages, *plan.page_shape(model_config.head_dim, dtype)), dtype),
        table=jnp.full((max_requests, layout.width), NO_PAGE, jnp.int32),
        free=jnp.arange(num_pages - 1, -1, -1, dtype=jnp.int32),
        num_free=jnp.int32(num_pages),
        owners=jnp.zeros(num_pages, jnp.int32),
        tokens=jnp.zeros(max_requests, jnp.int32),
        tail=jnp.zeros(max_requests, jnp.int32),
        budgets=jnp.tile(jnp.asarray(plan.group_ppm), (max_requests, 1)),
        layout=layout,
    )


def check_plan(plan: CachePlan, cache: Cache) -> None:
    """Raises ValueError where the pages or rows of `cache`, or what lies in them, are not as `plan` has them."""
    layout, pool = cache.layout, cache.pool
    pages = pool.shape[2], byte_pages.page_size(pool)
    if (plan.heads_per_page, plan.page_size) != pages or layout != row_layout(
        plan, layout.max_tokens, layout.max_tail
    ):
        raise ValueError(
            f"the cache is of another plan, with pages of {pages[0]} heads and {pages[1]} tokens: give the plan that "
            "init_cache was given"
        )


def with_pages(plan: CachePlan, cache: Cache, rows: jax.Array, *held: tuple[Any, Any]) -> jax.Array:
    """`rows` i32[N], and `cache.num_rows` for each that has not reserved what it is to hold, or whose tail is too long.

    `held`: one or several (tokens i32[N], tail i32[N]) of `CachePlan.group_pages`.
    """
    layout, budgets = cache.layout, cache.row(rows).budgets
    pages = jnp.stack([jax.vmap(plan.group_pages)(*counts, budgets) for counts in held]).max(axis=0)
    owned = cache.table.at[rows[:, None], layout.first + jnp.maximum(pages - 1, 0)].get(
        mode="fill", fill_value=NO_PAGE
    )
    there = (pages <= 0) | ((pages <= np.asarray(layout.capacity)) & (owned != NO_PAGE))
    longest = jnp.stack([tail for _, tail in held]).max(axis=0)
    return jnp.where(there.all(axis=1) & (longest <= layout.max_tail), rows, cache.num_rows)


def check_model(plan: CachePlan, model_config: Any) -> None:
    """Raises ValueError where `plan` is for other layers or heads than the model's."""
    heads = (len(model_config.full_layers), model_config.num_kv_heads)
    if plan.group_of.shape != heads:
        raise ValueError(
            f"the profile has {plan.group_of.shape} (layers, KV heads), model {model_config.name} has {heads}: "
            "calibrate a profile for this model (python -m calibrate)"
        )
    wanted, rings = SlidingLayers.of(model_config), plan.rings
    if (wanted and (wanted.count, wanted.window)) != (rings and (rings.layers, rings.window)):
        raise ValueError(
            f"the plan and model {model_config.name} do not have the same sliding-window layers: "
            "build it with sliding=SlidingLayers.of(model_config)"
        )


def _return_pages(cache: Cache, pages: jax.Array, given: jax.Array, *, shared: bool = False) -> Cache:
    """One owner fewer for `pages` i32[n] where `given` bool[n]; those without any go back on the stack.

    `shared`: some may be there more than once.
    """
    place = jnp.where(given, pages, cache.num_pages)
    owners = cache.owners.at[place].add(-1, mode="drop")
    freed = given & (owners[pages] == 0)
    if shared:
        order = jnp.arange(pages.size, dtype=jnp.int32)
        first = jnp.full_like(owners, pages.size).at[place].min(order, mode="drop")
        freed &= first[pages] == order
    at = jnp.where(freed, cache.num_free + jnp.cumsum(freed) - 1, cache.num_pages)
    return replace(
        cache,
        owners=owners,
        free=cache.free.at[at].set(pages, mode="drop"),
        num_free=cache.num_free + freed.sum(dtype=jnp.int32),
    )


def _take_pages(cache: Cache, wanted: jax.Array) -> tuple[Cache, jax.Array]:
    """A fresh page for every True of `wanted` bool[N, n]: (cache, i32[N, n] with NO_PAGE elsewhere).

    All or nothing for each of the N: from the first on for which too few are free none is taken.
    """
    fits = jnp.cumsum(wanted.sum(axis=1, dtype=jnp.int32)) <= cache.num_free
    wanted &= fits[:, None]
    pages = cache.free[cache.num_free - jnp.cumsum(wanted.reshape(-1)).reshape(wanted.shape)]
    owners = cache.owners.at[jnp.where(wanted, pages, cache.num_pages)].set(1, mode="drop")
    taken = wanted.sum(dtype=jnp.int32)
    return replace(cache, owners=owners, num_free=cache.num_free - taken), jnp.where(wanted, pages, NO_PAGE)


def _columns(plan: CachePlan, cache: Cache, rows: jax.Array, tokens: jax.Array, tail: jax.Array) -> jax.Array:
    """bool[N, R]: the columns of `rows` i32[N] that plan.group_pages(tokens, tail) pages of each group fill.

    `tokens` and `tail`: one number for all rows, or i32[N].
    """
    tokens = jnp.broadcast_to(whole("tokens", tokens), rows.shape)
    tail = jnp.broadcast_to(whole("tail", tail), rows.shape)
    pages = jax.vmap(plan.group_pages)(tokens, tail, cache.row(rows).budgets)
    needed = jnp.minimum(pages, np.asarray(cache.layout.capacity, np.int32))
    return jnp.asarray(cache.layout.index) < needed[:, cache.layout.group]


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def reserve(plan: CachePlan, cache: Cache, row: jax.Array, tokens: jax.Array, tail: jax.Array) -> Cache:
    """Make `row` own at least plan.group_pages(tokens, tail) pages of each group; what it owns already stays.

    The caller has counted: the missing pages must be free, or none is taken, and steps leave the row out. A row's capacity
    bounds each group. Of a number of no row nothing happens, here and in the functions below. Of several rows i32[N], all
    different, with `tokens` and `tail` i32[N], the same as of one after the other, but that none behind the first that
    finds too few gets any.

    Raises ValueError, as they do, where the cache is of another plan, and TypeError where a number is not whole.
    """
    check_plan(plan, cache)
    rows = jnp.atleast_1d(cache.known(row))
    pages = cache.row(rows).pages
    wanted = _columns(plan, cache, rows, tokens, tail) & (rows < cache.num_rows)[:, None]
    cache, fresh = _take_pages(cache, wanted & (pages == NO_PAGE))
    return replace(cache, table=cache.table.at[rows].set(jnp.where(pages == NO_PAGE, fresh, pages)))


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def trim(plan: CachePlan, cache: Cache, row: jax.Array, tokens: jax.Array, tail: jax.Array) -> Cache:
    """Give back what `row` owns beyond plan.group_pages(tokens, tail) pages of each group, but nothing that it holds.

    Of several rows i32[N], all different, with `tokens` and `tail` i32[N], the same as of one after the other.
    """
    check_plan(plan, cache)
    rows = jnp.atleast_1d(cache.known(row))
    of = cache.row(rows)
    needed = _columns(plan, cache, rows, tokens, tail) | _columns(plan, cache, rows, of.tokens, of.tail)
    given = (of.pages != NO_PAGE) & ~needed  # no other row's: these hold what both do
    cache = _return_pages(cache, of.pages.reshape(-1), given.reshape(-1))
    return replace(cache, table=cache.table.at[rows].set(jnp.where(given, NO_PAGE, of.pages)))


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def release(plan: CachePlan, cache: Cache, row: jax.Array) -> Cache:
    """Give back every page of `row`, one or several i32[N], all different, and forget its tokens and own budgets."""
    check_plan(plan, cache)
    row = cache.known(row)
    pages = cache.row(row).pages.reshape(-1)
    cache = _return_pages(cache, pages, pages != NO_PAGE, shared=row.size > 1)
    return replace(
        cache,
        table=cache.table.at[row].set(NO_PAGE),
        tokens=cache.tokens.at[row].set(0),
        tail=cache.tail.at[row].set(0),
        budgets=cache.budgets.at[row].set(plan.group_ppm),
    )


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def set_budgets(plan: CachePlan, cache: Cache, row: jax.Array, budgets: jax.Array) -> Cache:
    """Compress `row` under `budgets` i32[M] (`plan.budgets_at`) until it is released. Where it is not empty nothing happens.

    Of several rows i32[N], all different, each under its own: i32[N, M]. Raises ValueError where they are something else.
    """
    check_plan(plan, cache)
    row, budgets = cache.known(row), jnp.asarray(budgets)
    if budgets.shape != (*row.shape, plan.num_groups) or not jnp.issubdtype(budgets.dtype, jnp.integer):
        raise ValueError(
            f"budgets of {budgets.dtype}{[*budgets.shape]}: write those of plan.budgets_at(retention), parts per million of "
            f"{plan.num_groups} groups"
        )
    of = cache.row(row)
    row = jnp.where((of.tokens == 0) & (of.tail == 0), row, cache.num_rows)
    return replace(cache, budgets=cache.budgets.at[row].set(jnp.clip(budgets, 0, plan.most_ppm)))


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def fork(plan: CachePlan, cache: Cache, src: jax.Array, dst: jax.Array) -> Cache:
    """Make the empty row `dst` a copy of row `src`, reserved tail pages included.

    Full pages of locked entries are never written again and get a second owner; the others (at most window + tail
    entries of each group) are copied. Needs plan.pages(tokens, tail) - plan.shared_pages(tokens) free pages, where `tail`
    is what the row has reserved, both under the row's budgets; with fewer, or where `dst` is not empty, nothing happens.
    """
    check_plan(plan, cache)
    layout, size = cache.layout, plan.page_size
    src, dst = one_row(src, cache.num_rows), one_row(dst, cache.num_rows)
    pages, tokens, tail, budgets = cache.row(src)
    held = pages != NO_PAGE
    full = plan.shared_group_pages(tokens, budgets)
    shared = held & (layout.index < full[layout.group])
    enough = (held & ~shared).sum() <= cache.num_free
    enough &= (src < cache.num_rows) & (dst < cache.num_rows)
    before = cache.row(dst)
    enough &= (before.pages == NO_PAGE).all()
    shared &= enough
    cache, (fresh,) = _take_pages(cache, (held & enough & ~shared)[None])
    cache = replace(
        cache,
        owners=cache.owners.at[jnp.where(shared, pages, cache.num_pages)].add(1, mode="drop"),
        table=cache.table.at[dst].set(jnp.where(enough, jnp.where(shared, pages, fresh), before.pages)),
        tokens=cache.tokens.at[dst].set(jnp.where(enough, tokens, before.tokens)),
        tail=cache.tail.at[dst].set(jnp.where(enough, tail, before.tail)),
        budgets=cache.budgets.at[dst].set(jnp.where(enough, budgets, before.budgets)),
    )
    # The pages to copy lie together: at most this many of each group, from its first unshared page on.
    most = -(-(plan.window + layout.max_tail) // size) + 1
    compressed = slice(0, plan.num_groups)
    pool = _copy(cache.pool, layout, compressed, full, np.arange(most), pages, fresh)
    if plan.rings:
        rings = slice(plan.num_groups, None)

        # One page of each ring at a time: all of them at once would be a copy of hundreds of megabytes.
        def one(i: jax.Array, pool: jax.Array) -> jax.Array:
            return _copy(pool, layout, rings, full, i[None], pages, fresh)

        pool = lax.fori_loop(0, plan.rings.pages, one, pool)
    return replace(cache, pool=pool)


def _copy(
    pool: jax.Array, layout: RowLayout, groups: slice, first: Any, which: Any, src: jax.Array, dst: jax.Array
) -> jax.Array:
    """Copy pages first[m] + `which` i32[n] of each of the `groups` from row `src` i32[R] to `dst`, where that has any."""
    column = first[groups, None] + which
    inside = column < np.asarray(layout.capacity, np.int32)[groups, None]
    column = jnp.where(inside, layout.first[groups, None] + column, 0).reshape(-1)
    target = jnp.where(inside.reshape(-1) & (dst[column] != NO_PAGE), dst[column], pool.shape[0])
    return pool.at[target].set(pool[src[column]], mode="drop")


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def rollback(plan: CachePlan, cache: Cache, row: jax.Array, count: jax.Array) -> Cache:
    """Forget the last `count` i32[...] tokens of `row` i32[...], one or several.

    At most as many as its tail holds, and of the compressed ones as many as every group has whole at its end, min(window,
    entries of the smallest group). The entries go, the pages stay reserved. After reaching into the window, the next chunk
    must bring the row to at least as many tokens as it had been compressed at.
    """
    check_plan(plan, cache)
    of = cache.row(row)
    at_end = jnp.minimum(plan.lengths(of.tokens, of.budgets).min(axis=-1), plan.window)
    count = jnp.clip(whole("count", count), 0, jnp.maximum(of.tail + at_end, 0))
    return replace(cache, tail=cache.tail.at[cache.known(row)].add(-count))
