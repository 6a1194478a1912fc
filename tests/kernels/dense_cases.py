"""Products of some dozens of tokens, for the interpreter and a GPU."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import dense_products
from pallas_kernels.dense_products import Tuning, added_products_reference, dense_products_reference
from pallas_kernels.gates import Gate
from pallas_kernels.norms import rms_norm
from tests.kernels.expert_cases import relative_error

ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11}  # of the largest result


def check_products(
    tokens: int, depth: int, columns: int, gate: Gate | None, tuning: Tuning, dtype: str, interpret=None
) -> None:
    """The kernel against float32 products of the same numbers, twice the same."""
    rng = np.random.default_rng(tokens + columns)
    x = jnp.asarray(rng.standard_normal((tokens, depth)), dtype)
    weights = jnp.asarray(rng.standard_normal((depth, columns)) * depth**-0.5, dtype)
    given = {"gate": gate, "tuning": tuning, "interpret": interpret}
    out = dense_products.dense_products(x, weights, **given)
    expected = dense_products_reference(x.astype(jnp.float32), weights.astype(jnp.float32), gate=gate)
    assert out.shape == (tokens, columns // (2 if gate else 1)) and out.dtype == jnp.dtype(dtype)
    assert relative_error(out, expected) < (3 if gate else 1) * ROUNDING[dtype]  # gates are rounded, too
    if interpret is None:
        again = jax.jit(dense_products.dense_products, static_argnames=("gate", "tuning"))
        np.testing.assert_array_equal(out, again(x, weights, gate=gate, tuning=tuning))


def check_added(
    tokens: int,
    depth: int,
    columns: int,
    tuning: Tuning,
    gate: Gate,
    gates: Tuning,
    offset: float,
    interpret=None,
) -> None:
    """A product with residual and norm, and gates [columns, 2 * 256] behind it, against float32; twice the same."""
    rng = np.random.default_rng(tokens + columns)

    def some(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)

    x, residual, norm = some(tokens, depth), some(tokens, columns) * 4, some(columns) - offset
    weights, gate_up = some(depth, columns) * depth**-0.5, some(columns, 512) * columns**-0.5

    def both(x, weights, residual, norm, gate_up):
        total, scaled = dense_products.added_products(
            x, weights, residual, norm, offset=offset, tuning=tuning, interpret=interpret
        )
        opened = dense_products.dense_products(
            scaled, gate_up, gate=gate, eps=1e-5, tuning=gates, interpret=interpret
        )
        return total, scaled, opened

    given = x, weights, residual, norm, gate_up
    total, scaled, opened = both(*given)
    exact = [each.astype(jnp.float32) for each in given]
    expected, by_reference = added_products_reference(*exact[:4], offset=offset)
    assert total.shape == (tokens, columns) and total.dtype == jnp.bfloat16
    assert relative_error(total, expected) < 2 * ROUNDING["bfloat16"]  # the product is rounded, too
    normed = rms_norm(total.astype(jnp.float32), exact[3], 1e-5, offset)
    wanted = dense_products_reference(normed, exact[4], gate=gate)
    assert relative_error(opened, wanted) < 4 * ROUNDING["bfloat16"]
    again = dense_products_reference(by_reference, exact[4], gate=gate, eps=1e-5)
    assert relative_error(again, wanted) < 6 * ROUNDING["bfloat16"]
    if interpret is None:
        for one, other in zip(
            jax.tree.leaves(jax.jit(both)(*given)), jax.tree.leaves((total, scaled, opened)), strict=True
        ):
            np.testing.assert_array_equal(one, other)
