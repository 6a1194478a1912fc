"""Products of some dozens of tokens, for the interpreter and a GPU."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import dense_products
from pallas_kernels.dense_products import Tuning, dense_products_reference
from pallas_kernels.gates import Gate
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
