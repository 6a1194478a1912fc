"""The kernel of a layer's products for one token and a mixture of experts, on the CPU."""

import dataclasses
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.gpu_program import as_on_hopper
from models.routing import expert_weights, likeliest
from pallas_kernels import layer_products as lp
from pallas_kernels.layer_products.phases import Share, mixture_phases
from tests.kernels.layer_cases import count_kernels, in_float32
from tests.kernels.mixture_cases import QWEN3, Case, check_mixture

EIGHT = lp.Tuning(ctas=8, weight_slots=5, token_slots=4, narrow_gates=True)
MIXTURE = QWEN3.experts, QWEN3.chosen
FOUR = lp.Tuning(ctas=4, weight_slots=6, token_slots=3, ahead=2, early=1)


@pytest.mark.parametrize(
    ("case", "tuning"),
    [
        pytest.param(Case(256, 256, 128, 4, heads=384), EIGHT, marks=pytest.mark.slow),
        (Case(256, 256, 128, 4, heads=384, offset=1.0), dataclasses.replace(EIGHT, by_tile=True)),
        (Case(192, 128, 128, 3, normalize=False, gate="gelu", offset=1.0, dtype="float16"), FOUR),
    ],
    ids=["gates of 64 columns, heads", "the same, parts added up by tiles", "of 128, shares of all experts"],
)
def test_kernel_in_the_interpreter(case, tuning, raced):
    check_mixture(case, tuning, plgpu.InterpretGPUParams(detect_races=True))
    calls = 8 if case.heads else 7  # products, the sums of two, and the choice
    assert raced() == [False] * calls


def test_the_reference_is_the_models_own_mixture():
    case = Case(64, 64, 32, 3)
    attended, x, weights = jax.tree.map(in_float32, case.arrays())
    for normalize in (False, True):
        out, heads = lp.layer_products_reference(
            attended, x, weights, eps=1e-5, routing=lp.Routing(case.chosen, normalize)
        )
        x_there = x + attended @ weights.out
        h = x_there * jax.lax.rsqrt(jnp.mean(x_there**2) + 1e-5) * weights.norm
        logits = h @ weights.router
        largest, experts = likeliest(logits, case.chosen)
        shares, whole = expert_weights(logits, largest, normalize)
        for share, expert in zip(shares, experts[0], strict=True):
            gates, values = jnp.split(h @ weights.gate_up[expert], 2, axis=1)
            x_there += (jax.nn.silu(gates) * values) @ weights.down[expert] * share / whole
        np.testing.assert_allclose(out, x_there, rtol=1e-3, atol=1e-3)
        assert heads is None


def test_every_step_is_one_ctas():
    tuning = lp.tuning_for(1, *QWEN3.columns, mixture=MIXTURE)
    assert tuning is not None
    phases = mixture_phases(*QWEN3.columns, "silu", tuning, QWEN3.experts, lp.Routing(QWEN3.chosen, True))
    for phase in phases:
        assert phase.ctas <= tuning.ctas
        seen = np.zeros((phase.tiles, phase.depth // phase.step), int)
        shares = Share.of(phase, np.arange(tuning.ctas, dtype=np.int32), tuning.ctas)
        for tile, first, steps in zip(
            *map(np.asarray, (shares.tile, shares.first, shares.steps)), strict=True
        ):
            seen[tile, first : first + steps] += 1
        assert (seen == 1).all()
    _, _, gates, down, _ = phases
    assert (gates.wide, gates.step, gates.ctas, down.ctas) == (64, 128, 96, 128)
    # The chosen experts' gates lie side by side, what they let through one after another.
    assert [int(n) for n in gates.place(jnp.int32(13), jnp.int32(5))] == [1, 1, 5]
    assert [int(n) for n in down.place(jnp.int32(3), jnp.int32(25))] == [2, 3, 1]


def test_what_has_no_kernel():
    for wrong in ((64, 8), (128, 64)):  # gates of 384 tiles
        assert lp.tuning_for(1, *QWEN3.columns, mixture=wrong) is None
    assert lp.tuning_for(2, *QWEN3.columns, mixture=MIXTURE) is None
    case = Case(256, 128, 128, 4)
    (attended, x, weights), counters = case.arrays(), lp.counters_of(jnp.arange(3))
    how: dict[str, Any] = {"eps": 1e-5, "routing": lp.Routing(4, True)}
    with pytest.raises(NotImplementedError, match="2 tokens: the kernel takes one, if its layer has experts"):
        lp.layer_products(*(jnp.repeat(each, 2, axis=0) for each in (attended, x)), weights, counters, **how)
    with as_on_hopper(), pytest.raises(NotImplementedError, match="there is no tuning for these"):
        fewer = weights._replace(
            router=weights.router[:, :64], gate_up=weights.gate_up[:64], down=weights.down[:64]
        )
        lp.layer_products(attended, x, fewer, counters, **how)
    for wrong, message in (
        ({"routing": None}, "expected 1 to 128 experts"),
        ({"routing": lp.Routing(129, True)}, "expected 1 to 128 experts"),
        ({"weights": weights._replace(down=weights.down[1:])}, r"down \(127, 128, 128\): expected \(128, 128, 128\)"),
        ({"weights": weights._replace(heads=weights.router)}, "one of next_norm and heads"),
    ):  # fmt: skip
        given = {"attended": attended, "x": x, "weights": weights, "counters": counters} | how | wrong
        with pytest.raises(ValueError, match=message):
            lp.layer_products(**given)


def test_layers_share_one_kernel_text():
    arrays = jax.eval_shape(QWEN3.arrays)
    assert count_kernels(arrays, 2, routing=lp.Routing(QWEN3.chosen, True)) == 1
