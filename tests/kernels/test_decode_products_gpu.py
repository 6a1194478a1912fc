"""The products between two attentions on a Hopper GPU."""

import jax.numpy as jnp
import pytest

from pallas_kernels import decode_products as dp
from tests.kernels.test_decode_products import EPS, operands, relative

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("tokens", [8, 32, 64])
def test_against_plain_operations(tokens, dtype):
    args = operands(tokens, kv_heads=4, group=4, inner=3584, dtype=dtype)
    x, heads = dp.layer_products(*args, eps=EPS)
    want = dp.layer_products_reference(*args, eps=EPS)
    for got, expected in zip((x, *heads), want, strict=True):
        assert relative(got, expected) < 0.01
    _, stream, *_, norm, w_qkv, cos, sin = args
    got = dp.project_qkv(stream, norm, w_qkv, cos, sin, eps=EPS)
    for a, b in zip(got, dp.project_qkv_reference(stream, norm, w_qkv, cos, sin, eps=EPS), strict=True):
        assert relative(a, b) < 0.01


def test_last_layer_has_no_heads():
    args = list(operands(8))
    args[7] = None
    x, heads = dp.layer_products(*args, eps=EPS)
    assert heads is None
    assert relative(x, dp.layer_products_reference(*args, eps=EPS)[0]) < 0.01


def test_repeats_are_equal():
    args = operands(32, kv_heads=8, group=4, inner=14336)
    x, heads = dp.layer_products(*args, eps=EPS)
    for _ in range(20):
        again, heads_again = dp.layer_products(*args, eps=EPS)
        for a, b in zip((x, *heads), (again, *heads_again), strict=True):
            assert bool((a == b).all())
