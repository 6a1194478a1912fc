"""Pages of rows on their way between the device and host memory.

On a GPU the host's side is pinned memory, so that copies run beside the steps. They are only dispatched here; but each takes
a block of device memory until it is done, so no more than `under_way_bytes` of them begin before others end: beyond that the
caller waits for the oldest.
"""

import logging
import math
import os
from collections import deque
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.errors import JaxRuntimeError
from jax.sharding import Sharding

from serve.args import ConfigError
from serve.sequence import RowState
from tangram_jax.cache import Cache
from tangram_jax.offload import BlockSizes, read_block, set_counts, write_block

BLOCK_BYTES = 64 << 20  # enough for the full pace of the bus
MOST_UNDER_WAY = 1 << 30
PINNED_LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
PINNED_BESIDE = 4  # GiB of it for JAX's own copies

log = logging.getLogger("tangram.engine")


def allow_pinned(host_bytes: int) -> None:
    """Let JAX pin so much and little more (its own limit is 64 GiB). Of use only before it has begun to use the device."""
    if host_bytes:
        os.environ.setdefault(PINNED_LIMIT, str(math.ceil(host_bytes / 2**30) + PINNED_BESIDE))


def under_way_bytes(page_bytes: int, widest: int, host_bytes: int) -> int:
    """Bytes of device memory for blocks under way, of all devices together, where rows have at most `widest` pages."""
    sizes = _sizes(page_bytes, widest)
    row = sum(sizes.split(widest)) * page_bytes
    return max(min(MOST_UNDER_WAY, row, host_bytes), sizes.large * page_bytes) if host_bytes else 0


def _sizes(page_bytes: int, widest: int) -> BlockSizes:
    return BlockSizes.of(max(1, min(BLOCK_BYTES // page_bytes, widest)))


class Transfers:
    """Copies of rows out of the pool and back. `page_bytes`: of whole pages, if several devices have a part of each."""

    def __init__(self, pool: Sharding, page_bytes: int, widest: int, host_bytes: int) -> None:
        """`pool`: where the pool lies; a block lies there in the same way."""
        self._sizes, self._page_bytes, self._host_bytes = _sizes(page_bytes, widest), page_bytes, host_bytes
        self._most = under_way_bytes(page_bytes, widest, host_bytes)
        self._pins = jax.default_backend() == "gpu"
        self._here = pool
        self._host = self._here.with_memory_kind("pinned_host")  # a CPU has that kind as well
        self._under_way: deque[Any] = deque()  # arrays

    def saved_bytes(self, pages: int) -> int:
        """Bytes of the blocks of a row of `pages` pages."""
        return sum(self._sizes.split(pages)) * self._page_bytes

    @property
    def full(self) -> bool:
        """Whether the next block would have to wait."""
        return not self._fits(self._sizes.large * self._page_bytes)

    def save(self, cache: Cache, state: RowState, pages: np.ndarray) -> list[jax.Array] | None:
        """What the `pages` [page lists] of a row hold, under way to the host; None if there is no memory for it."""
        blocks = []
        try:
            for columns in self._sizes.columns(cache.layout, pages):
                self._wait_for(len(columns) * self._page_bytes)
                block = read_block(cache, np.int32(state.row), columns)
                blocks.append(jax.device_put(block, self._host))
                self._under_way.append(blocks[-1])
        except JaxRuntimeError as error:  # what becomes of the cache itself shows in the next step
            log.warning(
                "A conversation of %d tokens could not be copied to host memory: %s", state.cached, error
            )
            return None
        return blocks

    def load(self, cache: Cache, state: RowState, pages: np.ndarray, blocks: list[jax.Array]) -> Cache:
        """Fill a row, which owns just so many pages, with what was saved, and set its numbers."""
        row = np.int32(state.row)
        for columns, saved in zip(self._sizes.columns(cache.layout, pages), blocks, strict=True):
            self._wait_for(len(columns) * self._page_bytes)
            block = jax.device_put(saved, self._here)
            cache = write_block(cache, row, columns, block)
            self._under_way.append(block)
        return set_counts(cache, row, np.int32(state.compressed), np.int32(state.tail))

    def reset(self) -> None:
        """Forget what is under way."""
        self._under_way.clear()

    def warm_up(self, cache: Cache) -> Cache:
        """Compile and run all of it once, on no page."""
        row = np.int32(0)
        for size in {self._sizes.large, self._sizes.small}:
            columns = np.full(size, cache.layout.width, np.int32)
            saved = jax.device_put(read_block(cache, row, columns), self._host)
            cache = write_block(cache, row, columns, jax.device_put(saved, self._here))
        return set_counts(cache, row, np.int32(0), np.int32(0))

    def pin(self, cache: Cache) -> None:
        """Have the host's memory pinned now, which is slow: JAX keeps it for later, so that no step waits for it.

        Raises ConfigError if there is not that much.
        """
        if not self._pins:
            return
        size = self._sizes.large
        block = jax.device_put(jnp.zeros((size, *cache.pool.shape[1:]), cache.pool.dtype), self._here)
        held = []
        try:
            for _ in range(self._host_bytes // (size * self._page_bytes)):
                held.append(jax.device_put(block, self._host))
                held[-1].block_until_ready()
        except JaxRuntimeError as error:
            gib = len(held) * size * self._page_bytes / 2**30
            raise ConfigError(
                f"only {gib:.1f} GiB of host memory can be pinned: write a smaller --kv-offloading-size, or set "
                f"{PINNED_LIMIT} if that is the limit ({os.environ.get(PINNED_LIMIT, 64)} now); {error}"
            ) from error

    def _fits(self, size: int) -> bool:
        while self._under_way and self._under_way[0].is_ready():
            self._under_way.popleft()
        return sum(block.nbytes for block in self._under_way) + size <= self._most

    def _wait_for(self, size: int) -> None:
        """Until there is room for a block of `size` bytes."""
        while not self._fits(size) and self._under_way:
            self._under_way.popleft().block_until_ready()


class RowCopies:
    """What the scheduler asks of a runner about copies of its rows: a part of RowOperations."""

    cache: Cache
    transfers: Transfers | None

    def saved_bytes(self, pages: int) -> int:
        return self._copies.saved_bytes(pages)

    def save(self, state: RowState, pages: np.ndarray) -> list[jax.Array] | None:
        return self._copies.save(self.cache, state, pages)

    def load(self, state: RowState, pages: np.ndarray, saved: list[jax.Array]) -> None:
        self.cache = self._copies.load(self.cache, state, pages, saved)

    @property
    def copies_wait(self) -> bool:
        return self._copies.full

    @property
    def _copies(self) -> Transfers:
        if self.transfers is None:
            raise RuntimeError("this runner was made without host_bytes")
        return self.transfers
