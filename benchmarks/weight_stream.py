"""How fast weights can be streamed through shared memory, by their layout and by how many loads are under way.

  python -m benchmarks.weight_stream         under a minute on one Hopper GPU

A kernel that loads and computes nothing: the bound for the matrix products of a decode step. Every multiprocessor takes an
equal share of the pieces (64 x 64, 8 KB each, two of them a load) in the order that a layout gives:

  in_out w   [in, out], tiles of w pieces side by side, from the first row to the last: 128 w bytes of a row at a time
  out_in     [out, in], tiles of 64 rows, each read from its first column to its last
  packed     16 KB pieces in a line
  together   [in, out], loads dealt to the multiprocessors in turn: all of them read one stretch of whole rows at a time
  tiles      [in, out], a CTA for 128 columns of each half, as gates have it: where these are fewer than multiprocessors, the
             others idle, "last" the last CTAs, "spread" some between the others
"""

import argparse
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from rich.console import Console
from rich.table import Table

from benchmarks.gpu_timing import cold_kernel_us, read_roof
from benchmarks.streams import CTAS, NAME, streamed
from pallas_kernels.layer_products.phases import spread as spread_ctas

BLOCK, PIECES = 64, 2
SHAPES = {"gate_up": (4096, 28672), "down": (14336, 4096), "qkv": (4096, 6144), "out": (4096, 4096)}
i32 = jnp.int32


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where the pieces of a matrix [depth, columns] lie, in the order of reading."""

    name: str
    shape: tuple[int, int]  # of the stored array
    corner: Callable[[Any], tuple[Any, Any]]  # piece number -> its first row and column in the stored array
    dealt: bool = False  # loads in turn instead of a stretch for each CTA
    working: int | None = None  # CTAs, of all by default
    spread: bool = False  # those without work lie between the others


def in_out(depth: int, columns: int, width: int) -> Layout:
    """Tiles of `width` pieces side by side."""
    per_tile = depth // BLOCK * width

    def corner(piece: Any) -> tuple[Any, Any]:
        tile, rest = lax.div(piece, i32(per_tile)), lax.rem(piece, i32(per_tile))
        column = tile * width + lax.rem(rest, i32(width))
        return lax.div(rest, i32(width)) * BLOCK, column * BLOCK

    return Layout(f"in_out {width}", (depth, columns), corner)


def together(depth: int, columns: int) -> Layout:
    """Whole rows, by all CTAs at once."""
    whole = in_out(depth, columns, columns // BLOCK)
    return dataclasses.replace(whole, name="together", dealt=True)


def tiles(depth: int, columns: int, *, spread: bool) -> Layout:
    """Two pieces side by side in each half, from the first row to the last."""
    half = columns // 2
    per_tile = 2 * PIECES * depth // BLOCK

    def corner(piece: Any) -> tuple[Any, Any]:
        tile, rest = lax.div(piece, i32(per_tile)), lax.rem(piece, i32(per_tile))
        row, nth = lax.div(rest, i32(2 * PIECES)) * BLOCK, lax.rem(rest, i32(2 * PIECES))
        column = lax.div(nth, i32(PIECES)) * half + lax.rem(nth, i32(PIECES)) * BLOCK
        return row, column + tile * (PIECES * BLOCK)

    name = f"tiles {'spread' if spread else 'last'}"
    return Layout(name, (depth, columns), corner, working=half // (PIECES * BLOCK), spread=spread)


def out_in(depth: int, columns: int) -> Layout:
    """Tiles of 64 rows of the transposed matrix."""
    per_tile = depth // BLOCK
    return Layout(
        "out_in",
        (columns, depth),
        lambda p: (lax.div(p, i32(per_tile)) * BLOCK, lax.rem(p, i32(per_tile)) * BLOCK),
    )


def packed(depth: int, columns: int) -> Layout:
    """Pieces in a line."""
    return Layout("packed", (depth * columns // BLOCK, BLOCK), lambda p: (p * BLOCK, 0))


def stream(
    small: jax.Array,
    weights: jax.Array,
    *,
    layout: Layout,
    slots: int,
    ctas: int = CTAS,
    interpret: Any = None,
) -> jax.Array:
    """`small` f32[128], after all of `weights` went through shared memory."""
    return streamed(
        small, weights, loads_of=functools.partial(loads_of, layout, ctas), piece=(BLOCK, BLOCK), pieces=PIECES,
        slots=slots, ctas=ctas, interpret=interpret,
    )  # fmt: skip


def loads_of(layout: Layout, ctas: int, cta: Any, weights: Any) -> tuple[Any, Any, Any]:
    """See `streamed`."""
    loads, working = layout.shape[0] * layout.shape[1] // (PIECES * BLOCK * BLOCK), layout.working or ctas
    number, active = spread_ctas(cta, working, ctas) if layout.spread else (cta, cta < working)
    first, end = (lax.div((number + n) * loads, i32(working)) for n in (0, 1))
    count = jnp.where(active, end - first, 0)
    if layout.dealt:
        count = lax.div(loads - cta + (ctas - 1), i32(ctas))

    def places(n: Any) -> tuple[Any, ...]:
        load = n * ctas + cta if layout.dealt else first + n
        return tuple(layout.corner(load * PIECES + u) for u in range(PIECES))

    def source(corner: tuple[Any, Any]) -> Any:
        row, column = (pl.multiple_of(each, BLOCK) for each in corner)
        return weights.at[pl.ds(row, BLOCK), pl.ds(column, BLOCK)]

    return count, places, source


def layouts(depth: int, columns: int) -> list[Layout]:
    """All that are compared."""
    wide = [in_out(depth, columns, w) for w in (1, 2, 4, 8)]
    found = [*wide, out_in(depth, columns), packed(depth, columns), together(depth, columns)]
    if columns % (2 * PIECES * BLOCK) == 0 and CTAS // 2 < columns // (2 * PIECES * BLOCK) < CTAS:
        found += [tiles(depth, columns, spread=spread) for spread in (False, True)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--slots", type=int, nargs="*", default=[2, 3, 4, 8, 12], help="loads of 16 KB under way"
    )
    parser.add_argument("--products", nargs="*", choices=SHAPES, default=["gate_up", "out"])
    args = parser.parse_args()
    roof = read_roof()
    table = Table(
        "product", "layout", *(f"{s} loads" for s in args.slots), title=f"us, and share of {roof:.0f} GB/s"
    )
    for name in args.products:
        for layout in layouts(*SHAPES[name]):
            weights = jnp.ones(layout.shape, jnp.bfloat16)
            row = []
            for slots in args.slots:
                call = functools.partial(stream, layout=layout, slots=slots)
                us, _ = cold_kernel_us(call, (jnp.ones(128), weights), NAME)
                row.append(f"{us:.1f} ({weights.nbytes / us / 1e3 / roof:.3f})")
            table.add_row(name, layout.name, *row)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
