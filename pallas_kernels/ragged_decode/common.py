"""What the parts of the ragged decode kernel share: its static configuration, its buffers, and the items it works on."""

import dataclasses
from typing import Any, NamedTuple

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ragged_decode.byte_ops import Paged
from pallas_kernels.ragged_decode.heads import Made
from pallas_kernels.ragged_decode.tuning import Tuning

i32, f32 = jnp.int32, jnp.float32
WGMMA = plgpu.Layout.WGMMA
BY_QUERY = WGMMA.reduce(0)  # one value per column of [*, Gp]
BY_ROW = WGMMA.reduce(1)
LOAD_REGISTERS = 56  # of a thread of the loading warpgroup, where several compute


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Everything static. `queries` is S * G rounded up to a multiple of 8: the columns of the matrix products."""

    kv_heads: int
    tokens: int  # S new tokens of each request
    group: int
    queries: int
    head_dim: int
    page: int
    unit: int  # entries between possible borders of shares
    block: int  # entries of a tile
    packed: bool  # pages of bytes
    scale_rows: int  # of a page's column, before its entries
    num_shares: int
    merge_unroll: int
    slices: int  # of the output of an item of many pieces: a CTA puts each together; 0: one CTA does all
    many: int  # so many pieces are many
    scale: float
    soft_cap: float | None
    has_sinks: bool
    has_new: bool
    skips: bool
    fused: bool
    interpreted: bool
    tuning: Tuning
    heads: Made | None = None  # queries, keys and values come as a product's parts

    @property
    def columns(self) -> int:
        """That are queries, token by token."""
        return self.tokens * self.group

    @property
    def rest_first(self) -> bool:
        """Whether an item's sums begin with what is in no page: see `rest`."""
        return self.tokens > 1

    @property
    def slice_rows(self) -> int:
        return self.head_dim // self.slices

    @property
    def slice_unroll(self) -> int:
        """Pieces of which a slice is read at a time: as many as the registers hold."""
        each = self.slice_rows * self.queries // 128 + 1
        return min(self.tuning.slice_registers // self.turns // each, self.num_shares)

    @property
    def pages(self) -> int:
        return self.block // self.page

    @property
    def granule(self) -> int:
        """Entries to which the load of a page that is not full is rounded up: each count is a load of its own."""
        return max(16, self.page // 4)

    @property
    def slots(self) -> int:
        slots = self.tuning.num_slots(self.head_dim * (1 if self.packed else 2) * self.block)
        # Each slot belongs to one of the warpgroups that take turns.
        return max(slots // (2 * self.turns), 1) * 2 * self.turns if self.packed else slots

    @property
    def turns(self) -> int:
        """Computing warpgroups, which take the tiles in turns."""
        return self.tuning.turns if self.packed else 1

    @property
    def loaders(self) -> int:
        """Warps that load pages on their own: issued by the warpgroup as one, small pages are slower than the memory.

        The interpreter knows no warps.
        """
        page_bytes = self.page * self.head_dim * (1 if self.packed else 2)
        return 4 if page_bytes <= self.tuning.small_page and not self.interpreted else 1

    @property
    def registers(self) -> int:
        """Of a thread of the computing warpgroups, where there are several."""
        return min((512 - LOAD_REGISTERS) // self.turns // 8 * 8, 232)

    @property
    def paged(self) -> Paged:
        """How a tile of bytes lies in its rows."""
        return Paged(self.block, self.page, self.scale_rows, self.head_dim // self.halves)

    @property
    def halves(self) -> int:
        """Into which a tile's columns are divided: a swizzled line of shared memory has 128 bytes at most."""
        return self.head_dim // 128 if self.packed and self.head_dim > 128 else 1

    @property
    def tile(self) -> tuple[int, ...]:
        """The shape of a tile of keys or values in shared memory."""
        if self.packed:
            return self.halves, self.paged.rows, self.head_dim // self.halves
        return self.block, self.head_dim


def spread(x: Any, shape: tuple[int, ...]) -> Any:
    """A value per query, repeated over the rows of [*, Gp]."""
    return lax.broadcast_in_dim(x, shape, [1])


class Refs(NamedTuple):
    layer: Any  # i32[1]
    share: Any  # i32[L, W, SHARE_COLUMNS]
    item: Any  # i32[L, items + 1, ITEM_COLUMNS]
    sync: Any  # i32[L, W, SYNC_STRIDE]
    table: Any  # i32[B * R]
    # [items, G, D], or with the new token's key and value [items, G + 2, D]; of several [B, S, K, G + 2, D]; `Heads.parts`
    q: Any
    pool: Any  # [num_pages, 2, Hp, P, D], or u8[num_pages, 2, Hp, scale rows + P, D]
    out: Any  # [B, K * G * D]; of several tokens [B, S, K, G, D]; for the interpreter [items, S * G, D]
    lse: Any  # f32[items, Gp]
    part: Any  # f32[2 W, D, Gp]: pieces that go on in another share, then those that end an item
    part_lse: Any  # f32[2 W, Gp], in units of log 2
    sinks: Any = None  # float[K, Gp]
    q_s: Any = None  # [turns, Gp, D]
    kv_s: Any = None  # [slots, block, D]; of bytes u8[slots, halves, rows, D / halves], scales among them
    p_s: Any = None  # [turns, Gp, block]
    full: Any = None
    free: Any = None
    sums_s: Any = None  # f32[turns - 1, D, Gp], and what goes with them: what the others hand to the first
    sums_ml: Any = None  # f32[turns - 1, 2, Gp]
    meet: Any = None
    exchange_s: Any = None  # f32[turns, ...]: what the warps of a warpgroup exchange
    spare_s: Any = None  # [turns, block, D] for the interpreter, whose products take nothing from registers
    rope: Any = None  # this and what follows: see `Heads`
    bias: Any = None
    q_norm: Any = None
    k_norm: Any = None
    new: Any = None  # [B, K, 2, D]: keys and values that were made


class Item(NamedTuple):
    """One item and the part of it that belongs to this share."""

    begin: Any  # units
    stop: Any
    length: Any  # entries
    number: Any  # b * K + k
    skip: Any = 0  # entries at its front that are out of sight

    def piece(self, cfg: Config, start: Any, end: Any) -> tuple[Any, Any, Any]:
        """First entry of the piece, the entry after its last, its tiles."""
        base = (jnp.maximum(start, self.begin) - self.begin) * cfg.unit
        limit = jnp.minimum((jnp.minimum(end, self.stop) - self.begin) * cfg.unit, self.length)
        return base, limit, lax.div(limit - base + (cfg.block - 1), i32(cfg.block))


def layer_of(refs: Refs) -> Any:
    """The layer of the plan: not read where there is one, since all else waits for it."""
    return refs.layer[0] if refs.share.shape[0] > 1 else i32(0)
