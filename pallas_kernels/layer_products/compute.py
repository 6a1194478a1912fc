"""The computing warpgroups: sums of products, gates, and for some tokens the sums of parts, residual and norm."""

import functools
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.all_reduce.exchange import exchange
from pallas_kernels.gates import gated_sums
from pallas_kernels.layer_products import by_tile, choice, device_ops, fp8
from pallas_kernels.layer_products.phases import Addition, Config, Phase, Share, i32
from pallas_kernels.layer_products.slots import Slots, Steps
from pallas_kernels.layer_products.tuning import COLUMNS, STEP, TOKENS
from pallas_kernels.stores import put

f32 = jnp.float32
BY_ROW = plgpu.Layout.WGMMA.reduce(1)
LINE = 64  # columns that are stored at once
WARPGROUP = 128


def compute(
    cfg: Config, refs: dict[str, Any], cta: Any, wg: Any, weights_s: Any, tokens_s: Any, out_s: Any, *barriers: Any
) -> None:  # fmt: skip
    """All phases. `barriers`: those of `mosaic_gpu.barriers`; then the interpreter's memory."""
    barriers, others = barriers[:4], list(barriers[4:])
    known, factors_s = (others.pop(0), others.pop(0)) if cfg.scales else (None, None)
    exchanged = (others.pop(0), others.pop(0)) if cfg.tuning.fp8 else None
    shares = Share.all_of(cfg, refs, cta)
    steps = [share.steps * phase.token_loads for share, phase in zip(shares, cfg.phases, strict=True)]
    pieces = [share.steps * phase.pieces for share, phase in zip(shares, cfg.phases, strict=True)]
    weights = Slots(lambda slot: slot, barriers[:2], cfg.tuning.weight_slots, sum(pieces))

    def own_tokens(slot: Any) -> Any:
        first, rows = slot * cfg.slot_rows, TOKENS
        if cfg.tuning.fp8:
            rows = cfg.slot_rows
        else:
            first += wg * TOKENS
        return tokens_s.at[pl.ds(pl.multiple_of(first, 8), rows)]

    tokens = Slots(own_tokens, barriers[2:4], cfg.tuning.token_slots, sum(steps))
    for n, (phase, share) in enumerate(zip(cfg.phases, shares, strict=True)):
        first = sum(pieces[:n], i32(0)), sum(steps[:n], i32(0))
        read = Steps(weights, tokens, *first, phase.pieces, phase.token_loads, weights_s[phase.wide])
        common = phase, share, wg, read, out_s
        product: Any = functools.partial(_product, cfg, refs, *common)
        if cfg.tuning.fp8:
            product = functools.partial(fp8.product, cfg, refs, *common, exchanged, *others)
        if phase.scaled and known is not None:
            product = functools.partial(product, known=known.at[phase.number], factors_s=factors_s)

        def work(product: Any = product, phase: Phase = phase, share: Share = share) -> None:
            product()
            if cfg.interpreted:
                return
            if phase.by_tile:
                _add_up_tile(cfg, refs, phase, share, wg)
            elif phase.addition or phase.chooses or phase.number != cfg.last:
                device_ops.arrive(refs["counters"].at[phase.left])

        pl.when(share.active)(work)
        mine = (wg == 0) & (cta < cfg.tokens)
        if phase.addition and not phase.by_tile and not cfg.interpreted:
            pl.when(mine)(functools.partial(_add_up_all, cfg, refs, phase, phase.addition, cta))
        if phase.opens and not cfg.interpreted:
            pl.when(mine)(functools.partial(_open_all, cfg, refs, phase, cta))
        if phase.chooses and not cfg.interpreted:
            pl.when((wg == 0) & (cta == 0))(functools.partial(_choose, cfg, refs, phase))


