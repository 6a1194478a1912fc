"""The matrix products between two attentions, as one kernel for Hopper GPUs in Pallas' Mosaic GPU.

A decode step reads all weights once for a few tokens, so its pace is the memory's. Kernels of one product each leave the
memory idle while one ends and the next begins, some 5 us of 10 to 55. Here one kernel runs through the products (phases) of
a layer, with a barrier over the grid between them, and a loading warpgroup that never waits at those barriers: weights do
not depend on what is computed, so those of the next phases fill shared memory meanwhile. Another warpgroup loads the
tokens' vectors, which do wait. One computes Y^T = W^T X^T: 64 columns of weights fill the matrix instruction's rows, the
tokens are its columns.

A phase deals tiles of columns to CTAs, or to clusters of two that halve the rows of a tile and add their sums through the
cluster's shared memory. The CTA that owns a tile finishes it (norm, rotation, activation, residual).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.decode_products import device_ops
from pallas_kernels.decode_products.tuning import BLOCK, Tuning

WGMMA = plgpu.Layout.WGMMA
COUNTERS = 8  # of the barriers over the grid; zero before a call and after it
EXIT = COUNTERS - 1
STRIDE = 32  # of counters, so that each has a cache line
ROWS = 2 * BLOCK
COMPUTE, WEIGHTS, TOKENS = range(3)
i32, f32 = jnp.int32, jnp.float32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phase:
    """One product: `source` [T, depth] times `weights` [depth, halves, columns]. Names are keys of the operands."""

    source: str
    weights: str
    depth: int
    columns: int
    halves: int  # 2 where a tile is columns of two matrices (gate and up)
    blocks: int  # 64 columns each, of a tile: 1 or 2
    splits: int  # CTAs that share a tile: 1 or 2
    prepare: Callable[..., Any]  # prepare(view): reads what `finish` needs, before the products
    finish: Callable[..., None]  # finish(view, prepared, tile, sums)

    @property
    def tiles(self) -> int:
        return self.halves * self.columns // BLOCK // self.blocks

    @property
    def steps(self) -> int:
        """A step: 128 rows of weights, in `blocks` loads of two pieces of 64 x 64, and the tokens' 128 columns."""
        return self.depth // ROWS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    tokens: int
    phases: tuple[Phase, ...]
    num_clusters: int
    tuning: Tuning
    interpreted: bool = False

    @property
    def weight_slots(self) -> int:
        return self.tuning.weight_slots(self.tokens)


class View(dict):
    """The operands and results by name, for `prepare` and `finish`."""

    def __init__(self, refs: dict[str, Any], cfg: Config) -> None:
        super().__init__(refs)
        self.tokens, self.interpreted = cfg.tokens, cfg.interpreted


@dataclasses.dataclass
class Scratch:
    weights: Any  # [slots, 2, 64, 64]
    tokens: Any  # [slots, 2, T, 64]
    weights_full: Any
    weights_free: Any
    tokens_full: Any
    tokens_free: Any
    sent: Any = None  # f32[2, 64, T]
    one_sent: Any = None  # barriers of one sum and of two
    two_sent: Any = None


def kernel_body(cfg: Config, names: tuple[str, ...], dtype: Any, *refs: Any) -> None:
    """Operands and results by `names`. Interpreted: one phase, whose sums go to "part" f32[tiles, splits, blocks, 64, T]."""
    view = View(dict(zip(names, refs, strict=True)), cfg)

    def body(*scratch: Any) -> None:
        s = Scratch(*scratch)
        wg = lax.axis_index("wg")
        pl.when(wg == COMPUTE)(functools.partial(_compute, cfg, view, s))
        pl.when(wg == WEIGHTS)(functools.partial(_load_weights, cfg, view, s))
        pl.when(wg == TOKENS)(functools.partial(_load_tokens, cfg, view, s))

    tiled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))  # type: ignore[abstract]
    slots, token_slots = cfg.weight_slots, cfg.tuning.token_slots
    scratch = [
        plgpu.SMEM((slots, 2, BLOCK, BLOCK), dtype, transforms=tiled),
        plgpu.SMEM((token_slots, 2, cfg.tokens, BLOCK), dtype, transforms=tiled),
        plgpu.Barrier(num_arrivals=2, num_barriers=slots),
        plgpu.Barrier(num_barriers=slots),
        plgpu.Barrier(num_arrivals=2, num_barriers=token_slots),
        plgpu.Barrier(num_barriers=token_slots),
    ]
    if not cfg.interpreted:
        lanes = 32 if cfg.tokens % 32 == 0 else 8
        wide = (plgpu.TilingTransform((8, lanes)), plgpu.SwizzleTransform(4 * lanes))  # type: ignore[abstract]
        scratch += [
            plgpu.SMEM((2, BLOCK, cfg.tokens), f32, transforms=wide),
            plgpu.Barrier(num_arrivals=1),
            plgpu.Barrier(num_arrivals=2),
        ]
    pl.run_scoped(body, *scratch, collective_axes="wg")


