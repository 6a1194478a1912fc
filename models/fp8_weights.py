"""Weights in FP8, a scale for each output column: half of bfloat16's memory."""

from __future__ import annotations

from functools import partial

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
    """The configuration with the weights of all products in FP8; `dynamic`: and many tokens.

    Experts that are in MXFP4 stay so.

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
    if spec.matrices:
        return _quantise_each(_matrices(jnp.asarray(leaf), spec))
    return _quantise(jnp.asarray(leaf).reshape(spec.matrix))


def packed(codes: ArrayLike, scales: ArrayLike, spec: ParamSpec) -> Fp8Weights:
    """A leaf of codes f8e4m3fn, of the specification's shape, and of the scales of its columns, in the same order."""
    scales = jnp.asarray(scales, jnp.float32).reshape(*spec.matrices, -1)
    if spec.matrices:
        return Fp8Weights(_pack_each(_matrices(jnp.asarray(codes), spec)), scales)
    return Fp8Weights(_pack(jnp.asarray(codes).reshape(spec.matrix)), scales)


def dequantised(weights: Fp8Weights, spec: ParamSpec, dtype: DTypeLike = jnp.float32) -> jax.Array:
    """The leaf of floats, of the specification's shape, that FP8 weights stand for."""
    if spec.matrices:
        return _dequantise_each(weights, dtype).swapaxes(1, 2).reshape(spec.shape)
    return _dequantise(weights, dtype).reshape(spec.shape)


def values_at(weights: Fp8Weights, rows: np.ndarray, columns: np.ndarray) -> jax.Array:
    """f32[n], the weights at rows i[n] and columns i[n] of the matrix; only the tiles that they are in are unpacked."""
    tiles = weights.codes[columns // fp8.TILE, rows // fp8.TILE]
    side_by_side = fp8.unpack(tiles[:, None])
    at = np.arange(len(columns)) * fp8.TILE + columns % fp8.TILE
    return side_by_side[rows % fp8.TILE, at].astype(jnp.float32) * weights.scales[columns]


def in_fp8(params: Params, config: ModelConfig) -> tuple[Params, ModelConfig]:
    """Parameters with the weights of all products in FP8 instead of floats, and their configuration.

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


def _dequantise(weights: Fp8Weights, dtype: DTypeLike) -> jax.Array:
    return (fp8.unpack(weights.codes).astype(jnp.float32) * weights.scales).astype(dtype)


def _matrices(leaf: jax.Array, spec: ParamSpec) -> jax.Array:
    """[experts, depth, (parts,) columns] -> [experts, parts, depth, columns]"""
    experts, parts = spec.matrices
    return leaf.reshape(experts, -1, parts, leaf.shape[-1]).swapaxes(1, 2)


# One tile's columns after another's, or one expert after another: on the way they take several times their memory.


@jax.jit
def _quantise(matrix: jax.Array) -> Fp8Weights:
    codes, scales = lax.map(fp8.quantise, _by_tiles(matrix))
    return Fp8Weights(codes.reshape(-1, *codes.shape[2:]), scales.reshape(-1))


@jax.jit
def _quantise_each(matrices: jax.Array) -> Fp8Weights:
    return lax.map(jax.vmap(fp8.quantise), matrices)


@jax.jit
def _pack(codes: jax.Array) -> jax.Array:
    words = lax.map(fp8.pack, _by_tiles(codes))
    return words.reshape(-1, *words.shape[2:])


@jax.jit
def _pack_each(codes: jax.Array) -> jax.Array:
    return lax.map(jax.vmap(fp8.pack), codes)


@partial(jax.jit, static_argnums=1)
def _dequantise_each(weights: Fp8Weights, dtype: DTypeLike) -> jax.Array:
    return lax.map(jax.vmap(lambda each: _dequantise(each, dtype)), weights)


def _by_tiles(matrix: jax.Array) -> jax.Array:
    """[depth, columns] -> [columns / 64, depth, 64]"""
    return matrix.reshape(len(matrix), -1, fp8.TILE).swapaxes(0, 1)
