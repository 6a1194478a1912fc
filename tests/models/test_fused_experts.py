"""Checkpoints with a tensor for all experts, as transformers 5 has them in memory: the same model as one with many."""

import re

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from models.fp8_weights import with_fp8_weights
from models.huggingface import HuggingFaceDirectory
from models.testing import tiny_config
from models.weights import WeightMismatchError, assemble_params
from tests.models.checkpoints import GOLDEN, Tensors, golden_tensors, random_tensors, same

EXPERT = re.compile(r"(.*\.experts\.)(\d+)\.(\w+)\.weight")
MIXTRAL = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


def fused(tensors):
    """{prefix: {part: [matrices]}} of all experts become [X, 2S, E] and [X, E, S]."""
    parts, rest = {}, {}
    for name, x in tensors.items():
        found = EXPERT.fullmatch(name)
        if not found:
            rest[name.replace("block_sparse_moe", "mlp")] = x
            continue
        prefix, expert, kind = found.groups()
        of = parts.setdefault(prefix.replace("block_sparse_moe", "mlp"), {})
        of[int(expert), MIXTRAL.get(kind, kind)] = x
    for prefix, of in parts.items():
        count = 1 + max(expert for expert, _ in of)
        both = [np.concatenate([of[i, "gate_proj"], of[i, "up_proj"]]) for i in range(count)]
        rest[f"{prefix}gate_up_proj"] = np.stack(both)
        rest[f"{prefix}down_proj"] = np.stack([of[i, "down_proj"] for i in range(count)])
    return rest


@pytest.mark.parametrize("name", ["tiny_qwen3_moe", "tiny_mixtral"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_they_are_the_same_model(name, dtype):
    source, config = golden_tensors(name)
    tensors = fused(source.tensors)
    experts = [x.shape for key, x in tensors.items() if ".experts." in key]
    X, S, E = config.num_experts, config.expert_size, config.hidden_size
    assert set(experts) == {(X, 2 * S, E), (X, E, S)} and S != E
    want = assemble_params(source, config, dtype, progress=False)
    assert same(assemble_params(Tensors(tensors), config, dtype, progress=False), want)
    # And so with Mixtral's name for the module.
    renamed = {
        key.replace(".mlp.", ".block_sparse_moe."): x for key, x in tensors.items() if ".experts." in key
    }
    rest = {key: x for key, x in tensors.items() if ".experts." not in key}
    assert same(assemble_params(Tensors(rest | renamed), config, dtype, progress=False), want)


def test_a_directory_of_them(tmp_path):
    source, _ = golden_tensors("tiny_qwen3_moe")
    (tmp_path / "config.json").write_text((GOLDEN / "tiny_qwen3_moe" / "config.json").read_text())
    save_file(fused(source.tensors), tmp_path / "model.safetensors")
    directory = HuggingFaceDirectory(tmp_path)
    directory.open()
    want = assemble_params(source, directory.config, jnp.float32, progress=False)
    assert same(assemble_params(directory, directory.config, jnp.float32, progress=False), want)


def test_they_become_fp8():
    config = tiny_config(num_layers=1, num_experts=3, experts_per_token=2, expert_size=64)
    tensors, config = random_tensors(config), with_fp8_weights(config)
    want = assemble_params(Tensors(tensors), config, jnp.float32, progress=False)
    assert same(assemble_params(Tensors(fused(tensors)), config, jnp.float32, progress=False), want)


def test_mismatches_have_their_names():
    source, config = golden_tensors("tiny_mixtral")
    tensors = fused(source.tensors)
    experts = "model.layers.1.mlp.experts"
    del tensors[f"{experts}.gate_up_proj"]
    tensors[f"{experts}.down_proj"] = tensors[f"{experts}.down_proj"].swapaxes(1, 2)
    one = "model.layers.0.mlp.experts.1.down_proj.weight"
    with pytest.raises(WeightMismatchError) as caught:
        assemble_params(Tensors(tensors | {one: np.zeros((2, 2))}), config, jnp.float32, progress=False)
    X, S, E = config.num_experts, config.expert_size, config.hidden_size
    assert str(caught.value).splitlines()[1:] == [
        f"  {experts}.down_proj: expected shape {(X, E, S)}, found {(X, S, E)}",
        f"  {experts}.gate_up_proj: missing (expected shape {(X, 2 * S, E)})",
        f"  {one}: unexpected (shape (2, 2))",
    ]
