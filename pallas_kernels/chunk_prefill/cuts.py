"""Long histories cut into pieces that other CTAs work on, where tiles are few for the CTAs and of unequal work."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.chunk_prefill import columns as C

if TYPE_CHECKING:
    from pallas_kernels.chunk_prefill.plan import Own

i32 = jnp.int32
# Pieces of all heads of a layer, each a tile for every block of its request's queries: as many as make one tile for each
# CTA, but at least so many for each block.
LEAST_PIECES = 16
MIN_PIECE = 2  # blocks
# Blocks: where no head's history is longer, nothing is cut (a bound that was not measured by itself).
CUT_FROM = 8
# Tiles for each CTA; with more of them whole tiles balance. Measured: a chunk of 512 at retention 0.25 takes 359 us for 622,
# one of 1024 707 for 787; where nothing needs a cut, the kernel is 2% slower for being able to. The results of pieces and
# cut tiles lie in device memory, in float32: 101 MB for 2048 tokens, 8 KV heads of two queries each, D = 256.
CUT_BELOW = 2


def most_pieces(blocks: Any, heads: int, num_ctas: int, xp: Any = np) -> Any:
    """Tiles that are pieces, at most, of `blocks` blocks of queries."""
    return xp.maximum(LEAST_PIECES, num_ctas // blocks - heads) * blocks


class Pieces(NamedTuple):
    """Pieces of `size` blocks cut from the front of the histories. Each is a tile for every block of its request."""

    count: Any  # i32[B, K]: how many
    base: Any  # i32[B, K]: the number of the first tile that is a piece
    cut: Any  # i32[B, K]: blocks of them together
    size: Any
    tiles: Any  # how many are pieces

    @staticmethod
    def none(shape: tuple[int, ...]) -> Pieces:
        zero = np.zeros(shape, np.int32)
        return Pieces(zero, zero, zero, None, None)

    def rows(self, own: Own, tiles: jax.Array, most: int) -> jax.Array:
        """i32[most, TILE_COLUMNS] from the tiles [blocks * K, TILE_COLUMNS] that they are cut from."""
        number, heads = np.arange(most, dtype=np.int32), self.count.shape[1]
        after = (self.base + self.count * jnp.asarray(own.blocks_of)[:, None]).reshape(-1)
        pair = jnp.minimum((number[:, None] >= after[None]).sum(1, dtype=i32), len(after) - 1)
        request, within = pair // heads, number - self.base.reshape(-1)[pair]
        of_request = jnp.maximum(jnp.asarray(own.blocks_of)[request], 1)
        block = jnp.asarray(own.first_of)[request] + within % of_request
        cut_from = tiles.at[block * heads + pair % heads].get(mode="clip")
        values = {c: cut_from[:, c] for c in range(C.TILE_COLUMNS)} | {
            C.MASKED: 0,
            C.FREE: self.size,
            C.HISTORY_FIRST: within // of_request * self.size,
            C.PART: number,
            C.PIECES: -1,
        }
        return C.stack(values, (most,))

    def merges(self, own: Own, tiles: jax.Array) -> jax.Array:
        """i32[1 + blocks * K, MERGE_COLUMNS] of the tiles [blocks * K, TILE_COLUMNS], see `ChunkPlan.merges`."""
        heads = self.count.shape[1]
        within = np.arange(own.blocks, dtype=np.int32) - own.first_of[own.request]
        of_block = {
            C.MERGE_FIRST: self.base[own.request] + within[:, None],
            C.MERGE_STEP: own.blocks_of[own.request][:, None],
        }
        columns = {
            C.MERGE_ROW: C.ROW,
            C.MERGE_END: C.END,
            C.MERGE_HEAD: C.HEAD,
            C.MERGE_NUMBER: C.NUMBER,
            C.MERGE_PIECES: C.PIECES,
        }
        values = {c: tiles[:, column] for c, column in columns.items()} | {
            c: jnp.broadcast_to(x, (own.blocks, heads)).reshape(-1) for c, x in of_block.items()
        }
        held = (tiles[:, C.PIECES] > 0) & jnp.repeat(jnp.asarray(own.there), heads)
        at = jnp.where(held, jnp.cumsum(held, dtype=i32), 1 + len(tiles))
        rows = jnp.zeros((1 + len(tiles), C.MERGE_COLUMNS), i32).at[0, 0].set(held.sum(dtype=i32))
        return rows.at[at].set(C.stack(values, (len(tiles),)), mode="drop")


def cut_histories(own: Own, history: jax.Array, full: jax.Array, num_ctas: int, most: int) -> Pieces:
    """Pieces i32[B, K] each, of a length that makes at most `most` tiles of all histories; none where whole tiles do."""
    heads, blocks_of = history.shape[1], jnp.asarray(own.blocks_of)[:, None]
    tile = jnp.where(own.there[:, None], own.work[:, None] + history[own.request], 0)
    rounds = -(-own.count * heads // num_ctas)
    balanced = tile.max(initial=0) * (rounds * num_ctas * 10) <= tile.sum() * 11
    whole = balanced | (history.max() <= CUT_FROM)
    budget = jnp.minimum(most_pieces(jnp.maximum(own.count, 1), heads, num_ctas, jnp), most)
    size = jnp.maximum(-(-(history * blocks_of).sum() // budget), MIN_PIECE).astype(i32)
    # The rest of a head is not empty, and may hold a partial block. What is no request's is cut into nothing.
    count = jnp.where(
        whole | (blocks_of == 0), 0, jnp.minimum(jnp.maximum(-(-history // size) - 1, 0), full // size)
    )
    tiles = (count * blocks_of).reshape(-1)
    base = (jnp.cumsum(tiles, dtype=i32) - tiles).reshape(count.shape)
    return Pieces(count, base, count * size, size, tiles.sum())
