"""Products with FP8 weights on the CPU: packing, the reference, and the kernel under the interpreter."""

import itertools
from functools import partial
from unittest import mock

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

from pallas_kernels import fp8_products as fp8
from pallas_kernels.fp8_products.common import Config, Unit, pieces_of
from pallas_kernels.fp8_products.mosaic_gpu import fp8_products_mosaic_gpu
from pallas_kernels.fp8_products.tokens import in_depth, in_words
from pallas_kernels.fp8_products.tuning import NARROW, TUNING
from pallas_kernels.gates import in_halves
from tests.kernels.expert_cases import relative_error
from tests.kernels.fp8_cases import codes_in_bytes, odd_tokens
from tests.one_program import in_one

SLOW = partial(pytest.param, marks=pytest.mark.slow)
RNG = np.random.default_rng(0)


def test_all_codes_come_back():
    """Each of the 254 numbers and both zeros, at every place of a tile."""
    numbers = np.delete(np.arange(256, dtype=np.uint8), [0x7F, 0xFF])
    codes = RNG.permuted(np.resize(numbers, (64, 64 * 254)), axis=1).view(jnp.float8_e4m3fn)
    packed = fp8.pack(jnp.asarray(codes))
    assert packed.shape == fp8.packed_shape(64, 64 * 254) == (254, 1, 32, 32)
    np.testing.assert_array_equal(np.asarray(fp8.unpack(packed)).view(np.uint8), codes.view(np.uint8))


@settings(max_examples=20)
@given(st.integers(0, 2**32 - 1), st.floats(-30, 30))
def test_quantised_weights_are_near(seed, exponent):
    weights = np.random.default_rng(seed).standard_normal((128, 64)).astype(np.float32) * 2.0**exponent
    weights[:, 3] = 0
    found = fp8.quantise(jnp.asarray(weights))
    back = np.asarray(fp8.unpack(found.codes).astype(jnp.float32)) * np.asarray(found.scales)
    # Half of the last of four bits; below 2 ** -6 the numbers are as far apart as there.
    largest = np.abs(weights).max(axis=0)
    assert (np.abs(back - weights) <= np.abs(weights) / 15.9 + largest / 448 * 2.0**-9.9).all()
    np.testing.assert_array_equal(
        np.abs(back).max(axis=0), np.float32(448) * np.asarray(found.scales) * (largest > 0)
    )


def test_what_was_fp8_comes_back():
    """Weights of e4m3 with a scale for each column, whose largest number is in use, quantised again: the same codes."""
    codes = np.clip(RNG.standard_normal((64, 128)) * 100, -448, 448).astype(jnp.float8_e4m3fn)
    codes[5] = 448
    scales = RNG.uniform(1e-4, 1e-2, 128).astype(np.float32)
    found = fp8.quantise(jnp.asarray(codes.astype(np.float32) * scales))
    np.testing.assert_array_equal(np.asarray(fp8.unpack(found.codes)).view(np.uint8), codes.view(np.uint8))
    np.testing.assert_allclose(found.scales, scales, rtol=1e-6)


def test_random_weights_have_the_deviation():
    weights = fp8.random(RNG, 256, 128, 0.02)
    values = np.asarray(fp8.unpack(jnp.asarray(weights.codes)).astype(jnp.float32)) * weights.scales
    assert abs(values.std() / 0.02 - 1) < 0.02 and abs(values.mean()) < 1e-3


