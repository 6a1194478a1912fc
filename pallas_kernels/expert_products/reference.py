"""The same products for any backend, block by block in XLA operations: the reference, and what runs where no kernel does."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import fp8_products as fp8
from pallas_kernels.expert_products import mxfp4
from pallas_kernels.expert_products.plan import DirectPlan, ExpertPlan
from pallas_kernels.fp8_products import Fp8Tokens, Fp8Weights

GATE_SLOPE = 1.702  # of the sigmoid in GPT-OSS's gate
f32 = jnp.float32


def activation(gate: jax.Array, up: jax.Array, limit: float | None) -> jax.Array:
    """SiLU(gate) * up; with a limit GPT-OSS's: gate at most that and up within it, gate * sigmoid(1.702 gate) * (up + 1)."""
    if limit is None:
        return jax.nn.silu(gate) * up
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return gate * jax.nn.sigmoid(GATE_SLOPE * gate) * (up + 1)


def expert_products_reference(
    x: jax.Array | Fp8Tokens,
    weights: jax.Array | Fp8Weights,
    plan: ExpertPlan | DirectPlan,
    *,
    bias: jax.Array | None = None,
    limit: float | None = None,
) -> jax.Array:
    """See `pallas_kernels.expert_products.expert_products`; for blocks of any size. Of rows in FP8 the result is float32."""
    if isinstance(x, Fp8Tokens):
        x = x.values()
    rows, depth = x.shape
    codes, scales = weights if isinstance(weights, Fp8Weights) else (weights, None)
    packed = codes.ndim == 6
    parts, columns = (codes.shape[1], codes.shape[2] * mxfp4.TILE) if packed else codes.shape[2:]
    block, products, of_tokens = plan.block, plan.blocks.products(rows), plan.blocks.of_tokens(rows)
    x = jnp.pad(x, ((0, block), (0, 0)))

    def matrix(held: jax.Array) -> jax.Array:
        """[depth, parts * columns]"""
        if packed:
            unpacked = mxfp4.unpack(held) if scales is None else jax.vmap(fp8.unpack)(held)
            held = unpacked.swapaxes(0, 1).astype(x.dtype)
        return held.reshape(depth, parts * columns)

    def body(b: jax.Array, out: jax.Array) -> jax.Array:
        expert, row, _ = plan.blocks.place(b, block)
        given = plan.blocks.token(row) if of_tokens else row
        sums = jnp.matmul(
            lax.dynamic_slice_in_dim(x, given, block),
            matrix(codes[expert]),
            preferred_element_type=f32,
        )
        if scales is not None:
            sums *= scales[expert].reshape(-1)
        if bias is not None:
            sums += bias[expert].reshape(-1).astype(f32)
        if parts == 2:
            sums = activation(sums[:, :columns], sums[:, columns:], limit)
        # Rows of the next expert are written too; their own block comes later.
        return lax.dynamic_update_slice_in_dim(out, sums.astype(x.dtype), row, 0)

    start = jnp.zeros((products + block, columns), x.dtype)
    return lax.fori_loop(0, plan.blocks.total(), body, start)[:products]
