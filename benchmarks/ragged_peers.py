"""What XLA and JAX's own kernel make of the same entries: decode attention, each (request, KV head) a sequence of its own.

Times are sums of an operation's kernels with a cold L2, in microseconds; nothing here knows sinks.
"""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.gpu_timing import cold_calls, flush_buffer, kernels_of
from benchmarks.ragged_inputs import Inputs

CALLS = 8

Arrays = tuple[jax.Array, ...]


def cold_busy_us(call: Callable[..., jax.Array], args: Arrays) -> float:
    """Time of all kernels of `call(*args)` with a cold L2: a scan of calls and sweeps, less what is not the call."""
    return _scan_us(cold_calls(call, CALLS), args) - _around_us(args[0])


def _around_us(first: jax.Array) -> float:
    """A sweep, and what the scan does to the first argument."""
    return _scan_us(cold_calls(lax.optimization_barrier, CALLS), (first,))


def _scan_us(run: Callable[..., Any], args: Arrays) -> float:
    return sum(map(sum, kernels_of(run, (flush_buffer(), *args)).values())) / CALLS


def flat(x: Inputs) -> Arrays:
    """q [B K, G, D], keys and values [N, P, D], tables [B K, pages], lengths [B K]."""
    batch, heads = x.lengths.shape
    most = -(-int(x.lengths.max()) // x.pool.shape[3])
    at = np.minimum(x.first[:, None] + np.arange(most), x.table.shape[1] - 1)
    pages = x.num_pages
    keys, values = jax.jit(lambda pool: (pool[:pages, 0, 0], pool[:pages, 1, 0]))(x.pool)
    q = x.q.reshape(batch * heads, *x.q.shape[2:])
    tables = jnp.asarray(x.table[:, at].reshape(batch * heads, most))
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


def triton_us(args: Arrays, entries: tuple[int, ...] = (128, 64, 32)) -> float:
    """With blocks of the first so many entries that fit into shared memory; the default of 8 pages does not.

    Raises RuntimeError if none does.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

    q, keys, values, table, lengths = args
    errors = []
    for block in dict.fromkeys(max(1, n // keys.shape[1]) for n in entries):
        padded = jnp.pad(table, ((0, 0), (0, -table.shape[1] % (16 * block))))

        def call(*args: jax.Array, block: int = block) -> jax.Array:
            q, keys, values, table, lengths = args
            return paged_attention(q, keys[None], values[None], table, lengths, pages_per_compute_block=block)

        try:
            return cold_busy_us(call, (q, keys, values, padded, lengths))
        except Exception as error:  # of the compiler, in several kinds
            errors.append(f"{block} pages a block: {str(error)[:300]}")
    raise RuntimeError("; ".join(errors))
