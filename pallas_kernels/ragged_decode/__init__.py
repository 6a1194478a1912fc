"""Ragged paged decode attention: one query token per request over a cache whose every head has its own length."""

import jax

from pallas_kernels.ragged_decode.plan import DecodePlan, plan_decode
from pallas_kernels.ragged_decode.reference import ragged_decode_reference
from pallas_kernels.ragged_decode.tuning import DEFAULT, Tuning

__all__ = [
    "DEFAULT",
    "DecodePlan",
    "Tuning",
    "check_supported",
    "plan_decode",
    "ragged_decode",
    "ragged_decode_reference",
]

HEAD_DIMS = (64, 128, 256)
PAGE_SIZES = (16, 32, 64, 128)
MAX_GROUP = 16


def ragged_decode(
    q: jax.Array,
    pool: jax.Array,
    plan: DecodePlan,
    *,
    scale: float,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    k_new: jax.Array | None = None,
    v_new: jax.Array | None = None,
    out_dtype: jax.typing.DTypeLike | None = None,
    tuning: Tuning = DEFAULT,
) -> tuple[jax.Array, jax.Array]:
    """Attention of one token per request over its cache entries, for all KV heads of one layer.

    The heads may sit in any groups and columns: `plan` knows where. Order among a head's entries does not matter, so a
    sliding window kept as a ring needs nothing special.

    Args:
      q: [B, K, G, D] queries after RoPE, bfloat16 or float16.
      pool: [num_pages, 2, Hp, P, D] of the same dtype; all finite, also where nothing was written.
      plan: of this layer: `plan_decode(...).layer(index)`.
      scale: factor of the products q . k.
      soft_cap: logits become soft_cap * tanh(logits / soft_cap).
      sinks: f32[K, G] logit of an entry without value, one per query head (GPT-OSS).
      k_new, v_new: [B, K, D] key and value of the current token, one more entry of every head: so that the tokens of all
        layers can be appended to the cache at once, after the forward.
      out_dtype: of the output; q's by default.
      tuning: the chip's record.

    Returns:
      out [B, K, G, D], and lse f32[B, K, G], the natural log-sum-exp of all logits, sinks and current token included. Of a
      head with nothing to attend to: 0 and -inf.

    Raises:
      NotImplementedError: naming what no kernel supports; `ragged_decode_reference` takes the same arguments.
    """
    check_supported(q.shape, q.dtype, pool.shape, pool.dtype)
    from pallas_kernels.ragged_decode.mosaic_gpu import ragged_decode_mosaic_gpu

    return ragged_decode_mosaic_gpu(
        q, pool, plan, scale=scale, soft_cap=soft_cap, sinks=sinks,
        k_new=k_new, v_new=v_new, out_dtype=out_dtype, tuning=tuning,
    )  # fmt: skip


def check_supported(
    q_shape: tuple[int, ...],
    q_dtype: jax.typing.DTypeLike,
    pool_shape: tuple[int, ...],
    pool_dtype: jax.typing.DTypeLike,
    *,
    device: jax.Device | None = None,
) -> None:
    """Raises NotImplementedError, naming the feature, where `ragged_decode` has no kernel."""
    group, head_dim = q_shape[2], q_shape[3]
    page_size = pool_shape[3]
    if head_dim not in HEAD_DIMS:
        raise NotImplementedError(f"head dimension {head_dim}: the kernel has {HEAD_DIMS}")
    if group > MAX_GROUP:
        raise NotImplementedError(f"{group} query heads per KV head: the kernel takes up to {MAX_GROUP}")
    if page_size not in PAGE_SIZES:
        raise NotImplementedError(f"page size {page_size}: the kernel has {PAGE_SIZES}")
    if pool_dtype not in ("bfloat16", "float16"):
        raise NotImplementedError(f"pool of {pool_dtype}: the kernel takes bfloat16 and float16")
    if q_dtype != pool_dtype:
        raise NotImplementedError(
            f"queries of {q_dtype} over a pool of {pool_dtype}: the kernel takes equal dtypes"
        )
    device = jax.devices()[0] if device is None else device
    if device.platform != "gpu":
        raise NotImplementedError(f"platform {device.platform}: the kernel runs on NVIDIA Hopper GPUs")
    capability = str(getattr(device, "compute_capability", "unknown"))
    if capability != "9.0":
        raise NotImplementedError(f"compute capability {capability}: the kernel runs on 9.0 (Hopper)")
