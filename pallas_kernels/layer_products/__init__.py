"""The products between two layers' attention as one kernel: of up to 128 tokens, of one if the layer has experts."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import support
from pallas_kernels.fp8_products import Fp8Weights
from pallas_kernels.gates import Gate
from pallas_kernels.layer_products.phases import COUNTERS
from pallas_kernels.layer_products.reference import layer_products_reference
from pallas_kernels.layer_products.tuning import (
    LINKED,
    MOST_LINKED,
    MOST_LINKED_FP8,
    MOST_TOKENS,
    MULTIPLE,
    TOKENS,
    TUNING,
    Tuning,
    can_take,
    tuning_for,
)
from pallas_kernels.layer_products.weights import LayerWeights, Matrix, MixtureWeights, Routing, shape_of

__all__ = [
    "LINKED",
    "MOST_LINKED",
    "MOST_LINKED_FP8",
    "LayerWeights",
    "MixtureWeights",
    "Routing",
    "Tuning",
    "can_take",
    "check_shapes",
    "check_supported",
    "counters_of",
    "layer_products",
    "layer_products_reference",
    "tuning_for",
]


def check_supported(x: jax.Array, *others: Matrix, device: jax.Device | None = None) -> None:
    """Raises NotImplementedError, naming the feature, for tokens and weights of these shapes and dtypes without a kernel."""
    fp8 = any(isinstance(each, Fp8Weights) for each in others)
    dtypes = {str(each.dtype) for each in (x, *others) if not isinstance(each, Fp8Weights)}
    if len(dtypes) > 1 or dtypes - ({"bfloat16"} if fp8 else {"bfloat16", "float16"}):
        kinds = "bfloat16 beside weights in FP8" if fp8 else "bfloat16 or float16 for all"
        raise NotImplementedError(
            f"tokens and weights of {', '.join(sorted(dtypes))}: the kernel takes {kinds}"
        )
    if not can_take(x.shape[0], fp8):
        most = f"{TOKENS if fp8 else MOST_TOKENS}{' with weights in FP8' if fp8 else ''}"
        raise NotImplementedError(
            f"{x.shape[0]} tokens: the kernel takes 1 to {MULTIPLE}, and multiples of {MULTIPLE} up to {most}"
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
    weights: LayerWeights | MixtureWeights,
    counters: jax.Array,
    *,
    gate: Gate = "silu",
    eps: float,
    offset: float = 0.0,
    routing: Routing | None = None,
    links: jax.Array | None = None,
    tuning: Tuning | None = None,
    interpret: Any = None,
    in_parts: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """The residual stream [T, E] at the end of a layer, and the next layer's heads [T, H], from attention's result.

    `in_parts`: the heads as f32[splits, rows, H], parts to be added up, in as many rows as T or more.

    Args:
      attended: [T, A], bfloat16 or float16 as all others (bfloat16 with matrices in FP8); T as it `can_take`.
      x: [T, E], the residual stream before attention's result is added.
      weights: see `LayerWeights`; without heads None is given for these. With `MixtureWeights`, of one token, `routing`.
      counters: see `counters_of`.
      eps, offset: of all norms, as in `norms.rms_norm`.
      links: i32[1 + N, 2], see `all_reduce.links_of`, within a `jax.shard_map`: the matrices are a device's share, `out`
        and `down` of the depth and the others of the columns, and N devices add up what these give: a call is two of
        `all_reduce.all_reduce`, with its rules. With `interpret` what the others have instead, [2, N - 1, T, E], of `out`
        and of `down`: the interpreter has no memory of others.
      tuning: by default `tuning_for` these shapes.

    Raises:
      NotImplementedError: for what `check_supported` says, and for shapes that `tuning_for` has nothing for;
        `layer_products_reference` takes the same.
      ValueError: for shapes that do not belong together, and for weights that `tuning` cannot cut.
    """
    from pallas_kernels.layer_products.mosaic_gpu import layer_products_mosaic_gpu

    if isinstance(weights, MixtureWeights):
        check_mixture(attended, x, weights, counters, routing)
    else:
        check_shapes(attended, x, weights, counters)
    if interpret is None:
        check_supported(x, attended, *weights.given.values())
    if tuning is None and routing is not None and isinstance(weights, MixtureWeights):
        mixture = weights.router.shape[1], routing.experts
        tuning = tuning_for(len(x), *weights.columns, mixture=mixture)
    elif tuning is None:
        tuning = tuning_for(len(x), *weights.columns, fp8=weights.fp8)
    if tuning is None:
        raise NotImplementedError(
            f"{len(x)} tokens, a layer of {weights.columns} columns: there is no tuning for these"
        )
    return layer_products_mosaic_gpu(
        attended, x, weights, counters, links, gate=gate, eps=eps, offset=offset, tuning=tuning, routing=routing,
        interpret=interpret, in_parts=in_parts,
    )  # fmt: skip


def check_shapes(
    attended: jax.Array | jax.ShapeDtypeStruct, x: jax.Array, weights: LayerWeights, counters: jax.Array
) -> None:
    """Raises ValueError for shapes that do not belong together."""
    depth, width, inner, heads = weights.columns
    matrices = [
        each for each in (weights.out, weights.gate_up, weights.down, weights.heads) if each is not None
    ]
    if len({isinstance(each, Fp8Weights) for each in matrices}) > 1:
        raise ValueError("some of the matrices are in FP8: give all of them so, or none")
    wanted: dict[str, tuple[int, ...]] = {"gate_up": (width, 2 * inner), "down": (inner, width)}
    wanted |= dict.fromkeys(("norm", "out_post", "down_post", "next_norm"), (width,)) | {
        "heads": (width, heads)
    }
    wanted |= {"attended": (len(x), depth), "x": (len(x), width), "counters": (COUNTERS,)}
    given: dict[str, Any] = weights.given
    _check(given | {"attended": attended, "x": x, "counters": counters}, wanted)
    for one, other in (("out_post", "down_post"), ("next_norm", "heads")):
        _check_both(given, one, other)


def check_mixture(
    attended: jax.Array, x: jax.Array, weights: MixtureWeights, counters: jax.Array, routing: Routing | None
) -> None:
    """The same of one token and experts, and of how many are chosen."""
    (depth, width, inner, heads), (tokens, experts) = weights.columns, (len(x), weights.router.shape[1])
    if tokens != 1:
        raise NotImplementedError(f"{tokens} tokens: the kernel takes one, if its layer has experts")
    if routing is None or not 1 <= routing.experts <= experts:
        raise ValueError(f"routing {routing}: expected 1 to {experts} experts")
    wanted = {
        "router": (width, experts),
        "gate_up": (experts, width, 2 * inner),
        "down": (experts, inner, width),
    }
    wanted |= dict.fromkeys(("norm", "next_norm"), (width,)) | {"heads": (width, heads)}
    wanted |= {"attended": (1, depth), "x": (1, width), "counters": (COUNTERS,)}
    _check(weights.given | {"attended": attended, "x": x, "counters": counters}, wanted)
    _check_both(weights.given, "next_norm", "heads")


def _check(given: dict[str, Any], wanted: dict[str, tuple[int, ...]]) -> None:
    for name, array in given.items():
        if (shape := shape_of(array)) != wanted.get(name, shape):
            raise ValueError(f"{name} {shape}: expected {wanted[name]}, as out is {shape_of(given['out'])}")


def _check_both(given: dict[str, Any], one: str, other: str) -> None:
    if (one in given) != (other in given):
        raise ValueError(f"weights with one of {one} and {other}: give both or none")
