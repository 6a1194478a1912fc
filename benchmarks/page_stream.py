"""How fast pages can be loaded into shared memory, by the order in which multiprocessors read them: the bound for attention.

  python -m benchmarks.page_stream         under a minute on one Hopper GPU

A kernel that loads and computes nothing, a gigabyte in pieces of 16 KB (one head's keys or values of 64 entries of 128
numbers), as many for each CTA, whose places stand in a table:

  in turn      piece after piece by one CTA after another, so that all of them read one stretch of memory at a time
  stretches    each CTA one of its own
  pieces       in no order
  pages        of eight pieces in no order, as in a pool that has been used, each by one CTA, piece by piece
  four at once such pages, each by four CTAs, a head's keys and then its values by each
  by heads     such pages, a CTA's 62 for one head after another
"""

import argparse
import functools
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from rich.console import Console
from rich.table import Table

from benchmarks.gpu_timing import kernels_of, read_roof
from pallas_kernels.read_once import load_once

CTAS, EACH = 132, 496  # pieces of each CTA
ROWS, COLUMNS = 128, 64  # of a piece
HEADS = 4  # of a page: as many pieces of keys, then of values
i32 = jnp.int32


def orders(ctas: int = CTAS, each: int = EACH) -> dict[str, np.ndarray]:
    """The pieces of each CTA in the order of reading, i32[ctas, each], by name."""
    rng, pieces = np.random.default_rng(0), np.arange(ctas * each, dtype=np.int32)
    pages = rng.permutation(pieces[:: 2 * HEADS]) // (2 * HEADS)

    def head_of(pages: np.ndarray, head: int) -> np.ndarray:
        """[..., pages] -> [..., 2 pages], keys and values."""
        place = np.stack([pages * 2 * HEADS + head, pages * 2 * HEADS + HEADS + head], -1)
        return place.reshape(*pages.shape[:-1], -1)

    shared, own = pages.reshape(ctas // HEADS, -1), pages.reshape(ctas, -1)
    at_once = np.stack([head_of(shared, head) for head in range(HEADS)], 1)
    return {
        "in turn": pieces.reshape(each, ctas).T,
        "stretches": pieces.reshape(ctas, each),
        "pieces": rng.permutation(pieces).reshape(ctas, each),
        "pages": (own[..., None] * 2 * HEADS + np.arange(2 * HEADS, dtype=np.int32)).reshape(ctas, each),
        "four at once": at_once.reshape(ctas, each),
        "by heads": np.concatenate([head_of(own, head) for head in range(HEADS)], 1),
    }


def stream(
    small: jax.Array, x: jax.Array, order: jax.Array, *, slots: int, pieces: int, interpret: Any = None
) -> jax.Array:
    """`small` f32[128], after the pieces of x [N, ROWS, COLUMNS] went through shared memory, so many in each load."""
    ctas, each = order.shape
    loads = each // pieces

    def page_stream(small: Any, x: Any, order: Any, out: Any) -> None:
        cta = lax.axis_index("cta")

        def places(load: Any) -> tuple[Any, ...]:
            return tuple(order[cta, jnp.minimum(load * pieces + u, each - 1)] for u in range(pieces))

        def body(buffer: Any, full: Any, free: Any) -> None:
            @pl.when(lax.axis_index("wg") == 0)
            def _() -> None:
                def one(n: Any, at: tuple[Any, ...]) -> tuple[Any, ...]:
                    slot, following = lax.rem(n, i32(slots)), places(n + 1)  # read ahead, as attention does
                    pl.when(n >= slots)(lambda: plgpu.barrier_wait(free.at[slot]))
                    for u, place in enumerate(at):
                        load_once(x.at[place], buffer.at[slot, u], full.at[slot])
                    return following

                lax.fori_loop(0, loads, one, places(i32(0)))
                if interpret is not None:  # it wants every completion of a barrier to be seen
                    for slot in range(min(slots, loads)):
                        plgpu.barrier_wait(free.at[slot])

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
            plgpu.SMEM((slots, pieces, ROWS, COLUMNS), x.dtype, transforms=tiled),
            plgpu.Barrier(num_arrivals=pieces, num_barriers=slots),
            plgpu.Barrier(num_barriers=slots),
            collective_axes="wg",
        )

    run = plgpu.kernel(
        page_stream, out_type=jax.ShapeDtypeStruct(small.shape, small.dtype), grid=(ctas,), grid_names=("cta",),
        num_threads=2, thread_name="wg", interpret=interpret,
    )  # fmt: skip
    return run(small, x, order)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--slots", type=int, nargs="*", default=[2, 3, 4, 6], help="loads under way")
    args = parser.parse_args()
    roof, found = read_roof(), orders()
    x = jnp.ones((CTAS * EACH, ROWS, COLUMNS), jnp.bfloat16)
    table = Table("order", title=f"us, and share of {roof:.0f} GB/s")
    columns = [(slots, pieces) for pieces in (1, 2) for slots in args.slots]
    for slots, pieces in columns:
        table.add_column(f"{slots} x {16 * pieces} KB")
    for name, order in found.items():
        row = []
        for slots, pieces in columns:
            run = jax.jit(functools.partial(stream, slots=slots, pieces=pieces))
            kernels = kernels_of(run, (jnp.ones(128), x, jnp.asarray(order)), 5)
            us = float(
                np.median([t for key, times in kernels.items() if "page_stream" in key for t in times])
            )
            row.append(f"{us:.1f} ({x.nbytes / us / 1e3 / roof:.3f})")
        table.add_row(name, *row)
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
