"""Weights in FP8, a scale for each output column: half of bfloat16's memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from models.config import ModelConfig, UnsupportedModelError
from models.params import Params, ParamSpec, map_specs, param_specs
from pallas_kernels import fp8_products as fp8
from pallas_kernels.fp8_products import Fp8Weights


def with_fp8_weights(config: ModelConfig, *, dynamic: bool = False) -> ModelConfig:
    """The configuration with the weights of the dense products in FP8; `dynamic`: and many tokens for these products.

    Raises UnsupportedModelError naming every matrix that cannot be.
    """
    config = config.replace(weights_fp8=True, activations_fp8=dynamic)
    problems: dict[str, None] = {}  # ordered set: layers repeat
    for layer in param_specs(config)["layers"]:
        for name, spec in layer.items():
            try:
                if spec.fp8:
                    fp8.packed_shape(*spec.matrix)
            except NotImplementedError:
                problems["{} is {} x {}".format(name, *spec.matrix)] = None
    if problems:
        raise UnsupportedModelError(
            f"the weights of {config.name} cannot be in FP8: {', '.join(problems)}, expected multiples of {fp8.TILE}. "
            "Load them without quantization"
        )
    return config


def quantised(leaf: ArrayLike, spec: ParamSpec) -> Fp8Weights:
    """A leaf of finite floats, of the specification's shape, in FP8."""
    return _quantise(jnp.asarray(leaf).reshape(spec.matrix))


def packed(codes: ArrayLike, scales: ArrayLike, spec: ParamSpec) -> Fp8Weights:
    """A leaf of codes f8e4m3fn, of the specification's shape, and of the scales of its columns, in the same order."""
    scales = jnp.asarray(scales, jnp.float32).reshape(-1)
    return Fp8Weights(_pack(jnp.asarray(codes).reshape(spec.matrix)), scales)


def dequantised(weights: Fp8Weights, spec: ParamSpec, dtype: DTypeLike = jnp.float32) -> jax.Array:
    """The leaf of floats, of the specification's shape, that FP8 weights stand for."""
    values = fp8.unpack(weights.codes).astype(jnp.float32) * weights.scales
    return values.reshape(spec.shape).astype(dtype)


def values_at(weights: Fp8Weights, rows: np.ndarray, columns: np.ndarray) -> jax.Array:
    """f32[n], the weights at rows i[n] and columns i[n] of the matrix; only the tiles that they are in are unpacked."""
    tiles = weights.codes[columns // fp8.TILE, rows // fp8.TILE]
    side_by_side = fp8.unpack(tiles[:, None])
    at = np.arange(len(columns)) * fp8.TILE + columns % fp8.TILE
    return side_by_side[rows % fp8.TILE, at].astype(jnp.float32) * weights.scales[columns]


def in_fp8(params: Params, config: ModelConfig) -> tuple[Params, ModelConfig]:
    """Parameters with the weights of the dense products in FP8 instead of floats, and their configuration.

    Raises UnsupportedModelError, see `with_fp8_weights`.
    """
    config = with_fp8_weights(config)
    return map_specs(
        lambda spec, leaf: quantised(leaf, spec) if spec.fp8 else leaf, param_specs(config), params
    ), config


def in_floats(params: Params, config: ModelConfig) -> tuple[Params, ModelConfig]:
    """The parameters that those with FP8 weights stand for, in the dtype of the others, and their configuration."""
    dtype = params["embed"].dtype
    return map_specs(
        lambda spec, leaf: dequantised(leaf, spec, dtype) if spec.fp8 else leaf, param_specs(config), params
    ), config.replace(weights_fp8=False, activations_fp8=False)


# One tile's columns after another's: on the way they take several times their memory.


@jax.jit
def _quantise(matrix: jax.Array) -> Fp8Weights:
    codes, scales = lax.map(fp8.quantise, _by_tiles(matrix))
    return Fp8Weights(codes.reshape(-1, *codes.shape[2:]), scales.reshape(-1))


@jax.jit
def _pack(codes: jax.Array) -> jax.Array:
    words = lax.map(fp8.pack, _by_tiles(codes))
    return words.reshape(-1, *words.shape[2:])


def _by_tiles(matrix: jax.Array) -> jax.Array:
    """[depth, columns] -> [columns / 64, depth, 64]"""
    return matrix.reshape(len(matrix), -1, fp8.TILE).swapaxes(0, 1)
