"""Four ways to divide the work of decode attention among CTAs, on the same entries and with the same kernel.

* equal shares of all blocks, planned on the device once per step for all layers (the default);
* uniform splits of every (request, head), as many as fill the GPU once (FlashDecoding);
* the paper's split map (Algorithm 1) of the heads' budgets, nothing planned per step;
* equal shares planned on the host, anew for every layer and step, and copied to the device (FlashInfer).
"""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import tangram_jax as tj
from benchmarks.gpu_timing import kernels_of
from benchmarks.host_plan import host_plan
from benchmarks.ragged_inputs import Inputs, kernel_us
from pallas_kernels import ragged_decode as rd
from pallas_kernels.ragged_decode.plan import default_unit, least_share
from pallas_kernels.support import num_sms

LAYERS = 32  # that share one plan made on the device


def uniform_splits(items: int) -> int:
    """Parts of each (request, head) that fill the GPU about once."""
    return max(1, round(num_sms() / items))


def split_map(budgets: np.ndarray, requests: int) -> tuple[int, ...]:
    """Parts of each head: one map for every request, which has its share of the GPU."""
    return tuple(tj.split_map(budgets, max(1, num_sms() // requests), 1).reshape(-1).tolist())


def plans(x: Inputs) -> dict[str, rd.DecodePlan]:
    """The four ways by name."""
    batch, heads = x.lengths.shape
    device = x.plan()
    shares, items = host_planned(x)
    for mine, theirs in ((shares, device.shares[0]), (items, device.items[0])):
        np.testing.assert_array_equal(mine, theirs)  # the same division, made elsewhere
    return {
        "equal shares": device,
        "uniform splits": x.plan(splits=uniform_splits(batch * heads)),
        "split map": x.plan(splits=split_map(x.lengths.mean(axis=0), batch)),
        "host plan": dataclasses.replace(
            device, shares=jnp.asarray(shares)[None], items=jnp.asarray(items)[None]
        ),
    }


def host_planned(x: Inputs) -> tuple[np.ndarray, np.ndarray]:
    """What `host_plan` makes of one layer whose (request, head) items all hold entries."""
    unit = default_unit(x.page_size)
    offset = np.arange(len(x.lengths), dtype=np.int32)[:, None] * x.table.shape[1] + x.first
    return host_plan(
        x.lengths.reshape(-1), offset.reshape(-1), np.tile(x.column, len(x.lengths)), x.table,
        page_size=x.page_size, unit=unit, num_shares=num_sms(), least=least_share(unit),
    )  # fmt: skip


def host_plan_us(make: Callable[[int], Any], layers: int = LAYERS, steps: int = 10) -> float:
    """Wall time for each layer of planning all of them on the host, copies to the device included: the median step."""
    times = []
    for _ in range(steps):
        began = time.perf_counter()
        jax.block_until_ready([jax.device_put(make(layer)) for layer in range(layers)])
        times.append((time.perf_counter() - began) * 1e6 / layers)
    return float(np.median(times[1:]))


@functools.cache
def device_plan_us(requests: int, heads: int = 8, layers: int = LAYERS) -> tuple[float, int]:
    """Time and number of the kernels that plan a step for all layers on the device."""
    rng = np.random.default_rng(0)
    lengths = jnp.asarray(rng.integers(100, 8000, size=(requests, layers * heads)), jnp.int32)
    table = jnp.zeros((requests, layers * heads * 125), jnp.int32)
    first, column = np.arange(layers * heads) * 125, np.zeros(layers * heads)

    @jax.jit
    def run(lengths: jax.Array, table: jax.Array) -> Any:
        plan = rd.plan_decode(lengths, table, first, column, page_size=64, num_layers=layers)
        return plan.shares, plan.items, plan.sync  # what the kernel takes

    kernels = kernels_of(run, (lengths, table))
    return sum(map(sum, kernels.values())), sum(map(len, kernels.values()))


def measure(x: Inputs) -> dict[str, Any]:
    """Kernel times of the four ways, plans of one layer, and what each takes in all over what the best does."""
    batch, heads = x.lengths.shape
    kernels = {name: kernel_us(x, plan)[0] for name, plan in plans(x).items()}
    device = device_plan_us(batch, heads)[0] / LAYERS
    host = host_plan_us(lambda _: host_planned(x))
    planning = {"equal shares": device, "host plan": host}
    whole = {name: us + planning.get(name, 0.0) for name, us in kernels.items()}
    best = min(whole, key=lambda name: whole[name])
    return (
        kernels
        | {"planned on device": device, "planned on host": host, "best": best}
        | {f"{name} / best": us / whole[best] for name, us in whole.items()}
    )
