"""A tile's parts added up by the CTAs that made them: each has some tokens, and none waits for other tiles.

No CTA has all of a token then, nor knows its norm's factor. So the next product is of the residual times the norm's weights,
and its sums are scaled by the factor, made of each tile's sums of squares while the product is under way (`factors`).

A warp has a token at a time, a thread four columns of it: f32[4, 128] in registers (`LAYOUT`). The CPU interpreter has a
plain path beside each device operation.

Where each of several devices has a share of the product these CTAs add up the devices' shares, too: each with the CTA that
has the same part of the same tile on the other devices (`all_reduce.tiles`), while other CTAs' weights go on coming.
"""

import functools
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, vector

from pallas_kernels.all_reduce import tiles
from pallas_kernels.layer_products.device_ops import LINE
from pallas_kernels.layer_products.phases import ROWS, Config, Phase, Share
from pallas_kernels.layer_products.tuning import COLUMNS
from pallas_kernels.stores import put

f32 = jnp.float32
WARPS, LANES, VECTOR = ROWS, 32, COLUMNS // 32
SHAPE = (ROWS, COLUMNS)
LAYOUT = tiles.LAYOUT
SPLAT = plgpu.Layout.WG_SPLAT(())
LINE_OF_NUMBERS = 128  # tokens, of the sums of squares of a tile
AT_ONCE = 16  # sums of squares that are read at a time


def add_up(cfg: Config, refs: dict[str, Any], phase: Phase, share: Share, parts_are_there: Any) -> None:
    """Some tokens' columns of a tile: parts, residual, norm's weights, sums of squares.

    What does not depend on the parts is read before they are waited for.
    """
    how = phase.addition
    assert how is not None
    columns = pl.ds(pl.multiple_of(share.tile * COLUMNS, COLUMNS), COLUMNS)
    own, total = (refs[name].at[:, columns] for name in (how.residual, how.total))
    dtype, known = total.dtype, (cfg.tokens, cfg.interpreted)
    rows = [share.split * cfg.tile_rows(phase) + first for first in range(0, cfg.tile_rows(phase), ROWS)]
    before = [_load(own, row, *known) for row in rows]
    if how.norm:
        weights = _load(refs[how.norm].at[columns], None, *known).astype(f32) + cfg.offset
    over_devices = _Shares(cfg, refs, phase, share) if "links" in refs else lambda added: added
    parts_are_there()
    places = [refs[phase.out].at[n, :, columns] for n in range(phase.splits)]
    parts = [[_load(place, row, *known) for place in places] for row in rows]
    sums = over_devices([functools.reduce(jnp.add, each).astype(dtype) for each in parts])
    for row, residual, added in zip(rows, before, sums, strict=True):
        now = (residual.astype(f32) + added.astype(f32)).astype(dtype)
        _store(now, total, row, *known)
        if how.normed and how.squares:
            numbers = now.astype(f32)
            _store((numbers * weights).astype(dtype), refs[how.normed].at[:, columns], row, *known)
            _store_squares(numbers * numbers, refs[how.squares].at[share.tile], row, *known)


class _Shares:
    """Of several devices, of a part of a tile. Made before the parts are waited for: it reads which turn comes."""

    def __init__(self, cfg: Config, refs: dict[str, Any], phase: Phase, share: Share) -> None:
        self._cfg, self._links, self._share = cfg, refs["links"], share
        self._first, self._part = share.split * cfg.tile_rows(phase), share.split * phase.tiles + share.tile
        if not cfg.interpreted:
            self._turn = tiles.next_turn(self._links, self._part)

    def __call__(self, added: list[jax.Array]) -> list[jax.Array]:
        """f32[4, 128] each: what all devices have added up of some tokens, of which `added` is this one's."""
        if not self._cfg.interpreted:
            return tiles.exchange(added, self._links, self._part, self._turn, self._first, self._cfg.tokens)
        columns = pl.ds(pl.multiple_of(self._share.tile * COLUMNS, COLUMNS), COLUMNS)
        return [self._plainly(each, self._first + ROWS * n, columns) for n, each in enumerate(added)]

    def _plainly(self, added: jax.Array, row: Any, columns: Any) -> jax.Array:
        """With links that are the others' shares, [N - 1, T, columns]."""
        total = added.astype(f32)
        for device in range(self._links.shape[0]):
            total += _load(self._links.at[device, :, columns], row, self._cfg.tokens, True).astype(f32)
        return total


def forget(cfg: Config, refs: dict[str, Any], phase: Phase, share: Share) -> None:
    """Of the tokens and columns that were added up, what nobody reads any more."""
    assert phase.addition is not None
    columns = pl.ds(pl.multiple_of(share.tile * COLUMNS, COLUMNS), COLUMNS)
    parts = [refs[phase.out].at[n, :, columns] for n in range(phase.splits)]
    spent = [refs[name].at[:, columns] for name in phase.addition.spent]
    rows = cfg.tile_rows(phase)
    for place in parts + spent:
        _forget(place, share.split * rows, rows, cfg.tokens)


def factors(cfg: Config, refs: dict[str, Any], phase: Phase, held: Any) -> None:
    """To `held` f32[128] the norms' factors of all tokens that a product is of."""
    assert phase.scaled is not None
    name, tiles = phase.scaled
    layout = plgpu.Layout.WG_STRIDED((LINE_OF_NUMBERS,), 1)
    total = jnp.float32(0)
    for first in range(0, tiles, AT_ONCE):
        here = range(first, min(first + AT_ONCE, tiles))
        some = [plgpu.load(refs[name].at[tile], layout=layout, optimized=False) for tile in here]
        total = functools.reduce(jnp.add, some, total)
    held[...] = lax.rsqrt(total / phase.depth + cfg.eps)


