"""Products of tokens with the weights of a layer, which are floats or in FP8: the one place that decides what runs."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from models.config import ModelConfig
from models.shares import Share, over_devices
from pallas_kernels import all_reduce
from pallas_kernels import fp8_products as fp8
from pallas_kernels.fp8_products import Fp8Tokens, Fp8Weights
from pallas_kernels.gates import Gate, opened
from pallas_kernels.norms import rms_norm
from pallas_kernels.support import check_one_device

log = logging.getLogger("tangram")


def added_norm(
    x: Float[Array, "T depth"],
    added: Float[Array, "T depth"] | Share | None,
    norm: Float[Array, " depth"],
    weights: Array | Fp8Weights | None,
    config: ModelConfig,
) -> tuple[Float[Array, "T depth"], Any]:
    """x + added, and its RMS norm for products with `weights`: as Fp8Tokens where they take these and a kernel makes them.

    added: None for nothing; a device's share is added up with the others'. weights: None where not only such products read
    the norm.
    """
    if isinstance(added, Share):
        if added.links is not None:
            how = {"eps": config.norm_eps, "offset": config.norm_offset}
            return all_reduce.added_norm(x, added.part, norm, added.links, **how)
        added = over_devices(added, config)
    narrow = isinstance(weights, Fp8Weights) and _narrow(x, config) and _has_kernel(x, weights)
    if narrow and x.shape[1] <= fp8.MOST_NORMED:
        return fp8.normed_tokens(x, norm, added=added, eps=config.norm_eps, offset=config.norm_offset)
    x = x if added is None else x + added
    return x, rms_norm(x, norm, config.norm_eps, config.norm_offset)


def product(
    x: Float[Array, "T depth"] | Fp8Tokens,
    weights: Array | Fp8Weights,
    columns: tuple[int, ...],
    config: ModelConfig,
) -> Float[Array, "T ..."]:
    """Tokens times a matrix: [T, *columns], in the dtype of x; of what `added_norm` gives in FP8, bfloat16.

    `weights`: floats, [..., *columns] of `depth` rows in any number of axes; or that matrix in FP8, which kernels
    multiply on a Hopper GPU, elsewhere XLA operations. `config` says whether many tokens become FP8 for that.
    """
    if isinstance(weights, Fp8Weights):
        return _times(x, weights, config).reshape(-1, *columns)
    assert not isinstance(x, Fp8Tokens)
    # Contracting two axes at once would copy the weights on a CPU (20 ms instead of 1.2 ms a token).
    return jnp.einsum("te,e...->t...", x, weights.reshape(x.shape[1], *columns))


def gated_product(
    x: Float[Array, "T depth"] | Fp8Tokens, weights: Array | Fp8Weights, config: ModelConfig
) -> Float[Array, "T columns"]:
    """Tokens times a matrix of [2, columns], gates first, and what these let through. See `product`."""
    gate: Gate = "gelu" if config.gelu else "silu"
    if isinstance(weights, Fp8Weights):
        return _times(x, weights, config, gate)
    gate_up = product(x, weights, (2, config.intermediate_size), config)
    return opened(gate_up[:, 0], gate) * gate_up[:, 1]


def _times(x: Array | Fp8Tokens, weights: Fp8Weights, config: ModelConfig, gate: Gate | None = None) -> Array:
    """Tokens times FP8 weights, the tokens in FP8 too if they are many and the configuration says so."""
    if isinstance(x, Fp8Tokens):  # by a kernel, so the product has one
        return fp8.fp8_products(x, weights, gate=gate)
    multiply, quantise = fp8.fp8_products_reference, fp8.quantise_tokens_reference
    if _has_kernel(x, weights):
        multiply, quantise = fp8.fp8_products, fp8.quantise_tokens
    return multiply(quantise(x) if _narrow(x, config) else x, weights, gate=gate).astype(x.dtype)


def _narrow(x: Array, config: ModelConfig) -> bool:
    return config.activations_fp8 and len(x) >= fp8.LEAST_NARROW


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
