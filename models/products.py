"""Products of tokens with the weights of a layer, which are floats or in FP8: the one place that decides what runs."""

from __future__ import annotations

import logging
from functools import cache

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from models.config import ModelConfig
from pallas_kernels import fp8_products as fp8
from pallas_kernels.fp8_products import Fp8Tokens, Fp8Weights
from pallas_kernels.support import check_one_device

log = logging.getLogger("tangram")


def product(
    x: Float[Array, "T depth"], weights: Array | Fp8Weights, columns: tuple[int, ...], config: ModelConfig
) -> Float[Array, "T ..."]:
    """Tokens times a matrix: [T, *columns], in the dtype of x.

    `weights`: floats, [..., *columns] of `depth` rows in any number of axes; or that matrix in FP8, which kernels
    multiply on a Hopper GPU, elsewhere XLA operations. `config` says whether many tokens become FP8 for that.
    """
    if not isinstance(weights, Fp8Weights):
        # Contracting two axes at once would copy the weights on a CPU (20 ms instead of 1.2 ms a token).
        return jnp.einsum("te,e...->t...", x, weights.reshape(x.shape[1], *columns))
    multiply = fp8.fp8_products if _has_kernel(x, weights) else fp8.fp8_products_reference
    return multiply(_given(x, weights, config), weights).astype(x.dtype).reshape(-1, *columns)


def gated_product(
    x: Float[Array, "T depth"], weights: Array | Fp8Weights, config: ModelConfig
) -> Float[Array, "T columns"]:
    """What the gates let through: of tokens times a matrix of [2, columns] gates first, then what is gated.

    See `product`. With FP8 weights on a Hopper GPU one kernel does both.
    """
    if isinstance(weights, Fp8Weights) and _has_kernel(x, weights):
        return fp8.fp8_products(_given(x, weights, config), weights, gate="gelu" if config.gelu else "silu")
    gate_up = product(x, weights, (2, config.intermediate_size), config)
    return _gate(gate_up[:, 0], config) * gate_up[:, 1]


def _gate(x: Array, config: ModelConfig) -> Array:
    if config.gelu:  # in float32, as torch computes it whatever the dtype
        return jax.nn.gelu(x.astype(jnp.float32), approximate=True).astype(x.dtype)
    return jax.nn.silu(x)


def _given(x: Array, weights: Fp8Weights, config: ModelConfig) -> Array | Fp8Tokens:
    """The tokens as they are multiplied with FP8 weights: many in FP8 too, if the configuration says so."""
    if not config.activations_fp8 or len(x) < fp8.LEAST_NARROW:
        return x
    return (fp8.quantise_tokens if _has_kernel(x, weights) else fp8.quantise_tokens_reference)(x)


def _has_kernel(x: Array, weights: Fp8Weights) -> bool:
    try:
        check_one_device(weights.codes)
        fp8.check_supported(x.dtype)
    except NotImplementedError as reason:
        if jax.default_backend() == "gpu":
            _warn(str(reason))
        return False
    return True


@cache  # once, not for every product of every program
def _warn(reason: str) -> None:
    log.warning("FP8 weights are unpacked for every product, many times slower: %s", reason)