def _rounds(cfg: Config, phase: Phase) -> list[tuple[Any, Any, Any]]:
    """(tile, first step, steps) of this CTA, a tuple a round; no steps where it has no tile left."""
    cluster, rank = lax.axis_index("cluster"), lax.axis_index("rank")
    units = cfg.num_clusters * (2 // phase.splits)
    unit = cluster if phase.splits == 2 else 2 * cluster + rank
    found = []
    for start in range(0, phase.tiles, units):
        tile = unit + start
        share = rank if phase.splits == 2 else i32(0)
        first, end = (lax.div((share + n) * phase.steps, i32(phase.splits)) for n in (0, 1))
        found.append((tile, first, jnp.where(tile < phase.tiles, end - first, 0)))
    return found


def _load_weights(cfg: Config, view: View, s: Scratch) -> None:
    slots = i32(cfg.weight_slots)
    turn: Any = i32(0)
    for phase in cfg.phases:
        ref = view[phase.weights]
        for tile, first, steps in _rounds(cfg, phase):

            def one(
                n: Any, turn: Any, phase: Phase = phase, ref: Any = ref, tile: Any = tile, first: Any = first
            ) -> Any:
                slot = lax.rem(turn, slots)

                @pl.when(turn >= slots)
                def _() -> None:
                    plgpu.barrier_wait(s.weights_free.at[slot])

                step, sub = lax.div(n, i32(phase.blocks)), lax.rem(n, i32(phase.blocks))
                for u in range(2):
                    row = (first + step) * ROWS + (sub if phase.blocks == 2 else u) * BLOCK
                    number = tile * phase.blocks + (u if phase.blocks == 2 else 0)
                    half, column = lax.rem(number, i32(phase.halves)), lax.div(number, i32(phase.halves))
                    source = ref.at[pl.ds(row, BLOCK), half, pl.ds(column * BLOCK, BLOCK)]
                    plgpu.copy_gmem_to_smem(source, s.weights.at[slot, u], s.weights_full.at[slot])
                return turn + 1

            turn = lax.fori_loop(0, steps * phase.blocks, one, turn)
    _see_all(cfg, s.weights_free, turn, cfg.weight_slots)


def _load_tokens(cfg: Config, view: View, s: Scratch) -> None:
    slots = i32(cfg.tuning.token_slots)
    turn: Any = i32(0)
    for number, phase in enumerate(cfg.phases):
        ref = view[phase.source]
        for round_, (_, first, steps) in enumerate(_rounds(cfg, phase)):
            if number and not round_:

                @pl.when(
                    steps > 0
                )  # a CTA without work has no reader to keep the counters from being cleared
                def _(number: int = number) -> None:
                    device_ops.wait(view["counters"].at[(number - 1) * STRIDE], 2 * cfg.num_clusters)

            def one(t: Any, turn: Any, ref: Any = ref, first: Any = first) -> Any:
                slot = lax.rem(turn, slots)

                @pl.when(turn >= slots)
                def _() -> None:
                    plgpu.barrier_wait(s.tokens_free.at[slot])

                for u in range(2):
                    source = ref.at[:, pl.ds((first + t) * ROWS + u * BLOCK, BLOCK)]
                    plgpu.copy_gmem_to_smem(source, s.tokens.at[slot, u], s.tokens_full.at[slot])
                return turn + 1

            turn = lax.fori_loop(0, steps, one, turn)
    _see_all(cfg, s.tokens_free, turn, cfg.tuning.token_slots)


def _see_all(cfg: Config, barrier: Any, turn: Any, slots: int) -> None:
    """The interpreter wants every completion of a barrier to be seen."""
    if cfg.interpreted:
        for slot in range(slots):

            @pl.when(turn > slot)
            def _(slot: int = slot) -> None:
                plgpu.barrier_wait(barrier.at[slot])


def _compute(cfg: Config, view: View, s: Scratch) -> None:
    turn: Any = i32(0)  # of loads of weights
    token_turn: Any = i32(0)
    for number, phase in enumerate(cfg.phases):
        if number:
            device_ops.wait(view["counters"].at[(number - 1) * STRIDE], 2 * cfg.num_clusters)
        prepared = None if cfg.interpreted else phase.prepare(view)
        for tile, _, steps in _rounds(cfg, phase):
            sums = pl.run_scoped(
                functools.partial(_sums, cfg, phase, s, turn, token_turn, steps),
                *[plgpu.ACC((BLOCK, cfg.tokens), f32)] * phase.blocks,
            )
            turn, token_turn = turn + steps * phase.blocks, token_turn + steps

            @pl.when(steps > 0)
            def _(phase: Phase = phase, prepared: Any = prepared, tile: Any = tile, sums: Any = sums) -> None:
                _finish(cfg, phase, view, s, prepared, tile, sums)

        if number + 1 < len(cfg.phases):
            device_ops.arrive(view["counters"].at[number * STRIDE])
    if len(cfg.phases) > 1:
        _leave(cfg, view)


def _sums(
    cfg: Config, phase: Phase, s: Scratch, turn: Any, token_turn: Any, steps: Any, *accumulators: Any
) -> tuple[Any, ...]:
    def one(t: Any, _: Any) -> None:
        token_slot = lax.rem(token_turn + t, i32(cfg.tuning.token_slots))
        plgpu.barrier_wait(s.tokens_full.at[token_slot])
        for sub in range(phase.blocks):
            slot = lax.rem(turn + t * phase.blocks + sub, i32(cfg.weight_slots))
            plgpu.barrier_wait(s.weights_full.at[slot])
            for u in range(2):
                acc, part = (accumulators[u], sub) if phase.blocks == 2 else (accumulators[0], u)
                x = s.tokens.at[token_slot, part]
                plgpu.wgmma(acc, s.weights.at[slot, u].transpose((1, 0)), x.transpose((1, 0)))
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(s.weights_free.at[slot])
        plgpu.barrier_arrive(s.tokens_free.at[token_slot])

    lax.fori_loop(0, steps, one, None)
    return tuple(acc[...] for acc in accumulators)


def _finish(cfg: Config, phase: Phase, view: View, s: Scratch, prepared: Any, tile: Any, sums: Any) -> None:
    rank = lax.axis_index("rank")
    if cfg.interpreted:
        for b, value in enumerate(sums):
            view["part"].at[tile, rank if phase.splits == 2 else 0, b][...] = value
        return
    if phase.splits == 1:
        phase.finish(view, prepared, tile, sums)
        return
    sent = s.one_sent if phase.blocks == 1 else s.two_sent

    @pl.when(rank == 1)
    def _() -> None:
        for b, value in enumerate(sums):
            target = s.sent.at[b]
            plgpu.async_store_smem(
                value, target, sent, cluster_idx=i32(0), cluster_dim="rank", optimized=False
            )

    @pl.when(rank == 0)
    def _() -> None:
        plgpu.barrier_wait(sent)
        phase.finish(
            view, prepared, tile, [v + plgpu.load(s.sent.at[b], layout=WGMMA) for b, v in enumerate(sums)]
        )


def _leave(cfg: Config, view: View) -> None:
    """The first CTA waits for all others to be past the barriers, and leaves the counters at zero."""
    counters = view["counters"]
    first = (lax.axis_index("cluster") == 0) & (lax.axis_index("rank") == 0)

    @pl.when(jnp.logical_not(first))
    def _() -> None:
        device_ops.arrive(counters.at[EXIT * STRIDE])

    @pl.when(first)
    def _() -> None:
        device_ops.wait(counters.at[EXIT * STRIDE], 2 * cfg.num_clusters - 1)
        zeros = plgpu.layout_cast(
            jnp.zeros((COUNTERS * STRIDE,), i32), plgpu.Layout.WG_STRIDED((COUNTERS * STRIDE,), 2)
        )
        counters[...] = zeros


def finish_body(cfg: Config, names: tuple[str, ...], *refs: Any) -> None:
    """For the interpreter: adds the sums that `kernel_body` left in "part" and finishes them."""
    view = View(dict(zip(names, refs, strict=True)), cfg)
    (phase,) = cfg.phases
    tile = lax.axis_index("tile")
    sums = []
    for b in range(phase.blocks):
        parts = [
            plgpu.load(view["part"].at[tile, r, b], layout=WGMMA, optimized=False)
            for r in range(phase.splits)
        ]
        sums.append(functools.reduce(jnp.add, parts))
    phase.finish(view, phase.prepare(view), tile, sums)
