"""All matrix products between two attentions of a decode step as one kernel, for very few tokens: see `layer_products`.

A kernel of one product each loses the time in which memory idles while one ends and the next begins. Here one kernel runs
through the products (phases) of a layer with a barrier over the grid between them, and a loading warpgroup that never waits
at those barriers: weights do not depend on what is computed.

A CTA takes a block of rows of a stripe of columns: weights [in, out] are then read in long stretches, a block's sums of its
columns stay in registers from its first row to its last, and all that it needs of the tokens is its rows' numbers. The sums
go to memory, [blocks, T, columns]; the next phase adds up those of its own rows. No tensor cores: with so few tokens the
other units multiply faster than memory delivers.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.mosaic.gpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from benchmarks import layer_kernel_ops as device_ops
from pallas_kernels.gates import Gate, gated
from pallas_kernels.ragged_decode.device_ops import signal, wait
from pallas_kernels.support import num_sms

THREADS = 128  # of a warpgroup
SLOT = 8192  # weights of a load
SLOTS = 12  # loads under way
COPIES = 8  # of a load
WARPS = 4  # of the loading warpgroup; each loads on its own
WARPGROUPS = 2  # computing ones; each has half of a stripe's columns
STAMPS = 32  # of a CTA: its multiprocessor, then when each phase began, computed, and had left its sums
i32, f32 = jnp.int32, jnp.float32


@dataclasses.dataclass(frozen=True)
class Shape:
    """Of a product [depth, columns]: `blocks` of rows times stripes of `width` columns, `rows` of them a load."""

    depth: int
    columns: int
    width: int
    blocks: int

    @property
    def stripes(self) -> int:
        return self.columns // self.width

    @property
    def rows(self) -> int:
        rows = COPIES
        while rows * self.width > SLOT or self.depth % rows:
            rows //= 2
        return rows

    @property
    def most_rows(self) -> int:
        """Of a block."""
        return -(-(self.depth // self.rows) // self.blocks) * self.rows

    @property
    def prepared(self) -> int:
        """Rows whose numbers a warpgroup of two prepares."""
        return -(-self.most_rows // (2 * THREADS)) * THREADS


def shape_for(depth: int, columns: int, num_ctas: int) -> Shape:
    """The division that leaves the fewest multiprocessors and the least of their time unused."""

    def score(shape: Shape) -> float:
        use = depth * columns / (shape.most_rows * shape.width * num_ctas)
        return use - shape.blocks / 2000  # a few per cent are worth fewer sums to add up

    widths = [w for w in (1024, 1536, 2048, 512, 4096) if columns % w == 0 and columns // w <= num_ctas]
    return max((Shape(depth, columns, w, num_ctas // (columns // w)) for w in widths), key=score)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    tokens: int
    shapes: tuple[
        Shape, ...
    ]  # of the phases: output projection, gates and what they let through, down, the next heads
    gate: Gate
    eps: float
    num_ctas: int


class _Unit:
    """What a CTA takes of a phase: rows `first` to `first + count * shape.rows`, columns from `column`."""

    def __init__(self, shape: Shape) -> None:
        cta = lax.axis_index("cta")
        self.shape = shape
        self.there = cta < shape.stripes * shape.blocks
        self.block = lax.div(cta, i32(shape.stripes))
        units = shape.depth // shape.rows
        begin, end = (lax.div((self.block + n) * units, i32(shape.blocks)) for n in (0, 1))
        self.first = begin * shape.rows
        self.count = jnp.where(self.there, end - begin, 0)
        self.column = lax.rem(cta, i32(shape.stripes)) * shape.width


class _Operands(NamedTuple):
    attended: Any  # [T, depth]
    x: Any  # [T, E]
    norms: tuple[Any, ...]  # [E]: of the MLP, of the next heads
    weights: tuple[Any, ...]  # of the phases, flat
    sync: Any  # i32[phases, 32], zeros before and after
    between: Any  # [T, E]: x and the output projection
    after: Any  # [T, E]: and what the MLP adds
    out: Any  # [T, columns] of the last phase
    squares: Any  # f32[phases, T, 128]: sums over the rows of each warpgroup that prepares some
    stamps: Any  # i32[CTAs, STAMPS]
    sums: tuple[Any, ...]  # f32[blocks, T, columns] of each phase


class _Scratch(NamedTuple):
    weights: Any  # [SLOTS, SLOT]
    rows: Any  # f32[T, n]
    exchange: Any  # f32[WARPGROUPS, T, 4]
    full: Any
    free: Any
    met: Any


@functools.partial(jax.jit, static_argnames=("gate", "eps"))
def layer_products(
    attended: jax.Array,
    x: jax.Array,
    norms: tuple[jax.Array, jax.Array],
    weights: tuple[jax.Array, ...],
    sync: jax.Array,
    *,
    gate: Gate = "silu",
    eps: float = 1e-5,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """x after the layer [T, E], the next layer's heads [T, columns] and time stamps i32[CTAs, STAMPS], ns.

    attended [T, depth] of at most a few tokens; x [T, E]; norms [E] of the MLP and of the next heads; weights [in, out] of
    output projection, gates and what they let through, down, next heads; sync i32[4, 32] of zeros, zeros again afterwards.
    """
    tokens, ctas = x.shape[0], num_sms()
    shapes = tuple(shape_for(w.shape[0], w.shape[1], ctas) for w in weights)
    cfg = Config(tokens=tokens, shapes=shapes, gate=gate, eps=eps, num_ctas=ctas)
    results = [
        jax.ShapeDtypeStruct(x.shape, x.dtype),
        jax.ShapeDtypeStruct(x.shape, x.dtype),
        jax.ShapeDtypeStruct((tokens, shapes[-1].columns), x.dtype),
        jax.ShapeDtypeStruct((len(shapes), tokens, THREADS), f32),
        jax.ShapeDtypeStruct((ctas, STAMPS), i32),
        *(jax.ShapeDtypeStruct((s.blocks, tokens, s.columns), f32) for s in shapes),
    ]

    def layer_products(*refs: Any) -> None:
        _kernel(cfg, x.dtype, *refs)

    kernel = plgpu.kernel(
        layer_products, out_type=results, grid=(ctas,), grid_names=("cta",), num_threads=WARPGROUPS + 1, thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )  # fmt: skip
    _, after, out, _, stamps, *_ = kernel(attended, x, *norms, *(w.reshape(-1) for w in weights), sync)
    return after, out, stamps


def _kernel(cfg: Config, dtype: Any, *refs: Any) -> None:
    n = len(cfg.shapes)
    attended, x, *rest = refs
    norms, weights, rest = rest[: n - 2], rest[n - 2 : 2 * n - 2], rest[2 * n - 2 :]
    o = _Operands(attended, x, tuple(norms), tuple(weights), *rest[:6], tuple(rest[6:]))

    def body(*scratch: Any) -> None:
        s, wg = _Scratch(*scratch), lax.axis_index("wg")
        # Each warp takes every fourth load: a warpgroup as one is slower than the memory.
        pl.when(wg == WARPGROUPS)(lambda: plgpu.warp_map(functools.partial(_load, cfg, o.weights, s)))
        pl.when(wg < WARPGROUPS)(lambda: _compute(cfg, o, s, wg))

    most = max(shape.prepared for shape in cfg.shapes)
    pl.run_scoped(
        body,
        plgpu.SMEM((SLOTS, SLOT), dtype),
        plgpu.SMEM((cfg.tokens, 3 * most), f32),
        plgpu.SMEM((WARPGROUPS, cfg.tokens, 4), f32),
        plgpu.Barrier(num_arrivals=COPIES, num_barriers=SLOTS),
        plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=SLOTS),
        plgpu.Barrier(num_arrivals=WARPGROUPS),
        collective_axes="wg",
    )


def _load(cfg: Config, weights: tuple[Any, ...], s: _Scratch, warp: Any) -> None:
    before: Any = i32(0)  # loads of the phases before
    for shape, matrix in zip(cfg.shapes, weights, strict=True):
        unit = _Unit(shape)
        first = lax.rem(warp + WARPS * 64 - before, i32(WARPS))

        def one(
            k: Any, _: Any, shape: Shape = shape, matrix: Any = matrix, unit: _Unit = unit, first: Any = first,
            before: Any = before,
        ) -> None:  # fmt: skip
            n = first + k * WARPS
            turn = before + n
            slot = lax.rem(turn, i32(SLOTS))

            @pl.when(turn >= SLOTS)
            def _() -> None:
                plgpu.barrier_wait(s.free.at[slot])

            each = shape.rows * shape.width // COPIES
            start = (unit.first + n * shape.rows) * shape.columns + unit.column
            for c in range(COPIES):
                row, piece = divmod(c * each, shape.width)
                at = start + row * shape.columns + piece
                plgpu.copy_gmem_to_smem(
                    matrix.at[pl.ds(at, each)], s.weights.at[slot, pl.ds(c * each, each)], s.full.at[slot],
                    oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
                )  # fmt: skip

        lax.fori_loop(0, lax.div(unit.count - first + WARPS - 1, i32(WARPS)), one, None)
        before = before + unit.count


def _compute(cfg: Config, o: _Operands, s: _Scratch, wg: Any) -> None:
    cta = lax.axis_index("cta")

    def stamp(n: int, special: str = "globaltimer_lo") -> None:
        pl.when(wg == 0)(lambda: device_ops.stamp(o.stamps.at[cta, n], special))

    stamp(0, "smid")
    turn: Any = i32(0)
    for phase, shape in enumerate(cfg.shapes):
        unit = _Unit(shape)
        if phase:
            _grid_barrier(cfg, o.sync, phase - 1)
        stamp(4 * phase + 1)

        @pl.when(unit.there)
        def _(phase: int = phase, unit: _Unit = unit) -> None:
            some = wg * unit.shape.prepared < unit.count * unit.shape.rows
            pl.when(some)(lambda: _prepare(cfg, o, s, phase, unit, wg))
            plgpu.barrier_arrive(s.met)
            plgpu.barrier_wait(s.met)

        stamp(4 * phase + 2)
        mine = shape.width // WARPGROUPS
        vector = next(v for v in (8, 4, 2, 1) if (mine // THREADS) % v == 0)
        layout = plgpu.Layout.WG_STRIDED((mine,), vec_size=vector)

        def one(n: Any, carry: Any, shape: Shape = shape, mine: int = mine, layout: Any = layout) -> Any:
            turn, *acc = carry
            slot = lax.rem(turn, i32(SLOTS))
            plgpu.barrier_wait(s.full.at[slot])
            for r in range(shape.rows):
                held = s.weights.at[slot, pl.ds(r * shape.width + wg * mine, mine)]
                row = plgpu.load(held, layout=layout).astype(f32)
                for t in range(cfg.tokens):
                    acc[t] = acc[t] + row * s.rows[t, shape.prepared + n * shape.rows + r]
            plgpu.barrier_arrive(s.free.at[slot])
            return (turn + 1, *acc)

        zeros = [plgpu.layout_cast(jnp.zeros(mine, f32), layout) for _ in range(cfg.tokens)]
        turn, *acc = lax.fori_loop(0, unit.count, one, (turn, *zeros))
        stamp(4 * phase + 3)

        @pl.when(unit.there)
        def _(phase: int = phase, unit: _Unit = unit, mine: int = mine, acc: Any = acc) -> None:
            for t in range(cfg.tokens):
                o.sums[phase][unit.block, t, pl.ds(unit.column + wg * mine, mine)] = acc[t]

        stamp(4 * phase + 4)
    _grid_barrier(cfg, o.sync, len(cfg.shapes) - 1)
    stamp(4 * len(cfg.shapes) + 1)
    _finish(cfg, o, s, wg)
    stamp(4 * len(cfg.shapes) + 2)


def _grid_barrier(cfg: Config, sync: Any, number: int) -> None:
    arriving = WARPGROUPS * cfg.num_ctas
    signal(sync.at[number, 0])
    wait(sync.at[number, 0], i32(arriving), waiting=arriving)


def _read(ref: Any) -> Any:
    """f32[n] of global memory, a number a thread at a time."""
    layout = plgpu.Layout.WG_STRIDED(ref.shape, vec_size=1)
    return plgpu.load(ref, layout=layout, optimized=False).astype(f32)


def _added_up(sums: Any, t: int, at: Any, blocks: int) -> Any:
    """The blocks' sums of columns `at` of a token."""
    parts = [_read(sums.at[b, t, at]) for b in range(blocks)]
    while len(parts) > 1:
        pairs = [a + b for a, b in zip(parts[::2], parts[1::2], strict=False)]
        parts = pairs + parts[len(pairs) * 2 :]
    return parts[0]


