"""A layer's products as one kernel on the CPU: how they are cut, and the kernel under the interpreter, by products."""

import dataclasses
from functools import partial
from types import SimpleNamespace

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.gpu_program import as_on_hopper
from benchmarks.shapes import LLAMA_8B, SHAPES
from models.products import has_layer_kernel, layer_tuning
from models.testing import random_params, tiny_config
from models.transformer import forward
from pallas_kernels import layer_products as lp
from pallas_kernels.fp8_products import quantise
from pallas_kernels.layer_products import tuning as kernel_tuning
from pallas_kernels.layer_products.phases import Share, added_by_tile, phases_of, spread
from pallas_kernels.layer_products.tuning import TUNING
from tests.kernels.layer_cases import Case, check_layer, columns_of, count_kernels

SHAPE = {
    "llama": LLAMA_8B,
    "gemma": SHAPES["gemma-3-12b"],
    "qwen": SHAPES["qwen3-4b"],
    "small": SHAPES["llama-3.2-3b"],
    "more": SHAPES["qwen2.5-7b"],
}
SLOW = partial(pytest.param, marks=pytest.mark.slow)
FEW = lp.Tuning(ctas=4, weight_slots=4, token_slots=2)
NARROW = lp.Tuning(ctas=8, weight_slots=4, token_slots=4, narrow_gates=True)
TILES = dataclasses.replace(NARROW, by_tile=True)
MORE = lp.Tuning(ctas=8, weight_slots=4, token_slots=2)
OTHER = lp.Tuning(ctas=2, weight_slots=5, token_slots=3, ahead=2, early=1)
SMALL = {"hidden_size": 256, "intermediate_size": 512, "num_heads": 8, "num_kv_heads": 2, "head_dim": 64}
MIXTURE = {"num_experts": 128, "experts_per_token": 3, "expert_size": 128}
COLUMNS = {name: columns_of(config) for name, config in SHAPE.items()}


