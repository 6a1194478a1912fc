"""The matrix products between two attentions of a decode step, as one kernel that streams the weights past a few tokens.

Three hundredths faster than XLA's, see benchmarks/decode_products.py; the engine does not use it yet.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.decode_products.reference import layer_products_reference, project_qkv_reference
from pallas_kernels.decode_products.tuning import BLOCK, DEFAULT, Tuning
from pallas_kernels.support import check_device

__all__ = [
    "DEFAULT",
    "Heads",
    "Tuning",
    "check_supported",
    "layer_products",
    "layer_products_reference",
    "project_qkv",
    "project_qkv_reference",
]

MAX_TOKENS = 64
HEAD_DIM = 128


class Heads(NamedTuple):
    """Queries, keys and values of a layer after RoPE."""

    q: jax.Array  # [T, K * G, D]
    k: jax.Array  # [T, K, D]
    v: jax.Array  # [T, K, D]


def project_qkv(
    x: jax.Array,
    norm: jax.Array,
    w_qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    *,
    eps: float,
    tuning: Tuning = DEFAULT,
) -> Heads:
    """RMS norm, projection and RoPE: what comes before a model's first attention.

    Args:
      x: [T, E], T a multiple of 8 up to `MAX_TOKENS`; bfloat16 or float16, as all weights.
      norm: [E]. eps: added to the mean square.
      w_qkv: [E, K, G + 2, D]: of every KV head the weights of G query heads, the key, the value.
      cos, sin: f32[T, D / 2] of the rotation of the pairs (i, i + D / 2).
      tuning: the chip's record.

    Raises:
      NotImplementedError: see `check_supported`; the `_reference` functions take the same arguments.
    """
    from pallas_kernels.decode_products import mosaic_gpu

    return Heads(*mosaic_gpu.project_qkv(x, norm, w_qkv, cos, sin, eps=eps, tuning=tuning))


def layer_products(
    y: jax.Array, x: jax.Array, w_out: jax.Array, mlp_norm: jax.Array, w_gate_up: jax.Array, w_down: jax.Array,
    next_norm: jax.Array, w_qkv: jax.Array | None, cos: jax.Array, sin: jax.Array, *, eps: float, tuning: Tuning = DEFAULT,
) -> tuple[jax.Array, Heads | None]:  # fmt: skip
    """Everything from one layer's attention to the next one's: output projection, MLP, norms, projection of heads, RoPE.

    Args:
      y: [T, K * G * D], attention's result.
      x: [T, E], the residual stream before it.
      w_out: [K * G * D, E]. w_gate_up: [E, 2, F], gate and up. w_down: [F, E]. mlp_norm, next_norm: [E].
      w_qkv: of the next layer; None after the last.

    Returns:
      x [T, E] after the layer, and the next layer's heads.
    """
    from pallas_kernels.decode_products import mosaic_gpu

    x, *heads = mosaic_gpu.layer_products(
        y, x, w_out, mlp_norm, w_gate_up, w_down, next_norm, w_qkv, cos, sin, eps=eps, tuning=tuning
    )
    return x, Heads(*heads) if heads else None


def check_supported(
    *,
    tokens: int,
    hidden_size: int,
    intermediate_size: int,
    head_dim: int,
    dtype: jax.typing.DTypeLike,
    device: jax.Device | None = None,
) -> None:
    """Raises NotImplementedError, naming the feature, where the kernel does not run. `tokens`: as padded."""
    if jnp.dtype(dtype) not in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)):
        raise NotImplementedError(f"weights of {jnp.dtype(dtype)}: the products take bfloat16 and float16")
    if tokens > MAX_TOKENS or tokens % 8:
        raise NotImplementedError(f"{tokens} tokens: the products take multiples of 8 up to {MAX_TOKENS}")
    if head_dim != HEAD_DIM:
        raise NotImplementedError(f"head dimension {head_dim}: the products take {HEAD_DIM}")
    for name, size, multiple in (
        ("hidden size", hidden_size, BLOCK * BLOCK),
        ("intermediate size", intermediate_size, 2 * BLOCK),
    ):
        if size % multiple:
            raise NotImplementedError(f"{name} {size}: the products take multiples of {multiple}")
    device = jax.devices()[0] if device is None else device
    check_device(device)
    if device.core_count < 132:
        raise NotImplementedError(f"{device.core_count} multiprocessors: the products take 132, all at once")
