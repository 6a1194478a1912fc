"""Attention of one layer on an NVIDIA GPU: our kernels, and for chunks that they do not take a composition around cuDNN.

`attention.py` has the same operations for any backend and decides which one runs.
"""

import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# The public jax.nn.dot_product_attention rounds the log-sum-exp to the dtype of the output. In bfloat16 that is an error of
# up to 3% in the weights of the two parts of a merge, so this calls what lies beneath it.
from jax._src.cudnn.fused_attention_stablehlo import MaskType
from jax._src.cudnn.fused_attention_stablehlo import dot_product_attention as cudnn_attention

from models.logits import AttentionLogits
from models.products import EndOfLayer
from pallas_kernels import byte_pages, chunk_prefill, decode_layer, ragged_decode, unpack
from pallas_kernels.layer_products import LayerWeights, Tuning
from pallas_kernels.support import check_one_device
from tangram_jax.pages import NEVER, LayerPages, StepPages

PART = 8192  # history entries of each head that are gathered at a time
CUDNN_HEAD_DIMS = (64, 128, 256)

log = logging.getLogger("tangram")


def chunk_supported(
    q_shape: tuple[int, ...], dtype: Any, pool: jax.Array, soft_cap: float | None = None
) -> bool:
    """Whether `ChunkAttention` here takes queries of q_shape (T, K, G, D) over this pool, and `WindowAttention` over what
    `window_pool` makes of it.
    """
    if jax.default_backend() != "gpu":
        return False
    reason, head_dim, in_bytes = None, q_shape[-1], byte_pages.is_bytes(pool.dtype)
    if dtype not in (jnp.bfloat16, jnp.float16) or not (pool.dtype == dtype or in_bytes):
        reason = f"queries of {jnp.dtype(dtype)} over a pool of {pool.dtype}: one of bfloat16 and float16 is needed"
    elif soft_cap is not None and (missing := _why_no_kernel(q_shape, dtype, pool)):
        reason = f"cuDNN has no soft cap, and {missing}"
    elif soft_cap is None and (head_dim not in CUDNN_HEAD_DIMS or head_dim > _largest_cudnn_head()):
        reason = f"head dimension {head_dim}: this GPU's cuDNN takes some of {CUDNN_HEAD_DIMS}"
    if reason:
        log.warning("Chunk attention runs as XLA operations, several times slower: %s", reason)
    return reason is None


def takes_several(q_shape: tuple[int, ...], dtype: Any, pool: jax.Array) -> bool:
    """Whether one call of our kernel takes chunks of several rows: of 8-bit pages each row's are unpacked by themselves."""
    if jax.default_backend() != "gpu" or byte_pages.is_bytes(pool.dtype):
        return False
    return _why_no_kernel(q_shape, dtype, pool) is None


def _why_no_kernel(q_shape: tuple[int, ...], dtype: Any, pool: jax.Array) -> str | None:
    """What keeps our chunk kernel from these queries; None: nothing."""
    try:
        check_one_device(pool)
        shape, pool_dtype = pool.shape, pool.dtype
        if byte_pages.is_bytes(pool_dtype):
            unpack.check_supported(pool, dtype)
            shape, pool_dtype = (*shape[:3], byte_pages.page_size(pool), shape[4]), dtype
        chunk_prefill.check_supported(q_shape, dtype, shape, pool_dtype)
    except NotImplementedError as reason:
        return str(reason)
    return None


def window_pool(pool: jax.Array, dtype: Any) -> jax.Array:
    """What `WindowAttention` gives the chunk kernel as a pool, of `dtype`: an operand that it takes and reads no entry of.

    A pool of bytes, which the kernel does not know, gives one page that means nothing.
    """
    if not byte_pages.is_bytes(pool.dtype):
        return pool
    return pool[:1, :, :, : byte_pages.page_size(pool)].astype(dtype)


