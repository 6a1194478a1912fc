"""What PyTorch, FlashInfer and FlashAttention-3 make of the same entries: kernel times with a cold L2, in microseconds.

Every (request, KV head) is a sequence of its own, unless said otherwise; nothing here knows sinks.
"""

import functools
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.gpu_timing import trace_kernels
from benchmarks.ragged_inputs import Inputs
from benchmarks.ragged_peers import CALLS, flat
from pallas_kernels import ragged_decode as rd


def torch_busy_us(call: Callable[[], Any]) -> float:
    """Time of all kernels of a PyTorch call with a cold L2; the sweep's kernels are known by their names."""
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
        used = [
            x.table[b, x.first[k] : x.first[k] - (-x.lengths[b, k] // page)]
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
        page, head_dim = x.pool.shape[3:]
        pages = x.num_pages // heads
        inner = (page, heads) if layout == "NHD" else (heads, page)
        order = np.random.default_rng(2).permutation(pages).astype(np.int32)
        return cls(
            torch.from_dlpack(x.q).reshape(batch, -1, head_dim),
            torch.from_dlpack(x.pool)[: pages * heads].reshape(pages, 2, *inner, head_dim),
            torch.from_numpy(order).cuda(),
            x.lengths[:, 0].copy(),
            page,
            layout,
            head_dim**-0.5,
        )


def flashinfer_us(x: Inputs, equal: bool) -> dict[str, float]:
    """Kernel times and the plan's host time; the error of the output against ours."""
    peer = FlashInfer.by_head(x)
    result = {
        "FlashInfer": torch_busy_us(peer),
        "its plan": peer.plan_us(),
        "difference": difference(x, peer()),
    }
    if equal:
        result["FlashInfer joint"] = min(torch_busy_us(FlashInfer.joint(x, how)) for how in ("NHD", "HND"))
    return result


def flash_attention_3_us(x: Inputs) -> dict[str, float]:
    """Its kernels, what it plans on the device included; the error of the output against ours."""
    import torch
    from flash_attn_interface import flash_attn_with_kvcache

    q, keys, values, table, lengths = (torch.from_dlpack(array) for array in flat(x))
    call = functools.partial(
        flash_attn_with_kvcache, q[:, None], keys[:, :, None], values[:, :, None],
        cache_seqlens=lengths, page_table=table, softmax_scale=x.shape.head_dim**-0.5,
    )  # fmt: skip
    return {"FlashAttention-3": torch_busy_us(call), "its difference": difference(x, call())}


def difference(x: Inputs, theirs: Any) -> float:
    """Norm of the difference to our output over the norm; without sinks, which the others do not have."""
    ours, _ = rd.ragged_decode(x.q, x.pool, x.plan(), scale=x.shape.head_dim**-0.5)
    other = np.asarray(theirs.float().cpu()).reshape(ours.shape)
    return float(np.linalg.norm(other - np.asarray(ours, np.float32)) / np.linalg.norm(other))


def installed(name: str) -> bool:
    try:
        __import__(name)
    except ImportError as error:
        print(f"{name}: {error}", flush=True)
        return False
    return True
