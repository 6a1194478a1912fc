"""A layer's products of which each device has a share, on the CPU: the reference, the interpreter, and lowered for a GPU."""

import dataclasses

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.gpu_program import as_on_hopper
from models.products import layer_tuning
from models.sharding import share
from models.testing import tiny_config
from pallas_kernels import layer_products as lp
from pallas_kernels.layer_products.reference import times
from pallas_kernels.norms import rms_norm
from tests.kernels.expert_cases import relative_error
from tests.kernels.layer_cases import Case
from tests.kernels.share_cases import exact, options, shares_of
from tests.one_program import in_one

TILES = lp.Tuning(ctas=8, weight_slots=4, token_slots=4, by_tile=True)
BY_TOKEN = lp.Tuning(ctas=8, weight_slots=4, token_slots=2)


def test_the_reference_adds_up_shares():
    """Of a layer cut in two, what the whole layer gives."""
    case = Case(3, 256, 256, 128, 128, dtype="float32", post_norms=True)
    attended, x, weights = case.arrays()
    columns = (2, -1)  # gates, and what they let through

    def halves(matrix, axis, shape=None):
        return jnp.stack(jnp.split(matrix.reshape(len(matrix), *shape) if shape else matrix, 2, axis=axis))

    cut = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), weights)._replace(
        out=halves(weights.out, 0),
        gate_up=halves(weights.gate_up, 2, columns).reshape(2, 256, -1),
        down=halves(weights.down, 0),
        heads=halves(weights.heads, 1),
    )
    out, heads = exact(case, halves(attended, 1), x, cut)
    want = lp.layer_products_reference(attended, x, weights, **options(case))
    np.testing.assert_allclose(out, want[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(jnp.concatenate([*heads], axis=1), want[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("case", "tuning"),
    [
        (Case(5, 128, 256, 256, 128, offset=1.0), TILES),
        (Case(3, 128, 256, 128, gate="gelu", post_norms=True), BY_TOKEN),
    ],
    ids=["by tiles", "by tokens, post norms"],
)
def test_kernel_in_the_interpreter(case, tuning, raced):
    """One device's share, given what the other two have."""
    attended, x, weights = shares_of(case, 3)

    def others():
        """Of the products out and down, by float32."""
        wide = [leaf.astype(jnp.float32) for leaf in (attended, x)]
        w = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), weights)
        of_out = jax.vmap(times)(wide[0], w.out)
        norm = {"eps": 1e-5, "offset": case.offset}
        added = of_out.sum(0)
        now = wide[1] + (rms_norm(added, w.out_post[0], **norm) if case.post_norms else added)
        h = rms_norm(now, w.norm[0], **norm)
        of_down = jax.vmap(lambda up, down: times(times(h, up, gate=case.gate), down))(w.gate_up, w.down)
        return jnp.stack([of_out[1:], of_down[1:]]).astype(x.dtype)

    own = jax.tree.map(lambda leaf: leaf[0], weights)
    counters = lp.counters_of(jnp.arange(3))
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    out, heads = lp.layer_products(
        attended[0],
        x,
        own,
        counters,
        **options(case),
        links=in_one(others),
        tuning=tuning,
        interpret=interpret,
    )
    want, of_devices = exact(case, attended, x, weights)
    assert relative_error(out, want) < 2.0**-6
    if case.heads:
        assert relative_error(heads, of_devices[0]) < 2.0**-6
    assert raced() == [False] * (6 if case.heads else 5)  # products, and the sums of two of them


@pytest.mark.parametrize(
    ("case", "devices"),
    [
        (Case(8, 256, 1024, 512, 512), 2),
        pytest.param(Case(64, 256, 1024, 512, 512), 4, marks=pytest.mark.slow),
        (Case(8, 256, 512, 512, 512, post_norms=True, dtype="float16"), 4),
        (Case(8, 256, 1024, 512, 512, fp8=True), 2),
        pytest.param(Case(8, 256, 512, 512, 512, fp8=True, post_norms=True), 2, marks=pytest.mark.slow),
    ],
    ids=["by tiles", "64 tokens", "by tokens", "FP8", "FP8, by tokens"],
)
def test_kernels_are_lowered_for_a_gpu(case, devices):
    attended, x, weights = jax.eval_shape(lambda: case.arrays(zeros=True)) if not case.fp8 else case.arrays()
    tuning = lp.Tuning(ctas=64, weight_slots=8, token_slots=2, by_tile=True, fp8=case.fp8)
    counters = jax.eval_shape(lp.counters_of, jax.ShapeDtypeStruct((3,), jnp.int32))
    links = jax.ShapeDtypeStruct((1 + devices, 2), jnp.int32)

    def layer(attended, x, weights, counters, links):
        return lp.layer_products(
            attended, x, weights, counters, **options(case), links=links, tuning=tuning, in_parts=True
        )

    with as_on_hopper():
        traced = jax.jit(layer).trace(attended, x, weights, counters, links)
        assert traced.lower(lowering_platforms=("cuda",)).as_text().count("kernel_hash") == 1


def test_what_links_have_no_place_for():
    attended, x, weights = Case(3, 128, 128, 128).arrays(zeros=True)
    links = jnp.zeros((3, 2), jnp.int32)
    with (
        as_on_hopper(),
        pytest.raises(ValueError, match="multiples of 256 up to 8192 columns, 256 tokens and 132 CTAs"),
    ):
        lp.layer_products(
            attended, x, weights, lp.counters_of(jnp.arange(3)), eps=1e-5, links=links, tuning=TILES
        )


def test_which_models_have_it(monkeypatch):
    """Shares of all that a device alone has it for, between two linked ones, of tokens and columns that these reach."""
    asked = []

    def tuning_for(*shape, fp8, linked):
        asked.append(linked)
        return dataclasses.replace(TILES, fp8=fp8)

    monkeypatch.setattr(lp, "tuning_for", tuning_for)
    config = tiny_config(hidden_size=1024, num_heads=8, num_kv_heads=4, head_dim=64, intermediate_size=512)
    part, (two, four) = share(config, 2), (jax.ShapeDtypeStruct((1 + n, 2), jnp.int32) for n in (2, 4))
    assert layer_tuning(8, config) and not layer_tuning(8, part)
    assert layer_tuning(64, part, two) and not layer_tuning(72, part, two) and not layer_tuning(8, part, four)
    for width in (1024 + 128, 16_384):
        assert not layer_tuning(8, part.replace(hidden_size=width), two), width
    assert not layer_tuning(1, part.replace(num_experts=128, experts_per_token=2, expert_size=128), two)
    in_fp8 = part.replace(weights_fp8=True)
    assert layer_tuning(40, in_fp8, two) and not layer_tuning(48, in_fp8, two)
    assert layer_tuning(8, in_fp8, two) == layer_tuning(8, config.replace(weights_fp8=True))
    assert asked[-2:] == [True, False]