def _numbers(count: int) -> Any:
    layout = plgpu.Layout.WG_STRIDED((count,), vec_size=1)
    return plgpu.broadcasted_iota(i32, (count,), 0, layout=layout)


def _prepare(cfg: Config, o: _Operands, s: _Scratch, phase: int, unit: _Unit, wg: Any) -> None:
    """What the rows of a unit are multiplied by, to s.rows: of the row that the unit begins with at `prepared`.

    What all tokens need of memory is asked for before anything waits for it.
    """
    size = unit.shape.prepared
    start = jnp.minimum(unit.first + wg * size, unit.shape.depth - size)
    at = pl.ds(start, size)
    tokens = range(cfg.tokens)
    if phase == 0:
        values = [_read(o.attended.at[t, at]) for t in tokens]
    elif phase == 2:
        squares = [_read(o.squares.at[1, t]) for t in tokens]
        halves = [pl.ds(start + half * unit.shape.depth, size) for half in range(2)]
        found = [[_added_up(o.sums[1], t, half, cfg.shapes[1].blocks) for half in halves] for t in tokens]
        factors = _factors(cfg, squares, s, 1, wg)
        values = [
            gated(g * factor, v * factor, cfg.gate) for (g, v), factor in zip(found, factors, strict=True)
        ]
    else:
        values = _normed(cfg, o, s, phase, unit, wg, start)
    for t in tokens:
        s.rows[t, pl.ds(size + start - unit.first, size)] = values[t]


