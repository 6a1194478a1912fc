"""What the parts of the chunk prefill kernel share: its static configuration, its buffers, and the tiles it works on."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_kernels.chunk_prefill.tuning import ROWS, Tuning

LOG2E = math.log2(math.e)
i32, f32 = jnp.int32, jnp.float32
LINE = 64  # columns of a line of shared memory


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
    positions: int  # tokens of a tile
    head_dim: int
    page: int
    block: int
    num_ctas: int
    pieces: int  # tiles that are pieces, at most
    merge_columns: int
    cuts: bool  # whether there are any
    scale: float
    soft_cap: float | None
    window: int | None
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

    # Rows of a tile hold queries head by head: row g * positions + t is token t of head g. Each warpgroup has the next 64 of
    # them; where G does not divide them the last ones are empty.

    def spans(self, wg: int) -> list[Span]:
        """The rows of a warpgroup, head by head."""
        before, spans = wg * ROWS, []
        for head in range(self.group):
            start, stop = (min(max(x * self.positions - before, 0), ROWS) for x in (head, head + 1))
            if start < stop:
                spans.append(Span(start, head, start + before - head * self.positions, stop - start))
        return spans

    def columns(self, width: int) -> list[int]:
        """Where the parts of queries and results, of so many columns, begin that are copied at a time."""
        return list(range(0, width, LINE))

    @property
    def loads(self) -> int:
        """Of a warpgroup's queries, at most."""
        return max(len(self.spans(wg)) for wg in range(self.tuning.warpgroups)) * (self.head_dim // LINE)

    def token(self, row: Any, wg: Any) -> Any:
        """The tile's token in a warpgroup's row."""
        row, positions = row + wg * ROWS, self.positions
        return row & (positions - 1) if positions & (positions - 1) == 0 else lax.rem(row, i32(positions))


class Refs(NamedTuple):
    layer: Any  # i32[1]; within a warpgroup the number itself
    tiles: Any  # i32[L, n, TILE_COLUMNS]
    count: Any  # i32[L]
    merges: Any  # i32[L, 1 + n, MERGE_COLUMNS]
    sync: Any  # i32[L, tiles, SYNC_COLUMNS]
    table: Any  # i32[B * R]
    q: Any  # [T, K * G, D]
    k: Any  # [T, K, D]
    v: Any
    pool: Any  # [num_pages, 2, Hp, P, D]
    out: Any  # [T, K * G, D]
    lse: Any  # f32[T, K * G]
    part: Any  # f32[num_parts, warpgroups, 64, D]: results of pieces and cut tiles
    part_ml: Any  # f32[num_parts, warpgroups, 2, 64]
    q_s: Any = None  # [warpgroups, D / 64, 64, 64]
    k_s: Any = None  # [stages, block, D]
    v_s: Any = None
    q_full: Any = None
    q_free: Any = None
    k_full: Any = None
    k_free: Any = None
    v_full: Any = None
    v_free: Any = None
    turn: Any = None
    out_s: Any = None  # [warpgroups, `Config.staged` / 64, 64, 64]
    p_s: Any = None  # [warpgroups, 64, block], for the interpreter alone, as the next
    lse_s: Any = None  # f32[warpgroups, 64]
    # The places of `q_s` and `out_s` for copies, which begin at any row: tiles of eight are not theirs.
    q_rows: Any = None
    out_rows: Any = None


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
    number: Any

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
