"""The same products for any backend, block by block in XLA operations: the reference, and what runs where no kernel does."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.expert_products import mxfp4
from pallas_kernels.expert_products.plan import DirectPlan, ExpertPlan

GATE_SLOPE = 1.702  # of the sigmoid in GPT-OSS's gate
f32 = jnp.float32


def activation(gate: jax.Array, up: jax.Array, limit: float | None) -> jax.Array:
    """SiLU(gate) * up; with a limit GPT-OSS's: gate at most that and up within it, gate * sigmoid(1.702 gate) * (up + 1)."""
    if limit is None:
        return jax.nn.silu(gate) * up
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return gate * jax.nn.sigmoid(GATE_SLOPE * gate) * (up + 1)


def expert_products_reference(
    x: jax.Array,
    weights: jax.Array,
    plan: ExpertPlan | DirectPlan,
    *,
    bias: jax.Array | None = None,
    limit: float | None = None,
) -> jax.Array:
    """See `pallas_kernels.expert_products.expert_products`; for blocks of any size."""
    rows, depth = x.shape
    packed = weights.ndim == 6
    parts, columns = (weights.shape[1], weights.shape[2] * mxfp4.TILE) if packed else weights.shape[2:]
    block, products, of_tokens = plan.block, plan.blocks.products(rows), plan.blocks.of_tokens(rows)
    x = jnp.pad(x, ((0, block), (0, 0)))

    def matrix(held: jax.Array) -> jax.Array:
        return mxfp4.unpack(held).swapaxes(0, 1).astype(x.dtype) if packed else held

    def body(b: jax.Array, out: jax.Array) -> jax.Array:
        expert, row, _ = plan.blocks.place(b, block)
        given = plan.blocks.token(row) if of_tokens else row
        sums = jnp.matmul(
            lax.dynamic_slice_in_dim(x, given, block),
            matrix(weights[expert]).reshape(depth, parts * columns),
            preferred_element_type=f32,
        )
        if bias is not None:
            sums += bias[expert].reshape(-1).astype(f32)
        if parts == 2:
            sums = activation(sums[:, :columns], sums[:, columns:], limit)
        # Rows of the next expert are written too; their own block comes later.
        return lax.dynamic_update_slice_in_dim(out, sums.astype(x.dtype), row, 0)

    start = jnp.zeros((products + block, columns), x.dtype)
    return lax.fori_loop(0, plan.blocks.total(), body, start)[:products]
