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
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.gpu_timing import kernels_of, read_roof
from benchmarks.streams import CTAS, NAME, streamed

EACH = 496  # pieces of a CTA
ROWS, COLUMNS = 128, 64  # of a piece
HEADS = 4  # of a page: as many pieces of keys, then of values


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

    def loads_of(cta: Any, x: Any, order: Any) -> tuple[Any, Any, Any]:
        def places(load: Any) -> tuple[Any, ...]:
            return tuple(order[cta, jnp.minimum(load * pieces + u, each - 1)] for u in range(pieces))

        return jnp.int32(each // pieces), places, lambda place: x.at[place]

    return streamed(
        small, x, order, loads_of=loads_of, piece=(ROWS, COLUMNS), pieces=pieces, slots=slots, ctas=ctas,
        interpret=interpret,
    )  # fmt: skip


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
            us = float(np.median([t for key, times in kernels.items() if NAME in key for t in times]))
            row.append(f"{us:.1f} ({x.nbytes / us / 1e3 / roof:.3f})")
        table.add_row(name, *row)
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
