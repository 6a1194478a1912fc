"""The kernels: few rows of tokens are sent to all devices as they are (`exchange`), many added up on one each (`relay`)."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import row_loads as ops
from pallas_kernels.all_reduce.exchange import exchange
from pallas_kernels.all_reduce.links import RELAYS, are_few
from pallas_kernels.all_reduce.relay import Add, Give, relay_rows


@functools.partial(jax.jit, static_argnames="interpret")  # lowered once for all layers
def all_reduce_mosaic_gpu(share: jax.Array, links: jax.Array, *, interpret: Any = None) -> jax.Array:
    """See `all_reduce.all_reduce`."""

    def all_reduce(share: Any, links: Any, out: Any) -> None:  # the name that profiles show
        def give(row: Any, total: jax.Array) -> None:
            out.at[row][...] = total

        _rows(share, links, lambda row: lambda total: total.astype(out.dtype), give, interpret)

    return _kernel(all_reduce, share, links, 1, interpret)(share, links)[0]


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
        factors = _row(weight, None, interpret).astype(jnp.float32) + offset

        def add(row: Any) -> Callable[[jax.Array], jax.Array]:
            own = _row(x, row, interpret).astype(jnp.float32)
            return lambda total: (own + total).astype(out.dtype)

        def give(row: Any, total: jax.Array) -> None:
            out.at[row][...] = total
            total = total.astype(jnp.float32)
            inverse_rms = lax.rsqrt(jnp.sum(total * total) / columns + eps)
            normed.at[row][...] = (total * inverse_rms * factors).astype(out.dtype)

        _rows(share, links, add, give, interpret)

    total, normed = _kernel(all_reduce_norm, share, links, 2, interpret)(x, share, weight, links)
    return total, normed


def _kernel(
    body: Callable[..., None], share: jax.Array, links: jax.Array, results: int, interpret: Any
) -> Callable[..., Any]:
    (rows, columns), devices = share.shape, links.shape[0] - 1
    few = interpret is not None or are_few(rows, columns, devices)
    return plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct(share.shape, share.dtype)] * results,
        grid=(rows if few else min(-(-rows // devices), RELAYS),),
        grid_names=("cta",),
        **({} if interpret is None else {"interpret": interpret}),
    )


def _rows(
    share: Any,
    links: Any,
    add: Add,
    give: Give,
    interpret: Any,
) -> None:
    """The rows of this CTA, see `relay.relay_rows`; few are sent to all devices as they are."""
    rows, columns = share.shape
    if interpret is None and not are_few(rows, columns, links.shape[0] - 1):
        relay_rows(share, links, add, give)
        return
    row = lax.axis_index("cta")
    added = add(row)
    give(row, added(_total(share, links, row, interpret)))


def _total(share: Any, links: Any, row: Any, interpret: Any) -> jax.Array:
    """f32[columns], of all devices."""
    if interpret is None:
        columns = share.shape[1]
        return exchange(_row(share, row, interpret), links, row, ops.vector_size(columns, columns))
    total = links.at[0, row][...].astype(jnp.float32)
    for device in range(1, links.shape[0]):
        total += links.at[device, row][...].astype(jnp.float32)
    return total


def _row(ref: Any, row: Any, interpret: Any) -> jax.Array:
    """One of [T, columns], or all of [columns], as many elements of a thread side by side as it can load at once."""
    if interpret is not None:
        return (ref if row is None else ref.at[row])[...]
    columns = ref.shape[-1]

    def address(position: Any, ref: Any, *row: Any) -> Any:
        return ops.pointer_of(ref), ops.muladd((position[0], 1), *((number, columns) for number in row))

    return ops.load_vectors((columns,), ref.dtype, (ref,) if row is None else (ref, row), address)