@pytest.mark.parametrize(
    ("tokens", "columns", "depth", "options"),
    [
        (5, 192, 128, {"rows": 8}),
        pytest.param(20, 64, 192, {"rows": 16, "deep": 1}, marks=pytest.mark.slow),
        pytest.param(16, 192, 256, {"rows": 16, "splits": 2}, marks=pytest.mark.slow),
        pytest.param(40, 256, 128, {"rows": 32, "warpgroups": 2}, marks=pytest.mark.slow),
        (9, 192, 384, {"rows": 8, "warpgroups": 3, "splits": 3, "per_sm": 2}),
        SLOW(24, 64, 128, {"rows": 64}),
        SLOW(24, 128, 256, {"rows": 16, "splits": 2}),
        pytest.param(130, 64, 128, {"rows": 72, "deep": 1}, marks=pytest.mark.slow),
        (364, 128, 128, {"rows": 264, "warpgroups": 2, "deep": 1}),
        (40, 128, 320, {"rows": 32, "warpgroups": 2, "deep": 1}),
        (40, 64, 384, {"rows": 40, "splits": 2, "deep": 3}),
        (24, 64, 64, {"rows": 24, "stores": 2}),
    ],
    ids=[
        "few tokens",
        "two blocks",
        "split",
        "warpgroups",
        "split, warpgroups",
        "part of a block",
        "split, part of a block",
        "odd width",
        "two parts, one beyond the tokens",
        "an odd number of steps",
        "an odd number of steps, split",
        "one step, stored in two goes",
    ],
)
def test_kernel_in_the_interpreter(tokens, columns, depth, options):
    x = RNG.standard_normal((tokens, depth)).astype(np.float32)
    weights = in_one(fp8.quantise, jnp.asarray(RNG.standard_normal((depth, columns)), jnp.float32))
    expected = in_one(fp8.fp8_products_reference, jnp.asarray(x), weights)
    tuning = fp8.Tuning(num_ctas=2, **options)
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    given = jnp.asarray(x, jnp.float16)
    out = fp8_products_mosaic_gpu(given, weights, tuning=tuning, dtype=given.dtype, interpret=interpret)
    assert out.shape == (tokens, columns) and out.dtype == jnp.float16
    assert relative_error(out, expected) < 2e-3
    assert not gpu_callbacks.get_races().races_found


@pytest.mark.parametrize(
    ("tokens", "columns", "depth", "options"),
    [
        (5, 128, 192, {"rows": 8, "deep": 1}),
        SLOW(40, 128, 256, {"rows": 32, "warpgroups": 2, "deep": 2}),
        SLOW(16, 64, 512, {"rows": 16, "splits": 2, "deep": 4}),
        pytest.param(78, 64, 128, {"rows": 40, "deep": 2}, marks=pytest.mark.slow),
        SLOW(524, 64, 256, {"rows": 264, "deep": 2}),
        (304, 128, 192, {"rows": 304, "warpgroups": 2, "deep": 1}),
        (64, 128, 512, {"rows": 64, "warpgroups": 2, "deep": 2}),
        (70, 64, 384, {"rows": 40, "deep": 2, "stores": 2}),
        (130, 64, 512, {"rows": 128, "deep": 4}),
        pytest.param(264, 64, 256, {"rows": 264, "deep": 2}, marks=pytest.mark.slow),
        (48, 64, 384, {"rows": 48, "splits": 2, "deep": 2}),
    ],
    ids=[
        "a tile at a time",
        "two",
        "split, two twice",
        "odd width",
        "two parts",
        "two equal parts, a tile at a time",
        "two warpgroups, two steps of two",
        "an odd number of steps, stored in two goes",
        "two products a step",
        "two parts, two steps",
        "split, an odd number of steps",
    ],
)
def test_kernel_for_tokens_in_fp8_in_the_interpreter(tokens, columns, depth, options):
    x = in_one(fp8.quantise_tokens_reference, jnp.asarray(RNG.standard_normal((tokens, depth)), jnp.float32))
    weights = in_one(fp8.quantise, jnp.asarray(RNG.standard_normal((depth, columns)), jnp.float32))
    expected = in_one(fp8.fp8_products_reference, x, weights)
    tuning = fp8.Tuning(num_ctas=2, **options)
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    out = fp8_products_mosaic_gpu(x, weights, tuning=tuning, dtype=jnp.float16, interpret=interpret)
    assert out.shape == (tokens, columns) and out.dtype == jnp.float16
    assert relative_error(out, expected) < 2e-3
    assert not gpu_callbacks.get_races().races_found


