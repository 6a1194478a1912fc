"""An experiment (`layer_products`): all products between two attentions of a decode step as one kernel, up to 128 tokens.

CTAs stay where they are and work through four products (phases). A tile has 128 columns, and where tiles are fewer than
the multiprocessors their depth is split. Parts of a split depth go to global memory; one CTA for each token adds them up
with the residual and makes the norm. Weights are loaded ahead across the barriers between phases, but few at a time: what
a barrier stores and reads queues behind loads that are under way.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.experimental.mosaic.gpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from pallas_kernels.gates import gated
from pallas_kernels.stores import put

i32, f32 = jnp.int32, jnp.float32
STEP, TOKENS, COLUMNS = 64, 64, 128
STRIDE = 32  # of counters, so that each has a cache line
COMPUTING, LOADING = 216, 40  # registers of a thread, with two computing warpgroups
# Places of `stamps`: a CTA's start; of each phase the first product, the sums, the parts added up.
FIRST, SUMS, ROWS = 1, 5, 9
STAMPS = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phase:
    """One product: `source` [T, depth] times `weights` [depth, columns], or twice as many where `is_gated`."""

    source: str
    weights: str
    out: str  # f32[splits, rows, columns]; [T, columns] of gated ones
    depth: int
    columns: int
    is_gated: bool = False
    splits: int = 1
    norm: str | None = None  # weights of the norm of x and what the parts add up to
    normed: str = ""

    @property
    def pieces(self) -> int:
        """Of COLUMNS columns, that a tile has."""
        return 1 + self.is_gated

    @property
    def tiles(self) -> int:
        return self.columns // COLUMNS

    @property
    def ctas(self) -> int:
        return self.tiles * self.splits


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    tokens: int
    ctas: int
    eps: float
    phases: tuple[Phase, ...]
    weight_slots: int  # steps of STEP rows
    token_slots: int
    ahead: tuple[int, ...]  # loads of weights under way, of each phase
    early: int  # the same while a phase has not begun

    @property
    def warpgroups(self) -> int:
        """That compute."""
        return -(-self.tokens // TOKENS)

    def counters(self, phase: int) -> tuple[int, int]:
        """Of the CTAs that have left a phase's sums, and of the tokens whose parts are added up."""
        return 2 * phase * STRIDE, (2 * phase + 1) * STRIDE


def _fence() -> None:
    # What ordinary stores wrote is read by the copy engine, another proxy of memory.
    llvm.inline_asm(ir.Type.parse("!llvm.void"), [], "fence.proxy.async.global;", "", has_side_effects=True)


def _arrive(counter: Any) -> None:
    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def run(_: Any, counter: Any) -> None:
        _fence()
        mgpu_utils.warpgroup_barrier()
        mgpu_utils.SemaphoreRef(mgpu_utils.memref_ptr(counter)).signal(1, memory_scope="gpu")

    run(counter)


def _wait(counter: Any, value: int, waiting: int) -> None:
    """Until the counter is at `value`; the last of so many that wait leaves a zero."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def run(_: Any, counter: Any) -> None:
        pointer = mgpu_utils.memref_ptr(counter)
        mgpu_utils.SemaphoreRef(pointer).wait(value, decrement=False, memory_scope="gpu")
        mgpu_utils.inline_ptx(
            "red.relaxed.gpu.global.inc.u32 [$0], $1;",
            pointer,
            mgpu_utils.c(value + waiting - 1, ir.IntegerType.get_signless(32)),
            predicate=mgpu_utils.single_thread_predicate(mgpu_utils.ThreadSubset.WARPGROUP),
            has_side_effects=True,
        )
        mgpu_utils.warpgroup_barrier()
        _fence()

    run(counter)


def _stamp(ref: Any) -> None:
    """The GPU's clock in ns, its lower half."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def run(_: Any, ref: Any) -> None:
        word = ir.IntegerType.get_signless(32)
        now = llvm.inline_asm(word, [], "mov.u32 $0, %globaltimer_lo;", "=r", has_side_effects=True)
        mgpu_utils.inline_ptx(
            "st.global.u32 [$0], $1;",
            mgpu_utils.memref_ptr(ref),
            now,
            predicate=mgpu_utils.single_thread_predicate(mgpu_utils.ThreadSubset.WARPGROUP),
            has_side_effects=True,
        )

    run(ref)


