"""Stores to global memory, however what is stored lies in registers."""

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu


def put(dst: Any, value: jax.Array) -> None:
    """`dst[...] = value` for a reference to global memory.

    From JAX 0.12 on an assignment is for registers that fill whole lines of 128 bytes, and anything else has to be asked
    for; before, nothing had to be.
    """
    if hasattr(plgpu, "store"):
        plgpu.store(dst, value, optimized=False)
    else:
        dst[...] = value
