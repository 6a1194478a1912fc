"""A kernel that loads and computes nothing: what the memory gives in some order of reading."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.read_once import load_once

NAME = "memory_stream"  # in profiles
CTAS = 132
i32 = jnp.int32
Places = tuple[Any, ...]


def streamed(
    small: jax.Array,
    *operands: jax.Array,
    loads_of: Callable[..., tuple[Any, Callable[[Any], Places], Callable[[Any], Any]]],
    piece: tuple[int, int],
    pieces: int,
    slots: int,
    ctas: int = CTAS,
    interpret: Any = None,
) -> jax.Array:
    """`small` f32[128], after every CTA's loads went through its `slots` of shared memory, of so many pieces each.

    loads_of: of a CTA and the operands how many loads there are, the places of a load's pieces, which are found a load
      ahead, and what lies in one of these places, bfloat16[piece] of the first operand.
    """

    def memory_stream(small: Any, *refs: Any) -> None:
        *given, out = refs
        cta = lax.axis_index("cta")
        loads, places_of, source = loads_of(cta, *given)

        def body(buffer: Any, full: Any, free: Any) -> None:
            @pl.when(lax.axis_index("wg") == 0)
            def _() -> None:
                def one(n: Any, places: Places) -> Places:
                    slot, following = lax.rem(n, i32(slots)), places_of(n + 1)
                    pl.when(n >= slots)(lambda: plgpu.barrier_wait(free.at[slot]))
                    for u, place in enumerate(places):
                        load_once(source(place), buffer.at[slot, u], full.at[slot])
                    return following

                lax.fori_loop(0, loads, one, places_of(i32(0)))
                if interpret is not None:  # it wants every completion of a barrier to be seen
                    for slot in range(slots):
                        pl.when(loads > slot)(functools.partial(plgpu.barrier_wait, free.at[slot]))

            @pl.when(lax.axis_index("wg") == 1)
            def _() -> None:
                def one(n: Any, carry: Any) -> None:
                    del carry
                    slot = lax.rem(n, i32(slots))
                    plgpu.barrier_wait(full.at[slot])
                    plgpu.barrier_arrive(free.at[slot])

                lax.fori_loop(0, loads, one, None)

                @pl.when(cta == 0)
                def _() -> None:
                    out[...] = small[...]

        tiled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))  # type: ignore[abstract]
        pl.run_scoped(
            body,
            plgpu.SMEM((slots, pieces, *piece), operands[0].dtype, transforms=tiled),
            plgpu.Barrier(num_arrivals=pieces, num_barriers=slots),
            plgpu.Barrier(num_barriers=slots),
            collective_axes="wg",
        )

    run = plgpu.kernel(
        memory_stream, out_type=jax.ShapeDtypeStruct(small.shape, small.dtype), grid=(ctas,), grid_names=("cta",),
        num_threads=2, thread_name="wg", interpret=interpret,
    )  # fmt: skip
    return run(small, *operands)
