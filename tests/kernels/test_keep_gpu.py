"""Scoring, writing and appending on a Hopper GPU: moved entries bit for bit, sums against float64 NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import append as ap
from pallas_kernels import keep
from tests.kernels.keep_cases import (
    append_arguments,
    appended,
    make_case,
    make_window,
    window_error,
    write_arguments,
    written,
)

pytestmark = pytest.mark.gpu

SHAPES = [
    {},
    {"head_dim": 128, "page_size": 64, "heads_per_page": 4, "layers": 5, "kv_heads": 8},
    {"head_dim": 256, "page_size": 128, "heads_per_page": 3, "dtype": jnp.float16},
    {"head_dim": 64, "page_size": 8, "heads_per_page": 1, "layers": 1},
    {"packed": True},
    {"head_dim": 128, "page_size": 64, "heads_per_page": 4, "layers": 5, "kv_heads": 8, "packed": True},
    {"head_dim": 256, "page_size": 128, "heads_per_page": 3, "dtype": jnp.float16, "packed": True},
]


@pytest.mark.parametrize("batch", [1, 5, 21])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_append(shape, batch):
    case = make_case(num_pages=1600, tokens=batch, **shape)
    x = append_arguments(case, batch)
    got = jax.jit(lambda *given: ap.append(*given, **x))(case.pool, case.new(batch))
    np.testing.assert_array_equal(got, appended(case, x))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_write(shape):
    case = make_case(num_pages=120, tokens=200, **shape)
    x = write_arguments(case, capacity=40, chunk=190, pages=4)
    tail = x.pop("tail")
    got = jax.jit(lambda *given: keep.write_pages(*given, **x))(case.pool, case.keys, case.values, tail)
    np.testing.assert_array_equal(got, written(case, {"tail": tail, **x}))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"power": 2, "count": 100},
        {"count": 7, "head_dim": 256, "capacity": 104},
        {"chunk": 32, "capacity": 288, "head_dim": 128, "group": 4, "count": 31},
        {"chunk": 1024, "capacity": 288, "head_dim": 128, "group": 4, "kv_heads": 4, "count": 999},
        {"chunk": 256, "window": 128, "group": 3, "dtype": jnp.float16},
        {"head_dim": 256, "capacity": 288, "soft_cap": 1.5},
        {"chunk": 256, "power": 2, "soft_cap": 50.0},
    ],
    ids=str,
)
def test_window_sums(options):
    case = make_window(**options)
    got = keep.window_sums(*case.arrays, **case.options)
    assert window_error(got, case) < 1e-4
    again, (_, there) = keep.window_sums(*case.arrays, **case.options), case.expected()
    np.testing.assert_array_equal(np.where(there, got, 0), np.where(there, again, 0))


def test_a_pool_beyond_2_to_31_elements_is_changed_in_place():
    num_pages, page, head_dim = 70_000, 64, 128
    case = make_case(num_pages=120, page_size=page, head_dim=head_dim, heads_per_page=2, tokens=200)
    shape = (num_pages, *case.pool.shape[1:])
    assert np.prod(shape) > 2**31
    shift = num_pages - 120  # the far end of the pool

    def run(pool, keys, values, tail, new):
        pool = keep.write_pages(pool, keys, values, tail, **x)
        return ap.append(pool, new, **y)

    x = write_arguments(case, capacity=40, chunk=190, pages=4)
    y = append_arguments(case, batch=5)
    x["pages"] = jnp.where(x["pages"] < 0, -1, x["pages"] + shift)
    y["table"] = jnp.where(y["table"] < 0, -1, y["table"] + shift)
    tail = x.pop("tail")
    pool = jax.jit(lambda p: jnp.zeros(shape, p.dtype).at[shift:].set(p))(case.pool)
    new = case.new(5)
    program = jax.jit(run, donate_argnums=0).lower(pool, case.keys, case.values, tail, new).compile()
    assert program.memory_analysis().temp_size_in_bytes < 2**20
    where = pool.unsafe_buffer_pointer()
    pool = program(pool, case.keys, case.values, tail, new)
    assert pool.unsafe_buffer_pointer() == where
    x["pages"] = jnp.where(x["pages"] < 0, -1, x["pages"] - shift)
    y["table"] = jnp.where(y["table"] < 0, -1, y["table"] - shift)
    case.pool = written(case, {"tail": tail, **x})
    np.testing.assert_array_equal(jax.jit(lambda p: p[shift:])(pool), appended(case, y))
    assert not jax.jit(lambda p: p[:shift].any())(pool)
