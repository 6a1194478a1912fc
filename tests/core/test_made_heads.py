"""Decode steps whose attention makes the heads itself: what the step hands it, with the reference in its place."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tangram_jax as tj
from benchmarks.decode_ways import without
from benchmarks.gpu_program import as_on_hopper
from models.testing import random_params, tiny_config
from pallas_kernels import byte_pages, decode_layer
from pallas_kernels import ragged_decode as rd
from tangram_jax.attention import DecodeAttention
from tests.core.two_steps import GEMMA, SHAPE, after_prompts, random_weights, trace_other_steps, two_steps
from tests.kernels.decode_layer_cases import heads_of
from tests.kernels.ragged_cases import make_case
from tests.kernels.test_layer_products import small_weights  # noqa: F401

MIXTURE = {"num_experts": 4, "experts_per_token": 2, "expert_size": 64}


@pytest.fixture
def made(monkeypatch):
    """Layers whose heads the attention made."""
    calls = []

    def of_heads(self, layer, heads, made, sinks=None):
        calls.append(layer)
        qkv = rd.heads_reference(heads, made)
        return self(layer, qkv, sinks), qkv[:, :, -2:]

    monkeypatch.setattr(DecodeAttention, "makes_heads", lambda self: True)
    monkeypatch.setattr(DecodeAttention, "of_heads", of_heads)
    return calls


@pytest.mark.parametrize(
    "changes",
    [
        GEMMA | {"qkv_bias": True, "num_layers": 3, "sliding_layers": (0, 2)},
        MIXTURE | {"num_layers": 2, "qk_norm": True},
        {"num_layers": 2, "weights_fp8": True, "attention_sinks": True},
        {"num_layers": 2, "qk_norm": True, "qkv_bias": True, "attn_out_bias": True},
    ],
    ids=["windows, norms and biases", "experts", "FP8, sinks", "biases, also of what attention gives"],
)
def test_a_step_with_heads_made_is_the_same_step(request, changes):
    config = tiny_config(**SHAPE | changes)
    params = random_params(config) if config.weights_fp8 else random_weights(config)
    before = after_prompts(config, params)
    expected, cache = two_steps(config, params, *before)
    calls = request.getfixturevalue("made")
    got, other = two_steps(config.replace(name="made"), params, *before)
    assert len(calls) == config.num_layers
    np.testing.assert_allclose(got, expected, rtol=2e-4, atol=2e-4)
    np.testing.assert_allclose(other.pool, cache.pool, rtol=2e-4, atol=2e-4)
    np.testing.assert_array_equal(other.tail, cache.tail)


def test_steps_with_anything_else_have_theirs_made_for_them(made):
    trace_other_steps()
    assert not made


@pytest.mark.parametrize("changes", [{}, MIXTURE], ids=["layers' products as one kernel", "experts"])
def test_steps_lower(changes, small_weights, monkeypatch, caplog):  # noqa: F811
    config = tiny_config(**SHAPE | changes | {"head_dim": 128, "num_layers": 2})
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), random_params(config))
    plan = tj.CachePlan.build(tj.BudgetProfile.uniform(2, config.num_kv_heads, 0.5), 2, 32)
    cache = tj.init_cache(
        plan, config, num_pages=64, max_requests=4, max_tokens=256, max_tail=32, dtype=jnp.bfloat16
    )
    rows, given, attend = np.arange(4, dtype=np.int32), [], rd.ragged_decode

    def ragged_decode(q, *arguments, **options):
        given.append(q.parts.shape)
        return attend(q, *arguments, **options)

    monkeypatch.setattr(rd, "ragged_decode", ragged_decode)
    step = partial(tj.decode_step, params, config, plan, rows=rows, tokens=rows)
    with as_on_hopper(), without(decode_layer):
        text = jax.jit(step).trace(cache).lower(lowering_platforms=("cuda",)).as_text()
    columns = 2 * (4 + 2) * 128
    product, parts = (1, 4, columns), (1, 64, columns)
    assert given == ([product] * 2 if changes else [product, parts])
    assert re.findall("kernel_hash = ", text) and not caplog.records


@pytest.mark.parametrize(
    ("shape", "dtype", "tokens", "makes"),
    [
        ((128, 8, 4, 128), jnp.bfloat16, 1, True),
        ((1, 8, 8, 64), jnp.float16, 1, True),
        ((136, 8, 4, 128), jnp.bfloat16, 1, False),
        ((8, 8, 2, 256), jnp.bfloat16, 1, False),
        ((8, 8, 4, 128), byte_pages.DTYPE, 1, False),
        ((8, 8, 4, 128), jnp.bfloat16, 4, False),
    ],
    ids=str,
)
def test_where_attention_makes_heads(shape, dtype, tokens, makes):
    assert rd.makes_heads(shape, dtype, tokens=tokens) == makes


def test_heads_that_the_kernel_cannot_make_are_refused():
    case = make_case(np.full((2, 2), 40), new=True, head_dim=256)
    heads, made = heads_of(case)
    plan = jax.jit(rd.plan_decode, static_argnames="page_size")(
        jnp.asarray(case.lengths), case.table, case.first, case.column, page_size=case.page_size
    ).layer(0)
    with (
        as_on_hopper(),
        pytest.raises(NotImplementedError, match="heads of 256: the kernel makes heads of up to 128"),
    ):
        rd.ragged_decode(heads, case.pool, plan, scale=case.scale, has_new=True, made=made)
