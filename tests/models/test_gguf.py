"""GGUF files: what llama.cpp writes is read as llama.cpp reads it."""

import dataclasses
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.errors import JaxRuntimeError

from models import conversion_cache
from models.config import RopeScaling, UnsupportedModelError
from models.gguf import GGUFFile, unpermute_rope
from models.gguf_tokenizer import _pre_tokenizer
from models.huggingface import HuggingFaceDirectory, ModelNotFoundError
from models.registry import load_model
from models.weights import WeightMismatchError, assemble_params
from tests.models.checkpoints import GOLDEN, Tensors
from tests.models.gguf_files import logits_of, permute_rope, with_tiny_vocabulary, write_gguf


@pytest.fixture
def gguf_tiny(tiny):
    return with_tiny_vocabulary(*tiny)


def test_unpermute_undoes_llama_cpp():
    weight = np.arange(4 * 8 * 3).reshape(32, 3)
    assert (unpermute_rope(permute_rope(weight, 4), 4) == weight).all()
    assert not (permute_rope(weight, 4) == weight).all()


def test_gguf_file_and_its_cache(gguf_tiny, tmp_path, cache, monkeypatch, caplog):
    source, config = gguf_tiny
    path = write_gguf(tmp_path / "tiny.gguf", source, config)
    first = load_model(path, progress=False)
    expected = assemble_params(source, config, jnp.float32, progress=False)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), first.params, expected))
    assert first.name == "tiny" and first.config.eos_token_ids == (0, 2) and first.config.tie_embeddings
    np.testing.assert_array_equal(logits_of(first.params, first.config), logits_of(expected, config))
    ids = first.tokenizer.apply_chat_template([{"role": "user", "content": "é🙂 12"}])
    assert ids[0] == 1 and "é🙂 12" in first.tokenizer.decode(ids)

    with monkeypatch.context() as patch:
        patch.setattr("models.gguf.GGUFFile.__init__", lambda *args: pytest.fail("converted again"))
        second = load_model(path, progress=False)
    assert second.config == first.config and second.tokenizer.eos_token_ids == (0, 2)
    assert second.tokenizer.apply_chat_template([{"role": "user", "content": "é🙂 12"}]) == ids
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), first.params, second.params))

    # Another dtype and a changed file are other entries; a damaged entry is converted again.
    assert load_model(path, dtype=jnp.bfloat16, progress=False).params["embed"].dtype == jnp.bfloat16
    assert len(list((cache / "converted").iterdir())) == 2
    path.unlink()
    write_gguf(path, source, config, scale=2.0)
    changed = load_model(path, progress=False)
    np.testing.assert_array_equal(changed.params["embed"], 2 * first.params["embed"])
    for entry in (cache / "converted").iterdir():
        shutil.rmtree(entry / "params")
    again = load_model(path, progress=False)
    np.testing.assert_array_equal(again.params["embed"], changed.params["embed"])
    assert "converting again" in caplog.text


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer_config.json", "tokenizer.json"])
@pytest.mark.parametrize("change", [Path.unlink, lambda file: file.write_text("{}")])
def test_a_conversion_whose_tokenizer_is_not_whole_is_made_again(
    name, change, gguf_tiny, tmp_path, cache, caplog
):
    path = write_gguf(tmp_path / "tiny.gguf", *gguf_tiny)
    expected = load_model(path, progress=False).tokenizer.apply_chat_template(
        [{"role": "user", "content": "x"}]
    )
    (entry,) = (cache / "converted").iterdir()
    change(entry / "tokenizer" / name)
    again = load_model(path, progress=False).tokenizer
    assert again.apply_chat_template([{"role": "user", "content": "x"}]) == expected
    assert (
        "converting again" in caplog.text and "the files of its tokenizer are not those that" in caplog.text
    )
    caplog.clear()
    load_model(path, progress=False)
    assert not caplog.records


def test_a_conversion_that_cannot_be_kept_is_served_all_the_same(gguf_tiny, tmp_path, cache, caplog):
    path = write_gguf(tmp_path / "tiny.gguf", *gguf_tiny)
    cache.mkdir()
    (cache / "converted").write_text("")  # a file where the directory should be: for every user
    model = load_model(path, progress=False)
    np.testing.assert_array_equal(model.params["embed"], gguf_tiny[0].read("model.embed_tokens.weight"))
    assert "every start converts it: make room there, or set TANGRAM_CACHE" in caplog.text


