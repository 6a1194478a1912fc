"""Ragged paged decode attention: one or a few tokens per request over a cache whose every head has its own length."""

from typing import Any

import jax

from pallas_kernels import byte_pages
from pallas_kernels.ragged_decode.heads import Heads, Made, heads_reference, rope_of, shape_of
from pallas_kernels.ragged_decode.plan import DecodePlan, plan_decode
from pallas_kernels.ragged_decode.reference import ragged_decode_reference
from pallas_kernels.ragged_decode.tuning import DEFAULT, TUNING, Tuning, tuning_for
from pallas_kernels.support import check_attention, measured_on

__all__ = [
    "DEFAULT",
    "TUNING",
    "DecodePlan",
    "Heads",
    "Made",
    "Tuning",
    "check_supported",
    "heads_reference",
    "makes_heads",
    "max_queries",
    "plan_decode",
    "ragged_decode",
    "ragged_decode_reference",
    "rope_of",
    "shape_of",
    "tuning_for",
]


def ragged_decode(
    q: jax.Array | Heads,
    pool: jax.Array,
    plan: DecodePlan,
    *,
    scale: float,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    has_new: bool = False,
    tokens: int = 1,
    out_dtype: jax.typing.DTypeLike | None = None,
    tuning: Tuning | None = None,
    made: Made | None = None,
) -> Any:
    """Attention of one token per request, or a few, over its cache entries, for all KV heads of one layer.

    The heads may sit in any groups and columns: `plan` knows where. Order among a head's entries does not matter, so a
    sliding window kept as a ring needs nothing special.

    Args:
      q: [B, K, G, D] queries after RoPE, bfloat16 or float16; with `has_new` [B, K, G + 2, D], of several tokens
        [B * S, K, G + 2, D], those of a request one after another. Or what the kernel makes one token's of.
      pool: [num_pages, 2, Hp, P, D] of the same dtype; all finite, also where nothing was written. Or uint8: pages of bytes
        (`pallas_kernels.byte_pages`), which have more rows than P.
      plan: of this layer: `plan_decode(...).layer(index)`.
      scale: factor of the products q . k.
      soft_cap: logits become soft_cap * tanh(logits / soft_cap).
      sinks: f32[K, G] logit of an entry without value, one per query head (GPT-OSS).
      has_new: the last two rows of each KV head in `q` are the key and value of the current token, one more entry of every
        head: so that the tokens of all layers can be appended to the cache at once, after the forward.
      tokens: S new tokens of each request: each sees the entries, the new tokens before it, and itself.
      out_dtype: of the output; q's by default.
      tuning: by default the device's record.
      made: how, where `q` are heads to be made (with `has_new`, 16-bit pages and heads of up to `tuning.most_made` numbers).

    Returns:
      out [B, K, G, D], and lse f32[B, K, G], the natural log-sum-exp of all logits, sinks and new tokens included; of
      several tokens [B * S, ...]. Of a head with nothing to attend to: 0 and -inf. Of heads that were made their keys and
      values [B, K, 2, D], too, as they are to be appended.

    Raises:
      NotImplementedError: naming what no kernel supports; `ragged_decode_reference` takes the same arguments, after
        `heads_reference` where heads are to be made.
      ValueError: on several tokens without their keys and values.
    """
    if tokens > 1 and not has_new:
        raise ValueError(
            f"{tokens} tokens of a request see each other: give their keys and values, with `has_new`"
        )
    tuning = tuning or tuning_for()
    rows, kv_heads, group, head_dim = shape_of(q, made)
    q_shape = rows, kv_heads, group - 2 * has_new, head_dim
    dtype = made.dtype if made else q.dtype  # type: ignore[union-attr]
    check_supported(q_shape, dtype, pool.shape, pool.dtype, tokens=tokens)
    if made and (tokens > 1 or byte_pages.is_bytes(pool.dtype) or head_dim > tuning.most_made):
        raise NotImplementedError(
            f"{tokens} tokens of a request, {pool.dtype} pages and heads of {head_dim}: the kernel makes heads of up to "
            f"{tuning.most_made} numbers, of one token, beside 16-bit pages"
        )
    from pallas_kernels.ragged_decode.mosaic_gpu import ragged_decode_mosaic_gpu

    return ragged_decode_mosaic_gpu(
        q, pool, plan, scale=scale, soft_cap=soft_cap, sinks=sinks,
        has_new=has_new, tokens=tokens, out_dtype=out_dtype or dtype, tuning=tuning, made=made,
    )  # fmt: skip


def check_supported(
    q_shape: tuple[int, ...],
    q_dtype: jax.typing.DTypeLike,
    pool_shape: tuple[int, ...],
    pool_dtype: jax.typing.DTypeLike,
    *,
    tokens: int = 1,
    device: jax.Device | None = None,
) -> None:
    """Raises NotImplementedError, naming the feature, where `ragged_decode` has no kernel.

    q_shape (B, K, G, D), or (B * S, K, G, D) of several `tokens`, whose queries count as more of each KV head.
    """
    rows, kv_heads, group, head_dim = q_shape
    by_request = rows // tokens, kv_heads, tokens * group, head_dim
    most = max_queries(head_dim, pool_dtype)
    check_attention(by_request, q_dtype, pool_shape, pool_dtype, device=device, generations=TUNING, most=most)


def makes_heads(
    q_shape: tuple[int, ...],
    pool_dtype: jax.typing.DTypeLike,
    *,
    tokens: int = 1,
    device: jax.Device | None = None,
) -> bool:
    """Whether it is faster if the kernel makes heads itself; q_shape and tokens as for `check_supported`."""
    device = jax.devices()[0] if device is None else device
    tuning = tuning_for(device)
    can = tokens == 1 and q_shape[-1] <= tuning.most_made and not byte_pages.is_bytes(pool_dtype)
    return can and q_shape[0] <= tuning.most_rows_made and measured_on(tuning.kinds_made, device)


def max_queries(head_dim: int, pool_dtype: jax.typing.DTypeLike) -> int:
    """Of a KV head: its query heads, or as many for each of several tokens of a request.

    Shared memory has no room for more where warpgroups hand sums to each other.
    """
    return 16 if head_dim > 128 and byte_pages.is_bytes(pool_dtype) else 32
