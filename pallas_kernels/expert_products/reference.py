"""The same products for any backend, block by block in XLA operations: the reference, and what runs where no kernel does."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.expert_products.plan import ExpertPlan

f32 = jnp.float32


def expert_products_reference(x: jax.Array, weights: jax.Array, plan: ExpertPlan) -> jax.Array:
    """See `pallas_kernels.expert_products.expert_products`; for blocks of any size."""
    rows, depth = x.shape
    _, _, parts, columns = weights.shape
    block = plan.block
    x = jnp.pad(x, ((0, block), (0, 0)))

    def body(b: jax.Array, out: jax.Array) -> jax.Array:
        expert, row, _ = plan.place(b)
        sums = jnp.matmul(
            lax.dynamic_slice_in_dim(x, row, block),
            weights[expert].reshape(depth, parts * columns),
            preferred_element_type=f32,
        )
        if parts == 2:
            sums = jax.nn.silu(sums[:, :columns]) * sums[:, columns:]
        # Rows of the next expert are written too; their own block comes later.
        return lax.dynamic_update_slice_in_dim(out, sums.astype(x.dtype), row, 0)

    start = jnp.zeros((rows + block, columns), x.dtype)
    return lax.fori_loop(0, plan.ends[-1], body, start)[:rows]
