"""The kernels: a CTA for each row of tokens, which is sent to all devices' mailboxes and awaited from all of them."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import row_loads as ops
from pallas_kernels.all_reduce.exchange import exchange


@functools.partial(jax.jit, static_argnames="interpret")  # lowered once for all layers
def all_reduce_mosaic_gpu(share: jax.Array, links: jax.Array, *, interpret: Any = None) -> jax.Array:
    """See `all_reduce.all_reduce`."""

    def all_reduce(share: Any, links: Any, out: Any) -> None:  # the name that profiles show
        row = lax.axis_index("cta")
        out.at[row][...] = _total(share, links, row, interpret).astype(out.dtype)

    return _kernel(all_reduce, share, 1, interpret)(share, links)[0]


@functools.partial(jax.jit, static_argnames=("eps", "offset", "interpret"))
def added_norm_mosaic_gpu(
    x: jax.Array,
    share: jax.Array,
    weight: jax.Array,
    links: jax.Array,
    *,
    eps: float,
    offset: float,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """See `all_reduce.added_norm`."""
    columns = share.shape[1]

    def all_reduce_norm(x: Any, share: Any, weight: Any, links: Any, out: Any, normed: Any) -> None:
        row = lax.axis_index("cta")
        # Asked for before the others' rows are awaited.
        own, factors = _row(x, row, interpret), _row(weight, None, interpret).astype(jnp.float32)
        total = own.astype(jnp.float32) + _total(share, links, row, interpret)
        out.at[row][...] = total.astype(out.dtype)
        total = total.astype(out.dtype).astype(jnp.float32)
        inverse_rms = lax.rsqrt(jnp.sum(total * total) / columns + eps)
        normed.at[row][...] = (total * inverse_rms * (factors + offset)).astype(out.dtype)

    total, normed = _kernel(all_reduce_norm, share, 2, interpret)(x, share, weight, links)
    return total, normed


def _kernel(body: Callable[..., None], share: jax.Array, results: int, interpret: Any) -> Callable[..., Any]:
    return plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct(share.shape, share.dtype)] * results,
        grid=(len(share),),
        grid_names=("cta",),
        **({} if interpret is None else {"interpret": interpret}),
    )


def _total(share: Any, links: Any, row: Any, interpret: Any) -> jax.Array:
    """f32[columns], of all devices."""
    if interpret is None:
        return exchange(share, links, row)
    total = links.at[0, row][...].astype(jnp.float32)
    for device in range(1, links.shape[0]):
        total += links.at[device, row][...].astype(jnp.float32)
    return total


def _row(ref: Any, row: Any, interpret: Any) -> jax.Array:
    """One of [T, columns], or all of [columns], with each thread's elements where `exchange` has them."""
    if interpret is not None:
        return (ref if row is None else ref.at[row])[...]
    columns = ref.shape[-1]

    def address(position: Any, ref: Any, *row: Any) -> Any:
        return ops.pointer_of(ref), ops.muladd((position[0], 1), *((number, columns) for number in row))

    return ops.load_vectors((columns,), ref.dtype, (ref,) if row is None else (ref, row), address)
