"""Checkpoints that say two things: a head beside tied embeddings, several files, a config.json at odds with itself."""

import argparse
import json
import shutil

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from transformers import PreTrainedTokenizerFast

from models.config import RopeScaling, UnsupportedModelError, config_from_huggingface
from models.huggingface import HuggingFaceDirectory
from models.overrides import overridden, parse_overrides
from models.registry import load_model
from models.testing import tiny_tokenizer
from tests.models.checkpoints import GOLDEN
from tests.models.quantised_files import DTYPES, write_safetensors


def test_a_head_beside_tied_embeddings(tmp_path, caplog):
    """Another matrix than the embedding is the head, as transformers has it; the same one needs no second place."""
    directory = tmp_path / "m"
    shutil.copytree(GOLDEN / "tiny_qwen3", directory)
    tiny_tokenizer().save(str(directory))
    config = json.loads((directory / "config.json").read_text()) | {"tie_word_embeddings": True}
    (directory / "config.json").write_text(json.dumps(config))
    tensors = load_file(directory / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    for head, own in ((embedding, False), (embedding[::-1].copy(), True)):
        save_file(tensors | {"lm_head.weight": head}, directory / "model.safetensors")
        model = load_model(directory, progress=False)
        assert model.config.tie_embeddings != own and ("a head of its own" in caplog.text) == own
    assert {"embed", "lm_head"} <= model.params.keys()


def test_a_config_that_says_two_things():
    said = json.loads((GOLDEN / "tiny_qwen3" / "config.json").read_text())
    with pytest.raises(
        UnsupportedModelError, match="Qwen3ForCausalLM with model_type 'mistral' not supported"
    ):
        config_from_huggingface(said | {"model_type": "mistral"}, "x")
    assert config_from_huggingface(said | {"model_type": "of-their-own"}, "x").qk_norm
    newer = {"rope_theta": 5e5, "rope_type": "yarn", "factor": 2.0, "attention_factor": 2.0}
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    config = config_from_huggingface(said | {"rope_parameters": newer, "rope_scaling": yarn}, "x")
    assert (config.rope_theta, config.rope_scaling) == (5e5, RopeScaling.yarn(4.0, 512))
    for odd, words in (
        ({"is_causal": False}, "is_causal=false"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"rope_parameters": newer | {"llama_4_scaling_beta": 0.1}}, "llama_4_scaling_beta=0.1"),
    ):
        with pytest.raises(UnsupportedModelError, match=f"{words} not supported"):
            config_from_huggingface(said | odd, "x")
    for odd in ([1], "1", 1.0, True):
        with pytest.raises(UnsupportedModelError, match=r"bos_token_id is .*, expected a token id"):
            config_from_huggingface(said | {"bos_token_id": odd}, "x")
    assert config_from_huggingface(said | {"bos_token_id": -1}, "x").bos_token_id is None
    mixtral = json.loads((GOLDEN / "tiny_mixtral" / "config.json").read_text())
    with pytest.raises(UnsupportedModelError, match="num_local_experts=4 but num_experts=5"):
        config_from_huggingface(mixtral | {"num_experts": 5}, "x")
    del mixtral["num_local_experts"]
    assert config_from_huggingface(mixtral | {"num_experts": 6}, "x").num_experts == 6