@functools.partial(jax.jit, static_argnames=("eps", "ctas", "stamps", "how"))
def layer_products(
    y: jax.Array, x: jax.Array, w_out: jax.Array, norm: jax.Array, w_gate_up: jax.Array, w_down: jax.Array,
    next_norm: jax.Array, w_qkv: jax.Array, counters: jax.Array, *, eps: float = 1e-5, ctas: int = 132, stamps: bool = False,
    how: tuple[tuple[str, Any], ...] = (),
) -> dict[str, jax.Array]:  # fmt: skip
    """From attention's result y [T, E] and the residual stream x [T, E] to the next heads "qkv" [T, Q] and stream "x_new".

    counters: zeros, as they are again afterwards. how: of `Config`.
    """
    (tokens, width), inner, heads = x.shape, w_down.shape[0], w_qkv.shape[1]
    rows = -(-tokens // TOKENS) * TOKENS

    def splits(depth: int, columns: int) -> int:
        return max(1, min(ctas // (columns // COLUMNS), depth // STEP // 4))

    phases = (
        Phase(source="y", weights="w_out", out="parts_out", depth=y.shape[1], columns=width,
              splits=splits(y.shape[1], width), norm="norm", normed="h"),
        Phase(source="h", weights="w_gate_up", out="act", depth=width, columns=inner, is_gated=True),
        Phase(source="act", weights="w_down", out="parts_down", depth=inner, columns=width, splits=splits(inner, width),
              norm="next_norm", normed="next_h"),
        Phase(source="next_h", weights="w_qkv", out="parts_qkv", depth=width, columns=heads, splits=splits(width, heads)),
    )  # fmt: skip
    given = {
        "y": y, "x": x, "w_out": w_out, "norm": norm, "w_gate_up": w_gate_up, "w_down": w_down, "next_norm": next_norm,
        "w_qkv": w_qkv, "counters": counters,
    }  # fmt: skip
    made = {name: jax.ShapeDtypeStruct((tokens, width), x.dtype) for name in ("x_new", "h", "next_h")} | {
        "act": jax.ShapeDtypeStruct((tokens, inner), x.dtype)
    }
    for phase in phases:
        if not phase.is_gated:
            made[phase.out] = jax.ShapeDtypeStruct((phase.splits, rows, phase.columns), f32)
    if stamps:
        made["stamps"] = jax.ShapeDtypeStruct((ctas, STAMPS), i32)
    cfg = Config(tokens=tokens, ctas=ctas, eps=eps, phases=phases, **dict(how))

    def layer_products(*refs: Any) -> None:  # the name that profiles show
        _kernel(cfg, x.dtype, dict(zip((*given, *made), refs, strict=True)))

    kernel = plgpu.kernel(
        layer_products, out_type=list(made.values()), grid=(ctas,), grid_names=("cta",), num_threads=cfg.warpgroups + 2,
        thread_name="wg", compiler_params=plgpu.CompilerParams(approx_math=True),
    )  # fmt: skip
    result = dict(zip(made, kernel(*given.values()), strict=True))
    return result | {"qkv": result["parts_qkv"][:, :tokens].sum(0).astype(x.dtype)}


def _kernel(cfg: Config, dtype: Any, refs: dict[str, Any]) -> None:
    cta, wgs = lax.axis_index("cta"), cfg.warpgroups

    def body(weights_s: Any, tokens_s: Any, out_s: Any, *barriers: Any) -> None:
        wg = lax.axis_index("wg")
        weights_full, weights_free, tokens_full, tokens_free = barriers

        def registers(count: int, action: Any) -> None:
            if wgs == 2:
                plgpu.set_max_registers(count, action=action)

        @pl.when(wg < wgs)
        def _() -> None:
            registers(COMPUTING, "increase")
            _compute(cfg, refs, cta, wg, weights_s, tokens_s, out_s.at[wg], *barriers)

        @pl.when(wg == wgs)
        def _() -> None:
            registers(LOADING, "decrease")
            _load_weights(cfg, refs, cta, weights_s, weights_full, weights_free)

        @pl.when(wg == wgs + 1)
        def _() -> None:
            registers(LOADING, "decrease")
            _load_tokens(cfg, refs, cta, tokens_s, tokens_full, tokens_free)

    tiled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))  # type: ignore[abstract]
    pl.run_scoped(
        body,
        plgpu.SMEM((cfg.weight_slots, STEP, COLUMNS), dtype, transforms=tiled),
        plgpu.SMEM((cfg.token_slots, wgs * TOKENS, STEP), dtype, transforms=tiled),
        plgpu.SMEM((wgs, TOKENS, 64), dtype, transforms=tiled),
        plgpu.Barrier(num_arrivals=1, num_barriers=cfg.weight_slots),
        plgpu.Barrier(num_arrivals=wgs, num_barriers=cfg.weight_slots),
        plgpu.Barrier(num_arrivals=1, num_barriers=cfg.token_slots),
        plgpu.Barrier(num_arrivals=wgs, num_barriers=cfg.token_slots),
        collective_axes="wg",
    )


def _share(phase: Phase, cta: Any) -> tuple[Any, Any, Any, Any, Any]:
    """(tile, split, first step, steps, whether there are any) of a CTA."""
    tile, split = lax.rem(cta, i32(phase.tiles)), lax.div(cta, i32(phase.tiles))
    first, end = (lax.div((split + n) * (phase.depth // STEP), i32(phase.splits)) for n in (0, 1))
    active = cta < phase.ctas
    return tile, split, first, jnp.where(active, end - first, 0), active


def _load_weights(cfg: Config, refs: dict[str, Any], cta: Any, held: Any, full: Any, free: Any) -> None:
    slots = i32(cfg.weight_slots)
    turn: Any = i32(0)  # of loads
    seen: Any = i32(0)  # of those that have landed
    for number, phase in enumerate(cfg.phases):
        tile, _, first, steps, _ = _share(phase, cta)

        def one(
            n: Any,
            carry: Any,
            number: int = number,
            phase: Phase = phase,
            tile: Any = tile,
            first: Any = first,
        ) -> Any:
            turn, seen = carry
            j, piece = lax.div(n, i32(phase.pieces)), lax.rem(n, i32(phase.pieces))
            slot = lax.rem(turn, slots)
            pl.when(turn >= slots)(lambda: plgpu.barrier_wait(free.at[slot]))
            most: Any = i32(cfg.ahead[number])
            if number:
                most = jnp.where(n < slots, cfg.early, most)

            def land(_: Any, seen: Any) -> Any:
                plgpu.barrier_wait(full.at[lax.rem(seen, slots)])
                return seen + 1

            seen = lax.fori_loop(0, jnp.maximum(turn - seen - most + 1, 0), land, seen)
            rows = pl.ds(pl.multiple_of((first + j) * STEP, STEP), STEP)
            columns = pl.ds(pl.multiple_of(piece * phase.columns + tile * COLUMNS, COLUMNS), COLUMNS)
            plgpu.copy_gmem_to_smem(refs[phase.weights].at[rows, columns], held.at[slot], full.at[slot])
            return turn + 1, seen

        turn, seen = lax.fori_loop(0, steps * phase.pieces, one, (turn, seen))


def _load_tokens(cfg: Config, refs: dict[str, Any], cta: Any, held: Any, full: Any, free: Any) -> None:
    slots = i32(cfg.token_slots)
    turn: Any = i32(0)
    for number, phase in enumerate(cfg.phases):
        _, _, first, steps, active = _share(phase, cta)
        if number:
            before = cfg.phases[number - 1]
            sums, rows = cfg.counters(number - 1)
            counter, total = (rows, cfg.tokens) if before.norm else (sums, cfg.warpgroups * before.ctas)
            pl.when(active)(functools.partial(_wait, refs["counters"].at[counter], total, phase.ctas))

        def one(j: Any, turn: Any, phase: Phase = phase, first: Any = first) -> Any:
            slot = lax.rem(turn, slots)
            pl.when(turn >= slots)(lambda: plgpu.barrier_wait(free.at[slot]))
            deep = pl.ds(pl.multiple_of((first + j) * STEP, STEP), STEP)
            plgpu.copy_gmem_to_smem(
                refs[phase.source].at[pl.ds(0, held.shape[1]), deep], held.at[slot], full.at[slot]
            )
            return turn + 1

        turn = lax.fori_loop(0, steps, one, turn)


def _compute(
    cfg: Config, refs: dict[str, Any], cta: Any, wg: Any, weights_s: Any, tokens_s: Any, out_s: Any, *barriers: Any
) -> None:  # fmt: skip
    weights_full, weights_free, tokens_full, tokens_free = barriers
    weight_slots, token_slots = i32(cfg.weight_slots), i32(cfg.token_slots)
    turn: Any = i32(0)
    token_turn: Any = i32(0)

    def stamp(place: int, when: Any = True) -> None:
        if "stamps" in refs:
            pl.when((wg == 0) & when)(lambda: _stamp(refs["stamps"].at[cta, place]))

    stamp(0)
    for number, phase in enumerate(cfg.phases):
        tile, split, _, steps, active = _share(phase, cta)

        def work(
            number: int = number, phase: Phase = phase, tile: Any = tile, split: Any = split, steps: Any = steps,
            turn: Any = turn, token_turn: Any = token_turn,
        ) -> None:  # fmt: skip
            def release(j: Any) -> None:
                for piece in range(phase.pieces):
                    plgpu.barrier_arrive(
                        weights_free.at[lax.rem(turn + j * phase.pieces + piece, weight_slots)]
                    )
                plgpu.barrier_arrive(tokens_free.at[lax.rem(token_turn + j, token_slots)])

            def products(*accs: Any) -> tuple[jax.Array, ...]:
                def one(j: Any, _: Any) -> None:
                    token_slot = lax.rem(token_turn + j, token_slots)
                    plgpu.barrier_wait(tokens_full.at[token_slot])
                    stamp(FIRST + number, j == 0)
                    for piece, acc in enumerate(accs):
                        slot = lax.rem(turn + j * phase.pieces + piece, weight_slots)
                        plgpu.barrier_wait(weights_full.at[slot])
                        plgpu.wgmma(
                            acc, tokens_s.at[token_slot, pl.ds(wg * TOKENS, TOKENS)], weights_s.at[slot]
                        )
                    plgpu.wgmma_wait(phase.pieces)
                    pl.when(j > 0)(lambda: release(j - 1))

                lax.fori_loop(0, steps, one, None)
                plgpu.wgmma_wait(0)
                release(steps - 1)
                return tuple(acc[...] for acc in accs)

            sums = pl.run_scoped(products, *[plgpu.ACC((TOKENS, COLUMNS), f32)] * phase.pieces)
            rows = pl.ds(wg * TOKENS, TOKENS)
            if phase.is_gated:
                gates, values = (x.astype(out_s.dtype).astype(f32) for x in sums)
                act = gated(gates, values, "silu").astype(out_s.dtype)
                for offset in range(0, COLUMNS, 64):
                    if offset:
                        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    out_s[...] = act[:, offset : offset + 64]
                    plgpu.commit_smem()
                    columns = pl.ds(pl.multiple_of(tile * COLUMNS + offset, 64), 64)
                    plgpu.copy_smem_to_gmem(out_s, refs[phase.out].at[rows, columns])
                plgpu.wait_smem_to_gmem(0)
            else:
                columns = pl.ds(pl.multiple_of(tile * COLUMNS, COLUMNS), COLUMNS)
                put(refs[phase.out].at[split, rows, columns], sums[0])
            if number + 1 < len(cfg.phases):
                _arrive(refs["counters"].at[cfg.counters(number)[0]])

        pl.when(active)(work)
        stamp(SUMS + number)
        turn, token_turn = turn + steps * phase.pieces, token_turn + steps
        if phase.norm:
            pl.when((wg == 0) & (cta < cfg.tokens))(functools.partial(_add_up, cfg, refs, phase, number, cta))
            stamp(ROWS + number)


def _add_up(cfg: Config, refs: dict[str, Any], phase: Phase, number: int, row: Any) -> None:
    """The parts of a token and its residual, and the norm of that. What does not depend on the parts is read before."""
    width = phase.columns
    vector = next(size for size in (4, 2, 1) if width % (128 * size) == 0)
    layout = plgpu.Layout.WG_STRIDED((width,), vector)

    def read(ref: Any) -> jax.Array:
        return plgpu.load(ref, layout=layout, optimized=False)

    x_new = refs["x_new"]
    weight, own = read(refs[phase.norm].at[...]), read((x_new if number else refs["x"]).at[row])  # type: ignore[index]
    sums, rows = cfg.counters(number)
    _wait(refs["counters"].at[sums], cfg.warpgroups * phase.ctas, min(cfg.tokens, cfg.ctas))
    added = functools.reduce(jnp.add, (read(refs[phase.out].at[n, row]) for n in range(phase.splits)))
    total = (own.astype(f32) + added.astype(x_new.dtype).astype(f32)).astype(x_new.dtype)
    put(x_new.at[row], total)
    total = total.astype(f32)
    inverse_rms = lax.rsqrt(jnp.sum(total * total) / width + cfg.eps)
    put(refs[phase.normed].at[row], (total * inverse_rms * weight.astype(f32)).astype(x_new.dtype))
    _arrive(refs["counters"].at[rows])


def zeros() -> jax.Array:
    """Counters. Not a constant: the kernel writes them."""
    return jnp.zeros(8 * STRIDE, i32) + lax.optimization_barrier(i32(0))
