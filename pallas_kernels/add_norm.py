"""Residual addition and RMS norm as one small kernel for Hopper GPUs, in Pallas' Mosaic GPU.

XLA makes two kernels of it (three for few tokens), since the sum is needed twice. Between the products of a decode step each
kernel costs some 2 us, whatever it does. A CTA takes one token.
"""

import functools
from typing import Any

import jax
import jax.experimental.mosaic.gpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import support
from pallas_kernels.row_loads import WARPGROUP

MOST = 16_384  # elements of a row: they stay in registers


def check_supported(x: jax.Array) -> None:
    """Raises NotImplementedError, naming the feature, for a residual stream [T, E] that the kernel does not take."""
    if x.dtype not in ("bfloat16", "float16"):
        raise NotImplementedError(f"a residual stream of {x.dtype}: the kernel takes bfloat16 and float16")
    if x.shape[1] % WARPGROUP or x.shape[1] > MOST:
        raise NotImplementedError(
            f"hidden size {x.shape[1]}: the kernel takes multiples of {WARPGROUP} up to {MOST}"
        )
    support.check_one_device(x)
    support.check_device()


@functools.partial(jax.jit, static_argnames=("eps", "interpret"))
def add_norm(
    x: jax.Array, delta: jax.Array, weight: jax.Array, eps: float, *, interpret: Any = None
) -> tuple[jax.Array, jax.Array]:
    """The sum of x and delta [T, E] in their dtype, and its RMS norm times weight [E], computed in float32.

    The same as `models.transformer.add_norm`. Check with `check_supported` first.
    """
    tokens, width = x.shape
    vector = next(size for size in (8, 4, 2, 1) if width % (WARPGROUP * size) == 0)
    layout = plgpu.Layout.WG_STRIDED((width,), vec_size=vector)

    def add_norm(x_ref: Any, delta_ref: Any, weight_ref: Any, sum_ref: Any, normed_ref: Any) -> None:
        token = lax.axis_index("token")
        x, delta, weight = (
            plgpu.load(ref, layout=layout, optimized=False)
            for ref in (x_ref.at[token], delta_ref.at[token], weight_ref)
        )
        rounded = (x.astype(jnp.float32) + delta.astype(jnp.float32)).astype(x.dtype)
        exact = rounded.astype(jnp.float32)
        inverse = lax.rsqrt(jnp.sum(exact * exact) * (1 / width) + eps)
        sum_ref.at[token][...] = rounded
        normed_ref.at[token][...] = (exact * inverse * weight.astype(jnp.float32)).astype(x.dtype)

    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    kernel = plgpu.kernel(
        add_norm, out_type=[out, out], grid=(tokens,), grid_names=("token",),
        compiler_params=plgpu.CompilerParams(reduction_scratch_bytes=4096),
        **({} if interpret is None else {"interpret": interpret}),
    )  # fmt: skip
    summed, normed = kernel(x, delta.astype(x.dtype), weight)
    return summed, normed
