"""Mixtures of experts in GGUF files: read as llama.cpp reads them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.registry import load_model
from models.weights import WeightMismatchError, assemble_params
from tests.models.checkpoints import Tensors, golden_tensors
from tests.models.gguf_files import logits_of, with_tiny_vocabulary, write_gguf


def without_dense_layers(name):
    """A golden checkpoint whose layers are all mixtures: files in GGUF know no other."""
    source, config = golden_tensors(name)
    tensors = dict(source.tensors)
    for layer in config.dense_layers:
        for key in [key for key in tensors if f"layers.{layer}.mlp." in key]:
            del tensors[key]
        for key in [key for key in tensors if "layers.0.mlp." in key]:
            tensors[key.replace("layers.0.", f"layers.{layer}.")] = tensors[key]
    return with_tiny_vocabulary(Tensors(tensors), config.replace(dense_layers=(), normalize_experts=True))


@pytest.mark.parametrize(
    ("name", "architecture", "ints"),
    [
        ("tiny_mixtral", "llama", {"expert_count": 4, "expert_used_count": 2}),
        (
            "tiny_qwen3_moe",
            "qwen3moe",
            {"expert_count": 8, "expert_used_count": 3, "expert_feed_forward_length": 24},
        ),
    ],
    ids=["mixtral", "qwen3moe"],
)
def test_gguf_with_experts(name, architecture, ints, tmp_path, cache):
    source, config = without_dense_layers(name)
    ints = {f"{architecture}.{key}": value for key, value in ints.items()}
    path = write_gguf(tmp_path / "tiny.gguf", source, config, architecture=architecture, ints=ints)
    first = load_model(path, progress=False)
    for field in ("num_experts", "experts_per_token", "expert_size", "normalize_experts", "qk_norm"):
        assert getattr(first.config, field) == getattr(config, field), field
    expected = assemble_params(source, config, jnp.float32, progress=False)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), first.params, expected))
    np.testing.assert_array_equal(logits_of(first.params, first.config), logits_of(expected, config))
    second = load_model(path, progress=False)  # from the cache
    assert second.config == first.config
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), first.params, second.params))


def test_experts_that_are_missing_are_named():
    source, config = golden_tensors("tiny_mixtral")
    tensors = {
        name: x for name, x in source.tensors.items() if "layers.1.block_sparse_moe.experts.2." not in name
    }
    with pytest.raises(WeightMismatchError, match="3 mismatches") as error:
        assemble_params(Tensors(tensors), config, jnp.float32, progress=False)
    assert "model.layers.1.mlp.experts.2.up_proj.weight: missing (expected shape (48, 32))" in str(
        error.value
    )
