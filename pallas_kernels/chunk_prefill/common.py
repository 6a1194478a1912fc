"""What the parts of the chunk prefill kernel share: its static configuration, its buffers, and the tiles it works on."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_kernels.chunk_prefill.tuning import ROWS, Tuning

LOG2E = math.log2(math.e)
i32, f32 = jnp.int32, jnp.float32


class Place(NamedTuple):
    """A position in the tile, a query head of the group, and how many rows that are counted from there come before."""

    position: Any
    head: Any
    rows_before: Any


class Span(NamedTuple):
    """Rows of a warpgroup that are tokens of one head."""

    row: int  # the first
    head: int
    token: int  # in the first row
    size: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Everything static."""

    group: int
    tile_positions: int  # tokens of a tile
    head_dim: int
    page: int
    block: int
    num_ctas: int
    tokens: int  # T
    stride: int  # between the parts of a tile
    pieces: int  # of all tiles of a block of queries, at most
    merge_columns: int
    cuts: bool  # whether there are any
    scale: float
    soft_cap: float | None
    window: int | None
    packed: bool  # heads lie one after another in the rows of all warpgroups
    laid_out: bool  # queries lie tile after tile; else they are loaded from where they are
    interpreted: bool
    tuning: Tuning

    @property
    def fused(self) -> bool:
        return self.head_dim >= self.tuning.fused_from

    def slot(self, turn: Any) -> Any:
        """Where the keys and values of a CTA's n-th block lie."""
        stages = self.tuning.stages
        # The remainder of a signed number is a chain of a dozen instructions, which at D = 64 nothing hides.
        return turn & (stages - 1) if stages & (stages - 1) == 0 else lax.rem(turn, i32(stages))

    @property
    def staged(self) -> int:
        """Columns of results that go through shared memory at a time: as many as there is room for."""
        return self.head_dim if self.interpreted else min(self.head_dim, 128)

    @property
    def box(self) -> int:
        """Entries of one load."""
        return min(self.page, self.block)

    @property
    def boxes(self) -> int:
        return self.block // self.box

    # Rows hold queries head by head: row g * positions + t is token t of head g. Packed, that is so for the rows of all
    # warpgroups together, and the last ones may be empty. Else each warpgroup has some positions of some heads in its own
    # 64 rows.

    @property
    def positions(self) -> int:
        return self.tile_positions if self.packed else max(ROWS // self.group, 8)

    @property
    def heads(self) -> int:
        return self.group if self.packed else ROWS // self.positions

    def place(self, wg: Any) -> Place:
        """Where a warpgroup's rows begin."""
        if self.packed:
            return Place(0, 0, wg * ROWS)
        if self.heads == self.group:
            return Place(wg * self.positions, 0, 0)
        wg, parts = jnp.asarray(wg, i32), i32(self.group // self.heads)
        return Place(lax.div(wg, parts) * self.positions, lax.rem(wg, parts) * self.heads, 0)

    def spans(self, wg: int) -> list[Span]:
        """The rows of a warpgroup, head by head, counted from `place`; of each the same unless packed."""
        before = wg * ROWS if self.packed else 0
        spans = []
        for head in range(self.heads):
            start, stop = (min(max(x * self.positions - before, 0), ROWS) for x in (head, head + 1))
            if start < stop:
                spans.append(Span(start, head, start + before - head * self.positions, stop - start))
        return spans

    def token(self, row: Any, place: Place) -> Any:
        """The token in a warpgroup's row, counted from `place.position`."""
        if self.packed:
            return lax.rem(row + place.rows_before, i32(self.positions))
        return row & (self.positions - 1)


class Refs(NamedTuple):
    layer: Any  # i32[1]; within a warpgroup the number itself
    tiles: Any  # i32[L, n, TILE_COLUMNS]
    count: Any  # i32[L]
    merges: Any  # i32[L, 1 + K, 3]
    sync: Any  # i32[L, tiles, SYNC_COLUMNS]
    table: Any  # i32[B * R]
    q: Any  # [T, K * G, D]; laid out [blocks of queries, K, warpgroups, 64, D]
    k: Any  # [T, K, D]
    v: Any
    pool: Any  # [num_pages, 2, Hp, P, D]
    out: Any  # [T, K * G, D]
    lse: Any  # f32[T, K * G]
    part: Any  # f32[num_parts, warpgroups, 64, D]: results of pieces and cut tiles
    part_ml: Any  # f32[num_parts, warpgroups, 2, 64]
    q_s: Any = None  # [warpgroups, 64, D]
    k_s: Any = None  # [stages, block, D]
    v_s: Any = None
    q_full: Any = None
    q_free: Any = None
    k_full: Any = None
    k_free: Any = None
    v_full: Any = None
    v_free: Any = None
    turn: Any = None
    out_s: Any = None  # [warpgroups, 64, `Config.staged`]
    p_s: Any = None  # [warpgroups, 64, block], for the interpreter alone, as the next
    lse_s: Any = None  # f32[warpgroups, 64]


class Tile(NamedTuple):
    """A row of the plan."""

    row: Any
    end: Any
    segment: Any
    head: Any
    length: Any
    offset: Any
    column: Any
    masked: Any
    free: Any
    diagonal: Any
    chunk_last: Any
    chunk_first: Any
    chunk_free: Any
    history_first: Any
    part: Any
    pieces: Any
    at: Any

    def block(self, cfg: Config, j: Any) -> tuple[Any, Any]:
        """Whether the tile's j-th block is history, and its first entry in the history or in the chunk."""
        f = j - self.masked  # among those without a mask
        whole = lax.div(self.length, i32(cfg.block))
        full = whole - self.history_first
        partial = lax.rem(self.length, i32(cfg.block)) > 0
        history = jnp.where(f < 0, partial & (j == self.masked - 1), f < full)
        edge = self.chunk_first + (j - self.diagonal)
        in_chunk = jnp.where(
            f < 0,
            jnp.where(j < self.diagonal, self.chunk_last - j, edge),
            self.chunk_free + f - full,
        )
        in_history = jnp.where(f < 0, whole, self.history_first + f)
        return history, jnp.where(history, in_history, in_chunk) * cfg.block


def rounds_of(cfg: Config, refs: Refs, cta: Any) -> Any:
    """Tiles of this CTA: they are dealt back and forth."""
    count, ctas = refs.count[refs.layer], i32(cfg.num_ctas)
    full = lax.div(count, ctas)
    at = jnp.where(lax.rem(full, i32(2)) == 0, cta, cfg.num_ctas - 1 - cta)
    return full + (at < lax.rem(count, ctas)).astype(i32)


def tile_of(cfg: Config, refs: Refs, cta: Any, n: Any) -> Tile:
    at = jnp.where(lax.rem(n, i32(2)) == 0, cta, cfg.num_ctas - 1 - cta)
    number = jnp.minimum(n * cfg.num_ctas + at, refs.tiles.shape[1] - 1)
    return Tile(*(refs.tiles[refs.layer, number, c] for c in range(len(Tile._fields))))
