"""What the KV pool holds: in which dtype, in how many bytes of a device, and how long a request fits into it."""

import logging
import math
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models.config import ModelConfig
from models.registry import LoadedModel
from pallas_kernels import byte_pages
from serve.args import ConfigError, ServeConfig
from serve.drift import Recipe, measuring_bytes
from serve.transfers import under_way_bytes
from tangram_jax.cache import row_layout
from tangram_jax.plan import CachePlan
from tangram_jax.sharding import TensorParallel

CPU_POOL_SHARE, CPU_POOL_MOST = 0.25, 2 << 30  # of the free memory; bytes
GPU_RESERVE = 2 << 30  # bytes for everything beside weights, pool and what a chunk's tokens need

log = logging.getLogger("tangram.engine")


def cache_dtype(config: ServeConfig, dtype: Any) -> Any:
    """The pool's, for a model of `dtype`. Raises ConfigError for another float than that."""
    asked = config.kv_cache_dtype
    if asked == "int8":
        return byte_pages.DTYPE
    if asked not in ("auto", jnp.dtype(dtype).name):
        raise ConfigError(
            f"--kv-cache-dtype {asked} for a model in {jnp.dtype(dtype).name}: write auto, int8, or --dtype {asked} as well"
        )
    return dtype


def pool_bytes(
    config: ServeConfig,
    model: LoadedModel,
    plan: CachePlan,
    parallel: TensorParallel | None,
    recipe: Recipe | None,
    *,
    step: int,
    length: int,
    tail: int,
    rows: int,
    dtype: Any,
    on_gpu: bool,
) -> int:
    """Bytes of each device for the pool, beside all that needs memory.

    `step`: tokens of a step; `length`, `tail`: of a request; `rows`: of the table, running and stored.
    """
    devices, shape, stores = config.tensor_parallel_size, model.config, cache_dtype(config, dtype)
    if not on_gpu:
        return _free_on_cpu() // devices
    itemsize = jnp.dtype(dtype).itemsize
    chunk = _chunk_bytes(parallel.share if parallel else shape, min(step, length), itemsize)
    if recipe:  # a prompt may be measured while a chunk runs
        chunk += measuring_bytes(shape, recipe.tokens, itemsize)
    layout = row_layout(plan, length, tail)
    if byte_pages.is_bytes(stores):  # a chunk unpacks one layer's pages after another's: room for two
        most = shape.num_kv_heads * max(layout.capacity)
        chunk += 2 * most * plan.page_bytes(shape.head_dim, dtype) // plan.heads_per_page // devices
    page_bytes = plan.page_bytes(shape.head_dim, stores) // devices
    chunk += under_way_bytes(page_bytes * devices, layout.width, config.host_bytes) // devices
    table = rows * layout.width * jnp.dtype(jnp.int32).itemsize  # as large on each device
    return _free_on_gpu(config.gpu_memory_utilization, model.params, chunk + table)


def shorter_request(
    config: ServeConfig, plan: CachePlan, num_pages: int, length: int, tail: int, page_bytes: int
) -> int:
    """The longest request that so many pages hold, if they do not hold one of `length` tokens: that is served, and said.

    Raises ConfigError where the length was asked for, or hardly anything fits.
    """
    fits = _longest_that_fits(plan, num_pages, tail, length)
    if config.max_model_len is not None or fits < plan.window * 2:
        largest = row_layout(plan, length, tail, plan.group_ppm).width
        size = math.ceil(largest * page_bytes / 2**20)
        more = f"--num-pages {largest}" if config.num_pages else f"--kv-cache-memory {size}MiB"
        shorter = f", or --max-model-len {fits}" if fits > 1 else ""
        # What a row has at any retention: its least entries and its tail.
        least = row_layout(plan, length, tail, np.zeros_like(plan.group_ppm)).width
        lower = "--retention" if least <= num_pages else "--min-entries or --tail-limit"
        raise ConfigError(
            f"the KV pool has {num_pages} pages, one request of {length} tokens needs up to {largest}: "
            f"write {more}, or a lower {lower}{shorter}"
        )
    log.warning("The KV pool holds one request of %d tokens at most; --max-model-len set to that", fits)
    return fits


def _chunk_bytes(model: ModelConfig, tokens: int, itemsize: int) -> int:
    """Bytes for a prefill step of so many tokens: their keys and values of all layers twice, and a layer's inner values.

    Read off programs compiled for an H200 (`benchmarks.gpu_program --decode 0 --chunk N --layers L`).
    """
    kept = model.num_layers * model.num_kv_heads * model.head_dim
    return 4 * tokens * itemsize * (kept + model.intermediate_size)


def _free_on_gpu(utilization: float, params: Any, chunk: int) -> int:
    """Bytes for the pool."""
    stats = jax.local_devices()[0].memory_stats() or {}
    weights = sum(math.prod(x.sharding.shard_shape(x.shape)) * x.itemsize for x in jax.tree.leaves(params))
    return int(utilization * stats.get("bytes_limit", 0)) - weights - chunk - GPU_RESERVE


def _free_on_cpu() -> int:
    """Bytes for the pool."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(int(free * CPU_POOL_SHARE), CPU_POOL_MOST)


def _longest_that_fits(plan: CachePlan, num_pages: int, tail: int, most: int) -> int:
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        fits = row_layout(plan, middle, tail, plan.group_ppm).width <= num_pages
        low, high = (middle, high) if fits else (low, middle - 1)
    return low
