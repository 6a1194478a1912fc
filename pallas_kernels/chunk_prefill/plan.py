"""How the work of a prefill chunk is divided: tiles of queries, each with the blocks of entries that it attends to.

A tile is `positions` consecutive tokens of one request, with all G queries of one KV head. Its blocks are, in this order,
those that need a mask (the diagonal of the chunk, the far edge of a sliding window, the history's last partial block)
and those that do not (the rest of the history, then of the chunk). Tiles are ordered by falling work and dealt to the CTAs
back and forth. All of it is a few array operations on the device.

Where tiles are few for the CTAs and of unequal work, long histories are cut into pieces that are tiles of their own, first
in the order. What they and the tile that they were cut from come to is put together at the end of the kernel, by all CTAs:
each has done all of its tiles before it waits for others, so nothing deadlocks.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.chunk_prefill import cuts
from pallas_kernels.chunk_prefill.columns import (
    ALIGN,
    AT,
    CHUNK_FIRST,
    CHUNK_FREE,
    CHUNK_LAST,
    COLUMN,
    DIAGONAL,
    END,
    FREE,
    HEAD,
    HISTORY_FIRST,
    LENGTH,
    MASKED,
    MERGE_COLUMNS,
    NUMBER,
    OFFSET,
    PART,
    PIECES,
    ROW,
    SEGMENT,
    TILE_COLUMNS,
    stack,
)
from pallas_kernels.chunk_prefill.cuts import Pieces, cut_histories, most_pieces
from pallas_kernels.layered_plan import LayeredPlan

SYNC_COLUMNS = 8  # at least twice as many as computing warpgroups
i32 = jnp.int32

SORTED_BY_COUNTING = 4096  # up to so many tiles, comparing all pairs is faster than a sort


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ChunkPlan(LayeredPlan):
    """The division of one chunk's attention."""

    tiles: jax.Array  # i32[L, n, TILE_COLUMNS], by falling work
    count: jax.Array  # i32[L]: how many of them have any
    table: jax.Array  # i32[rows * R], the same for all layers
    starts: jax.Array  # i32[B]
    sizes: jax.Array  # i32[B]
    behind: jax.Array  # i32[B]
    key_starts: jax.Array  # i32[B]
    merges: jax.Array  # i32[L, 1 + n, MERGE_COLUMNS]: the tiles whose histories are cut
    sync: jax.Array  # i32[L, tiles, SYNC_COLUMNS], zero between kernels: they count results and readers there
    heads: jax.Array  # i32[L, B, K, 3]: length, offset, column; for the reference
    page_size: int = dataclasses.field(metadata={"static": True})
    positions: int = dataclasses.field(metadata={"static": True})
    block: int = dataclasses.field(metadata={"static": True})
    window: int | None = dataclasses.field(metadata={"static": True})
    most_pieces: int = dataclasses.field(metadata={"static": True})  # tiles that are pieces, at most


