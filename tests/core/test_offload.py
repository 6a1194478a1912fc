"""Rows that leave the cache as blocks of pages come back bit for bit, as other rows in other pages."""

from functools import cache

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tangram_jax as tj
from models.testing import tiny_config
from tangram_jax.cache import RowLayout
from tangram_jax.offload import BlockSizes, read_block, set_counts, write_block

BUDGETS = np.array([[0.05, 0.4], [0.25, 1.0], [0.7, 0.3]], np.float32)
WINDOWS = {"sliding_window": 9, "sliding_layers": (0, 2, 3)}
MAX_TOKENS, MAX_TAIL, PAGES = 90, 12, 260
SIZES = BlockSizes.of(20)


@cache
def plan_and_config(rings: bool):
    config = tiny_config(num_layers=6 if rings else 3, num_kv_heads=2, **(WINDOWS if rings else {}))
    profile = tj.BudgetProfile.from_ratios(BUDGETS[None].repeat(2, 0), retention=0.5, alpha=0.0)
    sliding = tj.SlidingLayers.of(config, MAX_TAIL)
    plan = tj.CachePlan.build(
        profile, heads_per_page=2, page_size=4, window=8, sinks=2, min_entries=8, sliding=sliding
    )
    return plan, config


def full_cache(rings: bool, dtype) -> tj.Cache:
    """Three rows over pages of random bits."""
    plan, config = plan_and_config(rings)
    cache = tj.init_cache(
        plan, config, num_pages=PAGES, max_requests=5, max_tokens=MAX_TOKENS, max_tail=MAX_TAIL, dtype=dtype
    )
    for row, (tokens, tail) in enumerate([(40, 0), (61, 7), (5, 3)]):
        cache = tj.reserve(plan, cache, np.int32(row), np.int32(tokens), np.int32(tail))
        cache = set_counts(cache, np.int32(row), np.int32(tokens), np.int32(tail))
    random = np.random.default_rng(0).bytes(cache.pool.nbytes)
    return cache.replace(
        pool=jax.numpy.asarray(np.frombuffer(random, cache.pool.dtype).reshape(cache.pool.shape))
    )


def bits(x) -> np.ndarray:
    return np.asarray(x).view(np.uint8)


@pytest.mark.parametrize(("rings", "dtype"), [(False, "float32"), (True, "uint8")])
def test_a_row_comes_back_bit_for_bit_elsewhere_and_touches_no_other(rings, dtype):
    plan, cache = plan_and_config(rings)[0], full_cache(rings, jax.numpy.dtype(dtype))
    tokens, tail = 61, 7
    filled = plan.group_pages(tokens, tail)
    before = bits(cache.pool), np.asarray(cache.table)
    blocks = [read_block(cache, np.int32(1), c) for c in SIZES.columns(cache.layout, filled)]
    assert [len(block) for block in blocks] == SIZES.split(int(filled.sum()))
    # Its pages go, and others take some of them, so that it comes back in different ones.
    cache = tj.release(plan, cache, np.int32(1))
    cache = tj.reserve(plan, cache, np.int32(4), np.int32(9), np.int32(0))
    cache = tj.reserve(plan, cache, np.int32(3), np.int32(tokens), np.int32(tail))
    for columns, block in zip(SIZES.columns(cache.layout, filled), blocks, strict=True):
        cache = write_block(cache, np.int32(3), columns, block)
    cache = set_counts(cache, np.int32(3), np.int32(tokens), np.int32(tail))
    cache = write_block(set_counts(cache, -1, 9, 9), -1, SIZES.columns(cache.layout, filled)[0], blocks[0])
    assert not read_block(cache, -1, np.arange(8)).any()
    pool, table = bits(cache.pool), np.asarray(cache.table)
    np.testing.assert_array_equal(cache.tokens, [40, 0, 5, tokens, 0])
    np.testing.assert_array_equal(cache.tail, [0, 0, 3, tail, 0])
    held = table[3] >= 0
    np.testing.assert_array_equal(held, before[1][1] >= 0)
    assert held.sum() == filled.sum()
    assert (table[3] != before[1][1])[held].any()
    np.testing.assert_array_equal(pool[table[3][held]], before[0][before[1][1][held]])
    others = np.setdiff1d(np.arange(PAGES), table[3])
    np.testing.assert_array_equal(pool[others], before[0][others])


def test_the_pool_is_never_copied():
    cache, columns = full_cache(False, np.float32), np.arange(8, dtype=np.int32)
    block = read_block(cache, np.int32(1), columns)
    programs = [
        read_block.lower(cache, np.int32(1), columns),
        write_block.lower(cache, np.int32(1), columns, block),
        set_counts.lower(cache, np.int32(1), np.int32(1), np.int32(1)),
    ]
    for program, donates in zip(programs, (False, True, True), strict=True):
        memory = program.compile().memory_analysis()
        assert memory.temp_size_in_bytes <= 2 * block.nbytes < cache.pool.nbytes / 4
        assert (memory.alias_size_in_bytes >= cache.pool.nbytes) == donates


def test_columns_without_a_page_read_zeros_and_write_nothing():
    cache = full_cache(False, np.float32)
    before, table = np.asarray(cache.pool), np.asarray(cache.table)
    assert table[2, 0] >= 0 and table[2, 15] < 0
    columns = np.array([0, 15, cache.layout.width, cache.layout.width + 9], np.int32)
    block = read_block(cache, np.int32(2), columns)
    np.testing.assert_array_equal(bits(block[0]), bits(before[table[2, 0]]))
    assert not np.asarray(block[1:]).any()
    cache = write_block(cache, np.int32(2), columns, jax.numpy.full_like(block, 7))
    assert (np.asarray(cache.pool[table[2, 0]]) == 7).all()
    others = np.setdiff1d(np.arange(PAGES), table[2, 0])
    np.testing.assert_array_equal(bits(cache.pool[others]), bits(before[others]))


@settings(deadline=None)
@given(
    most=st.integers(1, 70),
    groups=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 60)), min_size=1, max_size=6),
)
def test_blocks_hold_each_column_once_in_few_sizes(most, groups):
    """Of all groups the first pages, never more of a group than the row has columns for."""
    sizes = BlockSizes.of(most)
    assert 1 <= sizes.small <= sizes.large <= most
    assert sizes.large % sizes.small == 0
    layout = RowLayout(tuple(capacity for capacity, _ in groups), 0, 0)
    pages = np.array([wanted for _, wanted in groups])
    blocks = sizes.columns(layout, pages)
    assert {len(block) for block in blocks} <= {sizes.large, sizes.small}
    columns = np.concatenate([*blocks, np.zeros(0, np.int32)])
    held = [c for c in columns.tolist() if c < layout.width]
    assert held == [c for c in range(layout.width) if layout.index[c] < pages[layout.group[c]]]
    assert len(columns) - len(held) < sizes.small
