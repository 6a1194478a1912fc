"""What the kernels ask of a paged cache, of queries over it, and of the device."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import byte_pages

# Generations of GPUs by compute capability. Kernels that are tuned have a record for each that they run on, under the same
# key; the others run on all of these.
GENERATIONS = {"9.0": "Hopper"}
HEAD_DIMS = (64, 128, 256)
PAGE_SIZES = (16, 32, 64, 128)
MAX_GROUP = 16


def check_attention(
    q_shape: tuple[int, ...],
    q_dtype: jax.typing.DTypeLike,
    pool_shape: tuple[int, ...],
    pool_dtype: jax.typing.DTypeLike,
    *,
    device: jax.Device | None = None,
    generations: Iterable[str] = GENERATIONS,
    most: int = MAX_GROUP,
) -> None:
    """Raises NotImplementedError, naming the feature, for attention that has no kernel.

    q_shape (B or T, K, G, D) over a pool [num_pages, 2, Hp, P, D], G at most `most`. `generations`: see `check_device`.
    """
    group, head_dim = q_shape[2], q_shape[3]
    page_size = byte_pages.page_size(jax.ShapeDtypeStruct(pool_shape, pool_dtype))
    if head_dim not in HEAD_DIMS:
        raise NotImplementedError(f"head dimension {head_dim}: the kernel has {HEAD_DIMS}")
    if not 1 <= group <= most:
        raise NotImplementedError(f"{group} query heads per KV head: the kernel takes 1 to {most}")
    if page_size not in PAGE_SIZES:
        raise NotImplementedError(f"page size {page_size}: the kernel has {PAGE_SIZES}")
    _check_dtypes("queries", q_dtype, pool_dtype)
    check_device(device, generations)


def check_pages(pool: jax.Array, dtype: Any, *, device: jax.Device | None = None) -> None:
    """Raises NotImplementedError, naming the feature, for a pool [num_pages, 2, Hp, P, D] or device without kernels."""
    check_one_device(pool)
    if pool.shape[4] not in HEAD_DIMS:
        raise NotImplementedError(f"head dimension {pool.shape[4]}: the kernels have {HEAD_DIMS}")
    _check_dtypes("entries", dtype, pool.dtype)
    check_device(device)


def _check_dtypes(what: str, dtype: Any, pool_dtype: Any) -> None:
    dtype, pool_dtype = jnp.dtype(dtype), jnp.dtype(pool_dtype)
    if dtype not in ("bfloat16", "float16") or (pool_dtype != dtype and not byte_pages.is_bytes(pool_dtype)):
        raise NotImplementedError(
            f"{what} of {dtype} with a pool of {pool_dtype}: the kernels take bfloat16 or float16 with a pool of the same "
            "dtype or of bytes"
        )


def num_sms() -> int:
    """Multiprocessors of the default GPU; 132 (Hopper SXM) where there is none."""
    device = jax.devices()[0]
    return int(getattr(device, "core_count", 132) or 132) if device.platform == "gpu" else 132


def check_candidates(
    q: jax.Array, tail: jax.Array, *others: jax.Array, device: jax.Device | None = None
) -> None:
    """Raises NotImplementedError, naming the feature, for candidates that the scoring kernels do not take.

    They are a tail [..., 2, M, Hp, W, D], then a chunk of queries q [T, N, D] and `others`, keys or values, of the same
    dtype.
    """
    check_one_device(tail)
    (chunk, _, head_dim), capacity = q.shape, tail.shape[-2]
    if head_dim not in HEAD_DIMS:
        raise NotImplementedError(f"head dimension {head_dim}: the kernels have {HEAD_DIMS}")
    dtypes = [str(x.dtype) for x in (q, *others, tail)]
    if dtypes[0] not in ("bfloat16", "float16") or len(set(dtypes)) > 1:
        raise NotImplementedError(
            f"queries, candidates and tail of {', '.join(dtypes)}: the kernels take bfloat16 or float16 for all"
        )
    if (chunk % 64 and (chunk > 64 or chunk % 8)) or capacity % 8:
        raise NotImplementedError(
            f"chunks of {chunk} after tails of {capacity}: the kernels take multiples of 64 or fewer, and of 8"
        )
    check_device(device)


def check_one_device(array: jax.Array) -> None:
    """Raises NotImplementedError for an array on a mesh of several devices, unless it is one device's part of it."""
    mesh = jax.typeof(array).sharding.mesh
    size = math.prod(
        size
        for size, kind in zip(mesh.axis_sizes, mesh.axis_types, strict=True)
        if kind != jax.sharding.AxisType.Manual
    )
    if size > 1:
        raise NotImplementedError(
            f"a cache on a mesh of {size} devices: the kernels know one device's pages (see `jax.shard_map`)"
        )


def check_device(device: jax.Device | None = None, generations: Iterable[str] = GENERATIONS) -> None:
    """Raises NotImplementedError where the device (by default the first) is no GPU of these generations.

    `generations`: compute capabilities, the keys of a kernel's records of tuning.
    """
    device = jax.devices()[0] if device is None else device
    names = {capability: GENERATIONS[capability] for capability in generations}
    if device.platform != "gpu":
        known = " and ".join(names.values())
        raise NotImplementedError(f"platform {device.platform}: the kernels run on NVIDIA {known} GPUs")
    capability = str(getattr(device, "compute_capability", "unknown"))
    if capability not in names:
        known = " and ".join(f"{number} ({name})" for number, name in names.items())
        raise NotImplementedError(f"compute capability {capability}: the kernels run on {known}")


def record_for[T](records: Mapping[str, T], device: jax.Device | None = None) -> T:
    """A kernel's record of tuning for the generation of the device (by default the first).

    Where there is none the first one, as Hopper's `num_sms`: kernels are lowered and interpreted on other machines too.
    """
    device = jax.devices()[0] if device is None else device
    return records.get(str(getattr(device, "compute_capability", None)), next(iter(records.values())))


def measured_on(kinds: Iterable[str], device: jax.Device) -> bool:
    """Whether one of `kinds` is a part of the device's name. A device that is no GPU stands for those that are."""
    name = getattr(device, "device_kind", "")
    return device.platform != "gpu" or any(kind in name for kind in kinds)
