"""Which norms give their products tokens in FP8, and that the others are what they were."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.gpu_program import as_on_hopper
from models import products
from models.attention import dense_attend
from models.fp8_weights import in_fp8, quantised
from models.params import ParamSpec
from models.products import added_norm
from models.testing import random_params, tiny_config, tiny_gemma2_config
from models.transformer import forward
from pallas_kernels import fp8_products as fp8
from pallas_kernels.norms import rms_norm

CONFIGS = {
    "llama": tiny_config(num_layers=2),
    "gemma 2": tiny_gemma2_config(num_layers=2, sliding_layers=(0,)),
    "experts": tiny_config(
        num_layers=2, num_experts=6, experts_per_token=2, expert_size=64, dense_layers=(0,)
    ),
}
DYNAMIC = tiny_config(activations_fp8=True, norm_offset=1.0)
X, ADDED = jnp.asarray(np.random.default_rng(0).standard_normal((2, fp8.LEAST_NARROW, 64)), jnp.bfloat16)
NORM = jnp.linspace(-1, 1, 64, dtype=jnp.bfloat16)
WEIGHTS = quantised(jnp.eye(64), ParamSpec((64, 64), (None,) * 2, 64))


def given_for(x, weights, config):
    """What `added_norm` gives a product on a Hopper GPU, in shapes."""
    with as_on_hopper():
        norm = jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
        return jax.eval_shape(lambda x, norm: added_norm(x, x, norm, weights, config)[1], x, norm)


def test_when_norms_give_codes():
    """Of many tokens in bfloat16, for FP8 weights alone, where tokens may be in FP8."""
    codes = given_for(X, WEIGHTS, DYNAMIC)
    assert isinstance(codes, fp8.Fp8Tokens) and (codes.count, codes.codes.shape[1]) == X.shape
    wide = jax.ShapeDtypeStruct((256, fp8.MOST_NORMED + 64), jnp.bfloat16)
    for x, weights, config in (
        (X, WEIGHTS, DYNAMIC.replace(activations_fp8=False)),
        (X, jnp.eye(64, dtype=jnp.bfloat16), DYNAMIC),
        (X, None, DYNAMIC),
        (X[1:], WEIGHTS, DYNAMIC),
        (X.astype(jnp.float32), WEIGHTS, DYNAMIC),
        (wide, WEIGHTS, DYNAMIC),
    ):
        assert given_for(x, weights, config) == jax.ShapeDtypeStruct(x.shape, x.dtype)


def test_elsewhere_it_is_sum_and_norm():
    total, h = added_norm(X, ADDED, NORM, WEIGHTS, DYNAMIC)
    np.testing.assert_array_equal(total, X + ADDED)
    np.testing.assert_array_equal(h, rms_norm(X + ADDED, NORM, DYNAMIC.norm_eps, 1.0))
    total, h = added_norm(X, None, NORM, WEIGHTS, DYNAMIC)
    assert total is X
    np.testing.assert_array_equal(h, rms_norm(X, NORM, DYNAMIC.norm_eps, 1.0))


@pytest.mark.parametrize("kind", CONFIGS)
def test_norms_that_give_codes_change_nothing(kind, monkeypatch):
    """All but those that a router reads. References stand in for the kernels; without these, products quantise tokens."""
    params, config = in_fp8(random_params(CONFIGS[kind], 0), CONFIGS[kind])
    tokens = jnp.arange(fp8.LEAST_NARROW)

    def logits(config):
        return forward(params, config, tokens, tokens, dense_attend(tokens, config=config), None)[0]

    want = logits(config.replace(activations_fp8=True))
    assert not np.array_equal(want, logits(config))
    given = []

    def normed(x, weight, *, added, **how):
        given.append(added is not None)
        return fp8.normed_tokens_reference(x, weight, added=added, **how)

    monkeypatch.setattr(products, "_has_kernel", lambda *_: True)
    monkeypatch.setattr(fp8, "fp8_products", fp8.fp8_products_reference)
    monkeypatch.setattr(fp8, "quantise_tokens", fp8.quantise_tokens_reference)
    monkeypatch.setattr(fp8, "normed_tokens", normed)
    got = logits(config.replace(activations_fp8=True, name="not traced before"))
    # Traces: of the first layer's attention, of an MLP, of the others' attention.
    assert given == [False, True, True]
    np.testing.assert_array_equal(got, want)