def _product(
    cfg: Config,
    refs: dict[str, Any],
    phase: Phase,
    share: Share,
    wg: Any,
    read: Steps,
    out_s: Any,
    known: Any = None,
    factors_s: Any = None,
) -> None:
    """`known`: the barrier of the tokens' factors, which lie in `factors_s` f32[128], if there are some."""
    mine = pl.ds(wg * TOKENS, TOKENS)

    def products(*accs: Any) -> tuple[jax.Array, ...]:
        def one(step: Any, nothing: Any) -> None:
            given = read.wait_for_tokens(step)
            for piece, acc in enumerate(accs):
                held = read.wait_for_weights(step, piece)
                for n, x in enumerate(given):
                    plgpu.wgmma(acc, x, held.at[pl.ds(n * STEP, STEP)] if len(given) > 1 else held)
            plgpu.wgmma_wait(phase.pieces * phase.token_loads)
            read.release(jnp.maximum(step - 1, 0), step > 0)  # it is done

        lax.fori_loop(0, share.steps, one, None)
        plgpu.wgmma_wait(0)
        read.release(share.steps - 1)
        return tuple(acc[...] for acc in accs)

    sums = pl.run_scoped(products, *[plgpu.ACC((TOKENS, phase.wide), f32)] * phase.pieces)
    if known is not None:
        plgpu.barrier_wait(known)
        factors = plgpu.load(factors_s.at[pl.ds(0, TOKENS)], layout=BY_ROW, optimized=False)
        sums = tuple(x * lax.broadcast_in_dim(factors, x.shape, [0]) for x in sums)
    out = refs[phase.out]
    if phase.gate is None:
        columns = pl.ds(pl.multiple_of(share.tile * COLUMNS, COLUMNS), COLUMNS)
        place = out.at[share.split, mine, columns]
        if cfg.interpreted or cfg.tokens % TOKENS == 0:
            put(place, sums[0])
        else:  # what is written has to reach the memory at last, beside the weights
            device_ops.store_rows(sums[0], place, cfg.tokens - wg * TOKENS)
    else:
        gates, values = sums
        opened = gated_sums(gates, values, phase.gate, out_s.dtype)
        if phase.experts:
            opened *= refs["factors"][phase.place(share.tile, i32(0))[0]]
        opened = opened.astype(out_s.dtype)
        for offset in range(0, phase.wide, LINE):
            if offset:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            out_s[...] = opened[:, offset : offset + LINE]
            plgpu.commit_smem()
            columns = pl.ds(pl.multiple_of(share.tile * phase.wide + offset, LINE), LINE)
            plgpu.copy_smem_to_gmem(out_s, out.at[mine, columns])
        plgpu.wait_smem_to_gmem(0)


def _choose(cfg: Config, refs: dict[str, Any], phase: Phase) -> None:
    device_ops.wait(refs["counters"].at[phase.left], phase.ctas, 1)
    choose(cfg, refs, phase)
    device_ops.arrive(refs["counters"].at[phase.added])


def choose(cfg: Config, refs: dict[str, Any], phase: Phase) -> None:
    """The best columns of a product of one token, the largest first, and each one's share of all that are `chosen`."""
    layout = plgpu.Layout.WG_STRIDED((phase.columns,), 1)
    parts = [
        plgpu.load(refs[phase.out].at[n, 0], layout=layout, optimized=False) for n in range(phase.splits)
    ]
    logits = functools.reduce(jnp.add, parts)
    put(refs["logits"].at[...], logits)
    ranks = choice.ranks(logits, refs["logits"], interpreted=cfg.interpreted)
    weights = jnp.exp(logits - jnp.max(logits))
    counted = (
        jnp.where(ranks < phase.chooses, weights, 0.0) if cfg.routing and cfg.routing.normalize else weights
    )
    choice.store(ranks, weights / jnp.sum(counted), refs["chosen"], refs["factors"], cfg.interpreted)


def _add_up_all(cfg: Config, refs: dict[str, Any], phase: Phase, how: Addition, cta: Any) -> None:
    """Of every token that is this CTA's. There are no more tokens than CTAs."""

    def parts_are_there() -> None:
        device_ops.wait(refs["counters"].at[phase.left], cfg.warpgroups * phase.ctas, cfg.tokens)

    add_up(cfg, refs, phase, cta, parts_are_there)
    _tell(cfg, refs, phase)
    # Left in the L2, what nobody reads any more would go to the memory at last, beside the weights.
    for row in _parts_of(refs, phase, cta) + [refs[name].at[cta] for name in how.spent]:
        device_ops.forget(row)


def _add_up_tile(cfg: Config, refs: dict[str, Any], phase: Phase, share: Share, wg: Any) -> None:
    """What of a CTA's tile is its part, if it has one, by one of its warpgroups."""
    counter = refs["counters"].at[phase.left_of(share.tile)]
    device_ops.arrive(counter)

    @pl.when((share.split * cfg.tile_rows(phase) < cfg.tokens) & (wg == 0))
    def _() -> None:
        def parts_are_there() -> None:
            device_ops.wait(counter, cfg.warpgroups * phase.splits, cfg.adding(phase))

        by_tile.add_up(cfg, refs, phase, share, parts_are_there)
        _tell(cfg, refs, phase)
        by_tile.forget(cfg, refs, phase, share)


