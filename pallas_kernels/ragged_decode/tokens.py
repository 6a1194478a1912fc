"""Several new tokens of a request: token by token, as a model has them, and side by side for each KV head."""

import jax


def by_request(x: jax.Array, tokens: int) -> jax.Array:
    """[B * S, K, ...] to [B, K, S, ...]."""
    return x.reshape(-1, tokens, *x.shape[1:]).swapaxes(1, 2)


def by_token(x: jax.Array) -> jax.Array:
    """[B, K, S, ...] to [B * S, K, ...]."""
    batch, kv_heads, tokens, *rest = x.shape
    return x.swapaxes(1, 2).reshape(batch * tokens, kv_heads, *rest)
