"""Where an item's queries, new keys and values, and output lie in global memory, and how they come and go.

Of one token they are rows of the item; of several tokens the model leaves them token by token, with the other KV heads of
a token between them. The interpreter, which reads and writes whole tiles, has an item's rows side by side instead.
"""

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.ragged_decode import byte_ops, device_ops, heads
from pallas_kernels.ragged_decode.common import BY_ROW, WGMMA, Config, Refs, f32, i32
from pallas_kernels.ragged_decode.tokens import by_request, by_token


def read_queries(cfg: Config, refs: Refs, number: Any) -> Any:
    """The item's queries, transposed: [D, Gp], token by token. Columns from S * G on hold something finite."""
    if cfg.heads:
        return plgpu.layout_cast(heads.make_queries(cfg, refs, number), WGMMA)
    if cfg.interpreted:
        queries = refs.q.at[number, pl.ds(0, cfg.queries)]
        return plgpu.layout_cast(queries.transpose((1, 0))[...], WGMMA)
    rows = _of_item(cfg, refs.q, number, pl.ds(0, cfg.group))
    if cfg.packed:
        return device_ops.load_transposed(rows, cfg.queries, byte_ops.key_dimension(cfg.head_dim))
    return device_ops.load_transposed(rows, cfg.queries)


def read_key(cfg: Config, refs: Refs, number: Any, token: int = 0) -> Any:
    """Of a new token: f32[D], by the rows of the item's transposed queries."""
    return heads.make_key(cfg, refs, number) if cfg.heads else _read_row(cfg, refs, number, token, 0)


def read_value(cfg: Config, refs: Refs, number: Any, token: int = 0) -> Any:
    """Of a new token: f32[D], by the rows of the item's sums."""
    return heads.make_value(cfg, refs, number) if cfg.heads else _read_row(cfg, refs, number, token, 1)


def _read_row(cfg: Config, refs: Refs, number: Any, token: int, which: int) -> Any:
    if cfg.interpreted:
        row = refs.q.at[number, cfg.queries + 2 * token + which]
    elif cfg.tokens == 1:
        row = refs.q.at[number, cfg.group + which]
    else:
        row = refs.q.at[lax.div(number, i32(cfg.kv_heads)), token, _kv_head(cfg, number), cfg.group + which]
    if cfg.packed and not cfg.interpreted:
        dimension = byte_ops.value_dimension if which else byte_ops.key_dimension
        return byte_ops.load_row(row, dimension(cfg.head_dim))
    return plgpu.load(row, layout=BY_ROW, optimized=False).astype(f32)


def store(cfg: Config, refs: Refs, number: Any, out: Any, **where: Any) -> None:
    """Stores the item's output [D, Gp], or some rows of it: see `device_ops.store_transposed`."""
    if cfg.interpreted:
        refs.out.at[number][...] = out.T[: cfg.columns].astype(refs.out.dtype)
        return
    if cfg.packed:
        where["dimension"] = byte_ops.value_dimension(cfg.head_dim)
    if cfg.tokens > 1:
        rows = _of_item(cfg, refs.out, number, slice(None))
    else:
        size = cfg.group * cfg.head_dim
        rows = refs.out.at[lax.div(number, i32(cfg.kv_heads)), pl.ds(_kv_head(cfg, number) * size, size)]
        where["group"] = cfg.group
    device_ops.store_transposed(out, rows, **where)


def _of_item(cfg: Config, ref: Any, number: Any, rows: Any) -> Any:
    """Some rows of an item [rows, D], of several tokens [S, rows, D]."""
    if cfg.tokens == 1:
        return ref.at[number, rows]
    return ref.at[lax.div(number, i32(cfg.kv_heads)), :, _kv_head(cfg, number), rows]


def _kv_head(cfg: Config, number: Any) -> Any:
    return lax.rem(number, i32(cfg.kv_heads))


def as_read(q: jax.Array, cfg: Config) -> jax.Array:
    """[B * S, K, G, D] or with keys and values [B * S, K, G + 2, D] as `Refs.q`.

    For the interpreter [B * K, Gp, D] or [B * K, Gp + 2 S, D].
    """
    if cfg.interpreted:
        q = by_request(q, cfg.tokens)
        padding = ((0, 0), (0, cfg.queries - cfg.columns), (0, 0))
        queries, new = (
            x.reshape(len(q) * cfg.kv_heads, x.shape[2] * x.shape[3], cfg.head_dim)
            for x in jnp.split(q, [cfg.group], axis=3)
        )
        return jnp.concatenate([jnp.pad(queries, padding), new], axis=1)
    return q.reshape(-1, *q.shape[2:]) if cfg.tokens == 1 else q.reshape(-1, cfg.tokens, *q.shape[1:])


def out_shape(items: int, cfg: Config) -> tuple[int, ...]:
    """Of `Refs.out`."""
    if cfg.interpreted:
        return items, cfg.columns, cfg.head_dim
    if cfg.tokens == 1:  # as products read it
        return items // cfg.kv_heads, cfg.kv_heads * cfg.group * cfg.head_dim
    return items // cfg.kv_heads, cfg.tokens, cfg.kv_heads, cfg.group, cfg.head_dim


def as_given(x: jax.Array, cfg: Config) -> jax.Array:
    """Items with their tokens side by side, [B * K, S * G, ...], as [B * S, K, G, ...]."""
    return by_token(x.reshape(-1, cfg.kv_heads, cfg.tokens, cfg.group, *x.shape[2:]))
