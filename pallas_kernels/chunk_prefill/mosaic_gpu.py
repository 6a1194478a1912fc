"""Chunk prefill attention for Hopper GPUs, in Pallas' Mosaic GPU: the call. The kernel itself is in `kernel.py`."""

import functools
from typing import Any

import jax
import jax.experimental.mosaic.gpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.chunk_prefill.columns import ALIGN
from pallas_kernels.chunk_prefill.common import Config
from pallas_kernels.chunk_prefill.kernel import kernel_body
from pallas_kernels.chunk_prefill.plan import ChunkPlan
from pallas_kernels.chunk_prefill.tuning import DEFAULT, ROWS, Tuning

f32 = jnp.float32


def chunk_prefill_mosaic_gpu(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pool: jax.Array,
    plan: ChunkPlan,
    *,
    scale: float,
    soft_cap: float | None = None,
    tuning: Tuning = DEFAULT,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.chunk_prefill.chunk_prefill`.

    The interpreter has no counters: it takes cut histories with one CTA alone.
    """
    tuning = tuning.for_chunk(*q.shape)
    if plan.positions != tuning.positions(q.shape[2]):
        raise ValueError(
            f"the plan is not one of queries {q.shape}: give `plan_chunk` that q_shape, and the same tuning"
        )
    return _call(
        q, k, v, pool, plan,
        scale=float(scale), soft_cap=None if soft_cap is None else float(soft_cap), tuning=tuning, interpret=interpret,
    )  # fmt: skip


@functools.partial(jax.jit, static_argnames=("scale", "soft_cap", "tuning", "interpret"))
def _call(q, k, v, pool, plan, *, scale, soft_cap, tuning, interpret):
    # One jitted function for all layers: it is traced and lowered once, its calls hold byte-identical kernels, and the
    # runtime compiles a kernel once per distinct text. The layers differ in operands alone.
    tokens, heads, group, head_dim = q.shape
    rows = q.reshape(tokens, heads * group, head_dim)
    k, v = (jnp.pad(x, ((0, -len(x) % ALIGN), (0, 0), (0, 0))) for x in (k, v))
    num_ctas = min(tuning.ctas(), plan.tiles.shape[1])
    columns = head_dim if interpret is not None else tuning.columns(head_dim, plan.sync.shape[1], num_ctas)
    config = Config(
        group=group,
        positions=plan.positions,
        head_dim=head_dim,
        page=plan.page_size,
        block=plan.block,
        num_ctas=num_ctas,
        pieces=plan.most_pieces,
        merge_columns=columns,
        cuts=plan.most_pieces > 0,
        scale=scale,
        soft_cap=soft_cap,
        window=plan.window,
        interpreted=interpret is not None,
        tuning=tuning,
    )

    num_parts = plan.most_pieces + plan.sync.shape[1] if plan.most_pieces else 1

    def chunk_prefill(*refs):  # the name that profiles show
        kernel_body(config, pool.dtype, *refs)

    kernel = plgpu.kernel(
        chunk_prefill,
        out_type=[
            jax.ShapeDtypeStruct(rows.shape, q.dtype),
            jax.ShapeDtypeStruct(rows.shape[:2], f32),
            jax.ShapeDtypeStruct((num_parts, tuning.warpgroups, ROWS, head_dim), f32),
            jax.ShapeDtypeStruct((num_parts, tuning.warpgroups, 2, ROWS), f32),
        ],
        grid=(config.num_ctas,),
        grid_names=("cta",),
        num_threads=tuning.warpgroups + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **({} if interpret is None else {"interpret": interpret}),
    )
    out, lse, *_ = kernel(
        plan.layer_number.reshape(1),
        plan.tiles,
        plan.count,
        plan.merges,
        plan.sync,
        plan.table,
        rows,
        k,
        v,
        pool,
    )
    return out.reshape(q.shape), lse.reshape(q.shape[:3])