def test_a_disk_without_room_for_a_conversion_is_told_before_it_is_full(
    gguf_tiny, tmp_path, cache, monkeypatch, caplog
):
    path = write_gguf(tmp_path / "tiny.gguf", *gguf_tiny)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    load_model(path, progress=False)
    assert re.search(r"cannot be kept .* it takes \S+ MiB, 0 are free", caplog.text)
    assert list((cache / "converted").iterdir()) == []


def test_what_a_killed_conversion_left_goes_and_what_another_writes_stays(gguf_tiny, tmp_path, cache):
    path = write_gguf(tmp_path / "tiny.gguf", *gguf_tiny)
    killed, running = (cache / "converted" / f".tiny-float32-0123-{end}" for end in ("killed", "running"))
    for left in (killed, running):
        left.mkdir(parents=True)
    with conversion_cache._locked(running):
        load_model(path, progress=False)
    assert not killed.exists() and running.exists()
    assert len(list(running.parent.iterdir())) == 2


@pytest.mark.parametrize("error", [JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory"), MemoryError()])
def test_a_cached_model_stays_where_there_is_no_room_to_load_it(
    error, gguf_tiny, tmp_path, cache, monkeypatch
):
    """It went, and was converted again, if another process had the GPU's memory."""
    path = write_gguf(tmp_path / "tiny.gguf", *gguf_tiny)
    load_model(path, progress=False)

    def full(*_):
        raise error

    monkeypatch.setattr(conversion_cache, "_load", full)
    with pytest.raises(type(error)):
        load_model(path, progress=False)
    assert len(list((cache / "converted").iterdir())) == 1


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_gguf_of_qwen(architecture, tmp_path, cache):
    directory = HuggingFaceDirectory(GOLDEN / f"tiny_{architecture}")
    directory.open()
    tensors = Tensors({name: directory.read(name) for name in directory.shapes})
    source, config = with_tiny_vocabulary(tensors, directory.config)
    path = write_gguf(tmp_path / "tiny.gguf", source, config, architecture=architecture, pre="qwen2")
    first = load_model(path, progress=False)
    assert (first.config.qkv_bias, first.config.qk_norm) == (config.qkv_bias, config.qk_norm)
    expected = assemble_params(source, config, jnp.float32, progress=False)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), first.params, expected))
    np.testing.assert_array_equal(logits_of(first.params, first.config), logits_of(expected, config))
    assert first.tokenizer.encode("e\u0301") == first.tokenizer.encode("é")  # Unicode's composed form
    second = load_model(path, progress=False)  # from the cache
    assert second.config == first.config
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), first.params, second.params))


def test_gguf_rope_factors_and_untied_head(gguf_tiny, tmp_path, cache):
    source, config = gguf_tiny
    head = Tensors(source.tensors | {"lm_head.weight": source.tensors["model.embed_tokens.weight"] * 2})
    loaded = load_model(write_gguf(tmp_path / "f.gguf", head, config, rope_factors=[1, 1, 1, 1, 8, 8, 8, 8]))
    assert not loaded.config.tie_embeddings and loaded.params["lm_head"].shape == (32, 264)
    assert loaded.config.rope_scaling.factors == (1, 1, 1, 1, 8, 8, 8, 8)
    assert load_model(tmp_path / "f.gguf").config == loaded.config  # also through the cache


def test_gguf_of_yarn(gguf_tiny, tmp_path, cache):
    yarn = {"llama.rope.scaling.factor": 4.0}
    path = write_gguf(
        tmp_path / "y.gguf", *gguf_tiny, floats=yarn, ints={"llama.rope.scaling.original_context_length": 64},
        texts={"llama.rope.scaling.type": "yarn"},
    )  # fmt: skip
    loaded = load_model(path, progress=False)
    assert loaded.config.rope_scaling == RopeScaling.yarn(4.0, 64)
    assert loaded.config.max_positions == gguf_tiny[1].max_positions == 512
    assert load_model(path, progress=False).config == loaded.config  # also through the cache


