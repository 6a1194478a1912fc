"""The kernel for FP8 weights on a GPU, against the reference."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import fp8_products as fp8
from pallas_kernels.gates import in_halves
from tests.kernels.expert_cases import relative_error
from tests.kernels.fp8_cases import check_normed_tokens, codes_in_bytes, odd_tokens

pytestmark = pytest.mark.gpu

ROUNDING = 2.0**-8  # to bfloat16, of the largest result


@pytest.mark.parametrize(
    "tokens", [1, 2, 8, 9, 16, 24, 32, 33, 64, 72, 100, 128, 160, 300, 512, 640, 1056, 2048, 2080, 3000]
)
@pytest.mark.parametrize(("depth", "columns"), [(576, 960), (4096, 4096), (1536, 64), (2560, 1024)])
def test_products(tokens, depth, columns):
    rng = np.random.default_rng(tokens)
    weights = fp8.quantise(jnp.asarray(rng.standard_normal((depth, columns), np.float32) * depth**-0.5))
    x = jnp.asarray(rng.standard_normal((tokens, depth), np.float32), jnp.bfloat16)
    expected = fp8.fp8_products_reference(x.astype(jnp.float32), weights)
    out = jax.jit(fp8.fp8_products)(x, weights)
    assert out.shape == (tokens, columns) and out.dtype == jnp.bfloat16
    assert relative_error(out, expected) < ROUNDING
    np.testing.assert_array_equal(out, jax.jit(fp8.fp8_products)(x, weights))  # the same every time


@pytest.mark.parametrize("size", [1e-6, 1e6])
def test_products_of_small_and_large_tokens(size):
    """Sums of products are 2 ** -120 of what they become, and of small tokens without an exponent."""
    rng = np.random.default_rng(0)
    weights = fp8.quantise(jnp.asarray(rng.standard_normal((4096, 1024), np.float32)))
    x = jnp.asarray(rng.standard_normal((40, 4096), np.float32) * size, jnp.bfloat16)
    expected = fp8.fp8_products_reference(x.astype(jnp.float32), weights)
    assert relative_error(jax.jit(fp8.fp8_products)(x, weights), expected) < ROUNDING


@pytest.mark.parametrize(
    "tokens", [1, 65, 100, 128, 200, 256, 300, 512, 541, 640, 1056, 2048, 2080, 2173, 3000]
)
@pytest.mark.parametrize(("depth", "columns"), [(576, 960), (4096, 4096), (1536, 64), (2560, 1024)])
def test_products_of_tokens_in_fp8(tokens, depth, columns):
    """576 is an odd number of tiles: one at a time."""
    rng = np.random.default_rng(tokens)
    weights = fp8.quantise(jnp.asarray(rng.standard_normal((depth, columns), np.float32) * depth**-0.5))
    x = jnp.asarray(rng.standard_normal((tokens, depth), np.float32), jnp.bfloat16)
    x = jax.jit(fp8.quantise_tokens)(x)
    expected = fp8.fp8_products_reference(x, weights)
    out = jax.jit(fp8.fp8_products)(x, weights)
    assert out.shape == (tokens, columns) and out.dtype == jnp.bfloat16
    assert relative_error(out, expected) < 2 * ROUNDING  # the tensor cores' sums, too
    np.testing.assert_array_equal(out, jax.jit(fp8.fp8_products)(x, weights))  # the same every time


@pytest.mark.parametrize(("tokens", "depth"), [(10, 144), (6, 64), (333, 4096), (64, 14336), (9, 2560)])
def test_tokens_in_fp8(tokens, depth):
    """The same codes, but for some that a last bit of the scale's inverse moves by one."""
    x = jnp.asarray(odd_tokens(tokens, depth), jnp.bfloat16)
    want = jax.jit(fp8.quantise_tokens_reference)(x)
    got = jax.jit(fp8.quantise_tokens)(x)
    assert got.codes.shape == (-(-tokens // 8) * 8, depth) and got.scales.shape == (-(-tokens // 256) * 256,)
    for rows in (codes_in_bytes(got), got.scales):
        np.testing.assert_array_equal(rows[tokens:], np.broadcast_to(rows[tokens - 1], rows[tokens:].shape))
    got = got.cut()
    finite = np.delete(np.arange(tokens), [4, 5])
    np.testing.assert_array_equal(got.scales[finite], want.scales[finite])
    codes = [codes_in_bytes(x) for x in (got, want)]
    off = np.abs(codes[0][finite].astype(int) - codes[1][finite].astype(int))
    assert off.max() <= 1 and (off > 0).mean() < 1e-3
    for odd in (4, 5):
        assert (codes[0][odd] & 0x7F == 0x7F).any() or not np.isfinite(got.scales[odd])


@pytest.mark.parametrize("added", [False, True], ids=["alone", "added"])
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize(
    ("tokens", "depth"),
    [
        (6, 16),
        (10, 144),
        (333, 2048),
        (260, 2880),
        (64, 3840),
        (1001, 4096),
        (4096, 4096),
        (259, 5120),
        (40, 8192),
        (9, 16384),
    ],
)
def test_tokens_of_a_norm_in_fp8(tokens, depth, offset, added):
    check_normed_tokens(tokens, depth, offset, added)


@pytest.mark.parametrize("narrow", [False, True], ids=["bfloat16", "FP8"])
@pytest.mark.parametrize(
    "options",
    [
        {"rows": 64}, {"rows": 128, "warpgroups": 2}, {"rows": 256, "warpgroups": 2, "deep": 2},
        {"rows": 32, "splits": 4}, {"rows": 64, "splits": 4}, {"rows": 8, "splits": 4},
        {"rows": 104, "warpgroups": 2, "splits": 2}, {"rows": 72}, {"rows": 232, "warpgroups": 2, "deep": 2},
        {"rows": 264, "warpgroups": 2, "deep": 2}, {"rows": 320, "warpgroups": 2},
    ],
    ids=["64", "128", "256", "split", "many, split", "few, split", "split oddly", "72", "232", "264", "320"],
)  # fmt: skip
@pytest.mark.parametrize("tokens", [8, 24, 104, 296, 300, 2080])
def test_part_of_a_block(tokens, options, narrow):
    """The same results as in whole blocks, bit by bit."""
    rng = np.random.default_rng(0)
    weights = fp8.quantise(jnp.asarray(rng.standard_normal((1024, 768), np.float32)))
    x = jnp.asarray(rng.standard_normal((-(-tokens // 256) * 256, 1024), np.float32), jnp.bfloat16)
    tuning = fp8.Tuning(**{"deep": 1, **options})

    @jax.jit
    def run(x):
        return fp8.fp8_products(fp8.quantise_tokens(x) if narrow else x, weights, tuning=tuning)

    np.testing.assert_array_equal(run(x[:tokens]), run(x)[:tokens])


@pytest.mark.parametrize("narrow", [False, True], ids=["bfloat16", "FP8"])
@pytest.mark.parametrize("rows", [128, 240, 256, 272])
@pytest.mark.parametrize("depth", [128, 1152, 4096])
@pytest.mark.parametrize("way", ["stores", "deep"])
def test_ways_of_a_block(rows, depth, way, narrow):
    """The same results, bit by bit, however many steps and units a CTA has."""
    rng = np.random.default_rng(0)
    weights = fp8.quantise(jnp.asarray(rng.standard_normal((depth, 6144), np.float32)))
    x = jnp.asarray(rng.standard_normal((1100, depth), np.float32), jnp.bfloat16)
    x = fp8.quantise_tokens(x) if narrow else x
    plain = fp8.Tuning(rows=rows, warpgroups=2, deep=2 if narrow else 1)
    other = {"stores": 2} if way == "stores" else {"deep": 3 - plain.deep}
    run = jax.jit(fp8.fp8_products, static_argnames="tuning")
    want = run(x, weights, tuning=plain)
    for _ in range(3):
        np.testing.assert_array_equal(run(x, weights, tuning=dataclasses.replace(plain, **other)), want)


@pytest.mark.parametrize("gate", ["silu", "gelu"])
@pytest.mark.parametrize("narrow", [False, True], ids=["bfloat16", "FP8"])
@pytest.mark.parametrize("tokens", [80, 256, 300, 2048, 2080])
@pytest.mark.parametrize(("depth", "inner"), [(128, 576), (1024, 14336)])
def test_gated_products(tokens, depth, inner, narrow, gate):
    """What the plain product gives, with the gates after it."""
    rng = np.random.default_rng(0)
    weights = fp8.quantise(jnp.asarray(rng.standard_normal((depth, 2 * inner), np.float32) * 0.1))
    x = jnp.asarray(rng.standard_normal((tokens, depth), np.float32), jnp.bfloat16)
    x = fp8.quantise_tokens(x) if narrow else x
    run = jax.jit(fp8.fp8_products, static_argnames=("gate", "tuning"))
    plain = fp8.Tuning(rows=256, warpgroups=2, deep=2 if narrow else 1)
    wanted = in_halves(run(x, weights, tuning=plain), gate)
    for _ in range(3):
        out = run(x, weights, gate=gate)
        assert out.shape == (tokens, inner)
        assert relative_error(out, wanted.astype(jnp.float32)) < 2 * ROUNDING
        # A gate that is far below zero makes much of the last bit of its product, where parts of the depth are added up.
        np.testing.assert_allclose(
            *(x.astype(jnp.float32) for x in (out, wanted)), rtol=16 * ROUNDING, atol=1e-2
        )


@pytest.mark.parametrize("narrow", [False, True], ids=["bfloat16", "FP8"])
@pytest.mark.parametrize("tokens", [264, 300, 541, 1056, 1270, 2080, 2173])
@pytest.mark.parametrize("columns", [768, 6144, 28672])
def test_width_of_blocks(tokens, columns, narrow):
    """A token has the same results, bit by bit, in blocks of whatever width the device's record has."""
    rng = np.random.default_rng(0)
    weights = fp8.quantise(jnp.asarray(rng.standard_normal((1024, columns), np.float32)))
    x = jnp.asarray(rng.standard_normal((tokens, 1024), np.float32), jnp.bfloat16)
    x = fp8.quantise_tokens(x) if narrow else x
    plain = fp8.Tuning(rows=256, warpgroups=2, deep=2 if narrow else 1)
    run = jax.jit(fp8.fp8_products, static_argnames="tuning")
    np.testing.assert_array_equal(run(x, weights), run(x, weights, tuning=plain))


def test_every_code():
    """All numbers of e4m3 times one, the denormal ones included, are exact."""
    numbers = np.delete(np.arange(256, dtype=np.uint8), [0x7F, 0xFF])
    codes = np.resize(numbers, (64, 256)).view(jnp.float8_e4m3fn)
    weights = fp8.Fp8Weights(fp8.pack(jnp.asarray(codes)), jnp.ones(256))
    out = fp8.fp8_products(jnp.eye(64, dtype=jnp.bfloat16), weights)
    np.testing.assert_array_equal(np.asarray(out, np.float32), codes.astype(np.float32))
    out = fp8.fp8_products(fp8.quantise_tokens(jnp.eye(64, dtype=jnp.bfloat16)), weights)
    np.testing.assert_array_equal(np.asarray(out, np.float32), codes.astype(np.float32))


@pytest.mark.parametrize(
    "tuning",
    [
        fp8.Tuning(rows=8, per_sm=2, splits=4),
        fp8.Tuning(rows=16, warpgroups=3, splits=2),
        fp8.Tuning(rows=64, warpgroups=4, deep=1),
        fp8.Tuning(rows=128, warpgroups=2, deep=2, num_ctas=3),
        fp8.Tuning(rows=128, warpgroups=2, splits=2, deep=2),
        fp8.Tuning(rows=256, warpgroups=2, deep=1, num_ctas=5),
        fp8.Tuning(rows=128, warpgroups=4, deep=2),
    ],
    ids=[
        "splits",
        "three warpgroups",
        "four warpgroups",
        "few CTAs",
        "two parts",
        "large blocks",
        "four large ones",
    ],
)
@pytest.mark.parametrize("narrow", [False, True], ids=["bfloat16", "FP8"])
def test_tunings(tuning, narrow):
    rng = np.random.default_rng(0)
    weights = fp8.quantise(jnp.asarray(rng.standard_normal((1024, 768), np.float32)))
    x = jnp.asarray(rng.standard_normal((300, 1024), np.float32), jnp.bfloat16)
    given = fp8.quantise_tokens(x) if narrow else x
    expected = fp8.fp8_products_reference(given if narrow else x.astype(jnp.float32), weights)
    assert relative_error(fp8.fp8_products(given, weights, tuning=tuning), expected) < 2 * ROUNDING
