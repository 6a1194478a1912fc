"""What the numbers of a plan of chunk attention mean."""

from typing import Any

import jax
import jax.numpy as jnp

# Columns of `ChunkPlan.tiles`: first query row, the row after its request's last, the first row of the request's own keys,
# the head; of its history the entries, the place in the flat tables, the column in the page.
ROW, END, SEGMENT, HEAD = range(4)
LENGTH, OFFSET, COLUMN = range(4, 7)
MASKED, FREE, DIAGONAL = range(7, 10)  # blocks with a mask, without one, and on the diagonal
CHUNK_LAST, CHUNK_FIRST, CHUNK_FREE = range(10, 13)  # blocks of the chunk: last, first, first without a mask
HISTORY_FIRST = 13  # the first block of the history without a mask
# A tile's history may be cut into pieces, which other CTAs work on. PIECES: how many others there are, or -1 in a row that
# is one of them; PART: where the tile or piece leaves its result; NUMBER: of the tile, or the one that the piece is of.
PART, PIECES = 14, 15
AT = 16  # own keys of the request that come before the tile's first query
NUMBER = 17
TILE_COLUMNS = 18
# Columns of `ChunkPlan.merges`, of a tile whose history is cut: three and NUMBER as above; the PART of its first piece, how
# far the next ones' are apart, how many pieces there are. Row 0 holds the number of such tiles, whose rows follow.
MERGE_ROW, MERGE_END, MERGE_HEAD, MERGE_NUMBER, MERGE_FIRST, MERGE_STEP, MERGE_PIECES = range(7)
MERGE_COLUMNS = 7
ALIGN = 8  # rows at whose multiples requests begin: loads of swizzled tiles do


def aligned(rows: Any) -> Any:
    """So many rows, or as few more as make a multiple of ALIGN."""
    return -(-rows // ALIGN) * ALIGN


def stack(values: dict[int, Any], shape: tuple[int, ...]) -> jax.Array:
    """i32[*shape, columns] from the values of each column."""
    return jnp.stack([jnp.broadcast_to(values[c], shape) for c in range(len(values))], axis=-1).astype(
        jnp.int32
    )
