"""A layer's products as one kernel on a GPU, against the reference."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import layer_products as lp
from tests.kernels.layer_cases import Case, check_layer

pytestmark = pytest.mark.gpu
FEW = lp.Tuning(ctas=132, weight_slots=11, token_slots=4)
MANY = lp.Tuning(ctas=132, weight_slots=8, token_slots=5, early=1)


@pytest.mark.parametrize("tokens", [1, 7, 40, 64, 96])
@pytest.mark.parametrize(
    "case",
    [
        Case(0, 4096, 4096, 14336, 6144),
        Case(0, 4096, 3840, 15360, 8192, gate="gelu", offset=1.0, post_norms=True),
        Case(0, 4096, 2560, 9728, 6144, dtype="float16"),
        Case(0, 576, 512, 1536, 768),
        Case(0, 4096, 3840, 15360, gate="gelu", offset=1.0, post_norms=True),
        Case(0, 4096, 4096, 14336),
    ],
    ids=["Llama-3.1-8B", "Gemma-3-12B", "Qwen3-4B", "small", "Gemma's last", "Llama's last"],
)
def test_layers_of_models(case, tokens):
    check_layer(dataclasses.replace(case, tokens=tokens), FEW if tokens <= 64 else MANY, repeats=10)


def test_counters_serve_one_layer_after_another():
    attended, x, weights = Case(64, 4096, 4096, 14336, 6144).arrays()

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
