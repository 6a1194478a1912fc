"""Rows between the pool and host memory: bit for bit, never too many blocks at once."""

import jax
import numpy as np
import pytest
from jax.errors import JaxRuntimeError
from jax.sharding import SingleDeviceSharding

import tangram_jax as tj
from models.testing import tiny_config
from serve import transfers
from serve.args import ConfigError
from serve.pages import Holding
from serve.sequence import RowState
from serve.transfers import MOST_UNDER_WAY, Transfers, allow_pinned, under_way_bytes

CONFIG = tiny_config(num_layers=2)
TOKENS, TAIL = 90, 5


@pytest.fixture
def setting(monkeypatch):
    """(plan, cache with a row of random pages, transfers in blocks of 8 pages, 20 of them under way at most)"""
    plan = tj.CachePlan.build(tj.BudgetProfile.uniform(2, CONFIG.num_kv_heads, 0.5), page_size=4)
    cache = tj.init_cache(plan, CONFIG, num_pages=200, max_requests=3, max_tokens=100, max_tail=10)
    cache = tj.reserve(plan, cache, np.int32(0), np.int32(TOKENS), np.int32(TAIL))
    pool = np.random.default_rng(0).normal(size=cache.pool.shape).astype(np.float32)
    cache = cache.replace(pool=jax.numpy.asarray(pool))
    page = pool[0].nbytes
    monkeypatch.setattr(transfers, "BLOCK_BYTES", 8 * page)
    monkeypatch.setattr(transfers, "MOST_UNDER_WAY", 20 * page)
    device = jax.local_devices()[0]
    moved = Transfers(SingleDeviceSharding(device), page, cache.layout.width, 2**30)
    return plan, jax.device_put(cache, device), moved


def at(row: int) -> RowState:
    return RowState(row, Holding(np.zeros(1, np.int64)), np.zeros(1, np.int32), TOKENS, TAIL)


def row_of(cache, row):
    table = np.asarray(cache.table[row])
    return np.asarray(cache.pool)[table[table >= 0]]


def test_a_row_goes_and_comes_back(setting):
    plan, cache, moved = setting
    pages = plan.group_pages(TOKENS, TAIL)
    total = int(pages.sum())
    before = row_of(cache, 0)
    blocks = moved.save(cache, at(0), pages)
    assert {block.sharding.memory_kind for block in blocks} == {"pinned_host"}
    assert [len(block) for block in blocks] == [8] * (total // 8) + [1] * (total % 8)
    assert sum(block.nbytes for block in blocks) == moved.saved_bytes(total) == before.nbytes
    cache = tj.release(plan, cache, np.int32(0))
    cache = tj.reserve(plan, cache, np.int32(1), np.int32(20), np.int32(0))
    cache = tj.reserve(plan, cache, np.int32(2), np.int32(TOKENS), np.int32(TAIL))
    cache = moved.load(cache, at(2), pages, blocks)
    np.testing.assert_array_equal(row_of(cache, 2), before)
    assert (int(cache.tokens[2]), int(cache.tail[2])) == (TOKENS, TAIL)
    assert len(row_of(cache, 0)) == 0


class Block:
    """An array under way."""

    def __init__(self, nbytes):
        self.nbytes, self.done = nbytes, False

    def is_ready(self):
        return self.done

    def block_until_ready(self):
        self.done = True


def test_so_much_at_once_and_the_oldest_is_waited_for(setting):
    _, _, moved = setting
    page = moved.saved_bytes(1)
    blocks = [Block(8 * page) for _ in range(2)]
    for block in blocks:
        assert not moved.full
        moved._wait_for(block.nbytes)
        moved._under_way.append(block)
    assert moved.full
    moved._wait_for(4 * page)  # fits beside both
    assert not any(block.done for block in blocks)
    moved._wait_for(5 * page)
    assert [block.done for block in blocks] == [True, False]
    assert not moved.full
    moved.reset()
    assert not moved._under_way


def test_what_cannot_be_copied_is_told_and_lost(setting, monkeypatch, caplog):
    plan, cache, moved = setting

    def fail(*_):
        raise JaxRuntimeError("RESOURCE_EXHAUSTED: Out of host memory")

    monkeypatch.setattr(transfers.jax, "device_put", fail)
    assert moved.save(cache, at(0), plan.group_pages(TOKENS, TAIL)) is None
    assert "A conversation of 95 tokens could not be copied to host memory: RESOURCE" in caplog.text
    moved._pins = True
    with pytest.raises(JaxRuntimeError):  # of the device's memory: not ours to explain
        moved.pin(cache)


def test_memory_is_pinned_ahead_or_the_lack_of_it_explained(setting, monkeypatch):
    _, cache, moved = setting
    moved.pin(cache)  # a CPU has nothing to pin
    moved._pins, moved._host_bytes = True, 5 * moved.saved_bytes(8)
    put, made = jax.device_put, []

    def device_put(x, sharding):
        if sharding.memory_kind == "pinned_host":
            made.append(x.nbytes)
            if len(made) > 8:
                raise JaxRuntimeError("RESOURCE_EXHAUSTED")
        return put(x, sharding)

    monkeypatch.setattr(transfers.jax, "device_put", device_put)
    moved.pin(cache)
    assert made == [moved.saved_bytes(8)] * 5
    with pytest.raises(
        ConfigError, match=r"only 0.0 GiB .* a smaller --kv-offloading-size, or set XLA_PJRT_GPU_HOST"
    ):
        moved.pin(cache)


def test_the_device_memory_that_blocks_take():
    page = 128 << 10
    assert under_way_bytes(page, 100_000, 2**35) == MOST_UNDER_WAY
    assert under_way_bytes(page, 1000, 2**35) == 1024 * page  # a row of them in blocks
    assert under_way_bytes(page, 100_000, 1) == 64 << 20  # one block at least
    assert under_way_bytes(page, 100_000, 0) == 0


def test_jax_may_pin_what_was_asked_for_unless_told_otherwise(monkeypatch):
    monkeypatch.delenv(transfers.PINNED_LIMIT, raising=False)
    allow_pinned(0)
    assert transfers.PINNED_LIMIT not in transfers.os.environ
    monkeypatch.setenv(transfers.PINNED_LIMIT, "7")
    allow_pinned(10**11)
    assert transfers.os.environ[transfers.PINNED_LIMIT] == "7"
    monkeypatch.delenv(transfers.PINNED_LIMIT)
    allow_pinned(10**11)
    assert transfers.os.environ[transfers.PINNED_LIMIT] == "98"
    monkeypatch.delenv(transfers.PINNED_LIMIT)
