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

from pallas_kernels.layered_plan import LayeredPlan

# Columns of `ChunkPlan.tiles`: first query row, the row after its request's last, the first row of the request's own keys,
# the head; of its history the entries, the place in the flat tables, the column in the page.
ROW, END, SEGMENT, HEAD = range(4)
LENGTH, OFFSET, COLUMN = range(4, 7)
MASKED, FREE, DIAGONAL = range(7, 10)  # blocks with a mask, without one, and on the diagonal
CHUNK_LAST, CHUNK_FIRST, CHUNK_FREE = range(10, 13)  # blocks of the chunk: last, first, first without a mask
HISTORY_FIRST = 13  # the first block of the history without a mask
# A tile's history may be cut into pieces, which other CTAs work on. PIECES: how many others there are, or -1 in a row that
# is one of them; PART: where the tile or piece leaves its result. Modulo `stride` it is the number of the tile's block
# of queries.
PART, PIECES = 14, 15
AT = 16  # own keys of the request that come before the tile's first query
TILE_COLUMNS = 17
# Columns of `ChunkPlan.merges`: a head whose history is cut, the PART of its first piece over `stride`, how many there are.
# Row 0 holds the number of such heads, whose rows follow.
MERGE_HEAD, MERGE_FIRST, MERGE_PIECES = range(3)
# Pieces of all heads of a layer, each a tile for every block of queries: as many as make one tile for each CTA, but at
# least so many.
LEAST_PIECES = 16
MIN_PIECE = 2  # blocks
CUT_FROM = (
    8  # blocks: where no head's history is longer, nothing is cut (a bound that was not measured by itself)
)
# Tiles for each CTA; with more of them whole tiles balance. Measured: a chunk of 512 at retention 0.25 takes 359 us for 622,
# one of 1024 707 for 787; where nothing needs a cut, the kernel is 2% slower for being able to. The results of pieces and
# cut tiles lie in device memory, in float32: 101 MB for 2048 tokens, 8 KV heads of two queries each, D = 256.
CUT_BELOW = 2
SYNC_COLUMNS = 8  # at least twice as many as computing warpgroups
ALIGN = 8  # rows at whose multiples requests begin: loads of swizzled tiles do

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
    merges: jax.Array  # i32[L, 1 + K, 3]: the heads whose histories are cut
    sync: jax.Array  # i32[L, tiles, SYNC_COLUMNS], zero between kernels: they count results and readers there
    heads: jax.Array  # i32[L, B, K, 3]: length, offset, column; for the reference
    page_size: int = dataclasses.field(metadata={"static": True})
    positions: int = dataclasses.field(metadata={"static": True})
    block: int = dataclasses.field(metadata={"static": True})
    window: int | None = dataclasses.field(metadata={"static": True})
    stride: int = dataclasses.field(metadata={"static": True})  # between a tile's parts: its head's tiles
    num_parts: int = dataclasses.field(metadata={"static": True})  # results of pieces and cut tiles at most


