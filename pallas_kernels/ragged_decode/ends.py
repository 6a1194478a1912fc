"""What the ragged decode kernel does with an item's sums: pieces are handed over and put together, results written.

A piece that does not end its item goes to global memory, normalised, with its log-sum-exp; the CTA that holds the item's
end waits for the others, folds them in and writes. An item of many pieces is put together by several of the CTAs that hold
one, each some rows of the output: all pieces of a slice are read at once. These CTAs hold nothing else, so that they have
nothing else to do.

Whoever waits has left all its own pieces before. But where several put an item together they wait for CTAs of a higher
number: these have to be on the device too.
"""

from typing import Any, NamedTuple

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import pieces
from pallas_kernels.logits import LOG2E
from pallas_kernels.pieces import LOW, Sums
from pallas_kernels.ragged_decode import device_ops
from pallas_kernels.ragged_decode.common import BY_QUERY, WGMMA, Config, Item, Refs, f32, i32, spread
from pallas_kernels.ragged_decode.rest import with_rest
from pallas_kernels.ragged_decode.rows import store
from pallas_kernels.stores import put


class Cut(NamedTuple):
    """How the items at a share's borders go on in others."""

    layer: Any
    hand_to: Any  # the share where the last item ends
    first_share: Any  # where the first item begins


def end_item(
    cfg: Config, refs: Refs, item: Item, start: Any, end: Any, cut: Cut, q: Any, new: Any, sums: Sums
) -> None:
    """Writes an item's result, or does with a piece what is to be done."""
    has_head, has_tail = start <= item.begin, end >= item.stop
    if cfg.fused:
        pl.when(jnp.logical_not(has_tail))(lambda: _hand_over(cfg, refs, item, has_head, cut, sums))
        pl.when(has_tail)(lambda: _end(cfg, refs, item, has_head, cut, q, new, sums))
        return

    @pl.when(has_head & has_tail)
    def _() -> None:
        write(cfg, refs, item.number, with_rest(cfg, refs, item.number, q, new, sums))

    @pl.when(jnp.logical_not(has_head & has_tail))
    def _() -> None:
        _leave(refs, lax.axis_index("cta") + jnp.where(has_tail, cfg.num_shares, 0), sums)


def _leave(refs: Refs, slot: Any, sums: Sums) -> None:
    acc, m, norm = sums  # a piece has entries in sight, so that norm > 0
    put(refs.part.at[slot], acc * spread(1.0 / norm, acc.shape))
    put(refs.part_lse.at[slot], m + jnp.log2(norm))


def _hand_over(cfg: Config, refs: Refs, item: Item, has_head: Any, cut: Cut, sums: Sums) -> None:
    cta = lax.axis_index("cta")
    _leave(refs, cta, sums)
    device_ops.signal(refs.sync.at[cut.layer, cut.hand_to, 0])
    if cfg.slices:
        count = cut.hand_to - cut.first_share + 1
        part = cta - cut.first_share - 1  # among the shares that are within the item
        pl.when(jnp.logical_not(has_head) & (count >= cfg.many) & (part < cfg.slices))(
            lambda: _merge_slice(cfg, refs, item.number, cut, part)
        )


def _end(cfg: Config, refs: Refs, item: Item, has_head: Any, cut: Cut, q: Any, new: Any, sums: Sums) -> None:
    """What the CTA does that holds the item's end, and perhaps all of it."""
    cta = lax.axis_index("cta")
    counter = refs.sync.at[cut.layer, cta, 0]
    sums = with_rest(cfg, refs, item.number, q, new, sums)
    others = jnp.where(has_head, 0, cta - cut.first_share)
    many = others + 1 >= cfg.many if cfg.slices else jnp.bool_(False)

    def read(k: Any) -> Sums:
        at = cut.first_share + k
        part = plgpu.load(refs.part.at[at], layout=WGMMA, optimized=False)
        lse = plgpu.load(refs.part_lse.at[at], layout=BY_QUERY, optimized=False)
        return part, lse, plgpu.layout_cast(jnp.ones(cfg.queries, f32), BY_QUERY)

    @pl.when(jnp.logical_not(many))
    def _() -> None:
        pl.when(others > 0)(lambda: device_ops.wait(counter, others, clear=True))
        shape = (cfg.head_dim, cfg.queries)
        write(
            cfg,
            refs,
            item.number,
            pieces.fold(sums, others, read, lambda x: spread(x, shape), cfg.merge_unroll),
        )

    if cfg.slices:

        @pl.when(many)
        def _() -> None:
            _leave(refs, cfg.num_shares + cta, sums)
            device_ops.signal(counter)


def _merge_slice(cfg: Config, refs: Refs, number: Any, cut: Cut, part: Any) -> None:
    """Puts some rows of an item's output together."""
    layer, rows, unroll = cut.layer, cfg.slice_rows, cfg.slice_unroll
    first, count = cut.first_share, cut.hand_to - cut.first_share  # without the last
    at = pl.multiple_of(part * rows, rows)
    shape, here = (rows, cfg.queries), pl.ds(at, rows)
    layout = device_ops.slice_layout(shape)
    device_ops.wait(refs.sync.at[layer, cut.hand_to, 0], count + 1, waiting=cfg.slices)

    def read(start: Any, number: int, held: Any) -> tuple[list[Any], list[Any]]:
        some = pl.ds(start, number)
        return device_ops.load_pieces(refs.part.at[some, here], refs.part_lse.at[some], held, LOW)

    def some(r: Any, carry: Sums) -> Sums:
        acc, m, norm = carry
        parts, lses = read(first + r * unroll, unroll, count - r * unroll)
        top = _tree(jnp.maximum, [m, *lses])
        fade, weights = jnp.exp2(m - top), [jnp.exp2(lse - top) for lse in lses]
        sums = _tree(jnp.add, [weight * part for weight, part in zip(weights, parts, strict=True)])
        return acc * fade + sums, top, norm * fade + _tree(jnp.add, weights)

    (acc,), (m,) = read(cfg.num_shares + cut.hand_to, 1, i32(1))
    norm = plgpu.layout_cast(jnp.ones(shape, f32), layout)
    rounds = lax.div(count + (unroll - 1), i32(unroll))
    acc, m, norm = lax.fori_loop(0, rounds, some, (acc, m, norm))
    out, lse = acc * (1.0 / norm), (m + jnp.log2(norm)) * (1 / LOG2E)
    store(cfg, refs, number, out, first=at, layout=layout)
    pl.when(part == 0)(lambda: device_ops.store_first_row(lse, refs.lse.at[number], layout))


def _tree(combine: Any, values: list[Any]) -> Any:
    """All of them combined, in few steps one after another."""
    while len(values) > 1:
        paired = [combine(*two) for two in zip(values[::2], values[1::2], strict=False)]
        values = paired + values[2 * len(paired) :]
    return values[0]


def write(cfg: Config, refs: Refs, number: Any, sums: Sums) -> None:
    """Normalises and writes an item's result."""
    acc, m, norm = sums
    held = norm > 0
    inverse = jnp.where(held, 1.0 / norm, 0.0)
    put(refs.lse.at[number], jnp.where(held, (m + jnp.log2(norm)) * (1 / LOG2E), -jnp.inf))
    out = acc * spread(inverse, acc.shape)
    store(cfg, refs, number, out)