def _normed(
    cfg: Config, o: _Operands, s: _Scratch, phase: int, unit: _Unit, wg: Any, start: Any
) -> list[Any]:
    """x with what is added to it, times the norm's weight: the norm but for a factor, for which squares are added up."""
    size, dtype, tokens = unit.shape.prepared, o.x.dtype, range(cfg.tokens)
    at = pl.ds(start, size)
    before, after = (o.x, o.between) if phase == 1 else (o.between, o.after)
    norm = _read(o.norms[phase // 2].at[at])
    old = [_read(before.at[t, at]) for t in tokens]
    added = [_added_up(o.sums[phase - 1], t, at, cfg.shapes[phase - 1].blocks) for t in tokens]
    total = [(x + y.astype(dtype).astype(f32)).astype(dtype) for x, y in zip(old, added, strict=True)]
    values = [x.astype(f32) for x in total]
    first = unit.first + wg * size
    row = start + _numbers(size)
    mine = (row >= first) & (row < jnp.minimum(first + size, unit.first + unit.count * unit.shape.rows))

    @pl.when(unit.column == 0)
    def _() -> None:
        squares = device_ops.totals([jnp.where(mine, x * x, 0.0) for x in values], s.exchange.at[wg])
        for t in tokens:
            after[t, at] = total[t]
            o.squares[phase, t, WARPGROUPS * unit.block + wg] = squares[t]

    return [x * norm for x in values]


def _factors(cfg: Config, squares: list[Any], s: _Scratch, phase: int, wg: Any) -> list[Any]:
    """By which what `phase` has multiplied is to be multiplied to be the norm, of each token."""
    shape = cfg.shapes[phase]
    block, of = lax.div(_numbers(THREADS), i32(WARPGROUPS)), lax.rem(_numbers(THREADS), i32(WARPGROUPS))
    units = shape.depth // shape.rows
    begin, end = (lax.div((block + n) * units, i32(shape.blocks)) for n in (0, 1))
    there = (block < shape.blocks) & (of * shape.prepared < (end - begin) * shape.rows)
    totals = device_ops.totals([jnp.where(there, x, 0.0) for x in squares], s.exchange.at[wg])
    return [lax.rsqrt(x / shape.depth + cfg.eps) for x in totals]


def _finish(cfg: Config, o: _Operands, s: _Scratch, wg: Any) -> None:
    """The last phase's sums, added up over the blocks, to `out`."""
    last = len(cfg.shapes) - 1
    shape, workers = cfg.shapes[last], WARPGROUPS * cfg.num_ctas
    worker = lax.axis_index("cta") * WARPGROUPS + wg
    for t in range(cfg.tokens):
        for first in range(0, shape.columns // THREADS, workers):
            # Tokens to different warpgroups, as far as there are some.
            piece = first + lax.rem(worker + t * workers // cfg.tokens, i32(workers))

            @pl.when(piece < shape.columns // THREADS)
            def _(piece: Any = piece, t: int = t) -> None:
                at = pl.ds(piece * THREADS, THREADS)
                squares = [_read(o.squares.at[last, t])]
                found = _added_up(o.sums[last], t, at, shape.blocks)
                found = found * _factors(cfg, squares, s, last, wg)[0]
                o.out[t, at] = found.astype(o.out.dtype)