def _load(ref: Any, row: Any, tokens: int, interpreted: bool) -> jax.Array:
    """[ROWS, 128] from a row on of [N, 128] in global memory; past the last token the last; or as often all of [128]."""
    if interpreted:
        if row is None:
            return jnp.broadcast_to(ref[...], SHAPE)
        return ref[...][jnp.minimum(row + jnp.arange(ROWS), tokens - 1)]
    kind = plgpu.ShapeDtypeStruct(SHAPE, ref.dtype, layout=LAYOUT)
    given = () if row is None else (row,)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *[SPLAT] * len(given)), return_type=kind)
    def run(_: Any, ref: Any, *given: Any) -> Any:
        warp, lane = _thread()
        place = [_index(arith.muli(lane, _c(VECTOR)))]
        if given:
            at = arith.addi(given[0].registers.item(), warp)
            place.insert(0, _index(arith.minsi(at, _c(tokens - 1))))
        element = ir.MemRefType(ref.type).element_type
        registers = np.empty((1,), dtype=object)
        registers[0] = vector.load(ir.VectorType.get((VECTOR,), element), ref, place)
        layout = mgpu.WGStridedFragLayout(shape=SHAPE, vec_size=VECTOR)
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return run(ref, *given)


def _store(value: jax.Array, ref: Any, row: Any, tokens: int, interpreted: bool) -> None:
    """[ROWS, 128] to global memory [N, 128] from a row on, but for what is past the last token."""
    if interpreted:
        _store_plainly(value, ref, row, tokens)
        return

    @plgpu.inline_mgpu(arg_types=(LAYOUT, plgpu.RefType(), SPLAT))
    def run(_: Any, value: Any, ref: Any, row: Any) -> None:
        warp, lane = _thread()
        at = arith.addi(row.registers.item(), warp)
        with mgpu_utils.when(arith.cmpi(arith.CmpIPredicate.slt, at, _c(tokens))):
            vector.store(value.registers.item(), ref, [_index(at), _index(arith.muli(lane, _c(VECTOR)))])

    run(value, ref, row)


def _store_plainly(value: jax.Array, ref: Any, row: Any, tokens: int) -> None:
    for n in range(ROWS):
        pl.when(row + n < tokens)(functools.partial(put, ref.at[row + n], value[n]))


def _store_squares(value: jax.Array, ref: Any, row: Any, tokens: int, interpreted: bool) -> None:
    """The sums of the rows f32[ROWS, 128] to global memory f32[N] from `row` on, but for what is past the last token."""
    if interpreted:
        _store_plainly(value.sum(axis=1), ref, row, tokens)
        return

    @plgpu.inline_mgpu(arg_types=(LAYOUT, plgpu.RefType(), SPLAT))
    def run(_: Any, value: Any, ref: Any, row: Any) -> None:
        warp, lane = _thread()
        numbers = [
            vector.extract(value.registers.item(), dynamic_position=[], static_position=[n])
            for n in range(VECTOR)
        ]
        total = arith.addf(arith.addf(numbers[0], numbers[1]), arith.addf(numbers[2], numbers[3]))
        distance = LANES // 2
        while distance:
            total = arith.addf(total, mgpu_utils.shfl_bfly(total, distance))
            distance //= 2
        at = arith.addi(row.registers.item(), warp)
        there = arith.cmpi(arith.CmpIPredicate.slt, at, _c(tokens))
        first = arith.cmpi(arith.CmpIPredicate.eq, lane, _c(0))
        with mgpu_utils.when(arith.andi(there, first)):
            memref.store(total, ref, [_index(at)])

    run(value, ref, row)


def _forget(ref: Any, row: Any, rows: int, tokens: int) -> None:
    """Rows of [N, 128] in global memory: lines of the L2, as in `device_ops.forget`."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SPLAT))
    def run(_: Any, ref: Any, row: Any) -> None:
        kind = ir.MemRefType(ref.type)
        (stride, _), _ = kind.get_strides_and_offset()
        size = mgpu_utils.bytewidth(kind.element_type)
        lines = COLUMNS * size // LINE  # of a row
        mgpu_utils.warpgroup_barrier()  # all have read
        thread = arith.remui(mgpu_utils.thread_idx(), _c(WARPS * LANES))
        for first in range(0, rows * lines, WARPS * LANES):
            line = arith.addi(thread, _c(first))
            at = arith.addi(row.registers.item(), arith.divui(line, _c(lines)))
            offset = arith.addi(
                arith.muli(at, _c(stride * size)), arith.muli(arith.remui(line, _c(lines)), _c(LINE))
            )
            there = arith.andi(
                arith.cmpi(arith.CmpIPredicate.ult, line, _c(rows * lines)),
                arith.cmpi(arith.CmpIPredicate.slt, at, _c(tokens)),
            )
            mgpu_utils.inline_ptx(
                f"discard.global.L2 [$0], {LINE};",
                mgpu_utils.getelementptr(
                    mgpu_utils.memref_ptr(ref), [offset], ir.IntegerType.get_signless(8)
                ),
                predicate=there,
                has_side_effects=True,
            )

    run(ref, row)


def _thread() -> tuple[ir.Value, ir.Value]:
    """A thread's warp and lane."""
    thread = arith.remui(mgpu_utils.thread_idx(), _c(WARPS * LANES))
    return arith.divui(thread, _c(LANES)), arith.remui(thread, _c(LANES))


def _c(value: int) -> ir.Value:
    return mgpu_utils.c(value, ir.IntegerType.get_signless(32))


def _index(number: ir.Value) -> ir.Value:
    return arith.index_cast(ir.IndexType.get(), number)
