"""Stores to global memory, however what is stored lies in registers."""

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import numpy as np

HALF = 4  # dimension of an array's registers (WGMMA layout, 64 rows): the two rows of a thread, eight apart


def put(dst: Any, value: jax.Array) -> None:
    """`dst[...] = value` for a reference to global memory.

    From JAX 0.12 on an assignment is for registers that fill whole lines of 128 bytes, and anything else has to be asked
    for; before, nothing had to be.
    """
    if hasattr(plgpu, "store"):
        plgpu.store(dst, value, optimized=False)
    else:
        dst[...] = value


def rows_of_a_thread(value: Any) -> list[list[tuple[Any, Any, Any]]]:
    """Within `inline_mgpu`, of [64, n] in registers (WGMMA layout): (row, column, register) of a thread's two rows."""
    rows: dict[int, list[tuple[Any, Any, Any]]] = {}
    places = value.layout.thread_idxs(value.shape)
    for (row, column), at in zip(places, np.ndindex(value.registers.shape), strict=True):
        rows.setdefault(at[HALF], []).append((row, column, value.registers[at]))
    return list(rows.values())
