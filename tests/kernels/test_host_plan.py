"""The plan that a host would make, which benchmarks compare with ours, is ours number by number."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.host_plan import host_plan
from pallas_kernels import ragged_decode as rd
from pallas_kernels.ragged_decode.plan import least_share

BATCH, HEADS, PAGES = 3, 4, 40  # of a head


@functools.partial(jax.jit, static_argnames=("page_size", "unit", "num_shares"))
def device_plan(lengths, table, first, column, **how):
    return rd.plan_decode(lengths, table, first, column, **how)


@given(
    seed=st.integers(0, 2**32 - 1),
    spread=st.sampled_from([0.0, 1.0, 3.0]),
    shape=st.sampled_from([(16, 32, 7), (16, 32, 132), (16, 64, 5), (64, 64, 132), (16, 32, None)]),
)
def test_the_host_s_plan_is_the_device_s(seed, spread, shape):
    """Of heads that all hold entries, from equally many to very different numbers."""
    page_size, unit, num_shares = shape
    rng = np.random.default_rng(seed)
    most = PAGES * page_size
    lengths = rng.lognormal(4, spread, (BATCH, HEADS)).clip(1, most).astype(np.int32)
    first = (rng.permutation(HEADS) * PAGES).astype(np.int32)
    column = rng.integers(0, 2, HEADS).astype(np.int32)
    table = rng.permutation(BATCH * HEADS * PAGES).reshape(BATCH, -1).astype(np.int32)
    how = {"page_size": page_size, "unit": unit, "num_shares": num_shares}
    want = device_plan(lengths, jnp.asarray(table), first, column, **how)
    if num_shares is None:  # as many as there are SMs, or fewer
        how |= {"num_shares": want.num_shares, "least": least_share(unit)}
    offset = np.arange(BATCH, dtype=np.int32)[:, None] * table.shape[1] + first
    shares, items = host_plan(lengths.reshape(-1), offset.reshape(-1), np.tile(column, BATCH), table, **how)
    np.testing.assert_array_equal(shares, want.shares[0])
    np.testing.assert_array_equal(items, want.items[0])