@pytest.mark.parametrize(
    ("floats", "original", "scaling"),
    [
        ({"factor": 16.0}, 64, RopeScaling.yarn(16.0, 64)),
        (
            {"factor": 4.0, "attn_factor": 0.5},
            64,
            RopeScaling.yarn(4.0, 64, attention_factor=0.5 * 1.138629436),
        ),
        ({"factor": 0.0}, 0, RopeScaling.yarn(1.0, 512)),
        ({"factor": 4.0, "yarn_beta_fast": 8.0}, 64, "yarn with yarn_beta_fast"),
        ({"factor": 4.0, "yarn_attn_factor": 0.9}, 64, "yarn with yarn_attn_factor"),
    ],
)
def test_gguf_yarn_as_llama_cpp_reads_it(gguf_tiny, tmp_path, floats, original, scaling):
    path = write_gguf(
        tmp_path / "y.gguf", *gguf_tiny, floats={f"llama.rope.scaling.{k}": v for k, v in floats.items()},
        ints={"llama.rope.scaling.original_context_length": original}, texts={"llama.rope.scaling.type": "yarn"},
    )  # fmt: skip
    if isinstance(scaling, str):
        with pytest.raises(UnsupportedModelError, match=scaling):
            GGUFFile(path)
        return
    config = GGUFFile(path).config
    assert dataclasses.replace(config.rope_scaling, attention_factor=1.0) == dataclasses.replace(
        scaling, attention_factor=1.0
    )
    assert config.rope_scaling.attention_factor == pytest.approx(scaling.attention_factor, rel=1e-6)
    assert config.max_positions == max(512, 16 * 64 if floats["factor"] == 16 else 0)


@pytest.mark.parametrize(("pre", "bos"), [("smollm", []), ("llama-bpe", [1])])
def test_gguf_begins_texts_as_llama_cpp_does(pre, bos, gguf_tiny, tmp_path, cache):
    loaded = load_model(write_gguf(tmp_path / "b.gguf", *gguf_tiny, pre=pre), progress=False)
    assert loaded.tokenizer.encode("ab") == [*bos, 263]


@pytest.mark.parametrize("key", ["scaling.factor", "scale_linear"])
def test_gguf_rope_is_scaled_linearly_unless_it_says_otherwise(key, gguf_tiny, tmp_path, cache):
    floats = {f"llama.rope.{key}": 4.0}
    loaded = load_model(write_gguf(tmp_path / "r.gguf", *gguf_tiny, floats=floats), progress=False)
    assert (loaded.config.rope_scaling.kind, loaded.config.rope_scaling.factor) == ("linear", 4.0)
    factors = [1.0] * 4 + [2.0] * 4
    path = write_gguf(tmp_path / "f.gguf", *gguf_tiny, floats=floats, rope_factors=factors)
    assert load_model(path, progress=False).config.rope_scaling.factors == (4.0,) * 4 + (8.0,) * 4


def test_gguf_in_parts(gguf_tiny, tmp_path, cache):
    """As llama-gguf-split cuts it; any part will do."""
    source, config = gguf_tiny
    whole = load_model(write_gguf(tmp_path / "tiny.gguf", source, config), progress=False)
    write_gguf(tmp_path / "parts.gguf", source, config, tensors_of_a_part=9)
    first, *others = sorted(tmp_path.glob("parts-*.gguf"))
    assert len(others) > 1
    for path in (first, others[-1]):
        model = load_model(path, progress=False)
        assert model.name == "parts" and model.config.replace(name="tiny") == whole.config
        assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), model.params, whole.params))
    assert len(list((cache / "converted").iterdir())) == 2  # converted once
    others[0].unlink()
    with pytest.raises(ModelNotFoundError, match=rf"{first.name} is one of .* lacks {others[0].name}"):
        load_model(first, progress=False)


