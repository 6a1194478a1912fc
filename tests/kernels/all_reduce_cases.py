"""Shares of sums over devices, with what comes to them."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

EPS = 1e-5


class Case(NamedTuple):
    x: jax.Array  # [T, columns]
    shares: jax.Array  # [N, T, columns]
    weight: jax.Array  # [columns]


def make_case(devices, rows, columns, dtype):
    rng = np.random.default_rng(rows + columns)
    shapes = (rows, columns), (devices, rows, columns), (columns,)
    return Case(*(jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes))


def close(got, want, dtype):
    """To a rounding of each: sums of several roundings differ by the place of the last bit."""
    bits = 2.0**-7 if dtype == jnp.bfloat16 else 2.0**-10
    got, want = (np.asarray(x, np.float32) for x in (got, want))
    np.testing.assert_allclose(got, want, rtol=bits, atol=bits / 8)
