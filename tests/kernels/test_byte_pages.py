"""Pages of bytes: the format, and the references that read and write them."""

from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis.extra import numpy as hnp

from pallas_kernels import append, byte_pages, chunk_prefill, keep, ragged_decode
from tests.kernels import chunk_cases, keep_cases, ragged_cases

FINITE = st.floats(-30000, 30000, width=32, allow_subnormal=False)


@given(hnp.arrays(np.float32, (3, 8), elements=FINITE))
def test_no_element_is_off_by_more_than_half_a_step(x: np.ndarray) -> None:
    values, scales = byte_pages.quantise(jnp.asarray(x))
    back = np.asarray(byte_pages.dequantise(values, scales, jnp.float32), np.float64)
    largest = np.maximum(np.abs(x).max(-1, keepdims=True), 2.0**-17)
    assert (np.abs(back - x) <= 1.126 * largest / 254).all()


@pytest.mark.parametrize("factor", [1e-3, 1.0, 100.0])
def test_the_error_is_that_of_rounding_to_a_step(factor: float) -> None:
    """Against the variance that theory gives: a step squared over twelve, in a step between A / 127 and 1.125 of that."""
    x = factor * jax.random.normal(jax.random.key(0), (64, 128))
    back = byte_pages.dequantise(*byte_pages.quantise(x), jnp.float32)
    step = np.abs(np.asarray(x)).max(-1, keepdims=True) / 127
    noise = float(np.mean((np.asarray(back - x) / step) ** 2) * 12)
    assert 0.95 < noise < 1.27


def test_what_was_read_is_written_back_within_a_step() -> None:
    """The tail of a row is read, and written again with the next chunk."""
    x = jax.random.normal(jax.random.key(1), (256, 64)).astype(jnp.bfloat16)
    once = byte_pages.dequantise(*byte_pages.quantise(x), jnp.bfloat16)
    twice = byte_pages.dequantise(*byte_pages.quantise(once), jnp.bfloat16)
    largest = jnp.abs(once).max(-1, keepdims=True)
    assert (jnp.abs(twice - once) <= largest / 100).all()
    assert (twice == once).mean() > 0.95


@pytest.mark.parametrize("head_dim", [16, 64, 128, 256])
@pytest.mark.parametrize("size", [4, 16, 64, 128])
def test_a_page_holds_its_scales(size: int, head_dim: int) -> None:
    rng = np.random.default_rng(2)
    values = rng.integers(0, 256, (3, 2, size, head_dim), np.uint8)
    scales = rng.integers(0, 256, (3, 2, size), np.uint8)
    pages = jax.jit(byte_pages.join)(values, scales)
    assert pages.shape[2] == byte_pages.page_rows(jnp.uint8, size, head_dim)
    assert byte_pages.page_size(pages) == size
    got = jax.jit(byte_pages.split)(pages)
    np.testing.assert_array_equal(got[0], values)
    np.testing.assert_array_equal(got[1], scales)


def test_other_pools_have_a_row_for_each_entry() -> None:
    assert byte_pages.page_rows(jnp.bfloat16, 16, 64) == 16
    assert byte_pages.page_size(jnp.zeros((2, 2, 4, 16, 64), jnp.bfloat16)) == 16


def test_zeros_stay_zeros() -> None:
    values, scales = byte_pages.quantise(jnp.zeros((2, 32)))
    assert (values == byte_pages.ZERO).all()
    assert not byte_pages.dequantise(values, scales, jnp.bfloat16).any()


@jax.jit
def in_bytes(pool: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(the pool in bytes, what it then holds in float32) of a pool of entries."""
    pages = byte_pages.join(*byte_pages.quantise(pool))
    return pages, byte_pages.entries(pages, jnp.float32)


def test_decode_reads_what_the_bytes_stand_for() -> None:
    """With heads so small that a page's scales take two rows."""
    case = ragged_cases.make_case(
        [[70, 33, 33], [0, 1, 128]], dtype=jnp.float32, head_dim=8, sinks=True, new=True, packed=True
    )

    @jax.jit
    def reference(q, pool, sinks, lengths):
        plan = ragged_decode.plan_decode(
            lengths, case.table, case.first, case.column, page_size=case.page_size
        )
        return ragged_decode.ragged_decode_reference(
            q, pool, plan.layer(0), scale=case.scale, has_new=True, sinks=sinks
        )

    got = reference(case.q, case.pool, case.options["sinks"], case.lengths)
    out, lse = case.expected()
    assert ragged_cases.relative_error(got[0], out) < 1e-6
    np.testing.assert_allclose(got[1], lse, atol=2e-6)


def test_a_chunk_reads_what_the_bytes_stand_for() -> None:
    case = chunk_cases.make_case([[70, 33, 0]], 20, dtype=jnp.float32, head_dim=16)
    pages, case.pool = in_bytes(case.pool)

    @jax.jit
    def reference(*given):
        plan = chunk_cases.plan_of(case)
        return chunk_prefill.chunk_prefill_reference(*given, plan, scale=case.scale)

    got = reference(case.q, case.k, case.v, pages)
    out, lse = case.expected()
    assert chunk_cases.relative_error(got[0], out) < 1e-6
    np.testing.assert_allclose(got[1], lse, atol=2e-6)


@pytest.mark.parametrize(
    "options", [{"head_dim": 8, "dtype": jnp.float32}, {}], ids=["two rows of scales", "one"]
)
def test_what_is_written_is_quantised_and_the_rest_stays(options: dict[str, Any]) -> None:
    case = keep_cases.make_case(num_pages=120, packed=True, **options)
    x = keep_cases.append_arguments(case, batch=6)
    new = case.new(6)
    got = jax.jit(lambda pool: append.append_reference(pool, new, **x))(case.pool)
    for mine, theirs in zip(
        byte_pages.split(got), byte_pages.split(keep_cases.appended(case, x)), strict=True
    ):
        np.testing.assert_array_equal(mine, theirs)
    x = keep_cases.write_arguments(case, capacity=8, chunk=20, pages=3)
    got = jax.jit(lambda pool: keep.write_pages_reference(pool, case.keys, case.values, **x))(case.pool)
    for mine, theirs in zip(
        byte_pages.split(got), byte_pages.split(keep_cases.written(case, x)), strict=True
    ):
        np.testing.assert_array_equal(mine, theirs)


def test_single_entries_are_those_of_whole_columns() -> None:
    pages, held = in_bytes(jax.random.normal(jax.random.key(3), (5, 2, 3, 16, 8)))
    number, slot = np.array([[4], [0]]), np.array([3, 15, 8])
    for columns in ((number, 1, 2), (number, slice(None), slice(None))):
        get = jax.jit(lambda pool, columns=columns: byte_pages.entries_at(pool, columns, slot, jnp.float32))
        want = np.asarray(held)[*columns, slot]
        np.testing.assert_array_equal(get(pages), want)
        np.testing.assert_array_equal(get(held), want)
