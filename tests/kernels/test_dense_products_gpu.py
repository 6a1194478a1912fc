"""The kernel for products of some dozens of tokens on a GPU, against the reference."""

import jax.numpy as jnp
import numpy as np
import pytest

from models.products import gated_product, product
from models.testing import tiny_config
from pallas_kernels.dense_products import Tuning
from pallas_kernels.gates import in_halves
from tests.kernels.dense_cases import check_added, check_products
from tests.kernels.expert_cases import relative_error

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("tokens", [40, 64, 72, 128])
@pytest.mark.parametrize(
    ("depth", "columns", "gate", "tuning"),
    [
        (4096, 6144, None, Tuning(columns=64)),
        (4096, 4096, None, Tuning(columns=64, splits=2)),
        (4096, 28672, "silu", Tuning(columns=128)),
        (14336, 4096, None, Tuning(columns=64, splits=2)),
        (3840, 30720, "gelu", Tuning(columns=128)),
        (9728, 2560, None, Tuning(columns=64, splits=2)),
    ],
)
def test_products_of_models(tokens, depth, columns, gate, tuning, dtype):
    check_products(tokens, depth, columns, gate, tuning, dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("tokens", [1, 2, 5, 8, 32])
@pytest.mark.parametrize(
    ("depth", "columns", "tuning"),
    [
        (2880, 5120, Tuning(columns=64)),
        (4096, 2880, Tuning(columns=64, splits=2)),
        (2048, 5120, Tuning(columns=64)),
    ],
)
def test_products_of_few_tokens(tokens, depth, columns, tuning, dtype):
    check_products(tokens, depth, columns, None, tuning, dtype)


@pytest.mark.parametrize("tokens", [8, 64, 104, 128])
@pytest.mark.parametrize(
    ("depth", "columns", "gate", "tuning"),
    [
        (64, 64, None, Tuning(columns=64)),
        (128, 64, None, Tuning(columns=64, splits=2)),
        (1152, 1536, None, Tuning(columns=128, splits=2)),
        (576, 256, "silu", Tuning(columns=64)),
        (64, 128 * 300, None, Tuning(columns=128)),
    ],
    ids=["one step", "a step each", "odd number of steps", "gated", "more CTAs than multiprocessors"],
)
def test_other_cuts(tokens, depth, columns, gate, tuning):
    check_products(tokens, depth, columns, gate, tuning, "bfloat16")


@pytest.mark.parametrize("tokens", [8, 40, 72, 128])
@pytest.mark.parametrize(
    ("depth", "columns", "tuning", "gate", "gates"),
    [
        (4096, 4096, Tuning(columns=64, splits=2), "silu", Tuning(columns=128)),
        (14336, 4096, Tuning(columns=64, splits=2), "gelu", Tuning(columns=64)),
        (9728, 2560, Tuning(columns=64, splits=2), "silu", Tuning(columns=64)),
        (2560, 4096, Tuning(columns=64), "silu", Tuning(columns=128)),
        (576, 1536, Tuning(columns=128), "silu", Tuning(columns=64)),
    ],
)
def test_residual_and_norm(tokens, depth, columns, tuning, gate, gates):
    check_added(tokens, depth, columns, tuning, gate, gates, 1.0 if gate == "gelu" else 0.0)


@pytest.mark.parametrize("gate", ["silu", "gelu"])
def test_a_model_has_them(gate):
    """By the kernel where it was measured, else by XLA."""
    config = tiny_config(hidden_size=4096, intermediate_size=8192, gelu=gate == "gelu")
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((64, 4096)), jnp.bfloat16)
    weights = jnp.asarray(rng.standard_normal((4096, 2, 8192)) / 64, jnp.bfloat16)
    exact = jnp.matmul(x.astype(jnp.float32), weights.reshape(4096, -1).astype(jnp.float32))
    assert relative_error(product(x, weights, (2, 8192), config).reshape(64, -1), exact) < 2.0**-8
    assert relative_error(gated_product(x, weights, config), in_halves(exact, gate)) < 3 * 2.0**-8
