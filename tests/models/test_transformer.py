"""The forward pass: attention as an argument, dense attention, RoPE, decoding with a dense cache."""

import dataclasses
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beartype import beartype
from jaxtyping import TypeCheckError, jaxtyped

from models.attention import QUERY_BLOCK, causal_attention, dense_attend, masked_attention
from models.config import ModelConfig, RopeScaling
from models.params import abstract_params, num_parameters
from models.rope import rope_frequencies, rope_tables, rotate
from models.testing import random_params, reference_decode, tiny_config
from models.transformer import forward
from pallas_kernels.norms import rms_norm

CONFIG = tiny_config()
PARAMS = random_params(CONFIG)


def test_forward_threads_state_and_calls_layers_in_order():
    def attend(state, layer, q, k, v):
        assert q.shape == (5, 8, 16) and k.shape == v.shape == (5, 4, 16)
        return q, [*state, layer]

    tokens = jnp.arange(5, dtype=jnp.int32)
    logits, state = forward(PARAMS, CONFIG, tokens, tokens, attend, [])
    assert state == [0, 1, 2, 3]
    assert logits.shape == (5, 264) and logits.dtype == jnp.float32


def test_logits_at_selects_rows():
    tokens = jnp.asarray([9, 50, 200, 7], jnp.int32)
    positions = jnp.arange(4, dtype=jnp.int32)
    everything, _ = forward(PARAMS, CONFIG, tokens, positions, dense_attend(positions), None)
    rows = jnp.asarray([3, 1], jnp.int32)
    some, _ = forward(PARAMS, CONFIG, tokens, positions, dense_attend(positions), None, logits_at=rows)
    np.testing.assert_allclose(some, everything[rows], atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_activations_keep_the_dtype_of_the_weights(dtype):
    params = random_params(CONFIG, dtype=dtype)
    seen = set()

    def attend(state, layer, q, k, v):
        seen.update((q.dtype, k.dtype, v.dtype))
        return q.astype(jnp.float32), state

    tokens = jnp.arange(3, dtype=jnp.int32)
    logits, _ = forward(params, CONFIG, tokens, tokens, attend, None)
    assert seen == {jnp.dtype(dtype)} and logits.dtype == jnp.float32


def test_a_layer_is_traced_once(monkeypatch):
    """Guards the time to trace: 30 layers must not mean 30 traces of the layer."""
    import models.products
    import models.transformer

    calls = []
    for module in (models.products, models.transformer):
        monkeypatch.setattr(module, "rms_norm", lambda *args: calls.append(1) or rms_norm(*args))
    config = tiny_config(num_layers=8, norm_eps=1.25e-5)  # a configuration that no other test has traced
    tokens = jnp.arange(3, dtype=jnp.int32)
    jax.jit(lambda p: forward(p, config, tokens, tokens, dense_attend(tokens), None)[0]).trace(
        abstract_params(config, jnp.float32)
    )
    assert len(calls) == 4  # before the first attention, before the others, after each, before the head


def numpy_attention(q, k, v, visible):
    out = np.zeros_like(q)
    for t in range(q.shape[0]):
        for n in range(q.shape[1]):
            kv = n // (q.shape[1] // k.shape[1])
            entries = np.flatnonzero(visible[t])
            scores = k[entries, kv] @ q[t, n] * q.shape[2] ** -0.5
            weights = np.exp(scores - scores.max())
            out[t, n] = weights @ v[entries, kv] / weights.sum()
    return out


def test_causal_attention_agrees_with_numpy():
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(13, heads, 8)).astype(np.float32) for heads in (6, 2, 2))
    positions = rng.permutation(13).astype(np.int32)
    visible = positions[None] <= positions[:, None]
    attend = dense_attend(jnp.asarray(positions))
    out, state = attend("state", 0, *map(jnp.asarray, (q, k, v)))
    assert state == "state"
    np.testing.assert_allclose(out, numpy_attention(q, k, v, visible), atol=1e-5)


def test_long_attention_is_computed_in_blocks():
    rng = np.random.default_rng(1)
    T = 2 * QUERY_BLOCK + 37
    q, k, v = (jnp.asarray(rng.normal(size=(T, heads, 8)), jnp.float32) for heads in (2, 1, 1))
    positions = jnp.arange(T, dtype=jnp.int32)
    out = causal_attention(q, k, v, positions, positions)
    rows = jnp.asarray([0, 511, 512, 700, T - 1])
    some = causal_attention(q[rows], k, v, positions[rows], positions)
    np.testing.assert_allclose(out[rows], some, atol=1e-5)


def test_reference_decode_equals_recomputing():
    prompt = [3, 77, 150, 9, 22]
    ids, logits = reference_decode(PARAMS, CONFIG, prompt, 6)
    tokens = jnp.asarray(prompt + ids[:-1], jnp.int32)
    positions = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    expected, _ = forward(PARAMS, CONFIG, tokens, positions, dense_attend(positions), None)
    np.testing.assert_allclose(logits, expected[len(prompt) - 1 :], atol=1e-4)
    assert ids == jnp.argmax(expected[len(prompt) - 1 :], axis=1).tolist()


