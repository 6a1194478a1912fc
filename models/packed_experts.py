"""Experts that stay in MXFP4: a fourth of bfloat16's memory, read by a kernel as they are."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from models.config import ModelConfig
from models.mxfp4 import Mxfp4
from pallas_kernels import expert_products
from pallas_kernels.expert_products import mxfp4

_log = logging.getLogger("tangram")


def kept_packed(config: ModelConfig, dtype: DTypeLike, devices: int = 1) -> ModelConfig:
    """The configuration with the experts in MXFP4 where a kernel takes them so, else unchanged.

    `devices`: to which they are dealt, equally many to each.
    """
    reason = _obstacle(dtype)
    if config.num_experts % devices:
        reason = NotImplementedError(f"{config.num_experts} experts are not dealt to {devices} devices")
    try:
        mxfp4.packed_shape(1, 2, config.expert_size, config.hidden_size)
    except NotImplementedError as error:
        reason = reason or error
    if reason is None:
        return config.replace(experts_mxfp4=True)
    if jax.default_backend() == "gpu":
        _log.warning("The experts become %s: %s", larger_than_mxfp4(config, dtype), reason)
    return config


def larger_than_mxfp4(config: ModelConfig, dtype: DTypeLike) -> str:
    """What experts are that do not stay in MXFP4, for messages."""
    return (
        "FP8, of twice their size"
        if config.weights_fp8
        else f"{jnp.dtype(dtype).name}, of four times their size"
    )


def can_stay_packed(dtype: DTypeLike) -> bool:
    """Whether the default device has a kernel for experts in MXFP4, beside parameters of this dtype."""
    return _obstacle(dtype) is None


def _obstacle(dtype: DTypeLike) -> NotImplementedError | None:
    try:
        expert_products.check_supported(jnp.dtype(dtype).name, "int32", ())
    except NotImplementedError as reason:
        return reason
    return None


def pack_leaf(pieces: Sequence[Mxfp4], shape: tuple[int, ...]) -> jax.Array:
    """The weights of all experts, i32[X, parts, columns / 64, depth / 64, 17, 32], as `mxfp4.pack` has them.

    `pieces` have the columns of the weights as their rows, each a part's, or one has those of two parts in turn (GPT-OSS's
    gate and up).

    Raises NotImplementedError for a scale that the kernel does not take.
    """
    for _, scales in pieces:
        mxfp4.check_scales(scales)
    in_turn = shape[1] // len(pieces)
    parts = [_pack(np.asarray(blocks), np.asarray(scales), in_turn) for blocks, scales in pieces]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)


@partial(jax.jit, static_argnums=2)
def _pack(blocks: jax.Array, scales: jax.Array, in_turn: int) -> jax.Array:
    def one(expert: tuple[jax.Array, jax.Array]) -> jax.Array:
        split = (x.reshape(-1, in_turn, *x.shape[1:]).swapaxes(0, 1) for x in expert)
        return mxfp4.pack(*split)

    return lax.map(one, (blocks, scales))  # one after another: unpacked values take eight times the memory
