"""Inputs for the chunk prefill tests and the plain NumPy attention that they are compared with."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import chunk_prefill as cp


@dataclasses.dataclass
class Case:
    q: Any  # [T, K, G, D]
    k: Any  # [T, K, D]
    v: Any
    pool: Any
    table: Any  # i32[B, R]
    lengths: np.ndarray  # [B, K]
    first: np.ndarray  # [K]
    column: np.ndarray  # [K]
    starts: np.ndarray  # [B]
    sizes: np.ndarray
    scale: float
    soft_cap: float | None
    window: int | None
    behind: np.ndarray | None = None  # [B]
    key_starts: np.ndarray | None = None

    def expected(self) -> tuple[np.ndarray, np.ndarray]:
        """Dense attention in float64, head by head. Rows of no request: 0 and -inf."""
        q, k, v, pool = (np.asarray(x, np.float64) for x in (self.q, self.k, self.v, self.pool))
        tokens, heads, group, head_dim = q.shape
        page = pool.shape[3]
        out = np.zeros(q.shape)
        lse = np.full((tokens, heads, group), -np.inf)
        for b in range(len(self.lengths)):
            mine = slice(int(self.starts[b]), int(self.starts[b] + self.sizes[b]))
            size, behind, key = mine.stop - mine.start, 0, mine.start
            if self.behind is not None and self.key_starts is not None:
                behind, key = int(self.behind[b]), int(self.key_starts[b])
            seen = slice(key, key + behind + size)
            distance = behind + np.arange(size)[:, None] - np.arange(behind + size)[None]
            causal = (distance >= 0) & (distance < (self.window or np.inf))
            for h in range(heads):
                n = max(int(self.lengths[b, h]), 0)
                pages = np.asarray(self.table)[b, self.first[h] : self.first[h] + -(-n // page)]
                keys, values = (
                    np.concatenate([pool[pages, x, self.column[h]].reshape(-1, head_dim)[:n], own[seen, h]])
                    for x, own in ((0, k), (1, v))
                )
                mask = np.concatenate([np.ones((size, n), bool), causal], axis=1)
                logits = np.einsum("tgd,sd->tgs", q[mine, h], keys) * self.scale
                if self.soft_cap is not None:
                    logits = self.soft_cap * np.tanh(logits / self.soft_cap)
                logits = np.where(mask[:, None], logits, -np.inf)
                if size:
                    top = logits.max(axis=2, keepdims=True)
                    weights = np.exp(logits - top)
                    total = weights.sum(axis=2, keepdims=True)
                    out[mine, h] = np.einsum("tgs,sd->tgd", weights / total, values)
                    lse[mine, h] = (np.log(total) + top)[..., 0]
        return out, lse


def make_case(
    lengths: Any,
    tokens: int,
    *,
    starts: Any = None,
    sizes: Any = None,
    group: int = 4,
    head_dim: int = 128,
    page_size: int = 16,
    heads_per_page: int = 2,
    dtype: Any = jnp.bfloat16,
    soft_cap: float | None = None,
    window: int | None = None,
    behind: Any = None,
    key_starts: Any = None,
    seed: int = 0,
) -> Case:
    """Every head in a group of its own, in a random column; pages in random order; nothing in the pool is zero."""
    rng = np.random.default_rng(seed)
    lengths = np.asarray(lengths, np.int32)
    batch, heads = lengths.shape
    room = -(-np.maximum(lengths, 0).max(axis=0) // page_size)
    first = (3 + np.cumsum(room) - room).astype(np.int32)  # three entries of another layer come first
    row = int(3 + room.sum() + 1)
    num_pages = batch * row + 2
    table = rng.permutation(num_pages)[: batch * row].reshape(batch, row).astype(np.int32)

    def draw(*shape: int) -> Any:
        return jnp.asarray(rng.standard_normal(shape, np.float32).astype(dtype))

    keys = tokens if behind is None else tokens + 8 * len(behind) + sum(behind)
    return Case(
        q=draw(tokens, heads, group, head_dim),
        k=draw(keys, heads, head_dim),
        v=draw(keys, heads, head_dim),
        pool=draw(num_pages, 2, heads_per_page, page_size, head_dim),
        table=jnp.asarray(table),
        lengths=lengths,
        first=first,
        column=rng.integers(heads_per_page, size=heads).astype(np.int32),
        starts=np.asarray([0] if starts is None else starts, np.int32),
        sizes=np.asarray([tokens] if sizes is None else sizes, np.int32),
        scale=head_dim**-0.5 * (3.0 if soft_cap else 1.0),
        soft_cap=soft_cap,
        window=window,
        behind=None if behind is None else np.asarray(behind, np.int32),
        key_starts=None if behind is None else np.asarray(key_starts or [0], np.int32),
    )


def relative_error(got: Any, want: np.ndarray) -> float:
    got = np.asarray(got, np.float64)
    return float(np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30))


def plan_of(case: Case, tuning: cp.Tuning = cp.DEFAULT) -> cp.ChunkPlan:
    """Where there is one request over all rows, its sizes are left out, as the engine does."""
    whole = len(case.sizes) == 1 and case.sizes[0] == case.q.shape[0]
    return jitted_plan(
        jnp.asarray(case.lengths), case.table, case.first, case.column,
        q_shape=case.q.shape, page_size=case.pool.shape[3], window=case.window, tuning=tuning,
        starts=None if whole else case.starts, sizes=None if whole else case.sizes,
        behind=case.behind, key_starts=case.key_starts,
    ).layer(0)  # fmt: skip


def jitted_plan(
    lengths: Any, table: Any, first: Any, column: Any, *, starts: Any = None, sizes: Any = None, **how: Any
) -> cp.ChunkPlan:
    """`plan_chunk` as one program: its operations one by one would be as many programs."""

    def plan(lengths: jax.Array, table: jax.Array, starts: Any, sizes: Any) -> cp.ChunkPlan:
        return cp.plan_chunk(lengths, table, first, column, starts=starts, sizes=sizes, **how)

    return jax.jit(plan)(lengths, table, starts, sizes)
