"""How much of a GPU's memory the KV pool gets."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from models.registry import LoadedModel
from models.testing import random_params, tiny_config, tiny_tokenizer
from serve import pool_size
from serve.args import ConfigError, ServeConfig
from tangram_jax.cache import row_layout
from tangram_jax.plan import CachePlan
from tangram_jax.profile import BudgetProfile


def test_the_table_of_all_rows_has_room_beside_the_pool(monkeypatch):
    """2 MB a row of 128K tokens, where 256 heads have pages of their own and keep everything."""
    config = tiny_config()
    model = LoadedModel(config, random_params(config), tiny_tokenizer(), "tiny")
    plan = CachePlan.build(BudgetProfile.uniform(config.num_layers, config.num_kv_heads, 1.0), 1, 64)
    device = SimpleNamespace(memory_stats=lambda: {"bytes_limit": 80 * 2**30})
    monkeypatch.setattr(jax, "local_devices", lambda: [device])

    def free(rows: int) -> int:
        return pool_size.pool_bytes(
            ServeConfig(), model, plan, None, None,
            step=2048, length=100_000, tail=256, rows=rows, dtype=jnp.bfloat16, on_gpu=True,
        )  # fmt: skip

    assert free(0) - free(320) == 320 * 4 * row_layout(plan, 100_000, 256).width


@pytest.mark.parametrize(
    ("least", "retention", "advice"),
    [(0, 1.0, "a lower --retention, or"), (4096, 0.1, "a lower --min-entries or --tail-limit, or")],
)
def test_a_pool_that_is_too_small_says_what_helps(least, retention, advice):
    plan = CachePlan.build(BudgetProfile.uniform(2, 2, retention), 1, 16, min_entries=least)
    settings = ServeConfig(num_pages=40, max_model_len=448)
    with pytest.raises(
        ConfigError, match=rf"needs up to \d+: write --num-pages \d+, or {advice} --max-model-len"
    ):
        pool_size.shorter_request(settings, plan, 40, 448, 16, 1)
