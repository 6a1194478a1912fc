"""Queries, key and value of an item made from parts of the product that gives them, in the decode kernel itself.

They are added up, then as a model has it biased, normalised and rotated; what is rotated with a number lies D / 2 rows from
it. So no kernel stands between the product and attention. The key and the value are written for the append.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_kernels.ragged_decode import byte_ops, device_ops
from pallas_kernels.stores import put

f32, i32 = jnp.float32, jnp.int32
WGMMA = plgpu.Layout.WGMMA
BY_ROW = WGMMA.reduce(1)


class Heads(NamedTuple):
    """Operands. A row of the product has K times G queries, the key and the value, of D numbers each."""

    parts: jax.Array  # f32[splits, T or more, K * (G + 2) * D]
    rope: jax.Array  # f32[2, T, D]: see `rope_of`
    bias: jax.Array | None = None  # [K * (G + 2) * D]
    q_norm: jax.Array | None = None  # [D]
    k_norm: jax.Array | None = None  # [D]

    @property
    def given(self) -> dict[str, jax.Array]:
        """Those that are there but the parts, by name."""
        return {n: x for n, x in self._asdict().items() if x is not None and n != "parts"}


@dataclasses.dataclass(frozen=True)
class Made:
    """How heads are made: what is static."""

    kv_heads: int
    dtype: str  # that they are rounded to
    eps: float
    offset: float  # of norms


def shape_of(q: jax.Array | Heads, made: Made | None) -> tuple[int, ...]:
    """[T, K, G + 2, D], or without new keys and values [T, K, G, D]."""
    if not isinstance(q, Heads):
        return q.shape
    assert made is not None
    _, tokens, head_dim = q.rope.shape
    return tokens, made.kv_heads, q.parts.shape[2] // head_dim // made.kv_heads, head_dim


def heads_reference(heads: Heads, made: Made) -> jax.Array:
    """[T, K, G + 2, D], as `ragged_decode` takes them, by XLA operations."""
    tokens, kv_heads, rows, head_dim = shape_of(heads, made)
    x = heads.parts[:, :tokens].sum(0) + (0 if heads.bias is None else heads.bias.astype(f32))
    x = x.reshape(tokens, kv_heads, rows, head_dim)
    turned = jnp.roll(x, head_dim // 2, axis=-1)
    if heads.q_norm is not None and heads.k_norm is not None:
        inverse = lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + made.eps)
        at = jnp.arange(rows)[:, None]
        weights = jnp.where(at < rows - 2, heads.q_norm.astype(f32), heads.k_norm.astype(f32)) + made.offset
        x = jnp.where(at < rows - 1, x * inverse * weights, x)
        turned = turned * inverse * jnp.roll(weights, head_dim // 2, axis=-1)
    cos, sin = heads.rope[:, :, None, None]
    x = jnp.where(jnp.arange(rows)[:, None] < rows - 1, x * cos + turned * sin, x).astype(made.dtype)
    return jnp.where((jnp.arange(rows)[:, None] < rows - 2) | jnp.isfinite(x), x, 0)


def rope_of(cos: jax.Array, sin: jax.Array) -> jax.Array:
    """f32[2, T, D] of cosines and sines f32[T, D / 2]: factors of a number, and of what is rotated with it."""
    return jnp.stack([jnp.concatenate([cos, cos], 1), jnp.concatenate([-sin, sin], 1)])


def make_queries(cfg: Any, refs: Any, number: Any) -> Any:
    """The item's queries, transposed: [D, Gp]."""
    return _rotated(cfg, refs, number, 0, cfg.group, cfg.queries, "q_norm").astype(cfg.heads.dtype)


def make_key(cfg: Any, refs: Any, number: Any) -> Any:
    """f32[D]."""
    columns = cfg.queries if cfg.interpreted else 8
    return _kept(cfg, _rotated(cfg, refs, number, cfg.group, 1, columns, "k_norm").max(axis=1))


