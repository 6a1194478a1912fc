"""Chunk prefill attention: a chunk's queries over a ragged paged history and over the chunk itself, in one pass."""

import jax

from pallas_kernels.chunk_prefill.plan import ChunkPlan
from pallas_kernels.chunk_prefill.plan import plan_chunk as _plan_chunk
from pallas_kernels.chunk_prefill.reference import chunk_prefill_reference
from pallas_kernels.chunk_prefill.tuning import DEFAULT, Tuning

__all__ = [
    "DEFAULT",
    "ChunkPlan",
    "Tuning",
    "check_supported",
    "chunk_prefill",
    "chunk_prefill_reference",
    "plan_chunk",
]

HEAD_DIMS = (64, 128, 256)
PAGE_SIZES = (16, 32, 64, 128)
MAX_GROUP = 16


def plan_chunk(
    lengths: jax.Array,
    table: jax.Array,
    first: jax.Array,
    column: jax.Array,
    *,
    q_shape: tuple[int, ...],
    page_size: int,
    starts: jax.Array | None = None,
    sizes: jax.Array | None = None,
    rows: jax.Array | None = None,
    window: int | None = None,
    tuning: Tuning = DEFAULT,
) -> ChunkPlan:
    """See `plan.plan_chunk`; the sizes of tiles and steps follow from q_shape (T, K, G, D) and the tuning."""
    from pallas_kernels.chunk_prefill.kernel import tile_positions

    tokens, _, group, head_dim = q_shape
    return _plan_chunk(
        lengths, table, first, column,
        num_tokens=tokens, page_size=page_size, positions=tile_positions(group, tuning.warpgroups),
        block=tuning.block(head_dim), starts=starts, sizes=sizes, rows=rows, window=window,
    )  # fmt: skip
