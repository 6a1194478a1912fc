"""All products between a layer's attention and its end as one kernel, for some dozens of tokens."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import support
from pallas_kernels.gates import Gate
from pallas_kernels.layer_products.phases import COUNTERS
from pallas_kernels.layer_products.reference import layer_products_reference
from pallas_kernels.layer_products.tuning import MOST_TOKENS, MULTIPLE, TUNING, Tuning, tuning_for

__all__ = [
    "MOST_TOKENS",
    "MULTIPLE",
    "Tuning",
    "check_supported",
    "counters_of",
    "layer_products",
    "layer_products_reference",
    "tuning_for",
]


def check_supported(x: jax.Array, *weights: jax.Array, device: jax.Device | None = None) -> None:
    """Raises NotImplementedError, naming the feature, for tokens and weights of these shapes and dtypes without a kernel."""
    dtypes = {str(array.dtype) for array in (x, *weights)}
    if len(dtypes) > 1 or dtypes - {"bfloat16", "float16"}:
        raise NotImplementedError(
            f"tokens and weights of {', '.join(sorted(dtypes))}: the kernel takes bfloat16 or float16 for all"
        )
    if x.shape[0] % MULTIPLE or x.shape[0] > MOST_TOKENS:
        raise NotImplementedError(
            f"{x.shape[0]} tokens: the kernel takes multiples of {MULTIPLE} up to {MOST_TOKENS}"
        )
    support.check_device(device, TUNING)


def counters_of(tokens: jax.Array) -> jax.Array:
    """i32 zeros for the kernels of a step, one after another, made from any integers so that they are no constant.

    A kernel counts in them and leaves them at zero.
    """
    return jnp.broadcast_to(jnp.minimum(jnp.abs(tokens.reshape(-1)[:1]), 0).astype(jnp.int32), (COUNTERS,))


def layer_products(
    attended: jax.Array,
    x: jax.Array,
    w_out: jax.Array,
    norm: jax.Array,
    w_gate_up: jax.Array,
    w_down: jax.Array,
    counters: jax.Array,
    *,
    gate: Gate = "silu",
    eps: float,
    offset: float = 0.0,
    tuning: Tuning | None = None,
    interpret: Any = None,
) -> jax.Array:
    """The residual stream [T, E] at the end of a layer, from attention's result and the stream before it.

    Args:
      attended: [T, A], bfloat16 or float16 as all others; T a multiple of 8 up to MOST_TOKENS.
      x: [T, E].
      w_out: [A, E]. w_gate_up: [E, 2 F], gates first. w_down: [F, E].
      norm: [E], weights of the RMS norm before the gates; `eps` and `offset` as in `norms.rms_norm`.
      counters: see `counters_of`.
      tuning: by default `tuning_for` these shapes.

    Raises:
      NotImplementedError: for what `check_supported` says, and for shapes that `tuning_for` has nothing for;
        `layer_products_reference` takes the same.
      ValueError: for weights that `tuning` cannot cut.
    """
    from pallas_kernels.layer_products.mosaic_gpu import layer_products_mosaic_gpu

    if interpret is None:
        check_supported(x, attended, w_out, norm, w_gate_up, w_down)
    tuning = tuning or tuning_for(len(x), w_out.shape[0], x.shape[1], w_down.shape[0])
    if tuning is None:
        raise NotImplementedError(
            f"{len(x)} tokens times weights {w_out.shape} and {w_down.shape}: there is no tuning for these"
        )
    return layer_products_mosaic_gpu(
        attended, x, w_out, norm, w_gate_up, w_down, counters, gate=gate, eps=eps, offset=offset, tuning=tuning,
        interpret=interpret,
    )  # fmt: skip
