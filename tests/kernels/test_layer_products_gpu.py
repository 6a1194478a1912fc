"""A layer's products as one kernel on a GPU, against the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import layer_products as lp
from tests.kernels.layer_cases import Case, check_layer

pytestmark = pytest.mark.gpu
FEW = lp.Tuning(ctas=132, weight_slots=11, token_slots=4)
MANY = lp.Tuning(ctas=132, weight_slots=8, token_slots=5, early=1)


@pytest.mark.parametrize("tokens", [8, 24, 64, 72, 96, 128])
@pytest.mark.parametrize(
    "case",
    [
        Case(0, 4096, 4096, 14336),
        Case(0, 4096, 3840, 15360, gate="gelu", offset=1.0),
        Case(0, 4096, 2560, 9728, dtype="float16"),
        Case(0, 576, 512, 1536),
    ],
    ids=["Llama-3.1-8B", "Gemma-3-12B", "Qwen3-4B", "small"],
)
def test_layers_of_models(case, tokens):
    case = Case(tokens, case.attended, case.width, case.inner, case.gate, case.offset, case.dtype)
    check_layer(case, FEW if tokens <= 64 else MANY, repeats=10)


def test_counters_serve_one_layer_after_another():
    attended, x, *weights = Case(64, 4096, 4096, 14336).arrays()

    @jax.jit
    def run(counters, x):
        for _ in range(8):
            x = lp.layer_products(attended, x, *weights, counters, eps=1e-5, tuning=FEW) * 0.5
        return x

    out = run(lp.counters_of(jnp.arange(2)), x)
    for _ in range(5):
        np.testing.assert_array_equal(run(lp.counters_of(jnp.arange(2)), x), out)