def test_random_logits_depend_on_every_position():
    """The tiny model must notice a token far back, or tests built on it would notice nothing."""
    tokens = jnp.arange(20, 84, dtype=jnp.int32)
    positions = jnp.arange(64, dtype=jnp.int32)
    last = jnp.asarray([63])

    def logits(tokens):
        return forward(PARAMS, CONFIG, tokens, positions, dense_attend(positions), None, logits_at=last)[0]

    changes = [float(jnp.abs(logits(tokens.at[i].set(250)) - logits(tokens)).max()) for i in (0, 17, 40, 62)]
    assert min(changes) > 1e-3


def test_rope_is_a_rotation_by_position():
    x = jax.random.normal(jax.random.key(0), (2, 7, 3, 16))
    positions = jnp.asarray([0, 1, 2, 100, 1000, 5000, 8191], jnp.int32)
    rotated = rotate(x, *rope_tables(positions, CONFIG))
    np.testing.assert_allclose(rotated[:, 0], x[:, 0], atol=1e-6)
    angle = 100 * 10000 ** (-2 * 3 / 16)  # pair 3 is (x[3], x[3 + 8])
    expected = x[..., 3, :, 3] * np.cos(angle) - x[..., 3, :, 11] * np.sin(angle)
    np.testing.assert_allclose(rotated[:, 3, :, 3], expected, atol=1e-4)
    np.testing.assert_allclose(jnp.linalg.norm(rotated, axis=-1), jnp.linalg.norm(x, axis=-1), rtol=1e-5)


def test_rope_scaling():
    plain = rope_frequencies(CONFIG)
    linear = rope_frequencies(tiny_config(rope_scaling=RopeScaling(kind="linear", factor=4.0)))
    np.testing.assert_allclose(linear, plain / 4, rtol=1e-6)
    llama3 = RopeScaling(kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
    scaled = rope_frequencies(tiny_config(rope_scaling=llama3, rope_theta=500000.0, head_dim=128))
    plain = rope_frequencies(tiny_config(rope_theta=500000.0, head_dim=128))
    np.testing.assert_allclose(scaled[:20], plain[:20], rtol=1e-6)  # short wavelengths are kept
    np.testing.assert_allclose(scaled[-20:], plain[-20:] / 8, rtol=1e-6)  # long ones divided
    sudden = dataclasses.replace(llama3, low_freq_factor=4.0)  # no blend between them
    scaled_at_once = rope_frequencies(tiny_config(rope_scaling=sudden, rope_theta=500000.0, head_dim=128))
    slow = 8192 * plain / (2 * np.pi) <= 4
    np.testing.assert_allclose(scaled_at_once, np.where(slow, plain / 8, plain), rtol=1e-6)
    factors = RopeScaling(kind="factors", factors=tuple(float(x) for x in plain / scaled))
    by_factors = rope_frequencies(tiny_config(rope_scaling=factors, rope_theta=500000.0, head_dim=128))
    np.testing.assert_allclose(by_factors, scaled, rtol=1e-6)
    with pytest.raises(ValueError, match="expected llama3"):
        rope_frequencies(tiny_config(rope_scaling=RopeScaling(kind="longrope")))


def test_config_is_validated_and_hashable():
    assert hash(CONFIG) == hash(tiny_config()) and CONFIG.group_size == 2 and CONFIG.attention_scale == 0.25
    with pytest.raises(ValueError, match="multiple of num_kv_heads"):
        tiny_config(num_heads=9, num_kv_heads=4)
    with pytest.raises(ValueError, match="num_layers must be at least 1"):
        tiny_config(num_layers=0)
    with pytest.raises(ValueError, match="even"):
        tiny_config(head_dim=15)


def test_number_of_parameters_of_known_models():
    smollm2 = ModelConfig(
        name="s", vocab_size=49152, num_layers=30, hidden_size=576, intermediate_size=1536, num_heads=9,
        num_kv_heads=3, head_dim=64, max_positions=8192, tie_embeddings=True,
    )  # fmt: skip
    llama3_8b = ModelConfig(
        name="l", vocab_size=128256, num_layers=32, hidden_size=4096, intermediate_size=14336, num_heads=32,
        num_kv_heads=8, head_dim=128, max_positions=131072,
    )  # fmt: skip
    assert num_parameters(smollm2) == 134_515_008
    assert num_parameters(llama3_8b) == 8_030_261_248


def test_shapes_and_dtypes_are_as_annotated():
    """The annotations are checked here by beartype, at no cost in production."""

    def checked(function):
        return jaxtyped(function, typechecker=beartype)

    tokens = jnp.arange(6, dtype=jnp.int32)
    check_forward = checked(inspect.unwrap(forward))
    check_forward(PARAMS, CONFIG, tokens, tokens, dense_attend(tokens), None, logits_at=tokens[:2])
    with pytest.raises(TypeCheckError, match="positions"):
        check_forward(PARAMS, CONFIG, tokens, tokens[:5], dense_attend(tokens), None)
    with pytest.raises(TypeCheckError, match="tokens"):
        check_forward(PARAMS, CONFIG, tokens.astype(jnp.float32), tokens, dense_attend(tokens), None)
    q, k = jnp.ones((6, 8, 16)), jnp.ones((9, 4, 16))
    check_attention = checked(masked_attention)
    check_attention(q, k, k, jnp.ones((6, 9), bool))
    with pytest.raises(TypeCheckError, match="mask"):
        check_attention(q, k, k, jnp.ones((9, 6), bool))
    checked(rotate)(q, *rope_tables(tokens, CONFIG))