@pytest.mark.parametrize(
    ("case", "tuning"),
    [
        (Case(5, 576, 256, 512, 384, dtype="float16"), NARROW),
        (Case(5, 576, 256, 512, 384, offset=1.0), TILES),
        pytest.param(
            Case(30, 256, 512, 512), dataclasses.replace(MORE, by_tile=True), marks=pytest.mark.slow
        ),
        (Case(72, 256, 128, 256, gate="gelu", offset=1.0, post_norms=True), OTHER),
        (Case(5, 640, 256, 512, 384, fp8=True), dataclasses.replace(FEW, fp8=True)),
        (Case(5, 640, 256, 512, 384, fp8=True), dataclasses.replace(FEW, fp8=True, by_tile=True, by_warp=True)),
        (Case(5, 256, 512, 1152, 384), MORE),
        pytest.param(
            Case(5, 256, 512, 1152, 384), dataclasses.replace(MORE, by_tile=True), marks=pytest.mark.slow
        ),
        pytest.param(
            Case(5, 256, 512, 1280, 0, fp8=True), dataclasses.replace(MORE, fp8=True), marks=pytest.mark.slow
        ),
    ],
    ids=[
        "uneven splits, gates of 64 columns, heads", "by tiles", "no heads, by tiles",
        "two warpgroups, post norms", "FP8", "FP8, by tiles and warps", "more gates than CTAs", "the same, by tiles",
        "more, FP8",
    ],
)  # fmt: skip
def test_kernel_in_the_interpreter(case, tuning, raced):
    check_layer(case, tuning, plgpu.InterpretGPUParams(detect_races=True))
    calls = 6 if case.heads else 5  # products, and the sums of two of them
    calls += 2 * (case.inner // 128 > tuning.ctas)  # the last gates, and what their sums let through
    assert raced() == [False] * calls


@pytest.mark.parametrize("name", ["llama", "gemma", "qwen", "small", "more"])
def test_every_step_is_one_ctas(name):
    tuning = lp.tuning_for(32, *COLUMNS[name])
    assert tuning is not None
    phases = phases_of(*COLUMNS[name], "silu", False, tuning)
    assert [phase.number for phase in phases] == list(range(5 if name == "more" else 4))
    for phase in phases:
        assert phase.ctas <= tuning.ctas
        seen = np.zeros((phase.tiles, phase.depth // phase.step), int)
        shares = Share.of(phase, np.arange(tuning.ctas, dtype=np.int32), tuning.ctas)
        tile, first, steps = (np.asarray(each) for each in (shares.tile, shares.first, shares.steps))
        np.testing.assert_array_equal(shares.active, steps > 0)
        for cta in range(tuning.ctas):
            seen[tile[cta], first[cta] : first[cta] + steps[cta]] += 1
        assert (seen == 1).all()
    gates = [phase for phase in phases if phase.weights == "gate_up"]
    read = [
        int(p.tile_of_weights(t, piece)) for p in gates for t in range(p.tiles) for piece in range(p.pieces)
    ]
    assert sorted(read) == list(range(2 * COLUMNS[name][2] // gates[0].wide))


def test_nothing_is_forgotten_that_other_tiles_read():
    """Of what a product's parts are made of, when they are added up by tiles: as many gates as columns let it pass."""
    for phase in added_by_tile(phases_of(512, 1024, 1024, 512, "silu", False, FEW)):
        assert phase.addition is None or phase.source not in phase.addition.spent


@pytest.mark.parametrize("working", [0, 1, 76, 96, 112, 128, 131, 132])
def test_idle_ctas_lie_between_the_others(working):
    number, active = (np.asarray(each) for each in spread(jnp.arange(132, dtype=jnp.int32), working, 132))
    assert number[active].tolist() == list(range(working))
    for first in range(0, 132, 33):  # as many in every quarter
        assert abs(active[first : first + 33].sum() - working / 4) <= 1


def test_what_is_left_to_products_by_themselves():
    few_tiles = columns_of(SHAPES["qwen3-1.7b"])
    assert lp.tuning_for(64, *few_tiles) is None  # gates of 48 tiles
    assert lp.tuning_for(32, *few_tiles).narrow_gates  # 96 of half as many columns
    assert lp.tuning_for(64, *few_tiles, linked=True).narrow_gates
    for tokens in (1, 7, 8, 16, 128):
        assert lp.tuning_for(tokens, *COLUMNS["llama"]) is not None
    for tokens in (0, 9, 100, 129, 136):
        assert lp.tuning_for(tokens, *COLUMNS["llama"]) is None
    assert lp.tuning_for(64, 4096, 4096 + 64, 14336, 6144) is None
    assert lp.tuning_for(64, 576, 512, 1536, 768) is None


@pytest.mark.parametrize(
    ("kind", "most", "most_fp8"),
    [("NVIDIA H100 80GB HBM3", 128, 40), ("NVIDIA H200", 64, 64), ("NVIDIA H20", 0, 0)],
)
def test_only_gpus_on_which_it_was_faster_have_it(kind, most, most_fp8):
    device = SimpleNamespace(device_kind=kind, platform="gpu", compute_capability="9.0")
    counts = 1, 32, 40, 48, 64, 72, 128
    for fp8, limit in ((False, most), (True, most_fp8)):
        taken = [count for count in counts if lp.tuning_for(count, *COLUMNS["llama"], device, fp8=fp8)]
        assert taken == [count for count in counts if count <= limit]


def test_no_more_tokens_than_multiprocessors(monkeypatch):
    """Each of these adds up one token: an H100 for PCIe has 114."""
    monkeypatch.setattr(kernel_tuning, "num_sms", lambda: 114)
    assert lp.tuning_for(112, *COLUMNS["llama"]).ctas == 114
    assert lp.tuning_for(120, *COLUMNS["llama"]) is None


def test_tunings_that_would_wait_for_ever_are_refused():
    for wrong in ({"weight_slots": 3}, {"token_slots": 1}, {"ahead": 0}, {"early": 0}, {"ahead": 5}):
        with pytest.raises(ValueError, match="got Tuning"):
            dataclasses.replace(FEW, **wrong)
    for wrong in ({"token_slots": 3}, {"fp8": True}):
        with pytest.raises(
            ValueError, match="narrow gates are not of FP8 weights, and take 4 slots of tokens"
        ):
            dataclasses.replace(NARROW, **wrong)
    with pytest.raises(ValueError, match="two warpgroups take turns at slots of FP8 weights: an even number"):
        dataclasses.replace(OTHER, fp8=True)
    attended, x, weights = Case(8, 256, 128, 256).arrays()
    with as_on_hopper(), pytest.raises(ValueError, match="there are 132 multiprocessors"):
        too_many = dataclasses.replace(FEW, ctas=133)
        lp.layer_products(attended, x, weights, lp.counters_of(jnp.arange(3)), eps=1e-5, tuning=too_many)


def test_weights_that_do_not_belong_together_are_refused():
    attended, x, weights = Case(8, 256, 128, 256, 128).arrays()
    in_fp8 = Case(8, 256, 128, 256, fp8=True).arrays()[2]
    counters = lp.counters_of(jnp.arange(3))
    for others, message in (
        ((attended[:, 1:], x, weights, counters), r"attended \(8, 255\): expected \(8, 256\), as out is \(256, 128\)"),
        ((attended, x, weights._replace(norm=x), counters), r"norm \(8, 128\): expected \(128,\)"),
        ((attended, x, weights, counters[1:]), rf"counters .*: expected \({len(counters)},\)"),
        ((attended, x, weights._replace(next_norm=None), counters), "one of next_norm and heads: give both or none"),
        ((attended, x, weights._replace(out_post=x[0]), counters), "one of out_post and down_post"),
        ((attended, x, weights._replace(out=in_fp8.out), counters), "some of the matrices are in FP8"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            lp.layer_products(*others, eps=1e-5)


def test_what_has_no_kernel_is_said():
    (attended, x, weights), counters = Case(8, 256, 128, 256).arrays(), lp.counters_of(jnp.arange(3))
    with pytest.raises(NotImplementedError, match="platform cpu: the kernels run on NVIDIA Hopper GPUs"):
        lp.layer_products(attended, x, weights, counters, eps=1e-5)
    with pytest.raises(NotImplementedError, match="tokens and weights of bfloat16, float32"):
        lp.layer_products(attended.astype(jnp.float32), x, weights, counters, eps=1e-5)
    with pytest.raises(
        NotImplementedError, match="9 tokens: the kernel takes 1 to 8, and multiples of 8 up to 128"
    ):
        nine = jnp.zeros((9, 256), "bfloat16"), jnp.zeros((9, 128), "bfloat16")
        lp.layer_products(*nine, weights, counters, eps=1e-5)
    *given, in_fp8 = Case(72, 256, 128, 256, fp8=True).arrays()
    with pytest.raises(
        NotImplementedError, match=r"72 tokens: .* multiples of 8 up to 64 with weights in FP8"
    ):
        lp.layer_products(*given, in_fp8, counters, eps=1e-5)
    half = [array[:8].astype(jnp.float16) for array in given]
    with pytest.raises(NotImplementedError, match="float16: the kernel takes bfloat16 beside weights in FP8"):
        norm = in_fp8.norm.astype(jnp.float16)
        lp.layer_products(*half, in_fp8._replace(norm=norm), counters, eps=1e-5)
    interpret = plgpu.InterpretGPUParams()
    with pytest.raises(NotImplementedError, match="there is no tuning for these"):
        lp.layer_products(attended, x, weights, counters, eps=1e-5, interpret=interpret)
    with pytest.raises(ValueError, match=r"weights not in FP8: .* is for others"):
        tuning = dataclasses.replace(FEW, fp8=True)
        lp.layer_products(attended, x, weights, counters, eps=1e-5, interpret=interpret, tuning=tuning)
    with pytest.raises(ValueError, match="need 10 CTAs"):
        tuning = lp.Tuning(ctas=3, weight_slots=4, token_slots=2)
        lp.layer_products(
            *Case(8, 256, 128, 1024).arrays(), counters, eps=1e-5, interpret=interpret, tuning=tuning
        )


@pytest.mark.parametrize("tokens", [SLOW(1), 7, SLOW(32), 96])
def test_layers_share_one_kernel_text(tokens):
    arrays = jax.eval_shape(lambda: Case(tokens, *COLUMNS["llama"]).arrays(zeros=True))
    assert count_kernels(arrays, 3) == 1


@pytest.mark.parametrize(
    ("changes", "tokens"),
    [
        ({}, 64),
        ({"gelu": True, "norm_offset": 1.0, "qk_norm": True}, 64),
        ({"post_norms": True}, 64),
        ({"qkv_bias": True}, 64),
        ({"weights_fp8": True}, 40),
        (MIXTURE, 1),
        SLOW(MIXTURE | {"normalize_experts": False}, 1),
    ],
    ids=str,
)
def test_models_that_have_it(small_weights, monkeypatch, changes, tokens):
    """The reference in its place: what models hand to it, and with what they go on, is what they compute otherwise."""
    config = tiny_config(**{"num_layers": 3} | SMALL | changes)
    params = random_norms(random_params(config))
    at = jnp.arange(tokens)

    @jax.jit
    def logits(params, config=config):
        return forward(params, config, at, at, lambda state, layer, q, k, v: (q, state), ())[0]

    with monkeypatch.context() as without:
        without.setattr(lp, "tuning_for", lambda *shape, **kind: None)
        expected = logits(params)
    given = []

    def instead(attended, x, weights, counters, *, links, tuning, in_parts, **how):
        assert links is None
        given.append(weights.heads is not None)
        return lp.layer_products_reference(attended, x, weights, **how)

    monkeypatch.setattr(lp, "layer_products", instead)
    jax.clear_caches()
    np.testing.assert_allclose(logits(params), expected, rtol=1e-4, atol=1e-4)
    assert given == [True, False]  # layers with others after them are traced once


def test_models_that_have_none(small_weights):
    for changes, tokens in (
        ({}, 136),
        ({"attn_out_bias": True}, 64),
        ({"weights_fp8": True}, 72),
        (MIXTURE, 2),
        (MIXTURE | {"dense_layers": (1,)}, 1),
        (MIXTURE | {"expert_bias": True}, 1),
        (MIXTURE | {"swiglu_limit": 7.0}, 1),
        (MIXTURE | {"weights_fp8": True}, 1),
        (MIXTURE | {"num_experts": 64}, 1),
    ):
        assert layer_tuning(tokens, tiny_config(**SMALL | changes)) is None, changes
    for changes, tokens in (({}, 128), ({"weights_fp8": True}, 64), (MIXTURE, 1)):
        assert layer_tuning(tokens, tiny_config(**SMALL | changes)) is not None, changes


def test_layers_that_have_it(small_weights):
    """All that it reads is looked at."""
    config = tiny_config(hidden_size=256, intermediate_size=512, post_norms=True)
    layers, x = random_params(config)["layers"], jnp.zeros((64, 256))
    assert has_layer_kernel(layers, x, config)
    assert not has_layer_kernel(layers, x, config.replace(tensor_axis="tensor"))
    for name in (
        "attn_norm",
        "qkv",
        "attn_out",
        "attn_post_norm",
        "mlp_norm",
        "gate_up",
        "down",
        "mlp_post_norm",
    ):
        other = [*layers[:1], layers[1] | {name: layers[1][name].astype(jnp.bfloat16)}, *layers[2:]]
        assert not has_layer_kernel(other, x, config), name


@pytest.fixture
def small_weights(monkeypatch):
    """The kernel is worth while for any weights, and there is a device for it, of one dtype."""
    least = dataclasses.replace(TUNING["9.0"], least_ctas=0.0, least_weights=0)
    monkeypatch.setitem(TUNING, "9.0", least)

    def check(*arrays):
        if len({str(array.dtype) for array in arrays if isinstance(array, jax.Array)}) > 1:
            raise NotImplementedError

    monkeypatch.setattr(lp, "check_supported", check)


def random_norms(params):
    """As trained ones are: norms of ones, as `random_params` has them, would hide which of them is taken."""
    keys = iter(jax.random.split(jax.random.key(1), 100))

    def draw(path, array):
        norm = "norm" in jax.tree_util.keystr(path[-1:])
        return array * jax.random.uniform(next(keys), array.shape, minval=0.5, maxval=1.5) if norm else array

    return jax.tree_util.tree_map_with_path(draw, params)


@pytest.mark.parametrize(
    ("kind", "tokens", "fp8"),
    [
        *(("H100", tokens, False) for tokens in (64, 88)),
        *(SLOW("H100", tokens, False) for tokens in (8, 72, 80, 104, 128)),
        *(("H200", tokens, True) for tokens in (8, 48)),
    ],
)
def test_what_is_tuned_for_fits_into_shared_memory(kind, tokens, fp8):
    """Behind 80, 88 and 104 tokens matrix instructions read on, which had no room; with FP8 weights there are sums."""
    depth, width, inner, heads = COLUMNS["llama"]
    matrices = {
        "out": (depth, width),
        "gate_up": (width, 2 * inner),
        "down": (inner, width),
        "heads": (width, heads),
    }
    others = {"norm": (width,), "next_norm": (width,), "attended": (tokens, depth), "x": (tokens, width)}
    given: dict = {
        name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in (matrices | others).items()
    }
    if fp8:
        given |= {name: jax.eval_shape(quantise, given[name]) for name in matrices}
    device = SimpleNamespace(device_kind=f"NVIDIA {kind}", platform="gpu", compute_capability="9.0")
    tuning = lp.tuning_for(tokens, depth, width, inner, heads, device, fp8=fp8)

    def layer(attended, x, counters, **weights):
        return lp.layer_products(attended, x, lp.LayerWeights(**weights), counters, eps=1e-5, tuning=tuning)

    given["counters"] = jax.eval_shape(lp.counters_of, jax.ShapeDtypeStruct((1,), jnp.int32))
    with as_on_hopper():
        traced = jax.jit(layer).trace(**given)
        assert "kernel_hash" in traced.lower(lowering_platforms=("cuda",)).as_text()
