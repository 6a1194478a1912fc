"""The FLOPs that a step with a chunk is measured by, and a step of a small model."""

import argparse
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tangram_jax as tj
from benchmarks import prefill_step
from benchmarks.decode_step import random_weights
from benchmarks.gpu_program import as_on_hopper
from benchmarks.shapes import GEMMA_3_12B, LLAMA_8B, QWEN3_30B_A3B
from models.config import ModelConfig
from models.testing import random_params
from pallas_kernels import chunk_prefill, gaussian

TINY = ModelConfig(
    name="tiny", vocab_size=128, num_layers=2, hidden_size=64, intermediate_size=128, num_heads=4, num_kv_heads=2,
    head_dim=32, max_positions=512, rope_theta=10_000.0,
)  # fmt: skip


def plan_of(config, retention=1.0):
    return tj.CachePlan.build(
        prefill_step.ragged(config, retention), 1, 64, sliding=tj.SlidingLayers.of(config, max_tail=64)
    )


def test_flops_of_a_dense_model():
    plan = plan_of(LLAMA_8B)
    each = 2 * 32 * 218_103_808  # weights of the layers
    assert prefill_step.step_flops(LLAMA_8B, plan, 1, 0, 0) == each + 4 * 128 * 32 * 32
    alone = prefill_step.step_flops(LLAMA_8B, plan, 100, 0, 0)
    assert alone == 100 * each + 4 * 128 * 32 * 32 * 5050
    # All of the history is kept, and each query sees it.
    assert prefill_step.step_flops(LLAMA_8B, plan, 100, 640, 0) == alone + 4 * 128 * 32 * 32 * 64_000
    beside = prefill_step.step_flops(LLAMA_8B, plan, 100, 0, 2)
    assert beside == alone + 2 * (each + 4 * 128 * 32 * 32 * 8192)


def test_flops_of_experts_and_windows():
    """Of the experts those that a token goes through; in a window no more than it."""
    routed = prefill_step.step_flops(QWEN3_30B_A3B, plan_of(QWEN3_30B_A3B), 1, 0, 0)
    assert 2 * 2.4e9 < routed < 2 * 3.3e9
    plan = plan_of(GEMMA_3_12B)
    shape = 4 * 256 * 16  # of a query and a key, of all heads

    def flops(*case):
        return prefill_step.step_flops(GEMMA_3_12B, plan, *case)

    # Of eight times as many tokens: 40 layers whose tokens see 1024 each but for the first ones, 8 whose see all.
    windows, full = 8192 * 1024 - 1024 * 1023 / 2, 8192 * 8193 / 2
    few = 1024 * 1025 / 2
    more = shape * (40 * (windows - 8 * few) + 8 * (full - 8 * few))
    assert flops(8192, 0, 0) == pytest.approx(8 * flops(1024, 0, 0) + more, rel=1e-12)
    # A token more that decodes sees a window too, however short the chunk.
    products = 2 * (flops(1, 0, 0) - shape * 48) / 2
    assert flops(4, 0, 1) - flops(4, 0, 0) == pytest.approx(
        products + shape * (40 * 1024 + 8 * 8192), rel=1e-12
    )


def test_flops_of_chunks_that_share_a_step():
    plan = plan_of(LLAMA_8B)
    assert prefill_step.step_flops(LLAMA_8B, plan, 400, 640, 0, 4) == 4 * prefill_step.step_flops(
        LLAMA_8B, plan, 100, 640, 0
    )


@pytest.mark.parametrize("rows", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_step_of_a_small_model(monkeypatch, rows):
    monkeypatch.setattr(prefill_step, "DECODING", 128)
    args = argparse.Namespace(sustained=False, profile=False, heads_per_page=None)
    row = prefill_step.measure(random_weights(TINY), TINY, (64, 64, 2, rows), 1e12, args)
    assert row["ms"] > 0 and row["decoding"] == 2 and row["of_roof"] < 1


@pytest.mark.parametrize(("calls", "chunks"), [(nullcontext, 2), (prefill_step.calls_of_their_own, 1)])
def test_packed_chunks_have_calls_of_their_own_where_asked(calls, chunks, monkeypatch):
    config = TINY.replace(head_dim=64, sliding_window=40, sliding_layers=(0,))
    plan, counts = plan_of(config, 0.5), []
    cache = tj.init_cache(
        plan, config, num_pages=64, max_requests=2, max_tokens=256, max_tail=64, dtype=jnp.bfloat16
    )
    packed = tj.Packed.of([0, 1], [np.arange(20, dtype=np.int32)] * 2, 64)
    scorer = tj.get_scorer("expected_attention")

    def attention(q, k, v, pool, plan, **_):
        counts.append(len(plan.starts))
        return q, jnp.zeros(q.shape[:3])

    def logits(*args, starts, **how):
        counts.append(len(starts))
        return gaussian.gaussian_logits_reference(*args, starts=starts, **how)

    monkeypatch.setattr(chunk_prefill, "chunk_prefill", attention)
    monkeypatch.setattr(gaussian, "gaussian_logits", logits)
    params = random_params(config, 0, jnp.bfloat16)
    with as_on_hopper(), calls():
        jax.eval_shape(lambda cache: tj.step(params, config, plan, scorer, cache, packed, None), cache)
    assert counts == [chunks] * (3 * 2 // chunks)  # attention of two layers, scores of one
