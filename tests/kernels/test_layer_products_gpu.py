"""A layer's products as one kernel on a GPU, against the reference."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.decode_ways import PRODUCTS, on_any_gpu, without
from benchmarks.dense_products import queries_as_result
from benchmarks.shapes import SHAPES
from models.params import map_specs, param_specs
from models.products import has_layer_kernel
from models.transformer import forward
from pallas_kernels import layer_products as lp
from pallas_kernels.layer_products.tuning import TUNING, token_slots, weight_slots
from pallas_kernels.support import num_sms
from tests.kernels import mixture_cases
from tests.kernels.layer_cases import Case, check_layer, columns_of
from tests.kernels.mixture_cases import QWEN3

pytestmark = pytest.mark.gpu
SMS = num_sms()
FEW = lp.Tuning(ctas=SMS, weight_slots=11, token_slots=4, narrow_gates=True, by_tile=True)
MANY = lp.Tuning(ctas=SMS, weight_slots=8, token_slots=5, early=1)
FEW_OF_ONE = dataclasses.replace(FEW, token_slots=16)
FEWEST = dataclasses.replace(FEW_OF_ONE, weight_slots=12)
LLAMA, GEMMA, QWEN = (columns_of(SHAPES[name]) for name in ("llama-3.1-8b", "gemma-3-12b", "qwen3-4b"))
MORE_GATES = [columns_of(SHAPES[name]) for name in ("qwen2.5-7b", "qwen3-14b", "gemma-3-27b")]  # than CTAs


@pytest.mark.parametrize("tokens", [1, 7, 40, 128])
@pytest.mark.parametrize(
    "case",
    [
        Case(0, *LLAMA),
        Case(0, *GEMMA, gate="gelu", offset=1.0, post_norms=True),
        Case(0, *QWEN, dtype="float16"),
        Case(0, *QWEN),
        Case(0, 576, 512, 1536, 768),
        Case(0, 576, 512, 512, 768),
        Case(0, *GEMMA[:3], gate="gelu", offset=1.0, post_norms=True),
        Case(0, *LLAMA[:3]),
    ],
    ids=[
        "Llama-3.1-8B",
        "Gemma-3-12B",
        "Qwen3-4B, float16",
        "Qwen3-4B",
        "small",
        "as many gates as columns",
        "Gemma's last",
        "Llama's last",
    ],
)
def test_layers_of_models(case, tokens):
    tuning = FEWEST if tokens <= 8 else FEW if tokens <= 64 else MANY
    check_layer(dataclasses.replace(case, tokens=tokens), tuning, repeats=10)


@pytest.mark.parametrize("tokens", [80, 88, 104])
def test_tokens_that_matrix_instructions_read_on_behind(tokens):
    tuning = dataclasses.replace(MANY, token_slots=token_slots(tokens))
    check_layer(Case(tokens, *LLAMA), tuning, repeats=10)


@pytest.mark.parametrize("tokens", [1, 40, 128])
@pytest.mark.parametrize("columns", MORE_GATES, ids=str)
def test_more_gates_than_multiprocessors(columns, tokens):
    check_layer(Case(tokens, *columns), FEW if tokens <= 64 else MANY, repeats=10)


@pytest.mark.parametrize(("by_tile", "by_warp"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("tokens", [1, 7, 40, 64])
@pytest.mark.parametrize(
    "case",
    [
        Case(0, *LLAMA),
        Case(0, *GEMMA, gate="gelu", offset=1.0, post_norms=True),
        Case(0, *QWEN),
        Case(0, 640, 512, 1536),
        Case(0, *MORE_GATES[0]),
    ],
    ids=["Llama-3.1-8B", "Gemma-3-12B", "Qwen3-4B", "small", "Qwen2.5-7B"],
)
def test_layers_in_fp8(case, tokens, by_tile, by_warp):
    slots = {"weight_slots": weight_slots(tokens, True), "token_slots": token_slots(tokens, True)}
    tuning = lp.Tuning(ctas=SMS, **slots, fp8=True, by_tile=by_tile, by_warp=by_warp)
    check_layer(dataclasses.replace(case, tokens=tokens, fp8=True), tuning, repeats=10)


@pytest.mark.parametrize(
    "case",
    [
        QWEN3,
        dataclasses.replace(QWEN3, normalize=False, heads=0),
        mixture_cases.Case(4096, 4096, 1536, 8, heads=8192 + 1024),  # Qwen3-235B-A22B
        mixture_cases.Case(192, 256, 128, 3, heads=384, gate="gelu", offset=1.0, dtype="float16"),
    ],
    ids=["Qwen3-30B-A3B", "its last, shares of all experts", "Qwen3-235B-A22B", "small"],
)
@pytest.mark.parametrize("by_tile", [False, True])
def test_mixtures(case, by_tile):
    """With parts added up by tokens, and by tiles, as engines have them in bfloat16."""
    mixture_cases.check_mixture(case, dataclasses.replace(FEW_OF_ONE, by_tile=by_tile), repeats=10)


MODELS = [(name, tokens) for name in ("llama-3.1-8b", "gemma-3-12b") for tokens in (2, 64, 96)]


@pytest.mark.parametrize(
    ("name", "tokens"), [*MODELS, ("llama-3.2-3b", 8), ("qwen2.5-7b", 32), ("qwen3-30b-a3b", 1)]
)
def test_models_with_it_and_without(name, tokens):
    """As the engine has it, with the tuning of the device; norms are no ones, and MLPs weigh as much as the stream."""
    config = SHAPES[name].replace(num_layers=3, sliding_layers=(), vocab_size=1024)
    keys = iter(jax.random.split(jax.random.key(0), 100))

    def draw(spec):
        scale = config.hidden_size**-0.5 if len(spec.shape) > 1 else 0.3
        return jax.random.normal(next(keys), spec.shape, jnp.bfloat16) * scale + (len(spec.shape) == 1)

    params, at = map_specs(draw, param_specs(config)), jnp.arange(tokens)
    outs = []
    for left_out in ((), PRODUCTS):
        with on_any_gpu(TUNING), without(*left_out):
            of = config.replace(name=f"{name}, {len(left_out)}")
            assert has_layer_kernel(params["layers"], params["embed"][:tokens], of) == (not left_out)
            outs.append(
                jax.jit(lambda params, of=of: forward(params, of, at, at, queries_as_result, ())[0])(params)
            )
    assert jnp.linalg.norm(outs[0] - outs[1]) < 0.03 * jnp.linalg.norm(outs[1])


def test_counters_serve_one_layer_after_another():
    attended, x, weights = Case(64, *LLAMA).arrays()

    @jax.jit
    def run(counters, x):
        heads = 0
        for _ in range(8):
            x, more = lp.layer_products(attended, x, weights, counters, eps=1e-5, tuning=FEW)
            x, heads = x * 0.5, heads + more
        return x, heads

    outs = run(lp.counters_of(jnp.arange(2)), x)
    for _ in range(5):
        jax.tree.map(np.testing.assert_array_equal, run(lp.counters_of(jnp.arange(2)), x), outs)
