"""The Gaussian model of queries in plain XLA: the definitions that the kernels are held to."""

import jax
import jax.numpy as jnp
import numpy as np


def gaussian_logits_reference(
    q: jax.Array,
    turns: jax.Array,
    count: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    tail: jax.Array,
    *,
    place: np.ndarray,
    layer: jax.Array,
    unlocked: jax.Array,
    starts: jax.Array | np.ndarray,
    sizes: jax.Array | np.ndarray,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.gaussian.gaussian_logits`."""
    del unlocked

    def of_chunk(turns, count, tail, start, size):
        at = jnp.arange(turns.shape[0])
        own = jnp.where(at < size, start + at, len(q))
        q_own, k_own, v_own = (x.at[own].get(mode="fill", fill_value=0) for x in (q, keys, values))
        linear, quadratic = query_gaussian_reference(q_own, turns, count, scale=scale)
        return candidate_logits_reference(linear, quadratic, k_own, v_own, tail, place=place, layer=layer)

    return jax.vmap(of_chunk)(turns, count, tail, jnp.asarray(starts), jnp.asarray(sizes))


def query_gaussian_reference(
    q: jax.Array, turns: jax.Array, count: jax.Array, *, scale: float
) -> tuple[jax.Array, jax.Array]:
    """The coefficients of a candidate's logit: (scale * mean, f32[N, D]; scale^2 / 2 * covariance, [N, D, D] like q).

    float32 arithmetic, but the turned queries and the covariance are rounded to the dtype of q.
    """
    (first, second), (cos, sin) = (jnp.split(x.astype(jnp.float32), 2, axis=-1) for x in (q, turns[:, None]))
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    turned = turned.astype(q.dtype).astype(jnp.float32)
    mean = turned.sum(axis=0) / count
    square = jnp.einsum("tnd,tne->nde", turned, turned, precision="highest") / count
    covariance = square - mean[:, :, None] * mean[:, None, :]
    return scale * mean, (scale**2 / 2 * covariance).astype(q.dtype)


def candidate_logits_reference(
    linear: jax.Array,
    quadratic: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    tail: jax.Array,
    *,
    place: np.ndarray,
    layer: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """(linear . k + k . quadratic k, f32[N, W + T]; squared norms of the values, f32[K, W + T]); float32 arithmetic."""
    group, column = jnp.asarray(place)[layer].T
    k, v = (
        jnp.concatenate([t, x.swapaxes(0, 1)], axis=1).astype(jnp.float32)  # [K, C, D]
        for t, x in zip(tail[:, group, column], (keys, values), strict=True)
    )

    def by_head(x: jax.Array) -> jax.Array:  # [N, ...] -> [K, G, ...]
        return x.astype(jnp.float32).reshape(k.shape[0], -1, *x.shape[1:])

    turned = jnp.einsum("kce,kgde->kgcd", k, by_head(quadratic), precision="highest")
    z = ((turned + by_head(linear)[:, :, None]) * k[:, None]).sum(axis=-1)  # [K, G, C]
    return z.reshape(-1, z.shape[-1]), jnp.square(v).sum(axis=-1)