def make_value(cfg: Any, refs: Any, number: Any) -> Any:
    """f32[D]."""
    request, first = _place(cfg, number, cfg.group + 1)
    row = pl.ds(first, cfg.head_dim)
    parts = [refs.q.at[n, request, row] for n in range(refs.q.shape[0])]
    parts += [refs.bias.at[row]] if refs.bias is not None else []
    return _kept(cfg, sum(plgpu.load(x, layout=BY_ROW, optimized=False).astype(f32) for x in parts))


def store_new(cfg: Any, refs: Any, number: Any, new: tuple[Any, Any]) -> None:
    """The key and value of an item, for the append."""
    at = lax.div(number, i32(cfg.kv_heads)), lax.rem(number, i32(cfg.kv_heads))
    for n, x in enumerate(new):
        put(refs.new.at[*at, n], x.astype(cfg.heads.dtype))


def _place(cfg: Any, number: Any, head: int) -> tuple[Any, Any]:
    """The request of an item, and where a head of it begins in the product."""
    request, kv_head = lax.div(number, i32(cfg.kv_heads)), lax.rem(number, i32(cfg.kv_heads))
    return request, pl.multiple_of((kv_head * (cfg.group + 2) + head) * cfg.head_dim, cfg.head_dim)


def _rotated(cfg: Any, refs: Any, number: Any, head: int, count: int, columns: int, norm: str) -> Any:
    """f32[D, columns] of so many heads, the last one repeated."""
    request, first = _place(cfg, number, head)
    own, other = (_sums(cfg, refs, request, first, count, columns, turned) for turned in (False, True))
    shape = own.shape
    weights = getattr(refs, norm)
    if weights is not None:
        squares = (own * own).sum(axis=0)
        inverse = lax.broadcast_in_dim(lax.rsqrt(squares / cfg.head_dim + cfg.heads.eps), shape, [1])
        own, other = (
            x * inverse * lax.broadcast_in_dim(_row(cfg, weights, turned) + cfg.heads.offset, shape, [0])
            for x, turned in ((own, False), (other, True))
        )
    cos, sin = (
        lax.broadcast_in_dim(_row(cfg, refs.rope.at[n, request], False), shape, [0]) for n in range(2)
    )
    return own * cos + other * sin


def _kept(cfg: Any, x: Any) -> Any:
    """As the cache holds it: rounded, and 0 for what is not finite, as what is masked is still multiplied."""
    x = x.astype(cfg.heads.dtype).astype(f32)
    return jnp.where(jnp.abs(x) <= float(jnp.finfo(cfg.heads.dtype).max), x, 0.0)


def _sums(cfg: Any, refs: Any, request: Any, first: Any, count: int, columns: int, turned: bool) -> Any:
    here = pl.ds(first, count * cfg.head_dim)
    parts = [refs.q.at[n, request, here] for n in range(refs.q.shape[0])]
    parts += [refs.bias.at[here]] if refs.bias is not None else []
    return sum(_load(cfg, x, count, columns, turned).astype(f32) for x in parts)


def _load(cfg: Any, src: Any, count: int, columns: int, turned: bool) -> Any:
    """[count * D] to [D, columns]; `turned`: what is rotated with each number in its place."""
    if cfg.interpreted:
        x = src[...].reshape(count, cfg.head_dim).T
        x = jnp.concatenate([x, *[x[:, -1:]] * (columns - count)], axis=1)
        return jnp.roll(x, cfg.head_dim // 2, axis=0) if turned else x
    dimension = _turned(cfg.head_dim) if turned else device_ops.same
    return device_ops.load_transposed(src, columns, dimension, group=count)


def _row(cfg: Any, src: Any, turned: bool) -> Any:
    """[D] to f32[D], `turned` as in `_load`."""
    if cfg.interpreted:
        x = src[...].astype(f32)
        return jnp.roll(x, cfg.head_dim // 2) if turned else x
    if not turned:
        return plgpu.load(src, layout=BY_ROW, optimized=False).astype(f32)
    return byte_ops.load_row(src, _turned(cfg.head_dim))


def _turned(head_dim: int) -> Callable[[ir.Value], ir.Value]:
    return lambda row: arith.xori(row, mgpu_utils.c(head_dim // 2, row.type))
