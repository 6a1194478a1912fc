"""Tokens into FP8 in one kernel, and with the sum and the norm that they come from in one, too: a warp has a token.

XLA takes three kernels to quantise, since it neither keeps what a reduction has read nor stores bytes in another order at
the pace of the memory. And it would pad in kernels of its own: rows up to whole tiles of the products' kernel are the last
token again, and its scale stands for those of a whole block.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_kernels import row_loads as ops
from pallas_kernels.fp8_products.token_warp import WARPS, TokenWarp
from pallas_kernels.fp8_products.tokens import (
    MOST_NORMED,
    RUN,
    Fp8Tokens,
    normed_tokens_reference,
    quantise_tokens_reference,
)
from pallas_kernels.fp8_products.tuning import LEAST_TOKENS, MOST_TOKENS


@functools.partial(jax.jit, static_argnames="interpret")  # lowered once for all products of a depth
def quantise_tokens_mosaic_gpu(x: jax.Array, *, interpret: Any = None) -> Fp8Tokens:
    """See `fp8_products.quantise_tokens`."""

    def fp8_tokens(x: Any, codes: Any, scales: Any) -> None:  # the name that profiles show
        if interpret is None:
            _in_registers(_quantise, x, codes, scales)
        else:
            _in_rows(lambda row, token: quantise_tokens_reference(x.at[token][...][None]), x, codes, scales)

    (tokens,) = _call(fp8_tokens, x, interpret=interpret)
    return tokens


@functools.partial(jax.jit, static_argnames=("eps", "offset", "interpret"))
def normed_tokens_mosaic_gpu(
    x: jax.Array,
    weight: jax.Array,
    added: jax.Array | None,
    *,
    eps: float,
    offset: float,
    interpret: Any = None,
) -> tuple[jax.Array, Fp8Tokens]:
    """See `fp8_products.normed_tokens`."""
    if x.shape[1] > MOST_NORMED:
        raise NotImplementedError(f"norms of {x.shape[1]} numbers: the kernel takes up to {MOST_NORMED}")
    if weight.dtype != x.dtype:
        raise NotImplementedError(
            f"norms of {x.dtype} with weights of {weight.dtype}: the kernel takes one dtype"
        )

    def fp8_norm(x: Any, weight: Any, *refs: Any) -> None:
        """`refs`: what is added and a place for the sum, if at all, then places for codes and scales."""
        *adding, codes, scales = refs

        def plain(row: Any, token: Any) -> Fp8Tokens:
            added = adding[0].at[token][...][None] if adding else None
            total, found = normed_tokens_reference(
                x.at[token][...][None], weight[...], added=added, eps=eps, offset=offset
            )
            if adding:

                @pl.when(row < x.shape[0])
                def _() -> None:
                    adding[1].at[token][...] = total[0]

            return found

        if interpret is None:
            _in_registers(functools.partial(_norm, eps=eps, offset=offset), x, weight, *refs)
        else:
            _in_rows(plain, x, codes, scales)

    if added is None:
        (tokens,) = _call(fp8_norm, x, weight, interpret=interpret)
        return x, tokens
    total, tokens = _call(fp8_norm, x, weight, added, results=[x], interpret=interpret)
    return total, tokens


def _call(
    body: Callable[..., None], x: jax.Array, *others: jax.Array, results: Sequence[Any] = (), interpret: Any
) -> tuple[Any, ...]:
    """Of a kernel of x[T, depth] and others: arrays like `results`, then Fp8Tokens."""
    tokens, depth = x.shape
    if depth % RUN:
        raise NotImplementedError(f"tokens of {depth} numbers in FP8: the kernel takes multiples of {RUN}")
    rows, blocks = (-(-tokens // of) * of for of in (LEAST_TOKENS, MOST_TOKENS))
    kernel = plgpu.kernel(
        body,
        out_type=(
            *(jax.ShapeDtypeStruct(like.shape, like.dtype) for like in results),
            jax.ShapeDtypeStruct((rows, depth), jnp.float8_e4m3fn),
            jax.ShapeDtypeStruct((blocks,), jnp.float32),
        ),
        grid=(rows // WARPS,),
        grid_names=("cta",),
        **({} if interpret is None else {"interpret": interpret}),
    )
    *found, codes, scales = kernel(x, *others)
    return *found, Fp8Tokens(codes, scales, tokens)


def _in_rows(plain: Callable[[Any, Any], Fp8Tokens], x: Any, codes: Any, scales: Any) -> None:
    """Codes and scales of a CTA's rows, from what `plain` gives for a row and the token that it has."""
    first = lax.axis_index("cta") * WARPS
    rows, blocks = codes.shape[0], scales.shape[0]
    for row in range(WARPS):
        found = plain(first + row, jnp.minimum(first + row, x.shape[0] - 1))
        codes.at[first + row][...] = found.codes[0]
        scales.at[first + row][...] = found.scales[0]

    if blocks > rows:

        @pl.when(first + WARPS == rows)
        def _() -> None:
            scales.at[pl.ds(rows, blocks - rows)][...] = jnp.broadcast_to(found.scales, blocks - rows)


def _in_registers(body: Callable[..., None], x: Any, *refs: Any) -> None:
    """What `body` makes of a warp and the Refs, the first of which are the tokens."""
    types = (*(plgpu.RefType() for _ in (x, *refs)), ops.SCALAR)

    @plgpu.inline_mgpu(arg_types=types)
    def run(_: Any, *arguments: Any) -> None:
        *given, first = (ops.as_operand(argument) for argument in arguments)
        body(TokenWarp(first, *x.shape), *given)

    run(x, *refs, lax.axis_index("cta") * WARPS)


def _quantise(warp: TokenWarp, x: ir.Value, codes: ir.Value, scales: ir.Value) -> None:
    largest = warp.nothing()
    for group in warp.groups():
        for words in [warp.load(x, step) for step in group]:
            largest = warp.largest(words, largest)
    scale, factor = warp.scale(largest)
    for group in warp.groups():
        for step, words in [(step, warp.load(x, step)) for step in group]:
            warp.store_codes(codes, step, words, factor)
    warp.store_scale(scales, scale, ir.MemRefType(codes.type).shape[0])


def _norm(warp: TokenWarp, x: ir.Value, weight: ir.Value, *refs: ir.Value, eps: float, offset: float) -> None:
    *adding, codes, scales = refs
    held, squares = [], warp.f32(0.0)
    for group in warp.groups():
        at_once = [warp.load(x, step) for step in group]
        if adding:
            added, total = adding
            others = [warp.load(added, step) for step in group]
            at_once = [warp.added(*both) for both in zip(at_once, others, strict=True)]
            with mgpu_utils.when(warp.has_token):
                for step, words in zip(group, at_once, strict=True):
                    warp.store(total, step, words)
        for step, words in zip(group, at_once, strict=True):
            squares = arith.addf(squares, warp.within(step, warp.squares(words)))
        held += at_once
    mean = warp.divided(warp.total(squares), warp.f32(warp.depth))
    inverse_rms = warp.rsqrt(arith.addf(mean, warp.f32(eps)))

    largest = warp.nothing()
    for group in warp.groups():
        for step, weights in [(step, warp.load(weight, step, row=0)) for step in group]:
            held[step] = warp.normed(held[step], weights, inverse_rms, warp.f32(offset))
            largest = warp.largest(held[step], largest)
    scale, factor = warp.scale(largest)
    for step, words in enumerate(held):
        warp.store_codes(codes, step, words, factor)
    warp.store_scale(scales, scale, ir.MemRefType(codes.type).shape[0])
