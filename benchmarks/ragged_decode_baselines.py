"""Ragged decode attention against what others make of the same entries, kernel times of one run.

  python -m benchmarks.ragged_decode_baselines [--csv FILE]

Llama-3.1-8B's shape (32/8 heads, D 128), pages of 64. Every (request, KV head) is a sequence of its own for all of:
* FlashInfer's paged batch decode on tensor cores, where installed; on equal lengths also with a request's eight heads in
  one page, its ordinary use ("joint": the better of its two layouts). Its plan is made on the host for every set of
  lengths, i.e. for every layer if heads differ; ours once per step for all 32 layers, on the device;
* JAX's Pallas-Triton paged attention, in blocks of 128 entries;
* an XLA gather: pages gathered to the longest head, then two products and a softmax;
* PyTorch's scaled_dot_product_attention over dense keys and values, no pages (equal lengths only).

The L2 is swept before every call. An operation of several kernels counts with their sum, without the gaps between them.
"""

import argparse
import csv
import functools
import time
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.gpu_timing import flush_buffer, read_roof, trace_kernels
from benchmarks.ragged_decode import Inputs, Row, kernel_us, make_inputs, plan_us, show
from pallas_kernels import ragged_decode as rd

SIZES = ((1, 8192), (16, 8192), (64, 8192), (64, 32768), (4, 102400))
KINDS = ((0.25, "ragged"), (0.25, "equal"), (1.0, "equal"))
LAYERS = 32  # that share one plan of ours
CALLS = 8

Arrays = tuple[jax.Array, ...]


def cold_busy_us(call: Callable[..., jax.Array], args: Arrays) -> float:
    """Time of all kernels of `call(*args)` with a cold L2: a scan of calls and sweeps, less the sweeps."""

    @jax.jit
    def run(flush: jax.Array, *args: jax.Array) -> Any:
        def step(carry: jax.Array, _: Any) -> tuple[jax.Array, Any]:
            swept = jnp.sum(flush.astype(jnp.float32) * carry)
            out = call(args[0] + (swept * 0).astype(args[0].dtype), *args[1:])
            return swept * 1e-30 + 1.0, out.reshape(-1)[:1]

        return lax.scan(step, jnp.float32(1.0), None, length=CALLS)

    return _scan_us(run, args) - _sweep_us()


def _scan_us(run: Callable[..., Any], args: Arrays) -> float:
    flush = flush_buffer()
    jax.block_until_ready(run(flush, *args))
    return sum(map(sum, trace_kernels(lambda: run(flush, *args)).values())) / CALLS


@functools.cache
def _sweep_us() -> float:
    @jax.jit
    def run(flush: jax.Array) -> Any:
        def step(carry: jax.Array, _: Any) -> tuple[jax.Array, None]:
            return jnp.sum(flush.astype(jnp.float32) * carry) * 1e-30 + 1.0, None

        return lax.scan(step, jnp.float32(1.0), None, length=CALLS)

    return _scan_us(run, ())


def torch_busy_us(call: Callable[[], Any]) -> float:
    """The same for a PyTorch call; the sweep's kernels are known by their names."""
    call()
    sweeps = _torch_sweeps()
    if not sweeps:  # a profiler that sees JAX's kernels alone
        return _graph_us(call) - _graph_us(None)
    kernels = trace_kernels(lambda: _swept_calls(call, synchronize=True))
    return sum(sum(times) for name, times in kernels.items() if name not in sweeps) / CALLS


@functools.cache
def _torch_flush() -> Any:
    import torch

    return torch.ones(2**27, device="cuda", dtype=torch.bfloat16)


def _swept_calls(call: Callable[[], Any] | None, synchronize: bool = False) -> None:
    import torch

    for _ in range(CALLS):
        _torch_flush().sum(dtype=torch.float32)
        if call is not None:
            call()
    if synchronize:
        torch.cuda.synchronize()


@functools.cache
def _torch_sweeps() -> frozenset[str]:
    _swept_calls(None)
    return frozenset(trace_kernels(lambda: _swept_calls(None, synchronize=True)))


def _graph_us(call: Callable[[], Any] | None) -> float:
    import torch

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _swept_calls(call)
    times = []
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / CALLS)
    return min(times)


