"""Inputs for the ragged decode tests and the plain NumPy attention that they are compared with."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels import byte_pages
from tests.one_program import in_one


@dataclasses.dataclass
class Case:
    q: Any  # [B, K, G, D], with has_new [B, K, G + 2, D], of several tokens [B * S, K, G + 2, D]
    pool: Any
    table: Any
    lengths: np.ndarray  # [B, K]
    first: np.ndarray  # [K]
    column: np.ndarray  # [K]
    scale: float
    options: dict[str, Any]  # soft_cap, sinks, has_new, tokens
    skip: np.ndarray | None = None  # i32[B] entries of every head that are out of sight

    @property
    def page_size(self) -> int:
        return byte_pages.page_size(self.pool)

    @property
    def entries(self) -> Any:
        """[num_pages, 2, Hp, P, D]: what the pages hold."""
        if byte_pages.is_bytes(self.pool.dtype):
            return byte_pages.dequantise(*byte_pages.split(self.pool), jnp.float32)
        return self.pool

    def expected(self) -> tuple[np.ndarray, np.ndarray]:
        """Dense attention in float64, head by head and token by token."""
        q, pool = np.asarray(self.q, np.float64), np.asarray(self.entries, np.float64)
        new, tokens = np.zeros((len(q), q.shape[1], 0, q.shape[3])), self.options.get("tokens", 1)
        if self.options.get("has_new"):
            q, new = q[:, :, :-2], q[:, :, -2:]
        rows, kv_heads, group, head_dim = q.shape
        page = pool.shape[3]
        out = np.zeros((rows, kv_heads, group, head_dim))
        lse = np.full((rows, kv_heads, group), -np.inf)
        for row in range(rows):
            for k in range(kv_heads):
                b, own = row // tokens, slice(row - row % tokens, row + 1)
                n = max(int(self.lengths[b, k]), 0)
                skip = 0 if self.skip is None else self.skip[b]
                pages = np.asarray(self.table)[b, self.first[k] : self.first[k] + -(-n // page)]
                keys, values = (
                    np.concatenate(
                        [
                            pool[pages, x, self.column[k]].reshape(-1, head_dim)[skip:n],
                            new[own, k, x : x + 1].reshape(-1, head_dim),
                        ]
                    )
                    for x in range(2)
                )
                logits = q[row, k] @ keys.T * self.scale
                if (cap := self.options.get("soft_cap")) is not None:
                    logits = cap * np.tanh(logits / cap)
                if self.options.get("sinks") is not None:
                    logits = np.concatenate(
                        [logits, np.asarray(self.options["sinks"], np.float64)[k][:, None]], axis=1
                    )
                    values = np.concatenate([values, np.zeros((1, head_dim))])
                if logits.shape[1]:
                    top = logits.max(axis=1, keepdims=True)
                    weights = np.exp(logits - top)
                    out[row, k] = weights @ values / weights.sum(axis=1, keepdims=True)
                    lse[row, k] = np.log(weights.sum(axis=1)) + top[:, 0]
        return out, lse


def make_case(
    lengths: Any,
    *,
    group: int = 4,
    head_dim: int = 128,
    page_size: int = 16,
    heads_per_page: int = 2,
    dtype: Any = jnp.bfloat16,
    soft_cap: float | None = None,
    sinks: bool = False,
    new: bool = False,
    tokens: int = 1,
    skip: Any = None,
    seed: int = 0,
    packed: bool = False,
) -> Case:
    """Groups as `cluster="model"` makes them: heads of a layer lie in groups shared with other layers' heads.

    Heads k and k + 1 with equal lengths for all requests share a group (and a page); every group has room in the flat row
    for its longest request, and pages come in random order. Several `tokens` come with their keys and values.
    """
    rng = np.random.default_rng(seed)
    lengths = np.asarray(lengths, np.int32)
    batch, kv_heads = lengths.shape
    first, column = np.zeros(kv_heads, np.int32), np.zeros(kv_heads, np.int32)
    at, room = 3, 0  # three entries of another layer's group come first
    for k in range(kv_heads):
        joins = k > 0 and column[k - 1] + 1 < heads_per_page and (lengths[:, k] == lengths[:, k - 1]).all()
        if joins:
            first[k], column[k] = first[k - 1], column[k - 1] + 1
        else:
            at += room
            room = -(-max(int(lengths[:, k].max()), 0) // page_size)
            first[k], column[k] = (
                at,
                rng.integers(heads_per_page) if heads_per_page > 1 and rng.random() < 0.5 else 0,
            )
    row = at + room + 1
    num_pages = batch * row + 2
    table = rng.permutation(num_pages)[: batch * row].reshape(batch, row).astype(np.int32)

    def draw(*shape: int) -> Any:
        return jnp.asarray(rng.normal(size=shape).astype(np.float32).astype(dtype))

    pool = draw(num_pages, 2, heads_per_page, page_size, head_dim)
    if packed:  # of entries of very different sizes, most of all values
        sizes = np.exp(rng.normal(size=pool.shape[:-1]) * np.array([0.5, 3.0])[:, None, None])
        pool = in_one(lambda x: byte_pages.join(*byte_pages.quantise(x)), pool * sizes[..., None])
    options: dict[str, Any] = {}
    if soft_cap is not None:
        options["soft_cap"] = soft_cap
    if sinks:
        options["sinks"] = jnp.asarray(rng.normal(size=(kv_heads, group)).astype(np.float32))
    if new := new or tokens > 1:
        options["has_new"] = True
    if tokens > 1:
        options["tokens"] = tokens
    return Case(
        q=draw(batch * tokens, kv_heads, group + 2 * new, head_dim),
        pool=pool,
        table=jnp.asarray(table),
        lengths=lengths,
        first=first,
        column=column,
        scale=head_dim**-0.5 * (3.0 if soft_cap else 1.0),
        options=options,
        skip=None if skip is None else np.asarray(skip, np.int32),
    )


def relative_error(got: Any, want: np.ndarray) -> float:
    got = np.asarray(got, np.float64)
    return float(np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30))