def _tell(cfg: Config, refs: dict[str, Any], phase: Phase) -> None:
    """That some are added up. Who waits leaves a zero: nobody may count where nobody waits."""
    before_heads = "following" in refs and phase.number + 1 == cfg.last
    awaited = refs["following"][0] > 0 if before_heads else phase.number != cfg.last
    pl.when(awaited)(functools.partial(device_ops.arrive, refs["counters"].at[phase.added]))


def _parts_of(refs: dict[str, Any], phase: Phase, row: Any) -> list[Any]:
    return [refs[phase.out].at[n, row] for n in range(phase.splits)]


def _open_all(cfg: Config, refs: dict[str, Any], phase: Phase, cta: Any) -> None:
    """The last columns of the gates, of the token that is this CTA's."""
    device_ops.wait(refs["counters"].at[phase.left], cfg.warpgroups * phase.ctas, cfg.tokens)
    open_last(refs, phase, cta)
    device_ops.arrive(refs["counters"].at[phase.added])
    for row in _parts_of(refs, phase, cta):
        device_ops.forget(row)


def open_last(refs: dict[str, Any], phase: Phase, row: Any) -> None:
    """What a token's gates let through, from the parts of gates and values side by side: the last columns of "opened"."""
    assert phase.opens is not None
    out, columns = refs["opened"], phase.columns // 2
    layout = _by_number(columns)

    def added(first: int) -> jax.Array:
        parts = [part.at[pl.ds(first, columns)] for part in _parts_of(refs, phase, row)]
        return functools.reduce(jnp.add, [plgpu.load(x, layout=layout, optimized=False) for x in parts])

    opened = gated_sums(added(0), added(columns), phase.opens, out.dtype).astype(out.dtype)
    put(out.at[row, pl.ds(phase.others * COLUMNS, columns)], opened)


def _by_number(width: int) -> Any:
    """The layout of a token's numbers, some beside each other in a thread."""
    return plgpu.Layout.WG_STRIDED((width,), _beside(width))


def _beside(width: int) -> int:
    """Numbers of a token that a thread has beside each other."""
    return next(size for size in (4, 2, 1) if width % (WARPGROUP * size) == 0)


def add_up(cfg: Config, refs: dict[str, Any], phase: Phase, row: Any, parts_are_there: Any) -> None:
    """A token's parts and its residual, with the norms that belong to them.

    What does not depend on the parts is read before they are waited for: much has gone through the L2 since it was there.
    """
    width, how = phase.columns, phase.addition
    assert how is not None
    layout = _by_number(width)

    def read(ref: Any) -> jax.Array:
        return plgpu.load(ref, layout=layout, optimized=False)

    def factors(name: str) -> jax.Array:
        return read(refs[name].at[...]).astype(f32) + cfg.offset

    def normed(x: jax.Array, factors: jax.Array) -> jax.Array:
        inverse_rms = lax.rsqrt(jnp.sum(x * x) / width + cfg.eps)
        return (x * inverse_rms * factors).astype(dtype)

    out = refs[how.total]
    dtype = out.dtype
    own = read(refs[how.residual].at[row])
    of = {name: factors(name) for name in (how.post, how.norm) if name}
    parts_are_there()
    parts = [read(part) for part in _parts_of(refs, phase, row)]
    added = functools.reduce(jnp.add, parts).astype(dtype)
    if "links" in refs:
        added = _over_devices(cfg, added, refs["links"], row)
    if how.post:
        added = normed(added.astype(f32), of[how.post])
    total = (own.astype(f32) + added.astype(f32)).astype(dtype)
    put(out.at[row], total)
    if how.norm and how.normed:
        put(refs[how.normed].at[row], normed(total.astype(f32), of[how.norm]))


def _over_devices(cfg: Config, added: jax.Array, links: Any, row: Any) -> jax.Array:
    """f32[E]: what all devices have of a token; plainly with links that are the others' shares, [N - 1, T, E]."""
    if not cfg.interpreted:
        return exchange(added, links, row, _beside(len(added)))
    total = added.astype(f32)
    for device in range(links.shape[0]):
        total += links.at[device, row][...].astype(f32)
    return total