@pytest.mark.parametrize(
    "name", ["tied", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3", "gpt_oss"]
)
def test_a_config_without_architectures_is_what_its_type_says(name):
    said = json.loads((GOLDEN / f"tiny_{name}" / "config.json").read_text())
    want = config_from_huggingface(said, "x")
    nameless = {key: value for key, value in said.items() if key != "architectures"}
    for given in (nameless, nameless | {"architectures": None}, nameless | {"architectures": []}):
        assert config_from_huggingface(given, "x") == want
        assert config_from_huggingface(overridden(given, {"rms_norm_eps": said["rms_norm_eps"]}), "x") == want
    images = {"model_type": "mistral3", "text_config": nameless | {"model_type": "mistral"}}
    with pytest.raises(UnsupportedModelError, match=r"architecture \(none given\)"):  # no Mistral
        config_from_huggingface(overridden(images, {}), "x")
    if name == "gpt_oss":
        silent = {key: value for key, value in nameless.items() if not key.startswith("rope_")}
        changed = config_from_huggingface(overridden(silent, {"rope_theta": 9e4}), "x")
        assert changed.rope_theta == 9e4 and changed.rope_scaling.kind == "yarn"


def test_swish_is_another_name_of_silu():
    said = json.loads((GOLDEN / "tiny_qwen3" / "config.json").read_text())
    assert config_from_huggingface(said | {"hidden_act": "swish"}, "x") == config_from_huggingface(said, "x")


@pytest.mark.parametrize(
    ("family", "bases"),
    [
        ("mixtral", (1e6, None)),
        ("gemma3", (1e6, 1e4)),
        ("gpt_oss", (150_000.0, None)),
        ("qwen3", (1e4, None)),
    ],
)
def test_a_base_of_rope_that_is_null_is_the_familys(family, bases):
    said = json.loads((GOLDEN / f"tiny_{family}" / "config.json").read_text())
    nothing = {key: x for key, x in said.items() if not key.startswith("rope_")}
    for nulls in ((), ("rope_theta",), ("rope_local_base_freq",), ("rope_theta", "rope_local_base_freq")):
        config = config_from_huggingface(nothing | dict.fromkeys(nulls), "x")
        assert (config.rope_theta, config.sliding_rope_theta) == bases


@pytest.mark.parametrize(
    "dtype", ["int8", "int64", "uint8", "bool", "complex64", ml_dtypes.float8_e4m3fnuz, "float64", "float16"]
)
def test_tensors_that_are_no_floats_are_no_weights(dtype, tmp_path):
    """They were read as numbers: of a quantised checkpoint, say, whose config.json has lost what says so."""
    directory, name = tmp_path / "m", "model.layers.0.mlp.up_proj.weight"
    shutil.copytree(GOLDEN / "tiny_qwen3", directory)
    tensors = load_file(directory / "model.safetensors")
    odd = {
        name: tensors[name].astype(dtype),
        "position_ids": np.arange(3),
    }  # what is not read may be anything
    write_safetensors(directory / "model.safetensors", tensors | odd)
    file = HuggingFaceDirectory(directory)
    file.open()
    if np.dtype(dtype).name in ("float64", "float16"):
        np.testing.assert_array_equal(file.read(name), odd[name])
        return
    words = f"model.safetensors: tensor {name} is stored as {DTYPES[np.dtype(dtype).name]}, expected F64, F32"
    with pytest.raises(UnsupportedModelError, match=words):
        file.read(name)


def test_what_a_generation_config_says(tmp_path):
    directory = tmp_path / "m"
    shutil.copytree(GOLDEN / "tiny_qwen3", directory)
    own = HuggingFaceDirectory(directory).config.eos_token_ids
    sampling = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1}
    greedy = {"temperature": 0.0, "repetition_penalty": 1.1}
    for said, ends, defaults in (
        ({"eos_token_id": [5, None]}, (5,), {}),  # a null is no token, and was refused
        ({"eos_token_id": None}, (), {}),
        (sampling, (), sampling),
        (sampling | {"do_sample": True}, (), sampling),
        (sampling | {"do_sample": None}, (), sampling),
        # Greedy, whatever stands beside it: a server sampled with these.
        (sampling | {"do_sample": False}, (), greedy),
        ({"do_sample": False}, (), {"temperature": 0.0}),
    ):
        (directory / "generation_config.json").write_text(json.dumps(said))
        file = HuggingFaceDirectory(directory)
        assert file.config.eos_token_ids == tuple(sorted({*own, *ends}))
        assert file.sampling_defaults == defaults


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_json_that_is_nested_too_deep(name, tmp_path):
    directory = tmp_path / "m"
    shutil.copytree(GOLDEN / "tiny_qwen3", directory)
    (directory / name).write_text("[" * 100_000)
    with pytest.raises(UnsupportedModelError, match=f"cannot read .*/m/{name}: maximum recursion depth"):
        HuggingFaceDirectory(directory)
    with pytest.raises(argparse.ArgumentTypeError, match="is not JSON: maximum recursion depth"):
        parse_overrides("[" * 100_000)


def test_a_tokenizer_of_another_kind_is_named(tmp_path):
    directory = tmp_path / "m"
    shutil.copytree(GOLDEN / "tiny_qwen3", directory)
    tiny_tokenizer().save(str(directory))
    said = json.loads((directory / "tokenizer.json").read_text())
    decoder = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    (directory / "tokenizer.json").write_text(json.dumps(said | {"decoder": decoder}))
    words = r"cannot load .*/m/tokenizer.json: tokenizer with decoder \['WordPiece'\] is not supported"
    with pytest.raises(UnsupportedModelError, match=words):
        load_model(directory, progress=False)


def test_of_several_files_those_of_the_model_are_read(tmp_path):
    directory = tmp_path / "m"
    shutil.copytree(GOLDEN / "tiny_qwen3", directory)
    tensors = load_file(directory / "model.safetensors")
    save_file({name: x * 2 for name, x in tensors.items()}, directory / "model_old.safetensors")
    (directory / "model.safetensors.index.json").write_text('{"weight_map": {"x": "model_old.safetensors"}}')
    file = HuggingFaceDirectory(directory)
    file.open()
    for name, x in tensors.items():
        np.testing.assert_array_equal(file.read(name), x)
    (directory / "model.safetensors.index.json").unlink()
    (directory / "model.safetensors").rename(directory / "model_new.safetensors")
    with pytest.raises(UnsupportedModelError, match=r"in two files, model_old.safetensors is one of them"):
        HuggingFaceDirectory(directory).open()


def test_mistrals_large_vocabulary_is_split_as_it_was_made(tmp_path, monkeypatch):
    """transformers mends the pattern in the files if it is asked to; without it warns of wrong tokens."""
    directory = tmp_path / "m"
    shutil.copytree(GOLDEN / "tiny_tied", directory)
    tiny_tokenizer().save(str(directory))
    config = json.loads((directory / "config.json").read_text())
    asked, load = [], PreTrainedTokenizerFast.from_pretrained
    monkeypatch.setattr(
        PreTrainedTokenizerFast,
        "from_pretrained",
        lambda *args, fix_mistral_regex, **rest: asked.append(fix_mistral_regex) or load(*args, **rest),
    )
    mistral = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None}
    for kind, tokens in (({}, config["vocab_size"]), (mistral, config["vocab_size"]), (mistral, 5)):
        (directory / "config.json").write_text(json.dumps(config | kind))
        monkeypatch.setattr("models.huggingface._TEKKEN", tokens)
        HuggingFaceDirectory(directory).tokenizer()
    assert asked == [False, True, False]