def test_gguf_errors(gguf_tiny, tmp_path, cache, monkeypatch):
    source, config = gguf_tiny
    with pytest.raises(UnsupportedModelError, match="architecture gemma not supported"):
        load_model(write_gguf(tmp_path / "g.gguf", source, config, architecture="gemma"))
    (tmp_path / "text.gguf").write_text("not a model at all")
    with pytest.raises(UnsupportedModelError, match="not a readable GGUF"):
        load_model(tmp_path / "text.gguf")
    with pytest.raises(UnsupportedModelError, match="pre-tokenizer 'tekken' not supported"):
        load_model(write_gguf(tmp_path / "q.gguf", source, config, pre="tekken"))
    for pre in (None, "default"):
        with pytest.raises(UnsupportedModelError, match="does not say how text is split"):
            load_model(write_gguf(tmp_path / "d.gguf", source, config, pre=pre))
    with pytest.raises(UnsupportedModelError, match=r"attention\.causal=false not supported"):
        load_model(write_gguf(tmp_path / "c.gguf", source, config, flags={"llama.attention.causal": False}))
    with pytest.raises(UnsupportedModelError, match=r"one of 3 parts: .* NAME-00001-of-00003\.gguf"):
        load_model(write_gguf(tmp_path / "p.gguf", source, config, ints={"split.count": 3}))
    with monkeypatch.context() as patched:
        patched.setattr(gguf.GGUFWriter, "add_token_list", lambda *_: None)
        with pytest.raises(UnsupportedModelError, match=r"metadata tokenizer\.ggml\.tokens is missing"):
            load_model(write_gguf(tmp_path / "t.gguf", source, config))
    half = {"llama.rope.dimension_count": config.head_dim // 2}
    with pytest.raises(UnsupportedModelError, match="RoPE on 8 of 16 dimensions"):
        load_model(write_gguf(tmp_path / "h.gguf", source, config, ints=half))
    del source.tensors["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(WeightMismatchError, match=r"blk\.1\.ffn_up\.weight: missing"):
        load_model(write_gguf(tmp_path / "m.gguf", source, config), progress=False)
    assert not (cache / "converted").exists()


def test_gguf_numbers_of_each_layer(gguf_tiny, tmp_path, cache, monkeypatch):
    source, config = gguf_tiny
    for numbers, same in (([1, 1], True), ([1, 2], False)):
        counts = [n * config.num_kv_heads for n in numbers]
        monkeypatch.setattr(
            gguf.GGUFWriter,
            "add_head_count_kv",
            lambda writer, _, counts=counts: writer.add_array("llama.attention.head_count_kv", counts),
        )
        path = write_gguf(tmp_path / "n.gguf", source, config)
        if same:
            assert load_model(path, progress=False).config.num_kv_heads == config.num_kv_heads
        else:
            with pytest.raises(
                UnsupportedModelError, match=r"attention\.head_count_kv is .*, the same for all layers"
            ):
                load_model(path, progress=False)


def test_pre_tokenizers_split_as_llama_cpp_does():
    def split(pre, text):
        return [piece for piece, _ in _pre_tokenizer(pre, Path("x")).pre_tokenize_str(text)]

    assert split("smollm", "it's 1234½") == ["it", "'s", "Ġ", "1", "2", "3", "4", "Â½"]
    assert split("gpt-2", "it's 1234") == ["it", "'s", "Ġ1234"]
    assert split("llama-bpe", "IT'S 1234\n\nx") == ["IT", "'S", "Ġ", "123", "4", "ĊĊ", "x"]
    assert split("gpt-4o", "HelloWORLD IT'S a/b//\n 1234 don'T") == [
        "Hello", "WORLD", "ĠIT'S", "Ġa", "/b", "//Ċ", "Ġ", "123", "4", "Ġdon'T",
    ]  # fmt: skip
    assert split("qwen2", "IT'S 12\n\nx") == ["IT", "'S", "Ġ", "1", "2", "ĊĊ", "x"]


def test_quantised_gguf_tensors_are_dequantised(gguf_tiny, tmp_path):
    source, config = gguf_tiny
    path = write_gguf(tmp_path / "q.gguf", source, config)
    file = GGUFFile(path)
    wanted = file.read("blk.0.ffn_up.weight")
    tensor = file._tensors["blk.0.ffn_up.weight"]
    packed = gguf.quants.quantize(wanted, gguf.GGMLQuantizationType.Q8_0)
    file._tensors["blk.0.ffn_up.weight"] = tensor._replace(
        data=packed, tensor_type=gguf.GGMLQuantizationType.Q8_0
    )
    np.testing.assert_allclose(file.read("blk.0.ffn_up.weight"), wanted, atol=np.abs(wanted).max() / 100)
