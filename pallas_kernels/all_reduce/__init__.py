"""All-reduces of tokens' rows between the GPUs of one host, by kernels that write into the others' memory.

A decode step has two of some KB each a layer. NCCL's are recorded into a CUDA graph anew in every step, which takes the host
longer than the GPUs need for the step; these are kernels like any other, add the residual and normalise besides.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.all_reduce.links import EVEN, MOST_COLUMNS, in_passing, links_of
from pallas_kernels.norms import rms_norm

TRIED = (2, 4)  # numbers of devices on which these have run
PADDED = 1024  # columns that are no multiple of EVEN are padded to one of this

__all__ = [
    "EVEN",
    "MOST_COLUMNS",
    "added_norm",
    "all_reduce",
    "check_supported",
    "in_passing",
    "links_of",
]


def check_supported(share: Any) -> None:
    """Raises NotImplementedError, naming the feature, for a share [T, columns] that the kernels do not add up."""
    if share.dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(f"sums of {share.dtype}: the kernel takes bfloat16 and float16")
    if _padded(share.shape[1]) > MOST_COLUMNS:
        raise NotImplementedError(f"sums of {share.shape[1]} columns: the kernel takes up to {MOST_COLUMNS}")


def all_reduce(
    share: Float[Array, "T columns"], links: Int[Array, "_ 2"], *, interpret: Any = None
) -> Float[Array, "T columns"]:
    """The sum of all devices' `share`, bf16 or f16: added up in float32, in the same order on each device.

    Within a `jax.shard_map`. All devices make the same calls in the same order, as with any collective, and one after
    another: of two calls one must depend on the other's result.

    Args:
      share: what `check_supported` lets pass.
      links: i32[1 + N, 2], the device's part of what `links_of` gives. With `interpret` the shares of all devices instead,
        [N, T, columns]: the interpreter has no memory of others.
    """
    from pallas_kernels.all_reduce.mosaic_gpu import all_reduce_mosaic_gpu

    columns = share.shape[1]
    if interpret is None and (more := _padded(columns) - columns):
        return all_reduce(jnp.pad(share, ((0, 0), (0, more))), links)[:, :columns]
    return all_reduce_mosaic_gpu(share, links, interpret=interpret)


def added_norm(
    x: Float[Array, "T columns"],
    share: Float[Array, "T columns"],
    weight: Float[Array, " columns"],
    links: Int[Array, "_ 2"],
    *,
    eps: float,
    offset: float = 0.0,
    interpret: Any = None,
) -> tuple[Float[Array, "T columns"], Float[Array, "T columns"]]:
    """(x and the sum of all devices' `share`, the RMS norm of that): see `all_reduce` and `norms.rms_norm`.

    x is the same on all devices. The sum is rounded once, when x has been added; of columns that are no multiple of EVEN
    before that as well.
    """
    from pallas_kernels.all_reduce.mosaic_gpu import added_norm_mosaic_gpu

    if interpret is None and _padded(share.shape[1]) != share.shape[1]:
        x = x + all_reduce(share, links)
        return x, rms_norm(x, weight, eps, offset)
    return added_norm_mosaic_gpu(x, share, weight, links, eps=eps, offset=offset, interpret=interpret)


def _padded(columns: int) -> int:
    return columns if columns % EVEN == 0 else -(-columns // PADDED) * PADDED
