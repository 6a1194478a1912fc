"""Tokens into FP8 in one kernel, and with the sum and the norm that they come from in one, too: a CTA has a token.

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
from pallas_kernels.fp8_products.token_threads import WARPS, TokenThreads
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

    def fp8_tokens(x: Any, codes: Any, scales: Any, shared: Any) -> None:  # the name that profiles show
        def plain(row: Any, token: Any) -> Fp8Tokens:
            return quantise_tokens_reference(x.at[token][...][None])

        if interpret is None:
            _in_registers(_quantise, shared, x, codes, scales)
        else:
            _in_row(plain, x, codes, scales)

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
        """`refs`: what is added and a place for the sum, if at all, places for codes and scales, and shared memory."""
        *adding, codes, scales, shared = refs

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
            _in_registers(functools.partial(_norm, eps=eps, offset=offset), shared, x, weight, *refs[:-1])
        else:
            _in_row(plain, x, codes, scales)

    if added is None:
        (tokens,) = _call(fp8_norm, x, weight, interpret=interpret)
        return x, tokens
    total, tokens = _call(fp8_norm, x, weight, added, results=[x], interpret=interpret)
    return total, tokens


def _call(
    body: Callable[..., None], x: jax.Array, *others: jax.Array, results: Sequence[Any] = (), interpret: Any
) -> tuple[Any, ...]:
    """Of a kernel of x[T, depth] and others, which has shared memory f32[WARPS]: arrays like `results`, then Fp8Tokens."""
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
        grid=(rows,),
        grid_names=("cta",),
        scratch_types=[plgpu.SMEM((WARPS,), jnp.float32)],
        **({} if interpret is None else {"interpret": interpret}),
    )
    *found, codes, scales = kernel(x, *others)
    return *found, Fp8Tokens(codes, scales, tokens)


def _in_row(plain: Callable[[Any, Any], Fp8Tokens], x: Any, codes: Any, scales: Any) -> None:
    """Codes and scale of a CTA's row, from what `plain` gives for a row and the token that it has."""
    row, rows, blocks = lax.axis_index("cta"), codes.shape[0], scales.shape[0]
    found = plain(row, jnp.minimum(row, x.shape[0] - 1))
    codes.at[row][...] = found.codes[0]
    scales.at[row][...] = found.scales[0]
    if blocks > rows:

        @pl.when(row + 1 == rows)
        def _() -> None:
            scales.at[pl.ds(rows, blocks - rows)][...] = jnp.broadcast_to(found.scales, blocks - rows)


def _in_registers(body: Callable[..., None], shared: Any, x: Any, *refs: Any) -> None:
    """What `body` makes of a CTA's threads and the Refs, the first of which are the tokens."""
    types = (*(plgpu.RefType() for _ in (shared, x, *refs)), ops.SCALAR)

    @plgpu.inline_mgpu(arg_types=types)
    def run(_: Any, *arguments: Any) -> None:
        shared, *given, row = (ops.as_operand(argument) for argument in arguments)
        tokens, depth = x.shape
        body(TokenThreads(row, tokens, depth, shared), *given)

    run(shared, x, *refs, lax.axis_index("cta"))


def _quantise(cta: TokenThreads, x: ir.Value, codes: ir.Value, scales: ir.Value) -> None:
    largest = cta.nothing()
    for group in cta.groups():
        for words in [cta.load(x, step) for step in group]:
            largest = cta.largest(words, largest)
    scale, factor = cta.scale(largest)
    for group in cta.groups():
        for step, words in [(step, cta.load(x, step)) for step in group]:
            cta.store_codes(codes, step, words, factor)
    cta.store_scale(scales, scale, ir.MemRefType(codes.type).shape[0])


def _norm(
    cta: TokenThreads, x: ir.Value, weight: ir.Value, *refs: ir.Value, eps: float, offset: float
) -> None:
    *adding, codes, scales = refs
    held, squares = [], cta.f32(0.0)
    for group in cta.groups():
        at_once = [cta.load(x, step) for step in group]
        if adding:
            added, total = adding
            others = [cta.load(added, step) for step in group]
            at_once = [cta.added(*both) for both in zip(at_once, others, strict=True)]
            with mgpu_utils.when(cta.has_token):
                for step, words in zip(group, at_once, strict=True):
                    cta.store(total, step, words)
        for step, words in zip(group, at_once, strict=True):
            squares = arith.addf(squares, cta.within(step, cta.squares(words)))
        held += at_once
    mean = cta.divided(cta.total(squares), cta.f32(cta.depth))
    inverse_rms = cta.rsqrt(arith.addf(mean, cta.f32(eps)))

    largest = cta.nothing()
    for group in cta.groups():
        for step, weights in [(step, cta.load(weight, step, row=0)) for step in group]:
            held[step] = cta.normed(held[step], weights, inverse_rms, cta.f32(offset))
            largest = cta.largest(held[step], largest)
    scale, factor = cta.scale(largest)
    for step, words in enumerate(held):
        cta.store_codes(codes, step, words, factor)
    cta.store_scale(scales, scale, ir.MemRefType(codes.type).shape[0])