def plan_chunk(
    lengths: jax.Array | np.ndarray,
    table: jax.Array,
    first: jax.Array | np.ndarray,
    column: jax.Array | np.ndarray,
    *,
    num_tokens: int,
    page_size: int,
    positions: int,
    block: int,
    num_layers: int = 1,
    starts: jax.Array | np.ndarray | None = None,
    sizes: jax.Array | np.ndarray | None = None,
    rows: jax.Array | None = None,
    window: int | None = None,
    behind: jax.Array | np.ndarray | None = None,
    key_starts: jax.Array | np.ndarray | None = None,
    num_ctas: int = 132,
) -> ChunkPlan:
    """Divides the attention of a chunk, for all layers at once.

    Args:
      lengths: i32[B, H] history entries of each KV head, H = L * K heads in (layer, head) order. 0 or less: none. NumPy
        where it is known that there is no history at all.
      table: i32[rows, R] flat rows of page numbers.
      first: i32[H] position of each head's pages in a table row.
      column: i32[H] column of each head within its pages.
      num_tokens: T, rows of the packed chunk.
      page_size: entries in a page.
      positions, block: tokens of a tile and entries of a step, from the tuning.
      num_layers: L.
      starts: i32[B] row where each request's tokens begin, a multiple of 8; increasing.
      sizes: i32[B] tokens of each request. Without both: B requests of equal size, one after the other.
      rows: i32[B] table row of each request; `arange(B)` if None.
      window: a query sees the `window` last of its request's own keys, itself included. All of the history is visible.
      behind: i32[B] own keys of each request that come before its first query's: what a window still shows of earlier
        tokens, in order of positions. None: none.
      key_starts: i32[B] row where each request's own keys begin, a multiple of 8; `starts` if None.
      num_ctas: CTAs that share the work.
    """
    batch, all_heads = lengths.shape
    if all_heads % num_layers:
        raise ValueError(f"{all_heads} heads do not divide into {num_layers} layers")
    own = _own_blocks(batch, num_tokens, positions, block, window, starts, sizes, behind, key_starts)
    table_row = jnp.arange(batch, dtype=i32) if rows is None else rows.astype(i32)

    def by_layer(x: jax.Array) -> jax.Array:  # [B, H] -> [L, B, K]
        return x.reshape(batch, num_layers, -1).swapaxes(0, 1)

    length = by_layer(jnp.maximum(lengths.astype(i32), 0))
    offset = by_layer(table_row[:, None] * table.shape[1] + jnp.asarray(first, i32)[None])
    column = by_layer(jnp.broadcast_to(jnp.asarray(column, i32)[None], lengths.shape))
    # Few enough tiles are cut into pieces.
    heads = all_heads // num_layers
    none = isinstance(lengths, np.ndarray) and not (lengths > 0).any()
    cut = own.blocks * heads <= cuts.CUT_BELOW * num_ctas and not none
    most = (
        int(max((most_pieces(n, heads, num_ctas) for n in range(1, own.blocks + 1)), default=0)) if cut else 0
    )
    tiles, count, merges = jax.vmap(lambda *x: _tiles(own, *x, block=block, num_ctas=num_ctas, most=most))(
        length, offset, column
    )
    # Zeros that the compiler cannot know, so that no other constant shares their memory: the kernel writes there.
    zero = jnp.minimum(length[:, :1, :1], 0)
    return ChunkPlan(
        tiles=tiles,
        count=count,
        merges=merges,
        table=table.reshape(-1),
        starts=jnp.asarray(own.starts),
        sizes=jnp.asarray(own.sizes),
        behind=jnp.asarray(own.behind),
        key_starts=jnp.asarray(own.key_starts),
        sync=jnp.broadcast_to(zero, (num_layers, own.blocks * length.shape[2], SYNC_COLUMNS)),
        heads=jnp.stack([length, offset, column], axis=-1),
        index=None,
        page_size=page_size,
        positions=positions,
        block=block,
        window=window,
        most_pieces=most,
    )