def _largest_cudnn_head() -> int:
    """cuDNN may have to do what our kernel does not take: it wants Ampere or later, and Hopper for heads of 256."""
    capability = str(getattr(jax.devices()[0], "compute_capability", "9.0"))
    generation = int(capability.split(".")[0]) if capability.replace(".", "").isdigit() else 0  # AMD: gfx942
    return 256 if generation >= 9 else 128 if generation >= 8 else 0


class ChunkAttention:
    """Our kernel, its work planned once for all layers; the composition where it does not apply."""

    def __init__(
        self,
        q_shape: tuple[int, ...],
        dtype: Any,
        pages: StepPages,
        logits: AttentionLogits,
        chunks: tuple[jax.Array, jax.Array] | None = None,
    ) -> None:
        """q_shape (T, K, G, D), of what `chunk_supported` says yes to.

        `chunks`: where those of several rows begin, multiples of ALIGN, and how many tokens they have, i32[S] each, of what
        `takes_several` says yes to; None: one of T tokens.
        """
        self._pages, self._logits, self._plan = pages, logits, None
        pool, lengths = pages.pool, pages.lengths
        if reason := _why_no_kernel(q_shape, dtype, pool):
            log.warning("Chunk attention gathers its history for cuDNN: %s", reason)
            return
        table, rows, first, column = pages.table, pages.rows, pages.first, pages.column
        starts, sizes = chunks or (None, None)
        self._in_bytes = byte_pages.is_bytes(pool.dtype)
        if self._in_bytes:  # each layer's pages are unpacked, side by side
            layers, heads = first.shape
            table, rows = jnp.arange(heads * pages.most, dtype=jnp.int32)[None], jnp.zeros(1, jnp.int32)
            first = np.tile(np.arange(heads, dtype=np.int32) * pages.most, (layers, 1))
            column = np.zeros_like(first)
        self._plan = chunk_prefill.plan_chunk(
            lengths.reshape(lengths.shape[0], -1),
            table,
            first.reshape(-1),
            column.reshape(-1),
            q_shape=q_shape,
            page_size=byte_pages.page_size(pool),
            num_layers=lengths.shape[1],
            rows=rows,
            starts=starts,
            sizes=sizes,
        )

    def __call__(self, layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        """See `attention.chunk_attention`."""
        if self._plan is None:
            return chunk_composition(q, k, v, self._pages.of_layer(layer), self._logits.scale)
        pool = self._unpacked(layer, q) if self._in_bytes else self._pages.pool
        return chunk_prefill.chunk_prefill(q, k, v, pool, self._plan.layer(layer), **self._logits._asdict())

    def _unpacked(self, layer: int, q: jax.Array) -> jax.Array:
        """The layer's pages as the kernel reads them, [K * most, 2, 1, P, D]."""
        pages = self._pages.of_layer(layer)
        # Not before the queries are there: unpacked early, the pages of all layers would lie in memory at once.
        _, lengths = jax.lax.optimization_barrier((q, pages.lengths[0]))
        return unpack.unpack_pages(
            pages.pool,
            pages.table[0],
            lengths,
            pages.first,
            pages.column,
            most=self._pages.most,
            dtype=q.dtype,
        )


class WindowAttention:
    """Our kernel over what `rings.with_history` gives, one plan for all layers; cuDNN where it does not apply."""

    def __init__(
        self,
        q_shape: tuple[int, ...],
        dtype: Any,
        window: int,
        behind: jax.Array,
        pool: jax.Array,
        logits: AttentionLogits,
        chunks: tuple[jax.Array, jax.Array, jax.Array] | None = None,
    ) -> None:
        """See `attention.WindowAttention`; `behind` i32[S]: keys before that of each chunk's first query.

        `chunks`: i32[S] each, where chunks of several rows begin, how many tokens they have and where their keys begin, of
        what `takes_several` says yes to; None: one of T tokens.
        """
        self._window, self._behind, self._pool, self._logits = window, behind, pool, logits
        self._plan = None
        if reason := _why_no_kernel(q_shape, dtype, pool):
            log.warning("Chunk attention in a sliding window is left to cuDNN: %s", reason)
            return
        starts, sizes, key_starts = chunks or (None, None, None)
        none = np.zeros((len(behind), q_shape[1]), np.int32)
        self._plan = chunk_prefill.plan_chunk(
            none,
            jnp.zeros((len(behind), 1), jnp.int32),
            none[0],
            none[0],
            q_shape=q_shape,
            page_size=byte_pages.page_size(pool),
            window=window,
            behind=behind,
            starts=starts,
            sizes=sizes,
            key_starts=key_starts,
        ).layer(0)

    def __call__(self, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        """See `attention.window_attention`."""
        if self._plan is None:
            return window_composition(q, k, v, self._behind[0], self._window, self._logits.scale)
        return chunk_prefill.chunk_prefill(q, k, v, self._pool, self._plan, **self._logits._asdict())


def window_composition(
    q: jax.Array, k: jax.Array, v: jax.Array, behind: jax.Array, window: int, scale: float
) -> tuple[jax.Array, jax.Array]:
    """See `attention.window_attention`. cuDNN has queries and keys in step: rows without a query come first."""
    tokens, heads, group, head_dim = q.shape
    rows = jnp.zeros((len(k), heads * group, head_dim), q.dtype)
    rows = jax.lax.dynamic_update_slice_in_dim(rows, q.reshape(tokens, heads * group, head_dim), behind, 0)
    out, lse = cudnn_attention(
        rows[None],
        k[None],
        v[None],
        scale=scale,
        mask_type=MaskType.CAUSAL,
        sliding_window_length=window,
        return_residual=True,
    )
    out, lse = (jax.lax.dynamic_slice_in_dim(x, behind, tokens, 0) for x in (out[0], lse[0].T))
    return out.reshape(q.shape), lse.reshape(q.shape[:-1])


def chunk_composition(
    q: jax.Array, k: jax.Array, v: jax.Array, pages: LayerPages, scale: float
) -> tuple[jax.Array, jax.Array]:
    """See `attention.chunk_attention`. cuDNN takes ragged history if each KV head is a row of a batch.

    History is gathered in parts, so the memory is bounded; each part is merged by log-sum-exp.
    """
    tokens, heads, group, head_dim = q.shape
    out, lse = cudnn_attention(
        q.reshape(1, tokens, heads * group, head_dim),
        k[None],
        v[None],
        scale=scale,
        mask_type=MaskType.CAUSAL,
        return_residual=True,
    )
    start = (
        out.reshape(tokens, heads, group, head_dim).astype(jnp.float32),
        lse.reshape(heads, group, tokens).transpose(2, 0, 1),
    )
    page_size, width = pages.page_size, pages.table.shape[1]
    per_part = min(PART // page_size, width)
    part = per_part * page_size
    by_head = q.transpose(1, 0, 2, 3)  # [K, T, G, D]

    def body(i: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        at = pages.first[:, None] + i * per_part + np.arange(per_part)
        numbers = pages.table[0, jnp.minimum(at, width - 1)]
        keys, values = (
            x.reshape(heads, part, 1, head_dim) for x in pages.gather(numbers, pages.column[:, None], q.dtype)
        )
        there = jnp.clip(pages.lengths[0] - i * part, 0, part)  # [K]
        out, lse = cudnn_attention(
            by_head,
            keys,
            values,
            q_seqlen=jnp.full(heads, tokens, jnp.int32),
            kv_seqlen=jnp.maximum(there, 1),
            scale=scale,
            mask_type=MaskType.PADDING,
            return_residual=True,
        )
        lse = jnp.where(there[:, None, None] > 0, lse, NEVER)  # [K, G, T]
        return merge(state, (out.transpose(1, 0, 2, 3).astype(jnp.float32), lse.transpose(2, 0, 1)))

    steps = (pages.lengths.max() + (part - 1)) // part
    return jax.lax.fori_loop(0, steps, body, start)


def merge(a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Two (out f32[..., D], natural log-sum-exp f32[...]) of disjoint entries as one."""
    lse = jnp.logaddexp(a[1], b[1])
    out = a[0] * jnp.exp(a[1] - lse)[..., None] + b[0] * jnp.exp(b[1] - lse)[..., None]
    return out, lse


class DecodeKernel:
    """The ragged decode kernel under one plan of the step's work for all layers. Raises NotImplementedError early."""

    def __init__(
        self,
        q_shape: tuple[int, ...],
        dtype: Any,
        pages: StepPages,
        logits: AttentionLogits,
        splits: np.ndarray | int | None = None,
        *,
        tokens: int = 1,
    ) -> None:
        """q_shape (B * S, K, G, D), where each request has S `tokens`.

        `splits`: i32[L, K] or one number, parts of each head; None: equal shares of all entries.
        """
        pool, lengths = pages.pool, pages.lengths
        check_one_device(pool)
        ragged_decode.check_supported(q_shape, dtype, pool.shape, pool.dtype, tokens=tokens)
        self._pool, self._logits, self._tokens = pool, logits, tokens
        self._shape, self._dtype = q_shape, dtype
        self._plan = ragged_decode.plan_decode(
            lengths.reshape(lengths.shape[0], -1),
            pages.table,
            pages.first.reshape(-1),
            pages.column.reshape(-1),
            page_size=byte_pages.page_size(pool),
            num_layers=lengths.shape[1],
            rows=jnp.minimum(pages.rows, pages.table.shape[0] - 1),
            skip=pages.skip,
            splits=None if splits is None else np.reshape(splits, -1),
        )

    def __call__(self, layer: int, qkv: jax.Array, sinks: jax.Array | None = None) -> jax.Array:
        """See `attention.decode_attention`."""
        out, _ = ragged_decode.ragged_decode(
            qkv, self._pool, self._plan.layer(layer), sinks=sinks, has_new=True, tokens=self._tokens,
            **self._logits._asdict(),
        )  # fmt: skip
        return out

    def makes_heads(self) -> bool:
        """See `attention.DecodeAttention`."""
        return ragged_decode.makes_heads(self._shape, self._pool.dtype, tokens=self._tokens)

    def of_heads(
        self, layer: int, heads: ragged_decode.Heads, made: ragged_decode.Made, sinks: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """See `attention.DecodeAttention`."""
        out, _, new = ragged_decode.ragged_decode(
            heads, self._pool, self._plan.layer(layer), made=made, sinks=sinks, has_new=True, **self._logits._asdict()
        )  # fmt: skip
        return out, new

    def reaches_the_end(self, tuning: Tuning) -> bool:
        """See `attention.DecodeAttention`."""
        if self._tokens > 1:
            return False
        rows, kv_heads, group, head_dim = self._shape
        try:
            shape = rows, kv_heads, group + 2, head_dim
            decode_layer.check_supported(shape, self._dtype, self._pool, self._plan, tuning)
        except NotImplementedError:
            return False
        return True

    def to_the_end(
        self,
        layer: int,
        heads: decode_layer.Heads,
        made: decode_layer.Made,
        sinks: jax.Array | None,
        end: EndOfLayer,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """See `attention.DecodeAttention`."""
        assert isinstance(end.weights, LayerWeights)  # `whole_layers.reaching` says so
        return decode_layer.decode_layer(
            heads, self._pool, self._plan.layer(layer), end.x, end.weights, end.counters,
            jnp.full(1, not end.last, jnp.int32), end.links, made=made, sinks=sinks,
            products_tuning=end.tuning, **self._logits._asdict(), **end.how,
        )  # fmt: skip

    def history(self, layer: int, q: jax.Array) -> tuple[jax.Array, jax.Array]:
        """See `attention.history_attention`."""
        return ragged_decode.ragged_decode(
            q, self._pool, self._plan.layer(layer), out_dtype=jnp.float32, **self._logits._asdict()
        )
