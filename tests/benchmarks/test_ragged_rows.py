"""The rows of the decode attention benchmarks: what they span, and that their lengths, pages and plans are right."""

import dataclasses

import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from hypothesis import given, settings

from benchmarks import measured, ragged_divisions, ragged_rows
from benchmarks.ragged_decode_baselines import ROWS as BASELINE_ROWS
from benchmarks.ragged_inputs import Pools, make_inputs, random_pool
from benchmarks.ragged_rows import Row, capped
from pallas_kernels.ragged_decode import plan as P
from tests.benchmarks.lowering import abstract_pool

ROWS = {
    "default": ragged_rows.DEFAULT_ROWS,
    "grid": ragged_rows.GRID_ROWS,
    "all": ragged_rows.all_rows(),
    "divisions": ragged_rows.DIVISION_ROWS,
    "skew": ragged_rows.SKEW_ROWS,
    "empty": ragged_rows.EMPTY_ROWS,
}


@pytest.fixture(autouse=True)
def no_pool(monkeypatch):
    monkeypatch.setattr(Pools, "_make", abstract_pool)


@pytest.mark.parametrize("name", ROWS)
def test_lengths(name):
    rows = ROWS[name]
    assert len(rows) == len(set(rows))
    for row in rows:
        contexts, lengths = row.contexts(), row.lengths()
        total = row.requests * row.context
        assert total * 0.999 <= contexts.sum() <= total
        assert contexts.max() <= ragged_rows.MAX_CONTEXT
        assert lengths.shape == (row.batch, row.shape.num_kv_heads)
        assert (lengths[: row.requests] >= 1).all()
        assert (lengths[row.requests :] == -1).all()
        assert (lengths[: row.requests] <= contexts[:, None]).all()
        assert lengths[: row.requests].sum() == pytest.approx(
            total * row.shape.num_kv_heads * row.retention, rel=0.005
        )


def test_the_grid_spans_what_is_claimed():
    grid = ragged_rows.GRID_ROWS
    for model in ragged_rows.MODELS:
        rows = [row for row in grid if row.model == model]
        assert {row.retention for row in rows} == {1.0, 0.5, 0.25}
        assert {row.page for row in rows} == {16, 64}
        assert {1, 16, 64} <= {row.requests for row in rows}
    assert {row.requests for row in grid} == {1, 4, 16, 32, 64, 128}
    assert {row.context for row in grid} >= {1024, 8192, 32768, 131_072}
    assert set(grid) <= set(BASELINE_ROWS)
    mixes = {(row.requests, row.mix) for row in ragged_rows.DIVISION_ROWS}
    assert mixes >= {(requests, mix) for requests in (4, 16, 32, 64, 128) for mix in ragged_rows.MIXES}


@given(st.integers(0, 2**32 - 1), st.integers(2, 64), st.floats(0.01, 0.9), st.floats(1.0, 1000.0))
def test_capped(seed, size, mean, most):
    """The mean is kept, whatever must be cut off."""
    drawn = np.random.default_rng(seed).lognormal(0.0, 0.8, size=(3, size))
    result = capped(drawn, mean * most, most)
    assert result.max() <= most
    assert result.mean(axis=-1) == pytest.approx(mean * most, rel=1e-3)
    order = np.argsort(drawn, axis=-1)
    assert (np.diff(np.take_along_axis(result, order, -1)) >= 0).all()


@pytest.mark.parametrize(
    "row",
    [
        Row("Llama-3.1-8B", 4, 1024, 0.25, "ragged", mix="one long"),
        Row("Qwen3-30B-A3B", 2, 512, 0.5, "ragged", page=16, slots=5),
    ],
    ids=lambda row: row.model,
)
def test_every_page_is_in_the_table_once(row):
    x = make_inputs(row)
    used = [
        x.table[b, x.first[k] : x.first[k] + -(-n // row.page)]
        for b, lengths in enumerate(x.lengths)
        for k, n in enumerate(lengths)
    ]
    assert sorted(np.concatenate(used).tolist()) == list(range(x.num_pages))
    assert x.pool.shape[0] == x.num_pages == row.pages()


def test_a_pool_serves_all_rows_with_such_pages(monkeypatch):
    rows = [Row("Llama-3.1-8B", 1, 1024, 1.0, "equal"), Row("Qwen3-4B", 2, 1024, 1.0, "equal")]
    large = dataclasses.replace(rows[0], requests=128, context=131_072)
    limited = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda: [Limited(limited[0])])
    pools = Pools([*rows, large])
    assert pools.of(rows[0]).shape == pools.of(rows[1]).shape == (2 * 8 * 16, 2, 1, 64, 128)
    with pytest.raises(measured.DoesNotFitError, match="takes about 71 GB, the device has 60"):
        pools.of(large)


class Limited:
    """A device with 60 GB."""

    def __init__(self, device):
        self.platform = device.platform

    def memory_stats(self):
        return {"bytes_limit": 60e9}


def test_random_pools():
    numbers = np.asarray(random_pool((40, 2, 1, 16, 64)), np.float32)
    assert ((np.abs(numbers) >= 0.5) & (np.abs(numbers) < 1)).all()
    assert abs(numbers.mean()) < 0.01
    assert np.abs(numbers).mean() == pytest.approx(0.748, abs=0.002)
    flat = numbers.reshape(-1)
    for apart in (1, 64, 1024, 2048):  # neighbours in any direction
        assert abs(np.mean(flat[apart:] * flat[:-apart])) < 0.01
    octets = np.asarray(random_pool((40, 2, 1, 17, 64), True))
    assert octets.dtype == np.uint8
    assert octets.mean() == pytest.approx(127.5, abs=1)


@pytest.mark.parametrize("mix", ragged_rows.MIXES)
def test_divisions_cover_all_entries_once(mix):
    """Shares follow one another from the first block to the last, in each of the four ways."""
    x = make_inputs(Row("Llama-3.1-8B", 4, 8192, 0.25, "ragged", mix=mix))
    units = int((-(-x.lengths // 64)).sum())
    plans = ragged_divisions.plans(x)  # the host's are compared with the device's in there
    for plan in plans.values():
        shares = np.asarray(plan.shares[0])
        assert shares[0, P.START] == 0
        assert (shares[1:, P.START] == shares[:-1, P.END]).all()
        assert shares[-1, P.END] == units
    widest = {name: np.diff(np.asarray(p.shares[0])[:, [P.START, P.END]]).max() for name, p in plans.items()}
    assert widest["equal shares"] == widest["host plan"] == -(-units // 132)
    assert widest["split map"] >= widest["equal shares"]


@settings(max_examples=30)
@given(st.lists(st.integers(1, 3000), min_size=12, max_size=12))
def test_plans_of_host_and_device_are_equal(lengths):
    row = Row("Qwen3-30B-A3B", 3, 4096, 1.0, "equal")
    x = dataclasses.replace(make_inputs(row), lengths=np.array(lengths, np.int32).reshape(3, 4))
    device = x.plan()
    shares, items = ragged_divisions.host_planned(x)
    np.testing.assert_array_equal(shares, device.shares[0])
    np.testing.assert_array_equal(items, device.items[0])
