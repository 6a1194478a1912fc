"""Inputs for the tests of the kernels of the Gaussian model of queries, and what NumPy makes of them in float64."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass
class GaussianCase:
    arrays: tuple[Any, ...]  # q, turns, count, keys, values, tail
    options: dict[str, Any]

    def expected(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(logits f64[N, W + T], squared norms f64[K, W + T], which candidates exist in each head's tail bool[K, W + T])."""
        q, turns, count, keys, values, tail = (np.asarray(x, np.float64) for x in self.arrays)
        (chunk, heads, head_dim), kv_heads, capacity = q.shape, keys.shape[1], tail.shape[3]
        factors = turns[:, : head_dim // 2] + 1j * turns[:, head_dim // 2 :]
        pairs = (q[..., : head_dim // 2] + 1j * q[..., head_dim // 2 :]) * factors[:, None]
        turned = np.concatenate([pairs.real, pairs.imag], axis=-1)
        scale, place = self.options["scale"], self.options["place"][int(self.options["layer"])]
        logits = np.zeros((heads, capacity + chunk))
        norms, there = np.zeros((kv_heads, capacity + chunk)), np.ones((kv_heads, capacity + chunk), bool)
        for k, (m, column) in enumerate(place):
            candidates = np.concatenate([tail[0, m, column], keys[:, k]])
            norms[k] = np.square(np.concatenate([tail[1, m, column], values[:, k]])).sum(axis=-1)
            there[k, : capacity - int(self.options["unlocked"][m])] = False
            group = heads // kv_heads
            for n in range(k * group, (k + 1) * group):
                mean = turned[:, n].sum(axis=0) / count
                covariance = turned[:, n].T @ turned[:, n] / count - np.outer(mean, mean)
                bent = (candidates @ covariance * candidates).sum(axis=-1)
                logits[n] = scale * candidates @ mean + scale**2 / 2 * bent
        return logits, norms, there


def make_gaussian(
    *,
    chunk: int = 128,
    capacity: int = 64,
    kv_heads: int = 2,
    group: int = 2,
    head_dim: int = 64,
    count: int | None = None,
    unlocked: tuple[int, int, int] | None = None,
    dtype: Any = jnp.bfloat16,
    seed: int = 0,
) -> GaussianCase:
    """Queries around a mean that is no smaller than their spread; three layers in three head groups of two columns."""
    rng = np.random.default_rng(seed)
    count = chunk if count is None else count

    def draw(*shape: int, kind: Any = dtype) -> Any:
        return jnp.asarray(rng.normal(size=shape).astype(np.float32)).astype(kind)

    groups, columns, layers = 3, 2, 3
    at = np.stack(np.unravel_index(rng.permutation(groups * columns), (groups, columns)), axis=-1)
    place = np.stack([at[rng.permutation(len(at))[:kv_heads]] for _ in range(layers)]).astype(np.int32)
    mean = rng.normal(size=(kv_heads * group, head_dim))
    angle = rng.uniform(0, 2 * np.pi, (chunk, head_dim // 2))
    stretch = rng.uniform(0.2, 1, head_dim // 2) * (np.arange(chunk) < count)[:, None]
    turns = np.concatenate([np.cos(angle) * stretch, np.sin(angle) * stretch], axis=-1)
    q = np.asarray(draw(chunk, kv_heads * group, head_dim), np.float32) + mean
    arrays = (
        jnp.asarray(q.astype(np.float32)).astype(dtype), jnp.asarray(turns.astype(np.float16)), jnp.float32(count),
        draw(chunk, kv_heads, head_dim), draw(chunk, kv_heads, head_dim), draw(2, groups, columns, capacity, head_dim),
    )  # fmt: skip
    drawn = rng.integers(0, capacity + 1, groups) if unlocked is None else np.array(unlocked)
    options = dict(
        place=place, layer=jnp.int32(1), unlocked=jnp.asarray(drawn, jnp.int32), scale=head_dim**-0.5,
    )  # fmt: skip
    return GaussianCase(arrays, options)


def gaussian_error(got: tuple[Any, Any], case: GaussianCase) -> tuple[float, float]:
    """Largest errors over the candidates that exist: of the logits, and of the norms relative to the largest."""
    logits, norms, there = case.expected()
    group = len(logits) // len(norms)
    error = np.abs(np.asarray(got[0], np.float64) - logits)
    norm_error = np.abs(np.asarray(got[1], np.float64) - norms) / norms.max()
    return float(error[np.repeat(there, group, axis=0)].max()), float(norm_error[there].max())