@pytest.mark.parametrize("gate", ["silu", SLOW("gelu")])
@pytest.mark.parametrize(
    ("tokens", "inner", "options", "narrow"),
    [
        SLOW(40, 192, {"rows": 32, "warpgroups": 2}, False),
        SLOW(40, 192, {"rows": 32, "warpgroups": 2}, True),
        (70, 128, {"rows": 40, "warpgroups": 2}, False),
        SLOW(70, 128, {"rows": 40, "warpgroups": 2}, True),
        SLOW(264, 64, {"rows": 264, "warpgroups": 2, "stores": 2}, False),
        (264, 64, {"rows": 264, "warpgroups": 2, "stores": 2}, True),
        SLOW(20, 64, {"rows": 16}, False),
        (20, 64, {"rows": 16}, True),
    ],
    ids=[
        f"{what}, {of}"
        for what in ("two blocks", "odd width", "two parts", "one warpgroup: by XLA")
        for of in ("bfloat16", "FP8")
    ],
)
def test_gated_products_in_the_interpreter(tokens, inner, options, narrow, gate):
    """What the plain product gives, with the gates after it."""
    x = jnp.asarray(RNG.standard_normal((tokens, 192)), jnp.bfloat16)
    weights = in_one(fp8.quantise, jnp.asarray(RNG.standard_normal((192, 2 * inner)) * 0.1, jnp.float32))
    given = in_one(fp8.quantise_tokens_reference, x) if narrow else x
    tuning = fp8.Tuning(num_ctas=2, deep=1, **options)
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    out = fp8.fp8_products(given, weights, gate=gate, tuning=tuning, interpret=interpret)
    assert out.shape == (tokens, inner) and out.dtype == jnp.bfloat16
    assert not gpu_callbacks.get_races().races_found
    plain = fp8.fp8_products(given, weights, tuning=tuning, interpret=interpret)
    wanted = in_halves(plain, gate)
    np.testing.assert_allclose(out.astype(jnp.float32), wanted.astype(jnp.float32), rtol=2.0**-7, atol=1e-5)
    reference = in_one(fp8.fp8_products_reference, given, weights, gate=gate)
    assert relative_error(out, reference) < 2.0**-7


def test_gates_need_two_warpgroups():
    with pytest.raises(ValueError, match="gated products of 6 tiles need two warpgroups and no splits"):
        fp8.Tuning(rows=16).for_gates(6)
    assert not fp8.Tuning(rows=16, warpgroups=2).gates(5)


