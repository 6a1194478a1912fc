"""All products between one layer's attention and the next one's as one kernel, for up to 128 tokens."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import support
from pallas_kernels.gates import Gate
from pallas_kernels.layer_products.phases import COUNTERS
from pallas_kernels.layer_products.reference import layer_products_reference
from pallas_kernels.layer_products.tuning import MOST_TOKENS, MULTIPLE, TUNING, Tuning, can_take, tuning_for
from pallas_kernels.layer_products.weights import LayerWeights

__all__ = [
    "LayerWeights",
    "Tuning",
    "can_take",
    "check_shapes",
    "check_supported",
    "counters_of",
    "layer_products",
    "layer_products_reference",
    "tuning_for",
]


def check_supported(x: jax.Array, *others: jax.Array, device: jax.Device | None = None) -> None:
    """Raises NotImplementedError, naming the feature, for tokens and weights of these shapes and dtypes without a kernel."""
    dtypes = {str(array.dtype) for array in (x, *others)}
    if len(dtypes) > 1 or dtypes - {"bfloat16", "float16"}:
        raise NotImplementedError(
            f"tokens and weights of {', '.join(sorted(dtypes))}: the kernel takes bfloat16 or float16 for all"
        )
    if not can_take(x.shape[0]):
        raise NotImplementedError(
            f"{x.shape[0]} tokens: the kernel takes 1 to {MULTIPLE}, and multiples of {MULTIPLE} up to {MOST_TOKENS}"
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
    weights: LayerWeights,
    counters: jax.Array,
    *,
    gate: Gate = "silu",
    eps: float,
    offset: float = 0.0,
    tuning: Tuning | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array | None]:
    """The residual stream [T, E] at the end of a layer, and the next layer's heads [T, H], from attention's result.

    Args:
      attended: [T, A], bfloat16 or float16 as all others; T as it `can_take`.
      x: [T, E], the residual stream before attention's result is added.
      weights: see `LayerWeights`; without heads None is given for these.
      counters: see `counters_of`.
      eps, offset: of all norms, as in `norms.rms_norm`.
      tuning: by default `tuning_for` these shapes.

    Raises:
      NotImplementedError: for what `check_supported` says, and for shapes that `tuning_for` has nothing for;
        `layer_products_reference` takes the same.
      ValueError: for shapes that do not belong together, and for weights that `tuning` cannot cut.
    """
    from pallas_kernels.layer_products.mosaic_gpu import layer_products_mosaic_gpu

    check_shapes(attended, x, weights, counters)
    if interpret is None:
        check_supported(x, attended, *(array for array in weights if array is not None))
    tuning = tuning or tuning_for(len(x), *weights.columns)
    if tuning is None:
        raise NotImplementedError(
            f"{len(x)} tokens, a layer of {weights.columns} columns: there is no tuning for these"
        )
    return layer_products_mosaic_gpu(
        attended, x, weights, counters, gate=gate, eps=eps, offset=offset, tuning=tuning, interpret=interpret
    )


def check_shapes(
    attended: jax.Array | jax.ShapeDtypeStruct, x: jax.Array, weights: LayerWeights, counters: jax.Array
) -> None:
    """Raises ValueError for shapes that do not belong together."""
    depth, width, inner, heads = weights.columns
    wanted: dict[str, tuple[int, ...]] = {"gate_up": (width, 2 * inner), "down": (inner, width)}
    wanted |= dict.fromkeys(("norm", "out_post", "down_post", "next_norm"), (width,)) | {
        "heads": (width, heads)
    }
    wanted |= {"attended": (len(x), depth), "x": (len(x), width), "counters": (COUNTERS,)}
    given = {name: array for name, array in weights._asdict().items() if array is not None}
    for name, array in (given | {"attended": attended, "x": x, "counters": counters}).items():
        if array.shape != wanted.get(name, array.shape):
            raise ValueError(f"{name} {array.shape}: expected {wanted[name]}, as out is {weights.out.shape}")
    for one, other in (("out_post", "down_post"), ("next_norm", "heads")):
        if (one in given) != (other in given):
            raise ValueError(f"weights with one of {one} and {other}: give both or none")
