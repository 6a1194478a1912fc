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
        """(logits f64[S, N, W + R], squared norms f64[S, K, W + R], which candidates exist bool[S, K, W + R])."""
        q, turns, count, keys, values, tail = (np.asarray(x, np.float64) for x in self.arrays)
        starts, sizes = (np.asarray(self.options[name]) for name in ("starts", "sizes"))
        unlocked, (most, head_dim) = np.asarray(self.options["unlocked"]), turns.shape[1:]
        heads, kv_heads, capacity = q.shape[1], keys.shape[1], tail.shape[4]
        scale, place = self.options["scale"], self.options["place"][int(self.options["layer"])]
        logits = np.zeros((len(sizes), heads, capacity + most))
        norms = np.zeros((len(sizes), kv_heads, capacity + most))
        there = np.zeros(norms.shape, bool)
        for s, (start, size) in enumerate(zip(starts, sizes, strict=True)):
            factors = turns[s, :size, : head_dim // 2] + 1j * turns[s, :size, head_dim // 2 :]
            own, end = slice(start, start + size), capacity + size
            pairs = (q[own, :, : head_dim // 2] + 1j * q[own, :, head_dim // 2 :]) * factors[:, None]
            turned = np.concatenate([pairs.real, pairs.imag], axis=-1)
            for k, (m, column) in enumerate(place):
                candidates = np.concatenate([tail[s, 0, m, column], keys[own, k]])
                norms[s, k, :end] = np.square(np.concatenate([tail[s, 1, m, column], values[own, k]])).sum(-1)
                there[s, k, capacity - int(unlocked[s, m]) : end] = True
                group = heads // kv_heads
                for n in range(k * group, (k + 1) * group):
                    mean = turned[:, n].sum(axis=0) / count[s]
                    covariance = turned[:, n].T @ turned[:, n] / count[s] - np.outer(mean, mean)
                    bent = (candidates @ covariance * candidates).sum(axis=-1)
                    logits[s, n, :end] = scale * candidates @ mean + scale**2 / 2 * bent
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
    chunks: tuple[tuple[int, int], ...] | None = None,
    dtype: Any = jnp.bfloat16,
    seed: int = 0,
) -> GaussianCase:
    """Queries around a mean that is no smaller than their spread; three layers in three head groups of two columns.

    `chunks`: where each begins among `chunk` rows, and how many it has; by default there is one, whose first `count` are
    not left out.
    """
    rng = np.random.default_rng(seed)
    starts, sizes = np.array(chunks or [(0, chunk)], np.int32).T
    counts = sizes if chunks else np.array([chunk if count is None else count])

    def draw(*shape: int, kind: Any = dtype) -> Any:
        return jnp.asarray(rng.normal(size=shape).astype(np.float32).astype(kind))

    groups, columns, layers = 3, 2, 3
    at = np.stack(np.unravel_index(rng.permutation(groups * columns), (groups, columns)), axis=-1)
    place = np.stack([at[rng.permutation(len(at))[:kv_heads]] for _ in range(layers)]).astype(np.int32)
    mean = rng.normal(size=(kv_heads * group, head_dim))
    angle = rng.uniform(0, 2 * np.pi, (len(sizes), chunk, head_dim // 2))
    counted = (np.arange(chunk) < counts[:, None])[..., None]
    stretch = rng.uniform(0.2, 1, head_dim // 2) * counted
    turns = np.concatenate([np.cos(angle) * stretch, np.sin(angle) * stretch], axis=-1)
    q = np.asarray(draw(chunk, kv_heads * group, head_dim), np.float32) + mean
    arrays = (
        jnp.asarray(q.astype(np.float32).astype(dtype)),
        jnp.asarray(turns.astype(np.float16)),
        jnp.asarray(np.maximum(counts, 1), jnp.float32),
        *(draw(chunk, kv_heads, head_dim) for _ in range(2)),
        draw(len(sizes), 2, groups, columns, capacity, head_dim),
    )
    shape = len(sizes), groups
    drawn = rng.integers(0, capacity + 1, shape) if unlocked is None else np.broadcast_to(unlocked, shape)
    options = dict(
        place=place, layer=jnp.int32(1), unlocked=jnp.asarray(drawn, jnp.int32),
        starts=jnp.asarray(starts), sizes=jnp.asarray(sizes), scale=head_dim**-0.5,
    )  # fmt: skip
    return GaussianCase(arrays, options)


def gaussian_error(got: tuple[Any, Any], case: GaussianCase) -> tuple[float, float]:
    """Largest errors over the candidates that exist: of the logits, and of the norms relative to the largest."""
    logits, norms, there = case.expected()
    group = logits.shape[1] // norms.shape[1]
    error = np.abs(np.asarray(got[0], np.float64) - logits)
    norm_error = np.abs(np.asarray(got[1], np.float64) - norms) / norms.max()
    return float(error[np.repeat(there, group, axis=1)].max()), float(norm_error[there].max())
