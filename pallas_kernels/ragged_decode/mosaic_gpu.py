"""Ragged decode attention for Hopper GPUs, in Pallas' Mosaic GPU: the call. The kernel itself is in `kernel.py`.

`merge="separate"` leaves the pieces of items that borders cut to XLA: for the CPU interpreter, which lacks the counters that
the kernel uses to put them together itself.
"""

import functools
from typing import Any

import jax
import jax.experimental.mosaic.gpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import byte_pages
from pallas_kernels.ragged_decode.common import Config
from pallas_kernels.ragged_decode.heads import Heads, Made, heads_reference, shape_of
from pallas_kernels.ragged_decode.kernel import REDUCTION_BYTES, kernel_body
from pallas_kernels.ragged_decode.merge import merge_pieces
from pallas_kernels.ragged_decode.plan import DecodePlan
from pallas_kernels.ragged_decode.rows import as_given, as_read, out_shape
from pallas_kernels.ragged_decode.tuning import DEFAULT, Tuning
from pallas_kernels.support import num_sms

f32 = jnp.float32


def ragged_decode_mosaic_gpu(
    q: jax.Array | Heads,
    pool: jax.Array,
    plan: DecodePlan,
    *,
    scale: float,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    has_new: bool = False,
    tokens: int = 1,
    out_dtype: jax.typing.DTypeLike | None = None,
    tuning: Tuning = DEFAULT,
    merge: str = "fused",
    interpret: Any = None,
    made: Made | None = None,
) -> Any:
    """See `pallas_kernels.ragged_decode.ragged_decode`. Of heads to be `made` their keys and values [B, K, 2, D], too."""
    return _call(
        q, pool, plan, sinks,
        scale=float(scale), soft_cap=None if soft_cap is None else float(soft_cap), has_new=has_new, tokens=tokens,
        out_dtype=jnp.dtype(out_dtype or (q.parts if isinstance(q, Heads) else q).dtype), tuning=tuning, merge=merge,
        interpret=interpret, made=made,
    )  # fmt: skip


def config_of(
    shape: tuple[int, ...],
    pool: jax.Array,
    plan: DecodePlan,
    sinks: jax.Array | None,
    *,
    scale: float,
    soft_cap: float | None,
    has_new: bool,
    tokens: int,
    tuning: Tuning,
    fused: bool = True,
    interpreted: bool = False,
    made: Made | None = None,
) -> Config:
    """What is static of a call of `ragged_decode` with queries of `shape`. `fused`: the kernel merges pieces itself."""
    rows, kv_heads, held, head_dim = shape
    items, group = rows // tokens * kv_heads, held - 2 * has_new
    queries = -(-tokens * group // 8) * 8
    packed = byte_pages.is_bytes(pool.dtype)
    # CTAs that wait for ones of a higher number have to be on the device with them.
    slices = tuning.slices(head_dim * queries) if fused and plan.num_shares <= num_sms() else 0
    many = max(tuning.many_pieces, slices + 2)
    slices = slices if plan.num_shares >= many else 0
    unroll = tuning.unroll(plan.num_shares // max(items, 1), head_dim, queries)
    return Config(
        kv_heads=kv_heads,
        tokens=tokens,
        group=group,
        queries=queries,
        head_dim=head_dim,
        page=plan.page_size,
        unit=plan.unit,
        block=max(tuning.block(head_dim, plan.page_size, packed=packed), plan.unit),
        packed=packed,
        scale_rows=byte_pages.scale_rows(pool),
        num_shares=plan.num_shares,
        merge_unroll=min(unroll, many - 2) if slices else unroll,
        slices=slices,
        many=many,
        scale=scale,
        soft_cap=soft_cap,
        has_sinks=sinks is not None,
        has_new=has_new,
        skips=plan.skips,
        fused=fused,
        interpreted=interpreted,
        tuning=tuning,
        heads=made,
    )


def operands_of(
    q: jax.Array | Heads, pool: jax.Array, plan: DecodePlan, sinks: jax.Array | None, config: Config
) -> dict[str, jax.Array]:
    """Of the kernel, by their names in `Refs`."""
    operands = {
        "layer": plan.layer_number.reshape(1),
        "share": plan.shares,
        "item": plan.items,
        "sync": plan.sync,
    }
    operands |= {"table": plan.table.reshape(-1), "pool": pool}
    operands |= {"q": q.parts, **q.given} if isinstance(q, Heads) else {"q": as_read(q, config)}
    if sinks is not None:
        padding = ((0, 0), (0, config.queries - config.columns))
        operands["sinks"] = jnp.pad(jnp.tile(sinks, (1, config.tokens)), padding)
    return operands


def results_of(config: Config, requests: int, dtype: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """Of the kernel, by their names in `Refs`, the output of `dtype`."""
    items, pieces = requests * config.kv_heads, 2 * config.num_shares
    results = {
        "out": jax.ShapeDtypeStruct(out_shape(items, config), dtype),
        "lse": jax.ShapeDtypeStruct((items, config.queries), f32),
        "part": jax.ShapeDtypeStruct((pieces, config.head_dim, config.queries), f32),
        "part_lse": jax.ShapeDtypeStruct((pieces, config.queries), f32),
    }
    if config.heads:
        new = requests, config.kv_heads, 2, config.head_dim
        results["new"] = jax.ShapeDtypeStruct(new, config.heads.dtype)
    return results


@functools.partial(
    jax.jit,
    static_argnames=(
        "scale", "soft_cap", "has_new", "tokens", "out_dtype", "tuning", "merge", "interpret", "made",
    ),
)  # fmt: skip
def _call(
    q, pool, plan, sinks, *, scale, soft_cap, has_new, tokens, out_dtype, tuning, merge, interpret, made
):
    # One jitted function for all layers: it is traced and lowered once, its calls hold byte-identical kernels, and the
    # runtime compiles a kernel once per distinct text. The layers differ in operands alone.
    shape = shape_of(q, made)
    config = config_of(
        shape, pool, plan, sinks, scale=scale, soft_cap=soft_cap, has_new=has_new, tokens=tokens, tuning=tuning,
        fused=merge == "fused", interpreted=interpret is not None, made=made,
    )  # fmt: skip
    operands = operands_of(q, pool, plan, sinks, config)
    results = results_of(config, shape[0] // tokens, out_dtype)

    def ragged_decode(*refs):  # the name that profiles show
        kernel_body(config, pool.dtype, dict(zip((*operands, *results), refs, strict=True)))

    kernel = plgpu.kernel(
        ragged_decode,
        out_type=list(results.values()),
        grid=(plan.num_shares,),
        grid_names=("cta",),
        num_threads=config.turns + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=REDUCTION_BYTES),
        **({} if interpret is None else {"interpret": interpret}),
    )
    out, lse, part, part_lse, *made_new = kernel(*operands.values())
    if not config.fused:
        rows = as_read(heads_reference(q, made), config) if made else operands["q"]
        sinks, new = (None, None) if config.rest_first else (sinks, rows[:, -2:] if has_new else None)
        out, lse = merge_pieces(plan, out, lse, part, part_lse, rows, sinks, new, scale, soft_cap)
    if interpret is not None:
        out = as_given(out, config)
    out = out.reshape(shape[0], config.kv_heads, config.group, config.head_dim)
    return out, as_given(lse[:, : config.columns], config), *made_new
