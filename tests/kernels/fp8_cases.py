"""Tokens that are hard to bring into FP8."""

import numpy as np

from pallas_kernels.fp8_products import Fp8Tokens


def odd_tokens(count: int, depth: int) -> np.ndarray:
    """f32[count, depth]: of zeros, large, tiny, far apart, with a NaN, with an infinite number, then plain; 6 at least."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((count, depth)).astype(np.float32)
    x[0] = 0
    x[1] *= 1e20
    x[2] *= 1e-20
    x[3] *= np.exp(4 * rng.standard_normal(depth))
    x[4, 5] = np.nan
    x[5, 7] = np.inf
    return x


def codes_in_bytes(x: Fp8Tokens) -> np.ndarray:
    return np.asarray(x.codes).view(np.uint8)
