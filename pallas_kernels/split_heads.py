"""Queries, keys and values out of their joint projection, with RoPE: a small kernel for Hopper GPUs, in Pallas' Mosaic GPU.

XLA makes three kernels of it, of some 1.5 us each between the products of a decode step. A CTA takes one token and some of
its KV heads; every thread loads vectors of an element's own half of its head and of the other half.
"""

import functools
from typing import Any

import jax
import jax.experimental.mosaic.gpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxlib.mlir.dialects import arith

from pallas_kernels import row_loads as ops
from pallas_kernels import support

FEW_TOKENS = 64  # up to here a token's heads are spread over several CTAs
f32, i32 = jnp.float32, jnp.int32


def check_supported(qkv: jax.Array) -> None:
    """Raises NotImplementedError, naming the feature, for a projection [T, K, G + 2, D] that the kernel does not take."""
    _, kv_heads, _, head_dim = qkv.shape
    if qkv.dtype not in ("bfloat16", "float16"):
        raise NotImplementedError(f"heads of {qkv.dtype}: the kernel takes bfloat16 and float16")
    if head_dim not in support.HEAD_DIMS:
        raise NotImplementedError(f"head dimension {head_dim}: the kernel has {support.HEAD_DIMS}")
    if kv_heads * head_dim % ops.WARPGROUP:
        raise NotImplementedError(
            f"{kv_heads} KV heads of {head_dim}: the kernel takes multiples of {ops.WARPGROUP}"
        )
    support.check_one_device(qkv)
    support.check_device()


@functools.partial(jax.jit, static_argnames="interpret")
def split_heads(
    qkv: jax.Array, cos: jax.Array, sin: jax.Array, *, interpret: Any = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """q [T, K * G, D], k and v [T, K, D] of qkv [T, K, G + 2, D]; q and k rotated by cos, sin f32[T, D / 2].

    The same as `models.transformer.split_heads`. Check with `check_supported` first.
    """
    tokens, kv_heads, members, head_dim = qkv.shape
    least = max(1, ops.WARPGROUP // head_dim)
    per_cta = least if tokens <= FEW_TOKENS else kv_heads
    # The pair (a, b) of an element's own half and the other: first half a cos - b sin, second half a cos + b sin.
    tables = jnp.concatenate([cos, cos], axis=-1), jnp.concatenate([-sin, sin], axis=-1)

    def split_heads(*refs: Any) -> None:
        (_plain if interpret is not None else _vectors)(per_cta, *refs)

    shapes = ((tokens, kv_heads * (members - 2), head_dim), *[(tokens, kv_heads, head_dim)] * 2)
    kernel = plgpu.kernel(
        split_heads, out_type=[jax.ShapeDtypeStruct(shape, qkv.dtype) for shape in shapes],
        grid=(tokens, kv_heads // per_cta), grid_names=("token", "part"),
        **({} if interpret is None else {"interpret": interpret}),
    )  # fmt: skip
    q, k, v = kernel(qkv, *tables)
    return q, k, v


def _vectors(per_cta: int, qkv: Any, cos: Any, sin: Any, *outs: Any) -> None:
    _, kv_heads, members, head_dim = qkv.shape
    token, first = lax.axis_index("token"), lax.axis_index("part") * per_cta
    group = members - 2

    def heads(count: int, start: int, other_half: bool) -> jax.Array:
        """[per_cta * count, D]: of every KV head `count` members from `start` on."""

        def address(position: Any, qkv: Any, token: Any, first: Any) -> Any:
            row, d = position
            kv_head = arith.addi(first, arith.divui(row, ops.constant(count)))
            member = arith.addi(ops.constant(start), arith.remui(row, ops.constant(count)))
            if other_half:
                d = arith.remui(arith.addi(d, ops.constant(head_dim // 2)), ops.constant(head_dim))
            row = ops.muladd((token, kv_heads * members), (kv_head, members), (member, 1))
            return ops.pointer_of(qkv), ops.muladd((row, head_dim), (d, 1))

        return ops.load_vectors((per_cta * count, head_dim), qkv.dtype, (qkv, token, first), address)

    def table(ref: Any, rows: int) -> jax.Array:
        """f32[rows, D]: the token's row, repeated."""

        def address(position: Any, ref: Any, token: Any) -> Any:
            return ops.pointer_of(ref), ops.muladd((token, head_dim), (position[1], 1))

        return ops.load_vectors((rows, head_dim), f32, (ref, token), address)

    for out, count, start in zip(outs, (group, 1, 1), (0, group, group + 1), strict=True):
        value = heads(count, start, other_half=False)
        if start <= group:  # values are not rotated
            other = heads(count, start, other_half=True).astype(f32)
            rows = per_cta * count
            value = (value.astype(f32) * table(cos, rows) + other * table(sin, rows)).astype(out.dtype)
        out.at[token, pl.ds(first * count, per_cta * count)][...] = value


def _plain(per_cta: int, qkv: Any, cos: Any, sin: Any, *outs: Any) -> None:
    """For the interpreter: head by head."""
    *_, members, head_dim = qkv.shape
    token, first = lax.axis_index("token"), lax.axis_index("part") * per_cta
    halves = [pl.ds(i * head_dim // 2, head_dim // 2) for i in range(2)]
    for n in range(per_cta):
        for member in range(members):
            which = max(0, member - (members - 3))
            row = (first + n) * (members - 2) + member if not which else first + n
            for own, other in (halves, halves[::-1]):
                value = qkv.at[token, first + n, member, own][...]
                if which < 2:
                    turned = (
                        qkv.at[token, first + n, member, other][...].astype(f32) * sin.at[token, own][...]
                    )
                    value = (value.astype(f32) * cos.at[token, own][...] + turned).astype(value.dtype)
                outs[which].at[token, row, own][...] = value
