"""KV heads sharded over simulated devices: the same logits and tokens as on one."""

import os
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import jax
import numpy as np
import pytest

import tangram_jax as tj
from models.sharding import pad_heads, shard_params, tensor_mesh
from models.testing import random_params, tiny_config
from tangram_jax.sharding import shard_cache


def run(
    params, config, mesh=None, *, prompt: int, steps: int, dtype=np.float32
) -> tuple[np.ndarray, list[int]]:
    """(logits after the prompt, greedy tokens), prompt in two chunks, ragged budgets, heads of all layers grouped."""
    shape = (config.num_layers, config.num_kv_heads)
    # Zero heads have no attention worth keeping; padded and plain models must agree, so budgets go by head number.
    budgets = np.random.default_rng(0).uniform(0.3, 0.9, (config.num_layers, 1)).repeat(shape[1], 1)
    profile = tj.BudgetProfile.from_ratios(budgets[None].astype(np.float32), retention=0.5, alpha=0.0)
    plan = tj.CachePlan.build(
        profile, heads_per_page=config.num_kv_heads, page_size=16, window=8, min_entries=16
    )
    cache = tj.init_cache(
        plan, config, num_pages=64, max_requests=2, max_tokens=256, max_tail=32, dtype=dtype
    )
    if mesh is not None:
        params, cache = shard_params(params, mesh, config=config), shard_cache(cache, mesh)
    prefill_chunk = jax.jit(
        tj.prefill_chunk, static_argnums=(1, 2), static_argnames="scorer", donate_argnames="cache"
    )
    decode_step = jax.jit(tj.decode_step, static_argnums=(1, 2), donate_argnames="cache")
    tokens = np.random.default_rng(1).integers(8, config.vocab_size, prompt).astype(np.int32)
    row = np.int32(1)
    cache = tj.reserve(plan, cache, row, np.int32(prompt), np.int32(steps))
    logits = None
    for part in np.split(tokens, 2):
        logits, cache = prefill_chunk(
            params,
            config,
            plan,
            cache,
            scorer=tj.get_scorer("snapkv"),
            row=row,
            tokens=part,
            count=np.int32(len(part)),
        )
    if mesh is not None:
        assert cache.pool.sharding.shard_shape(cache.pool.shape)[2] == config.num_kv_heads // mesh.size
    first = np.asarray(logits)
    chosen = [int(first.argmax())]
    for _ in range(steps):
        logits, cache = decode_step(
            params, config, plan, cache, rows=np.array([1], np.int32), tokens=np.array(chosen[-1:], np.int32)
        )
        chosen.append(int(np.asarray(logits)[0].argmax()))
    return first, chosen


def check_tiny() -> None:
    config = tiny_config(num_layers=2, num_heads=8, num_kv_heads=4)
    params = random_params(config, 0)
    want, tokens = run(params, config, prompt=40, steps=6)
    got, sharded = run(params, config, tensor_mesh(2), prompt=40, steps=6)
    np.testing.assert_allclose(got, want, atol=1e-4)
    assert sharded == tokens
    got, sharded = run(params, config, tensor_mesh(4), prompt=40, steps=1, dtype=np.uint8)
    # Rounding to bytes moves logits by 0.04, a wrong head by 1.
    np.testing.assert_allclose(got, want, atol=0.2)
    assert sharded == tokens[:2]


def check_padded_real_weights() -> None:
    """SmolLM2's 9 query and 3 KV heads do not divide: zero heads make them 24 and 8."""
    from models.registry import load_model

    model = load_model(progress=False)
    want, tokens = run(model.params, model.config, prompt=64, steps=8)
    params, config = pad_heads(model.params, model.config, 24, 8)
    for size in (2, 4):
        got, sharded = run(params, config, tensor_mesh(size), prompt=64, steps=8)
        np.testing.assert_allclose(got, want, atol=1e-3)
        assert sharded == tokens


def on_simulated_devices(function: str) -> None:
    root = Path(__file__).parents[2]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4"}
    environment["PYTHONPATH"] = os.pathsep.join([str(root), str(Path(__file__).parent)])
    code = f"import test_sharding as t; t.{function}(); print('agree')"
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert result.stdout.strip().endswith("agree"), result.stderr[-4000:]


def test_two_and_four_devices():
    on_simulated_devices("check_tiny")


@pytest.mark.slow
def test_padded_real_weights_on_two_and_four_devices():
    on_simulated_devices("check_padded_real_weights")


def test_columns_must_divide():
    config = tiny_config(num_layers=1)
    plan = tj.CachePlan.build(tj.BudgetProfile.uniform(1, 4, 0.5), heads_per_page=1)
    cache = tj.init_cache(plan, config, num_pages=4, max_requests=1, max_tokens=64)

    class TwoDevices:  # as much of a mesh as is looked at
        shape: ClassVar = {"tensor": 2}

    with pytest.raises(ValueError, match="heads_per_page a multiple of 2"):
        shard_cache(cache, TwoDevices())
