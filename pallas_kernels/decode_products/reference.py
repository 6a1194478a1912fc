"""The products between two attentions in plain operations: what the kernel computes, for tests and other platforms."""

import jax
import jax.numpy as jnp

f32 = jnp.float32


def start_stream(x: jax.Array, norm: jax.Array) -> tuple[jax.Array, jax.Array]:
    """x [T, E], norm [E] -> (x * norm [T, E], sums of squares f32[E / 64, T] by 64 columns)."""
    tokens, width = x.shape
    exact = x.astype(f32)
    squares = jnp.square(exact).reshape(tokens, width // 64, 64).sum(-1).T
    return (exact * norm.astype(f32)).astype(x.dtype), squares


def _product(x: jax.Array, w: jax.Array) -> jax.Array:
    flat = jnp.matmul(x.astype(f32), w.reshape(len(w), -1).astype(f32), precision="highest")
    return flat.reshape(len(x), *w.shape[1:])


def _normed(x: jax.Array, norm: jax.Array, eps: float) -> jax.Array:
    exact = x.astype(f32)
    return exact * jax.lax.rsqrt(jnp.mean(jnp.square(exact), -1, keepdims=True) + eps) * norm.astype(f32)


def project_qkv_reference(
    x: jax.Array, norm: jax.Array, w_qkv: jax.Array, cos: jax.Array, sin: jax.Array, *, eps: float
) -> list[jax.Array]:
    """See `project_qkv`."""
    tokens, _, members, head_dim = len(x), *w_qkv.shape[1:]
    y = _product(_normed(x, norm, eps), w_qkv)
    first, second = jnp.split(y, 2, axis=-1)
    cos, sin = cos[:, None, None], sin[:, None, None]
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    q = turned[:, :, : members - 2].reshape(tokens, -1, head_dim)
    return [a.astype(x.dtype) for a in (q, turned[:, :, members - 2], y[:, :, members - 1])]


def layer_products_reference(y, x, w_out, mlp_norm, w_gate_up, w_down, next_norm, w_qkv, cos, sin, *, eps):  # type: ignore[no-untyped-def]
    """See `layer_products`: [x, q, k, v]."""
    x = (x.astype(f32) + _product(y, w_out)).astype(x.dtype)
    opened = _product(_normed(x, mlp_norm, eps), w_gate_up)
    act = (jax.nn.silu(opened[:, 0]) * opened[:, 1]).astype(x.dtype)
    x = (x.astype(f32) + _product(act, w_down)).astype(x.dtype)
    return [x] if w_qkv is None else [x, *project_qkv_reference(x, next_norm, w_qkv, cos, sin, eps=eps)]