def _tiles(
    own: "Own",
    length: jax.Array,
    offset: jax.Array,
    column: jax.Array,
    *,
    block: int,
    num_ctas: int,
    most: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(i32[n, TILE_COLUMNS], how many have any work, merges) of one layer, from i32[B, K] each; `most` tiles are pieces."""
    heads = length.shape[1]
    blocks, request = own.blocks, own.request

    # Tiles are [blocks of queries, K].
    entries = length[request]
    work = -(-length // block)  # [B, K]
    pieces = cut_histories(own, work, length // block, num_ctas, most) if most else Pieces.none(length.shape)
    work = work - pieces.cut
    if own.alone:
        place = _places(own.work, work[0])
    else:
        place = _places_by_pairs(jnp.where(own.there[:, None], own.work[:, None] + work[request], 0))
    cut, number = (
        jnp.asarray(pieces.cut)[request],
        np.arange(blocks * heads, dtype=np.int32).reshape(blocks, heads),
    )
    values: dict[int, Any] = {
        ROW: own.row[:, None],
        END: own.end[:, None],
        SEGMENT: own.segment[:, None],
        HEAD: np.arange(heads, dtype=np.int32)[None],
        LENGTH: entries,
        OFFSET: offset[request],
        COLUMN: column[request],
        MASKED: own.masked[:, None] + (entries % block > 0),
        FREE: own.free[:, None] + entries // block - cut,
        DIAGONAL: own.diagonal[:, None],
        CHUNK_LAST: own.last[:, None],
        CHUNK_FIRST: own.first[:, None],
        CHUNK_FREE: own.first_free[:, None],
        HISTORY_FIRST: cut,
        PART: most + number,
        PIECES: jnp.asarray(pieces.count)[request],
        AT: own.at[:, None],
        NUMBER: number,
    }
    tiles = stack(values, (blocks, heads)).reshape(-1, TILE_COLUMNS)
    front, cut_rows, merges = jnp.zeros((0, TILE_COLUMNS), i32), i32(0), jnp.zeros((1, MERGE_COLUMNS), i32)
    if most:
        front, cut_rows, merges = pieces.rows(own, tiles, most), pieces.tiles, pieces.merges(own, tiles)
    rows_of = jnp.concatenate([front, jnp.zeros_like(tiles)])
    placed = rows_of.at[cut_rows + place].set(tiles, unique_indices=True, mode="promise_in_bounds")
    return placed, (own.count * heads + cut_rows).astype(i32), merges


class Own(NamedTuple):
    """Blocks of queries of all requests in a line, and the blocks of the chunk that each attends to. NumPy where known."""

    known: bool
    blocks: int  # how many at most; the arrays below have so many
    count: Any  # how many there are
    starts: Any  # i32[B]
    sizes: Any  # i32[B]
    behind: Any  # i32[B]
    key_starts: Any  # i32[B]
    first_of: Any  # i32[B]: the first block of each request
    blocks_of: Any  # i32[B]: how many are of it
    request: Any
    there: Any
    row: Any
    end: Any
    segment: Any
    at: Any  # own keys of the request before the block's first query
    masked: Any  # blocks of the chunk with a mask
    free: Any  # and without
    diagonal: Any  # the former on the diagonal
    last: Any
    first: Any
    first_free: Any

    @property
    def alone(self) -> bool:
        """One request, of known size: all but the histories is then known."""
        return self.known and len(self.sizes) == 1

    @property
    def work(self) -> Any:
        return self.masked + self.free


def _own_blocks(
    batch: int,
    num_tokens: int,
    positions: int,
    block: int,
    window: int | None,
    starts: Any,
    sizes: Any,
    behind: Any,
    key_starts: Any,
) -> Own:
    xp: Any = jnp
    known = behind is None and (starts is None or sizes is None)
    if starts is None or sizes is None:
        if num_tokens % batch or (batch > 1 and num_tokens // batch % ALIGN):
            raise ValueError(
                f"{num_tokens} rows are no {batch} requests of a multiple of {ALIGN}: give starts and sizes"
            )
        starts = np.arange(batch, dtype=np.int32) * (num_tokens // batch)
        sizes = np.full(batch, num_tokens // batch, np.int32)
        xp = np if known else jnp
    behind = np.zeros(batch, np.int32) if behind is None else behind
    key_starts = starts if key_starts is None else key_starts
    starts, sizes, behind, key_starts = (xp.asarray(x, i32) for x in (starts, sizes, behind, key_starts))
    per_request = -(-sizes // positions)  # the last one may be partial
    stop = xp.cumsum(per_request, dtype=i32)
    blocks = int(stop[-1]) if known else -(-num_tokens // positions) + batch - 1
    number = np.arange(blocks, dtype=np.int32)
    request = xp.minimum((number[:, None] >= stop[None]).sum(1, dtype=i32), batch - 1)
    # Of the block's first query within its request, and among its request's own keys.
    row = (number - (stop - per_request)[request]) * positions
    at = row + behind[request]
    until = at + positions - 1
    partly = (at + 1) // block  # the first block of the chunk that some query sees in part
    first = first_free = xp.zeros_like(at)
    if window is not None:
        first = xp.maximum(at - window + 1, 0) // block
        first_free = xp.maximum(xp.clip((until - window) // block + 1, 0, partly), first)
    diagonal = until // block - partly + 1
    return Own(
        known=known,
        blocks=blocks,
        count=stop[-1],
        starts=starts,
        sizes=sizes,
        behind=behind,
        key_starts=key_starts,
        first_of=stop - per_request,
        blocks_of=per_request,
        request=request,
        there=number < stop[-1],
        row=starts[request] + row,
        end=(starts + sizes)[request],
        segment=key_starts[request],
        at=at,
        masked=diagonal + first_free - first,
        free=partly - first_free,
        diagonal=diagonal,
        last=until // block,
        first=first,
        first_free=first_free,
    )


def _places(own: np.ndarray, history: jax.Array) -> jax.Array:
    """i32[blocks * K]: place of each tile by falling work, own[block] + history[head], without a sort."""
    most = int(own.max(initial=0))
    values = np.arange(-1, most + 2)
    # Blocks of a head whose own work is larger.
    more = jnp.asarray((own[None] > values[:, None]).sum(1), jnp.int32)
    equal = jnp.asarray((own[None] == values[:, None]).sum(1), i32)
    work = own[:, None, None] + history[None, :, None]
    at = jnp.clip(work - history[None, None], -1, most + 1) + 1  # [blocks, K, other heads]
    heads = np.arange(history.shape[0])
    ties = jnp.where(heads[:, None] > heads[None], equal[at], 0)
    block = np.arange(own.shape[0])
    earlier = ((own[:, None] == own[None]) & (block[:, None] > block[None])).sum(1, dtype=np.int32)
    return ((more[at] + ties).sum(2, dtype=i32) + earlier[:, None]).reshape(-1)


def _places_by_pairs(work: jax.Array) -> jax.Array:
    """The same for any work."""
    work = work.reshape(-1)
    number = np.arange(work.shape[0], dtype=np.int32)
    if work.shape[0] > SORTED_BY_COUNTING:
        order = jnp.argsort(-work, stable=True)
        return jnp.zeros_like(order).at[order].set(number)
    before = (work[None] > work[:, None]) | ((work[None] == work[:, None]) & (number[None] < number[:, None]))
    return jax.lax.optimization_barrier(before.sum(1, dtype=i32))
