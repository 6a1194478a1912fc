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
from pallas_kernels.ragged_decode.kernel import REDUCTION_BYTES, kernel_body
from pallas_kernels.ragged_decode.merge import merge_pieces
from pallas_kernels.ragged_decode.plan import DecodePlan
from pallas_kernels.ragged_decode.rows import as_given, as_read, out_shape
from pallas_kernels.ragged_decode.tuning import DEFAULT, Tuning
from pallas_kernels.support import num_sms

f32 = jnp.float32


def ragged_decode_mosaic_gpu(
    q: jax.Array,
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
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.ragged_decode.ragged_decode`."""
    return _call(
        q, pool, plan, sinks,
        scale=float(scale), soft_cap=None if soft_cap is None else float(soft_cap), has_new=has_new, tokens=tokens,
        out_dtype=jnp.dtype(q.dtype if out_dtype is None else out_dtype), tuning=tuning, merge=merge, interpret=interpret,
    )  # fmt: skip


@functools.partial(
    jax.jit,
    static_argnames=("scale", "soft_cap", "has_new", "tokens", "out_dtype", "tuning", "merge", "interpret"),
)
def _call(q, pool, plan, sinks, *, scale, soft_cap, has_new, tokens, out_dtype, tuning, merge, interpret):
    # One jitted function for all layers: it is traced and lowered once, its calls hold byte-identical kernels, and the
    # runtime compiles a kernel once per distinct text. The layers differ in operands alone.
    _, kv_heads, held, head_dim = q.shape
    items, group = q.shape[0] // tokens * kv_heads, held - 2 * has_new
    queries = -(-tokens * group // 8) * 8
    packed = byte_pages.is_bytes(pool.dtype)
    fused = merge == "fused"
    # CTAs that wait for ones of a higher number have to be on the device with them.
    slices = tuning.slices(head_dim * queries) if fused and plan.num_shares <= num_sms() else 0
    many = max(tuning.many_pieces, slices + 2)
    slices = slices if plan.num_shares >= many else 0
    unroll = tuning.unroll(plan.num_shares // max(items, 1), head_dim, queries)
    config = Config(
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
        interpreted=interpret is not None,
        tuning=tuning,
    )
    layer, rows = plan.layer_number.reshape(1), as_read(q, config)
    operands = [layer, plan.shares, plan.items, plan.sync, plan.table.reshape(-1), rows, pool]
    if sinks is not None:
        padding = ((0, 0), (0, queries - config.columns))
        operands.append(jnp.pad(jnp.tile(sinks, (1, tokens)), padding))
    pieces = 2 * plan.num_shares
    shapes = [
        jax.ShapeDtypeStruct(out_shape(items, config), out_dtype),
        jax.ShapeDtypeStruct((items, queries), f32),
        jax.ShapeDtypeStruct((pieces, head_dim, queries), f32),
        jax.ShapeDtypeStruct((pieces, queries), f32),
    ]

    def ragged_decode(*refs):  # the name that profiles show
        kernel_body(config, pool.dtype, *refs)

    kernel = plgpu.kernel(
        ragged_decode,
        out_type=shapes,
        grid=(plan.num_shares,),
        grid_names=("cta",),
        num_threads=config.turns + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=REDUCTION_BYTES),
        **({} if interpret is None else {"interpret": interpret}),
    )
    out, lse, part, part_lse = kernel(*operands)
    if not fused:
        sinks, new = (None, None) if config.rest_first else (sinks, rows[:, -2:] if has_new else None)
        out, lse = merge_pieces(plan, out, lse, part, part_lse, rows, sinks, new, scale, soft_cap)
    if interpret is not None:
        out = as_given(out, config)
    return out.reshape(-1, kv_heads, group, head_dim), as_given(lse[:, : config.columns], config)
