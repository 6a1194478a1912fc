"""A layer's products as one kernel on the CPU: how they are cut, and the kernel under the interpreter, by products."""

import dataclasses

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

from benchmarks.gpu_program import as_on_hopper
from models.testing import random_params, tiny_config
from models.transformer import forward
from pallas_kernels import layer_products as lp
from pallas_kernels.layer_products.phases import Share, phases_of
from pallas_kernels.layer_products.tuning import STEP, TUNING
from tests.kernels.layer_cases import Case, check_layer

FEW = lp.Tuning(ctas=4, weight_slots=4, token_slots=2)
OTHER = lp.Tuning(ctas=2, weight_slots=5, token_slots=3, ahead=2, early=1)
LLAMA_8B, GEMMA_12B, QWEN_4B = (4096, 4096, 14336, 6144), (4096, 3840, 15360, 8192), (4096, 2560, 9728, 6144)


@pytest.mark.parametrize(
    ("case", "tuning"),
    [
        (Case(5, 576, 256, 512, 384, dtype="float16"), FEW),
        (Case(72, 256, 128, 256, gate="gelu", offset=1.0, post_norms=True), OTHER),
    ],
    ids=["uneven splits, heads", "two warpgroups, post norms"],
)  # fmt: skip
def test_kernel_in_the_interpreter(case, tuning):
    check_layer(case, tuning, plgpu.InterpretGPUParams(detect_races=True))
    assert not gpu_callbacks.get_races().races_found


@pytest.mark.parametrize("shape", [LLAMA_8B, GEMMA_12B], ids=["llama", "gemma"])
@pytest.mark.parametrize("tokens", [1, 64, 96])
def test_every_step_is_one_ctas(shape, tokens):
    tuning = lp.tuning_for(tokens, *shape)
    assert tuning is not None
    for phase in phases_of(*shape, "silu", False, tuning):
        assert 0.7 * tuning.ctas <= phase.ctas <= tuning.ctas
        seen = np.zeros((phase.tiles, phase.depth // STEP), int)
        for cta in range(tuning.ctas):
            share = Share.of(phase, jnp.int32(cta))
            assert bool(share.active) == (int(share.steps) > 0)
            seen[int(share.tile), int(share.first) : int(share.first) + int(share.steps)] += 1
        assert (seen == 1).all()


def test_what_is_left_to_products_by_themselves():
    assert lp.tuning_for(64, *LLAMA_8B) is not None
    assert lp.tuning_for(64, *QWEN_4B) is None  # its gates have 76 tiles
    for tokens in (9, 100, 129, 136):
        assert lp.tuning_for(tokens, *LLAMA_8B) is None
    assert lp.tuning_for(64, 4096, 4096 + 64, 14336, 6144) is None
    assert lp.tuning_for(64, 576, 512, 1536, 768) is None


def test_what_has_no_kernel_is_said():
    (attended, x, weights), counters = Case(8, 256, 128, 256).arrays(), jnp.zeros(192, jnp.int32)
    with pytest.raises(NotImplementedError, match="platform cpu: the kernels run on NVIDIA Hopper GPUs"):
        lp.layer_products(attended, x, weights, counters, eps=1e-5)
    with pytest.raises(NotImplementedError, match="tokens and weights of bfloat16, float32"):
        lp.layer_products(attended.astype(jnp.float32), x, weights, counters, eps=1e-5)
    with pytest.raises(
        NotImplementedError, match="9 tokens: the kernel takes 1 to 8, and multiples of 8 up to 128"
    ):
        nine = jnp.zeros((9, 256), "bfloat16"), jnp.zeros((9, 128), "bfloat16")
        lp.layer_products(*nine, weights, counters, eps=1e-5)
    interpret = plgpu.InterpretGPUParams()
    with pytest.raises(NotImplementedError, match="there is no tuning for these"):
        lp.layer_products(attended, x, weights, counters, eps=1e-5, interpret=interpret)
    with pytest.raises(ValueError, match="need 4 CTAs"):
        tuning = lp.Tuning(ctas=3, weight_slots=4, token_slots=2)
        lp.layer_products(
            *Case(8, 256, 128, 512).arrays(), counters, eps=1e-5, interpret=interpret, tuning=tuning
        )


@pytest.mark.parametrize("tokens", [1, 7, 32, 96])
def test_layers_share_one_kernel_text(tokens):
    """And one array of counters, which is no constant."""
    arrays = jax.eval_shape(lambda: Case(tokens, *LLAMA_8B).arrays(zeros=True))

    def run(counts, attended, x, weights):
        counters = lp.counters_of(counts)
        for _ in range(3):
            x, heads = lp.layer_products(attended, x, weights, counters, eps=1e-5)
            attended = heads[:, : attended.shape[1]]
        return x, heads

    with as_on_hopper():
        traced = jax.jit(run).trace(jax.ShapeDtypeStruct((4,), jnp.int32), *arrays)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("kernel_hash") == 1


@pytest.mark.parametrize(
    ("changes", "tokens", "asked"),
    [
        ({}, 64, 3),
        ({"gelu": True, "norm_offset": 1.0, "qk_norm": True}, 64, 3),
        ({"post_norms": True}, 64, 3),
        ({"qkv_bias": True}, 64, 3),
        ({}, 136, 0),
        ({"attn_out_bias": True}, 64, 0),
        ({"num_experts": 4, "experts_per_token": 2, "expert_size": 64}, 64, 0),
        ({"weights_fp8": True}, 64, 0),
    ],
    ids=str,
)
def test_a_model_has_it_for_dense_layers(monkeypatch, changes, tokens, asked):
    """The reference in its place: what models hand to it, and with what they go on, is what they compute otherwise."""
    config = tiny_config(
        num_layers=3,
        hidden_size=256,
        intermediate_size=512,
        num_heads=8,
        num_kv_heads=2,
        head_dim=64,
        **changes,
    )
    given = []
    monkeypatch.setattr(lp, "check_supported", lambda *arrays: None)

    def instead(attended, x, weights, counters, *, tuning, **how):
        given.append(weights.heads is not None)
        return lp.layer_products_reference(attended, x, weights, **how)

    monkeypatch.setattr(lp, "layer_products", instead)
    params = random_params(config)
    at = jnp.arange(tokens)

    @jax.jit
    def logits(params, config=config):
        return forward(params, config, at, at, lambda state, layer, q, k, v: (q, state), ())[0]

    expected = logits(params)
    assert given == []
    least = dataclasses.replace(TUNING["9.0"], least_ctas=0.0, least_weights=0)
    monkeypatch.setitem(TUNING, "9.0", least)
    jax.clear_caches()
    np.testing.assert_allclose(logits(params), expected, rtol=1e-4, atol=1e-4)
    assert given == [True, False][: asked and 2]  # layers with another after them are traced once