def plan_chunk(
    lengths: jax.Array,
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
      lengths: i32[B, H] history entries of each KV head, H = L * K heads in (layer, head) order. 0 or less: none.
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
    cut = own.alone and own.blocks * heads <= CUT_BELOW * num_ctas
    most = max(LEAST_PIECES, num_ctas // max(own.blocks, 1) - heads) if cut else 0
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
        stride=own.blocks,
        num_parts=(most + heads) * own.blocks if cut else 0,
    )


def _tiles(
    own: "_Own",
    length: jax.Array,
    offset: jax.Array,
    column: jax.Array,
    *,
    block: int,
    num_ctas: int,
    most: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(i32[n, TILE_COLUMNS], how many have any work, merges) of one layer, from i32[B, K] each; `most` pieces."""
    heads = length.shape[1]
    blocks, request = own.blocks, own.request

    # Tiles are [blocks of queries, K].
    entries = length[request]
    work = -(-length // block)  # [B, K]
    pieces = _Pieces.none(heads)
    if most:
        pieces = _cut(own.work, work[0], length[0] // block, num_ctas, most)
        work = work - pieces.cut[None]
    if own.alone:
        place = _places(own.work, work[0])
    else:
        place = _places_by_pairs(jnp.where(own.there[:, None], own.work[:, None] + work[request], 0))
    number = np.arange(blocks, dtype=np.int32)[:, None]
    values: dict[int, Any] = {
        ROW: own.row[:, None],
        END: own.end[:, None],
        SEGMENT: own.segment[:, None],
        HEAD: np.arange(heads, dtype=np.int32)[None],
        LENGTH: entries,
        OFFSET: offset[request],
        COLUMN: column[request],
        MASKED: own.masked[:, None] + (entries % block > 0),
        FREE: own.free[:, None] + entries // block - pieces.cut[None],
        DIAGONAL: own.diagonal[:, None],
        CHUNK_LAST: own.last[:, None],
        CHUNK_FIRST: own.first[:, None],
        CHUNK_FREE: own.first_free[:, None],
        HISTORY_FIRST: pieces.cut[None],
        PART: (most + np.arange(heads, dtype=np.int32)[None]) * blocks + number,
        PIECES: pieces.count[None],
        AT: own.at[:, None],
    }
    tiles = _stack(values, (blocks, heads))
    front, cut_rows = jnp.zeros((0, TILE_COLUMNS), i32), i32(0)
    if most:
        front, cut_rows = pieces.rows(tiles), pieces.count.sum() * blocks
    tiles = tiles.reshape(-1, TILE_COLUMNS)
    rows_of = jnp.concatenate([front, jnp.zeros_like(tiles)])
    placed = rows_of.at[cut_rows + place].set(tiles, unique_indices=True, mode="promise_in_bounds")
    return placed, (own.count * heads + cut_rows).astype(i32), pieces.merges()


def _stack(values: dict[int, Any], shape: tuple[int, int]) -> jax.Array:
    return jnp.stack([jnp.broadcast_to(values[c], shape) for c in range(TILE_COLUMNS)], axis=-1).astype(i32)


class _Own(NamedTuple):
    """Blocks of queries of all requests in a line, and the blocks of the chunk that each attends to. NumPy where known."""

    known: bool
    blocks: int  # how many at most; the arrays below have so many
    count: Any  # how many there are
    starts: Any  # i32[B]
    sizes: Any  # i32[B]
    behind: Any  # i32[B]
    key_starts: Any  # i32[B]
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
) -> _Own:
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
    return _Own(
        known=known,
        blocks=blocks,
        count=stop[-1],
        starts=starts,
        sizes=sizes,
        behind=behind,
        key_starts=key_starts,
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


class _Pieces(NamedTuple):
    """Pieces of `size` blocks cut from the front of the heads' histories."""

    count: Any  # i32[K]: how many
    base: Any  # i32[K]: the number of a head's first piece
    cut: Any  # i32[K]: blocks of them together
    head: Any  # i32[most]: the head of each piece
    first: Any  # i32[most]: each piece's first block
    size: Any

    @staticmethod
    def none(heads: int) -> "_Pieces":
        zero = np.zeros(heads, np.int32)
        return _Pieces(zero, zero, zero, None, None, None)

    def rows(self, tiles: jax.Array) -> jax.Array:
        """i32[most * blocks, TILE_COLUMNS] from the tiles [blocks, K, TILE_COLUMNS] that they are cut from."""
        cut_from = tiles[:, self.head].swapaxes(0, 1)
        most, blocks = cut_from.shape[:2]
        number = np.arange(most, dtype=np.int32)[:, None]
        values = {c: cut_from[..., c] for c in range(TILE_COLUMNS)} | {
            MASKED: 0,
            FREE: self.size,
            HISTORY_FIRST: self.first[:, None],
            PART: number * blocks + np.arange(blocks, dtype=np.int32),
            PIECES: -1,
        }
        return _stack(values, (most, blocks)).reshape(-1, TILE_COLUMNS)

    def merges(self) -> jax.Array:
        """i32[1 + K, 3], see `ChunkPlan.merges`."""
        heads = len(self.count)
        held = jnp.asarray(self.count > 0)
        rows = jnp.stack([np.arange(heads, dtype=np.int32), self.base, self.count], axis=-1).astype(i32)
        at = jnp.where(held, jnp.cumsum(held, dtype=i32), 1 + heads)
        number = jnp.zeros((1 + heads, 3), i32).at[0, 0].set(held.sum(dtype=i32))
        return number.at[at].set(rows, mode="drop")


def _cut(own: np.ndarray, history: jax.Array, full: jax.Array, num_ctas: int, most: int) -> _Pieces:
    """Pieces of a length that makes at most `most` of all histories; none where whole tiles do."""
    blocks, heads = own.shape[0], history.shape[0]
    total = own.sum() * heads + history.sum() * blocks
    rounds = -(-blocks * heads // num_ctas)
    balanced = (history.max() + own.max()) * (rounds * num_ctas * 10) <= total * 11
    whole = balanced | (history.max() <= CUT_FROM)
    size = jnp.maximum(-(-history.sum() // most), MIN_PIECE)
    # The rest of a head is not empty, and may hold a partial block.
    count = jnp.where(whole, 0, jnp.minimum(jnp.maximum(-(-history // size) - 1, 0), full // size))
    stop = jnp.cumsum(count, dtype=i32)
    number = np.arange(most)
    head = jnp.minimum((number[:, None] >= stop[None]).sum(1, dtype=i32), heads - 1)
    base = stop - count
    return _Pieces(count, base, count * size, head, (number - base[head]) * size, size)


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
