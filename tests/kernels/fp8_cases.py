"""Tokens that are hard to bring into FP8, and norms of them."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import fp8_products as fp8
from pallas_kernels.fp8_products import Fp8Tokens
from pallas_kernels.norms import rms_norm


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


def check_normed_tokens(
    tokens: int, depth: int, offset: float, added: bool, interpret=None, eps: float = 1e-5
) -> None:
    """The kernel against sum, norm and codes one after another, each rounded: of odd tokens, with odd numbers added.

    The sum is the same, bit by bit. The mean of the squares may differ in its last bits, as it is added up in another order:
    then a number of the norm here and there is the next bfloat16, so that its code is the next one, or, if it is the largest
    of its token, the scale is 2 ** -8 off and with it the codes of that token.
    """
    rng = np.random.default_rng(depth)
    x = jnp.asarray(odd_tokens(tokens, depth), jnp.bfloat16)
    h = jnp.asarray(rng.standard_normal((tokens, depth)), jnp.bfloat16).at[0].set(0) if added else None
    weight = jnp.asarray(rng.standard_normal(depth), jnp.bfloat16)

    run = jax.jit(fp8.normed_tokens, static_argnames=("eps", "offset", "interpret"))
    total, got = run(x, weight, added=h, eps=eps, offset=offset, interpret=interpret)
    assert total.dtype == x.dtype and got.count == tokens
    assert got.codes.shape == (-(-tokens // 8) * 8, depth) and got.scales.shape == (-(-tokens // 256) * 256,)
    for rows in (codes_in_bytes(got), np.asarray(got.scales)):
        np.testing.assert_array_equal(rows[tokens:], np.broadcast_to(rows[tokens - 1], rows[tokens:].shape))

    # Operation by operation: in one program XLA may leave out the rounding between them.
    wanted_total = x + h if added else x
    want = fp8.quantise_tokens_reference(rms_norm(wanted_total, weight, eps, offset))
    finite = np.delete(np.arange(tokens), [4, 5])
    np.testing.assert_array_equal(*(np.asarray(x, np.float32)[finite] for x in (total, wanted_total)))
    scales, codes = np.asarray(got.scales)[:tokens], codes_in_bytes(got)[:tokens]
    assert not np.isfinite(scales[[4, 5]]).any() and (codes[[4, 5]] & 0x7F == 0x7F).all()

    np.testing.assert_allclose(scales[finite], np.asarray(want.scales)[finite], rtol=2.0**-7)
    same = finite[scales[finite] == np.asarray(want.scales)[finite]]
    assert len(same) > 0.9 * len(finite)
    off = np.abs(codes[same].astype(int) - codes_in_bytes(want)[same].astype(int))
    assert off.max() <= 1 and (off > 0).mean() < 1e-2
