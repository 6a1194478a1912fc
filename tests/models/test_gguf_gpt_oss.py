"""GPT-OSS in GGUF files: read as llama.cpp reads them, but for the ends of YaRN's blend."""

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.config import UnsupportedModelError
from models.gguf import GGUFFile
from models.registry import load_model
from models.rope_scaling import RopeScaling
from models.weights import WeightMismatchError, assemble_params
from tests.models.checkpoints import Tensors, golden_tensors
from tests.models.gguf_files import logits_of, with_tiny_vocabulary, write_gguf

FIELDS = {
    "architecture": "gpt-oss",
    "pre": "gpt-4o",
    "ints": {
        "gpt-oss.expert_count": 4, "gpt-oss.expert_used_count": 2, "gpt-oss.expert_feed_forward_length": 64,
        "gpt-oss.attention.sliding_window": 24, "gpt-oss.rope.scaling.original_context_length": 64,
    },
    "floats": {"gpt-oss.rope.scaling.factor": 4.0},
    "texts": {"gpt-oss.rope.scaling.type": "yarn"},
}  # fmt: skip


@pytest.fixture(scope="module")
def tiny():
    """The golden checkpoint with what GGUF files do not say as it always is."""
    source, config = with_tiny_vocabulary(*golden_tensors("tiny_gpt_oss"))
    return source, config.replace(swiglu_limit=7.0, rope_scaling=RopeScaling.yarn(4.0, 64, truncate=False))


def same(a, b):
    return jax.tree.all(jax.tree.map(lambda x, y: bool((x == y).all()), a, b))


def test_gguf_of_gpt_oss(tiny, tmp_path, cache):
    source, config = tiny
    path = write_gguf(tmp_path / "tiny.gguf", source, config, **FIELDS)
    first = load_model(path, progress=False)
    said = first.config.replace(
        name=config.name, eos_token_ids=config.eos_token_ids, norm_eps=config.norm_eps
    )
    assert said == config
    expected = assemble_params(source, config, jnp.float32, progress=False)
    assert same(first.params, expected)
    np.testing.assert_array_equal(logits_of(first.params, first.config), logits_of(expected, config))
    second = load_model(path, progress=False)  # from the cache
    assert second.config == first.config and same(second.params, first.params)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_in_mxfp4(tiny, tmp_path, cache, dtype):
    """As in most of its files."""
    source, config = tiny
    path = write_gguf(tmp_path / "tiny.gguf", source, config, **FIELDS, mxfp4=True)
    file = GGUFFile(path)
    kinds = {t.tensor_type.name for name, t in file._tensors.items() if name.endswith("_exps.weight")}
    assert kinds == {"MXFP4"}

    def rounded(x):  # [X, in, out]
        data = gguf.quants.quantize(
            np.ascontiguousarray(x.astype(np.float32).swapaxes(1, 2)), gguf.GGMLQuantizationType.MXFP4
        )
        return gguf.quants.dequantize(data, gguf.GGMLQuantizationType.MXFP4).swapaxes(1, 2)

    tensors = {
        name: rounded(x) if name.endswith(("gate_up_proj", "down_proj")) else x
        for name, x in source.tensors.items()
    }
    expected = assemble_params(Tensors(tensors), config, dtype, progress=False)
    assert same(load_model(path, dtype=dtype, progress=False).params, expected)


def test_layers_with_the_window_as_the_file_says(tiny, tmp_path):
    pattern = {"gpt-oss.attention.sliding_window_pattern": 3}
    ints = FIELDS["ints"] | pattern
    config = GGUFFile(write_gguf(tmp_path / "p.gguf", *tiny, **FIELDS | {"ints": ints})).config
    assert (config.sliding_layers, config.sliding_window) == ((0, 1), 24)
    ints = FIELDS["ints"] | {"gpt-oss.attention.sliding_window_pattern": 1000}
    with pytest.raises(UnsupportedModelError, match="sliding window in every layer"):
        GGUFFile(write_gguf(tmp_path / "e.gguf", *tiny, **FIELDS | {"ints": ints}))
    floats = FIELDS["floats"] | {"gpt-oss.rope.freq_base_swa": 77.0}
    with pytest.raises(UnsupportedModelError, match=r"rope.freq_base_swa 77.0 other than rope.freq_base"):
        GGUFFile(write_gguf(tmp_path / "s.gguf", *tiny, **FIELDS | {"floats": floats}))


def test_missing_tensors_have_the_names_of_the_file(tiny, tmp_path, cache):
    source, config = tiny
    tensors = dict(source.tensors)
    for name in ("self_attn.sinks", "mlp.experts.down_proj_bias", "mlp.router.bias"):
        del tensors[f"model.layers.1.{name}"]
    path = write_gguf(tmp_path / "m.gguf", Tensors(tensors), config, **FIELDS)
    with pytest.raises(WeightMismatchError) as caught:
        load_model(path, progress=False)
    assert str(caught.value).splitlines()[1:] == [
        "  blk.1.attn_sinks.weight: missing (expected shape (4,))",
        "  blk.1.ffn_gate_inp.bias: missing (expected shape (4,))",
        "  blk.1.ffn_down_exps.bias: missing (expected shape (4, 32))",
    ]