def flat(x: Inputs) -> Arrays:
    """q [B K, G, D], keys and values [N, P, D], tables [B K, pages], lengths [B K]."""
    batch, heads = x.lengths.shape
    most = -(-int(x.lengths.max()) // x.pool.shape[3])
    table = np.asarray(x.table)
    at = np.minimum(x.first[:, None] + np.arange(most), table.shape[1] - 1)
    keys, values = jax.jit(lambda pool: (pool[:, 0, 0], pool[:, 1, 0]))(x.pool)
    q = x.q.reshape(batch * heads, *x.q.shape[2:])
    tables = jnp.asarray(table[:, at].reshape(batch * heads, most))
    return q, keys, values, tables, jnp.asarray(x.lengths.reshape(-1))


def gather_us(args: Arrays) -> float:
    scale = args[0].shape[-1] ** -0.5

    def call(
        q: jax.Array, keys: jax.Array, values: jax.Array, table: jax.Array, lengths: jax.Array
    ) -> jax.Array:
        k, v = (a[table].reshape(table.shape[0], -1, a.shape[-1]) for a in (keys, values))
        s = jnp.einsum("sgd,std->sgt", q, k, preferred_element_type=jnp.float32) * scale
        s = jnp.where(jnp.arange(s.shape[-1]) < lengths[:, None, None], s, -jnp.inf)
        return jnp.einsum("sgt,std->sgd", jax.nn.softmax(s, axis=-1).astype(v.dtype), v)

    return cold_busy_us(call, args)


def triton_us(args: Arrays, entries: tuple[int, ...] = (128, 64)) -> float | None:
    """With blocks of the first so many entries that fit into shared memory; the default of 8 pages does not."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

    q, keys, values, table, lengths = args
    for block in (max(1, n // keys.shape[1]) for n in entries):
        padded = jnp.pad(table, ((0, 0), (0, -table.shape[1] % (16 * block))))

        def call(*args: jax.Array, block: int = block) -> jax.Array:
            q, keys, values, table, lengths = args
            return paged_attention(q, keys[None], values[None], table, lengths, pages_per_compute_block=block)

        try:
            return cold_busy_us(call, (q, keys, values, padded, lengths))
        except Exception as error:  # deprecated upstream: report, and go on without it
            print(f"Pallas-Triton, {block} pages a block: {str(error)[:200]}", flush=True)
    return None


def sdpa_us(x: Inputs) -> float:
    import torch

    batch, heads = x.lengths.shape
    shape = (batch, heads, int(x.lengths[0, 0]), x.shape.head_dim)
    k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    q = torch.randn((batch, heads * x.shape.group, 1, shape[-1]), device="cuda", dtype=torch.bfloat16)
    attend = torch.nn.functional.scaled_dot_product_attention
    us = torch_busy_us(functools.partial(attend, q, k, v, enable_gqa=True))
    del q, k, v
    torch.cuda.empty_cache()
    return us


class FlashInfer:
    """A plan of FlashInfer's batch decode and a call under it."""

    def __init__(
        self, q: Any, pool: Any, indices: Any, lengths: np.ndarray, page: int, layout: str, scale: float
    ) -> None:
        """q [S, N, D]; pool [pages, 2, P, K, D] ("NHD") or [pages, 2, K, P, D] ("HND"); lengths i32[S]."""
        import torch
        from flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper

        self.q, self.pool = q, pool
        kv_heads = pool.shape[3 if layout == "NHD" else 2]
        pages = -(-lengths // page)
        indptr = torch.from_numpy(np.concatenate([[0], np.cumsum(pages)]).astype(np.int32))
        last = torch.from_numpy((lengths - (pages - 1) * page).astype(np.int32))
        workspace = torch.zeros(512 * 2**20, dtype=torch.uint8, device="cuda")
        self._wrapper = BatchDecodeWithPagedKVCacheWrapper(
            workspace, layout, use_tensor_cores=True, backend="fa2"
        )
        self._plan = lambda: self._wrapper.plan(
            indptr, indices, last, q.shape[1], kv_heads, q.shape[2], page,
            q_data_type=q.dtype, kv_data_type=q.dtype, sm_scale=scale,
        )  # fmt: skip
        self._plan()

    def __call__(self) -> Any:
        return self._wrapper.run(self.q, self.pool)

    def plan_us(self, calls: int = 10) -> float:
        """Median wall time of a plan on the host, its copy to the device included."""
        import torch

        times = []
        for _ in range(calls):
            torch.cuda.synchronize()
            began = time.perf_counter()
            self._plan()
            torch.cuda.synchronize()
            times.append((time.perf_counter() - began) * 1e6)
        return float(np.median(times))

    @classmethod
    def by_head(cls, x: Inputs) -> "FlashInfer":
        """Every (request, KV head) a sequence with one KV head, over the very pool of our kernel."""
        import torch

        batch, heads = x.lengths.shape
        num_pages, _, _, page, head_dim = x.pool.shape
        table = np.asarray(x.table)
        used = [
            table[b, x.first[k] : x.first[k] - (-x.lengths[b, k] // page)]
            for b in range(batch)
            for k in range(heads)
        ]
        return cls(
            torch.from_dlpack(x.q).reshape(batch * heads, -1, head_dim),
            torch.from_dlpack(x.pool).reshape(num_pages, 2, page, 1, head_dim),
            torch.from_numpy(np.concatenate(used)).cuda(),
            x.lengths.reshape(-1),
            page,
            "NHD",
            head_dim**-0.5,
        )

    @classmethod
    def joint(cls, x: Inputs, layout: str) -> "FlashInfer":
        """Every request a sequence with all KV heads in its pages: as many bytes of the same pool, equal lengths."""
        import torch

        batch, heads = x.lengths.shape
        num_pages, _, _, page, head_dim = x.pool.shape
        inner = (page, heads) if layout == "NHD" else (heads, page)
        order = np.random.default_rng(2).permutation(num_pages // heads).astype(np.int32)
        return cls(
            torch.from_dlpack(x.q).reshape(batch, -1, head_dim),
            torch.from_dlpack(x.pool).reshape(num_pages // heads, 2, *inner, head_dim),
            torch.from_numpy(order).cuda(),
            x.lengths[:, 0].copy(),
            page,
            layout,
            head_dim**-0.5,
        )


def flashinfer_us(x: Inputs, equal: bool) -> dict[str, float]:
    """Kernel times and the plan's host time; the error of the output against ours."""
    peer = FlashInfer.by_head(x)
    ours, _ = rd.ragged_decode(x.q, x.pool, x.plan(), scale=x.shape.head_dim**-0.5)
    theirs = np.asarray(peer().float().cpu()).reshape(ours.shape)
    error = np.linalg.norm(theirs - np.asarray(ours, np.float32)) / np.linalg.norm(theirs)
    result = {
        "FlashInfer": torch_busy_us(peer),
        "its plan": peer.plan_us(),
        "difference": float(error),
    }
    if equal:
        result["FlashInfer joint"] = min(torch_busy_us(FlashInfer.joint(x, how)) for how in ("NHD", "HND"))
    return result


def installed(name: str) -> bool:
    try:
        __import__(name)
    except ImportError as error:
        print(f"{name}: {error}", flush=True)
        return False
    return True


def measure(row: Row, peers: dict[str, bool], plan: float) -> dict[str, Any]:
    """One row: microseconds of ours and of every peer that applies."""
    x = make_inputs(row)
    equal = bool((x.lengths == x.lengths[0, 0]).all())
    result: dict[str, Any] = {
        "requests": row.requests,
        "context": row.context,
        "kept": row.retention,
        "lengths": row.skew,
        "MB": x.kv_bytes / 1e6,
        "ours": kernel_us(x)[0],
        "our plan": plan,
    }
    if peers["flashinfer"]:
        try:
            result |= flashinfer_us(x, equal)
        except Exception as error:  # a peer that fails is reported, the others are still measured
            peers["flashinfer"] = False
            print(f"FlashInfer: {type(error).__name__} {str(error)[-1500:]}", flush=True)
    if "FlashInfer" in result:
        result["FlashInfer/ours"] = (
            min(result["FlashInfer"], result.get("FlashInfer joint", np.inf)) / result["ours"]
        )
        result["with plans"] = (result["FlashInfer"] + result["its plan"]) / (result["ours"] + plan)
    if equal and peers["torch"]:
        result["SDPA"] = sdpa_us(x)
    args = flat(x)
    del x
    result["Pallas-Triton"] = triton_us(args)
    result["XLA gather"] = gather_us(args)
    return result


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--csv", help="write the rows there too")
    options = parser.parse_args(argv)
    peers = {name: installed(name) for name in ("torch", "flashinfer")}
    peers["flashinfer"] &= peers["torch"]
    print(f"{jax.devices()[0].device_kind}, read roof {read_roof():.0f} GB/s; times in us", flush=True)
    results = []
    for requests, context in SIZES:
        plan = plan_us(requests, LAYERS)[0] / LAYERS
        for retention, skew in KINDS:
            row = Row("Llama-3.1-8B", requests, context, retention, skew)
            results.append(measure(row, peers, plan))
            print(results[-1], flush=True)
    show(results)
    if options.csv:
        with open(options.csv, "w", newline="") as f:
            writer = csv.DictWriter(f, list(dict.fromkeys(key for r in results for key in r)))
            writer.writeheader()
            writer.writerows(results)


if __name__ == "__main__":
    main()