@pytest.mark.parametrize("tokens", [10, 256])
def test_tokens_in_fp8_in_the_interpreter(tokens):
    """Rows beyond them are the last one again: finite, and as many as the products' kernel wants."""
    x = jnp.asarray(odd_tokens(tokens, 144), jnp.bfloat16)
    want = fp8.quantise_tokens_reference(x)
    got = fp8.quantise_tokens(x, interpret=plgpu.InterpretGPUParams(detect_races=True))
    assert got.codes.shape == (-(-tokens // 8) * 8, 144) and got.scales.shape == (256,)
    same = np.ones(tokens, bool)
    same[4] = tokens < 256  # XLA on a CPU may overlook a NaN
    for found, wanted in (got.scales, want.scales), (codes_in_bytes(got), codes_in_bytes(want)):
        np.testing.assert_array_equal(found[:tokens][same], wanted[same])
        np.testing.assert_array_equal(found[tokens:], np.broadcast_to(wanted[-1], found[tokens:].shape))
    assert not gpu_callbacks.get_races().races_found


@pytest.mark.parametrize(
    ("tokens", "options"),
    [(13, {"rows": 8}), SLOW(40, {"rows": 16}), (19, {"rows": 8, "splits": 2}), SLOW(523, {"rows": 264})],
    ids=["odd", "part of a block", "split", "two parts"],
)
def test_products_of_what_was_quantised_in_the_interpreter(tokens, options):
    """With no copy between the two kernels, whatever the number of tokens; NaN and infinity stay in their rows."""
    x = jnp.asarray(odd_tokens(tokens, 128), jnp.bfloat16)
    weights = in_one(fp8.quantise, jnp.asarray(RNG.standard_normal((128, 64)), jnp.float32))
    tuning = fp8.Tuning(num_ctas=2, **options)
    interpret = plgpu.InterpretGPUParams(detect_races=True)

    def run(x, weights):
        x = fp8.quantise_tokens(x, interpret=interpret)
        return fp8_products_mosaic_gpu(x, weights, tuning=tuning, dtype=jnp.bfloat16, interpret=interpret)

    out = np.asarray(run(x, weights), np.float32)
    assert not gpu_callbacks.get_races().races_found
    codes = in_one(fp8.quantise_tokens_reference, x)
    expected = np.asarray(in_one(fp8.fp8_products_reference, codes, weights))
    assert out.shape == expected.shape == (tokens, 64)
    finite = np.delete(np.arange(tokens), [4, 5])
    assert np.isfinite(out[finite]).all() and not np.isfinite(out[[4, 5]]).all(axis=1).any()
    for row in finite[1:]:  # from 1e-20 to 1e20
        assert relative_error(out[row], expected[row]) < 2.0**-8
    assert " pad[" not in str(jax.make_jaxpr(run)(x, weights))


def test_tokens_in_fp8_are_near():
    """Half of the last of four bits, below 2 ** -6 half of what the numbers there are apart; what is not finite is alone."""
    x = odd_tokens(10, 144)
    found = fp8.quantise_tokens_reference(jnp.asarray(x))
    back = np.asarray(in_depth(found.codes).astype(jnp.float32) * found.scales[:, None])
    assert np.isnan(back[[4, 5]]).any(axis=1).all()
    finite = np.delete(np.arange(10), [4, 5])
    off = np.abs(back - x)[finite]
    assert (
        off <= np.abs(x[finite]) / 15.9 + np.abs(x[finite]).max(axis=1, keepdims=True) / 448 * 2.0**-9.9
    ).all()
    np.testing.assert_array_equal(in_depth(in_words(jnp.arange(64).reshape(2, 32))).ravel(), np.arange(64))


def test_what_is_not_supported():
    with pytest.raises(NotImplementedError, match="FP8 weights of 96 x 64: the kernel takes multiples of 64"):
        fp8.packed_shape(96, 64)
    with pytest.raises(
        NotImplementedError, match="tokens of float16 for FP8 weights: the kernel takes bfloat16"
    ):
        fp8.check_supported(jnp.float16)
    with pytest.raises(NotImplementedError, match="platform cpu"):
        fp8.check_supported(jnp.bfloat16)
    with pytest.raises(
        NotImplementedError, match="tokens of 24 numbers in FP8: the kernel takes multiples of 16"
    ):
        fp8.quantise_tokens(jnp.ones((4, 24), jnp.bfloat16), interpret=plgpu.InterpretGPUParams())
    with pytest.raises(ValueError, match="tokens of 128 numbers for weights of a depth of 64"):
        weights = fp8.quantise(jnp.ones((64, 64)))
        fp8_products_mosaic_gpu(jnp.ones((4, 128), jnp.bfloat16), weights, tuning=fp8.Tuning(rows=8))
    with pytest.raises(ValueError, match="up to 8 parts of the depth, of blocks of up to 256 tokens, not"):
        weights, tuning = fp8.quantise(jnp.ones((128, 64))), fp8.Tuning(rows=264, splits=2)
        fp8_products_mosaic_gpu(jnp.ones((264, 128), jnp.bfloat16), weights, tuning=tuning)


@settings(max_examples=200)
@given(
    tokens=st.integers(1, 9000), across=st.integers(1, 500), deep=st.integers(1, 300), narrow=st.booleans()
)
def test_tuning(tokens, across, deep, narrow):
    """Of every shape: buffers that fit, whole work, full blocks, and splits only where there is too little work."""
    (records,) = (NARROW if narrow else TUNING).values()
    size = 1 if narrow else 2
    with mock.patch.multiple(
        "pallas_kernels.fp8_products.tuning", num_sms=lambda: 132, record_for=lambda *_: records
    ):
        tuning = fp8.tuning_for(tokens, across, deep, narrow=narrow)
        cut = tuning.for_weights(across, deep)
        wgs, splits, (step, stages) = cut.warpgroups, cut.splits, cut.steps(deep, size)
        assert across % wgs == 0 and deep % (splits * step) == 0 and stages >= 2
        assert splits == tuning.splits and (splits == 1 or (tokens <= 256 and tuning.part == tuning.rows))
        buffers = stages * step * (wgs * 4096 + tuning.rows * 64 * size)
        buffers += wgs * cut.stored * 64 * (2 + 4 * (splits - 1))
        assert tuning.per_sm * (buffers + 2048) <= 228 * 1024
        blocks = -(-tokens // tuning.rows)
        assert tuning.rows % 8 == 0 and min(tokens, 64) <= tuning.rows <= 320
        assert (
            tuning.part % 8 == 0
            and tuning.part <= 256
            and tuning.part in (tuning.rows, -(-tuning.rows // 16) * 8)
        )
        assert blocks * tuning.rows - tokens < 8 + tokens / 8
        assert blocks * tuning.rows <= -(-tokens // 256) * 256  # as many scales as `quantise_tokens` gives
        units = blocks * (across // wgs)
        assert splits == 1 or units * splits <= 132 * tuning.per_sm


@pytest.mark.parametrize(
    ("tokens", "rows"),
    [
        (256, (128, 128, 256, 128)),
        (300, (152, 104, 304, 104)),
        (512, (256, 128, 256, 128)),
        (541, (272, 184, 272, 184)),
        (1056, (216, 264, 264, 264)),
        (2048, (256, 256, 256, 256)),
        (2080, (264, 264, 264, 264)),
        (2173, (272, 272, 272, 272)),
        (2304, (256, 256, 256, 256)),
        (8192, (256, 256, 256, 256)),
    ],
)
def test_blocks_of_a_layer(tokens, rows):
    """Llama-3.1-8B's with tokens in FP8: 256 or 128 where that leaves none over, else the least time by rounds."""
    matrices = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
    with mock.patch("pallas_kernels.fp8_products.tuning.record_for", lambda *_: NARROW["9.0"]):
        found = [fp8.tuning_for(tokens, across // 64, deep // 64, narrow=True) for across, deep in matrices]
    assert tuple(tuning.rows for tuning in found) == rows


@pytest.mark.parametrize("splits", [2, 3, 4, 8])
@pytest.mark.parametrize("rows", range(8, 264, 8))
def test_every_row_is_finished_by_one_of_a_cluster(rows, splits):
    """Each a CTA's of its own, whatever `stores` says."""
    tuning = fp8.Tuning(rows=rows, splits=splits, stores=2)
    shares = pieces_of(rows, tuning.stored)
    assert len(shares) <= splits and all(count % 8 == 0 for _, count in shares)
    assert [row for first, count in shares for row in range(first, first + count)] == list(range(rows))


def test_a_block_has_no_rows_beyond_the_tokens():
    for tokens, rows in (1, 8), (8, 8), (9, 16), (64, 64), (1000, 64):
        assert fp8.Tuning(rows=64, splits=4).for_tokens(tokens).rows == rows


@pytest.mark.parametrize("blocks", [1, 3, 8, 11, 40])
def test_units_are_all_different(blocks):
    """Blocks and columns, each combination once."""
    cfg = Config(
        blocks=blocks, rows=8, part=8, stored=8, columns=5, warpgroups=2, splits=1, steps=4, deep_step=2, stages=2,
        num_ctas=7, narrow=False, gate=None, interpreted=False,
    )  # fmt: skip
    numbers = jnp.arange(cfg.units)
    with mock.patch("jax.lax.axis_index", lambda _: numbers % 7):
        unit = Unit(cfg, numbers // 7)
    found = set(zip(*(np.asarray(x).tolist() for x in (unit.row, unit.column)), strict=True))
    assert found == set(itertools.product(range(0, 8 * blocks, 8), range(0, 10, 2)))
