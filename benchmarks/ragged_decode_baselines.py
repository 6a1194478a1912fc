"""What others make of the inputs of `benchmarks/ragged_decode.py`, every head a sequence of its own.

* an XLA gather: pages gathered to the longest head, then two products and a softmax;
* JAX's Pallas-Triton paged attention;
* PyTorch's scaled_dot_product_attention over dense keys and values, no pages (equal lengths only).
"""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def baseline_us(x: Any, busy_us: Callable[..., float]) -> dict[str, float]:
    """Microseconds of each baseline; those that do not apply are left out."""
    result = {"XLA gather": busy_us(_gather(x), _flat(x))}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            result["Pallas-Triton"] = busy_us(_triton(x), _flat(x))
        except Exception as error:  # deprecated upstream: report, and go on without it
            print(f"Pallas-Triton: {error}")
    if (x.lengths == x.lengths[0, 0]).all():
        torch_us = _torch(x)
        if torch_us is not None:
            result["torch SDPA"] = torch_us
    return result


def _flat(x: Any) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
    """q [B K, G, D], keys and values [N, P, D], tables [B K, pages], lengths [B K]."""
    batch, heads = x.lengths.shape
    most = -(-int(x.lengths.max()) // x.pool.shape[3])
    table = np.asarray(x.table)
    at = np.minimum(x.first[:, None] + np.arange(most), table.shape[1] - 1)
    keys, values = jax.jit(lambda pool: (pool[:, 0, 0], pool[:, 1, 0]))(x.pool)
    q = x.q.reshape(batch * heads, *x.q.shape[2:])
    return (
        q,
        keys,
        values,
        jnp.asarray(table[:, at].reshape(batch * heads, most)),
        jnp.asarray(x.lengths.reshape(-1)),
    )


def _gather(x: Any) -> Callable[..., jax.Array]:
    scale = x.shape.head_dim**-0.5

    def call(
        q: jax.Array, keys: jax.Array, values: jax.Array, table: jax.Array, lengths: jax.Array
    ) -> jax.Array:
        k, v = (a[table].reshape(table.shape[0], -1, a.shape[-1]) for a in (keys, values))
        s = jnp.einsum("sgd,std->sgt", q, k, preferred_element_type=jnp.float32) * scale
        s = jnp.where(jnp.arange(s.shape[-1]) < lengths[:, None, None], s, -jnp.inf)
        return jnp.einsum("sgt,std->sgd", jax.nn.softmax(s, axis=-1).astype(v.dtype), v)

    return call


def _triton(x: Any) -> Callable[..., jax.Array]:
    from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

    def call(
        q: jax.Array, keys: jax.Array, values: jax.Array, table: jax.Array, lengths: jax.Array
    ) -> jax.Array:
        block = 8
        table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % (16 * block))))
        return paged_attention(q, keys[None], values[None], table, lengths, pages_per_compute_block=block)

    return call


def _torch(x: Any, calls: int = 10) -> float | None:
    try:
        import torch
    except ImportError:
        return None
    batch, heads = x.lengths.shape
    n, d = int(x.lengths[0, 0]), x.shape.head_dim
    shape = (batch, heads, n, d)
    k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    q = torch.randn((batch, heads * x.shape.group, 1, d), device="cuda", dtype=torch.bfloat16)
    attend = torch.nn.functional.scaled_dot_product_attention
    for _ in range(3):
        attend(q, k, v, enable_gqa=True)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        attend(q, k, v, enable_gqa=True)
    end.record()
    torch.cuda.synchronize()
    del q, k, v
    torch.cuda.empty_cache()
    return start.elapsed_time(end) * 1e3 / calls
