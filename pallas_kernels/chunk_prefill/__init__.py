"""Chunk prefill attention: a chunk's queries over a ragged paged history and over the chunk itself, in one pass."""

import jax
import numpy as np

from pallas_kernels import byte_pages
from pallas_kernels.chunk_prefill.columns import ALIGN, aligned
from pallas_kernels.chunk_prefill.plan import ChunkPlan
from pallas_kernels.chunk_prefill.plan import plan_chunk as _plan_chunk
from pallas_kernels.chunk_prefill.reference import chunk_prefill_reference
from pallas_kernels.chunk_prefill.tuning import DEFAULT, TUNING, Tuning, tuning_for
from pallas_kernels.support import check_attention

__all__ = [
    "ALIGN",
    "DEFAULT",
    "TUNING",
    "ChunkPlan",
    "Tuning",
    "aligned",
    "check_supported",
    "chunk_prefill",
    "chunk_prefill_reference",
    "plan_chunk",
    "tuning_for",
]


def chunk_prefill(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pool: jax.Array,
    plan: ChunkPlan,
    *,
    scale: float,
    soft_cap: float | None = None,
    tuning: Tuning | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attention of a chunk's queries over each KV head's history, all of it visible, and over the chunk, causally.

    Several requests' chunks may lie in the T rows one after another. Order among a head's history entries does not matter,
    so a sliding window kept as a ring needs nothing special.

    Args:
      q: [T, K, G, D] queries after RoPE, bfloat16 or float16.
      k, v: [T, K, D] keys and values of the chunk, of the same dtype; more rows where the plan has keys before the queries.
      pool: [num_pages, 2, Hp, P, D] of the same dtype; all finite, also where nothing was written. Pages of bytes only the
        reference takes: `pallas_kernels.unpack` makes pages for the kernel of them.
      plan: of this layer, `plan_chunk(...).layer(index)`, with the same q_shape and tuning: where the requests begin, where
        their history is, the window.
      scale: positive factor of the products q . k.
      soft_cap: logits become soft_cap * tanh(logits / soft_cap).
      tuning: by default the device's record.

    Returns:
      out [T, K, G, D] in q's dtype, and lse f32[T, K, G], the natural log-sum-exp of all logits. Rows of no request are not
      written.

    Raises:
      NotImplementedError: naming what the kernel does not support; `chunk_prefill_reference` takes the same arguments.
      ValueError: if the plan is of other queries or another tuning.
    """
    check_supported(q.shape, q.dtype, pool.shape, pool.dtype)
    from pallas_kernels.chunk_prefill.mosaic_gpu import chunk_prefill_mosaic_gpu

    return chunk_prefill_mosaic_gpu(
        q, k, v, pool, plan, scale=scale, soft_cap=soft_cap, tuning=tuning or tuning_for()
    )


def check_supported(
    q_shape: tuple[int, ...],
    q_dtype: jax.typing.DTypeLike,
    pool_shape: tuple[int, ...],
    pool_dtype: jax.typing.DTypeLike,
    *,
    device: jax.Device | None = None,
) -> None:
    """Raises NotImplementedError, naming the feature, where `chunk_prefill` has no kernel: q_shape (T, K, G, D)."""
    if byte_pages.is_bytes(pool_dtype):
        raise NotImplementedError("a pool of bytes: unpack its pages first (pallas_kernels.unpack)")
    check_attention(q_shape, q_dtype, pool_shape, pool_dtype, device=device, generations=TUNING)


def plan_chunk(
    lengths: jax.Array | np.ndarray,
    table: jax.Array,
    first: jax.Array | np.ndarray,
    column: jax.Array | np.ndarray,
    *,
    q_shape: tuple[int, ...],
    page_size: int,
    num_layers: int = 1,
    starts: jax.Array | np.ndarray | None = None,
    sizes: jax.Array | np.ndarray | None = None,
    rows: jax.Array | None = None,
    window: int | None = None,
    behind: jax.Array | np.ndarray | None = None,
    key_starts: jax.Array | np.ndarray | None = None,
    tuning: Tuning | None = None,
) -> ChunkPlan:
    """See `plan.plan_chunk`; the sizes of tiles and steps follow from q_shape (T, K, G, D) and the tuning."""
    tokens, _, group, head_dim = q_shape
    tuning = (tuning or tuning_for()).for_chunk(*q_shape)
    return _plan_chunk(
        lengths, table, first, column,
        num_tokens=tokens, page_size=page_size, num_layers=num_layers,
        positions=tuning.positions(group), block=tuning.block(head_dim),
        starts=starts, sizes=sizes, rows=rows, window=window,
        behind=behind, key_starts=key_starts, num_ctas=tuning.ctas(),
    )  # fmt: skip
