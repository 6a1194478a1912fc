"""Pages of bytes: the format."""

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.extra import numpy as hnp

from pallas_kernels import byte_pages

FINITE = st.floats(-30000, 30000, width=32, allow_subnormal=False)


@settings(deadline=None)
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
    keys = jax.random.split(jax.random.key(2), 2)
    values = jax.random.randint(keys[0], (3, 2, size, head_dim), 0, 256).astype(jnp.uint8)
    scales = jax.random.randint(keys[1], (3, 2, size), 0, 256).astype(jnp.uint8)
    pages = byte_pages.join(values, scales)
    assert pages.shape[2] == byte_pages.page_rows(jnp.uint8, size, head_dim)
    assert byte_pages.page_size(pages) == size
    got = byte_pages.split(pages)
    assert (got[0] == values).all() and (got[1] == scales).all()


def test_other_pools_have_a_row_for_each_entry() -> None:
    assert byte_pages.page_rows(jnp.bfloat16, 16, 64) == 16
    assert byte_pages.page_size(jnp.zeros((2, 2, 4, 16, 64), jnp.bfloat16)) == 16


def test_zeros_stay_zeros() -> None:
    values, scales = byte_pages.quantise(jnp.zeros((2, 32)))
    assert (values == byte_pages.ZERO).all()
    assert not byte_pages.dequantise(values, scales, jnp.bfloat16).any()
