"""GGUF files whose metadata no converter writes: refused by name, or read as llama.cpp reads it."""

import math
import re

import pytest

from models.config import UnsupportedModelError
from models.gguf import GGUFFile
from models.testing import TINY_CHAT_TEMPLATE
from tests.models.gguf_files import with_tiny_vocabulary, write_gguf


@pytest.fixture
def gguf_tiny(tiny):
    return with_tiny_vocabulary(*tiny)


def refused(path, *words):
    """Whether the file is refused, by its name and with these words."""
    with pytest.raises(UnsupportedModelError, match=re.escape(str(path))) as raised:
        GGUFFile(path).tokenizer()
    return all(word in str(raised.value) for word in words)


@pytest.mark.parametrize("odd", [0.0, -5.0, math.nan, math.inf])
@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("rope.freq_base", "a number above 1"),
        ("attention.layer_norm_rms_epsilon", "a positive number"),
        ("rope.scaling.factor", "a positive number"),
        ("rope.scale_linear", "a positive number"),
    ],
)
def test_numbers_that_make_logits_nan_are_refused(key, expected, odd, gguf_tiny, tmp_path):
    path = write_gguf(tmp_path / "n.gguf", *gguf_tiny, metadata={f"llama.{key}": odd})
    if odd == 0 and "scal" in key:  # not scaled, as in llama.cpp
        assert GGUFFile(path).config.rope_scaling is None
    else:
        assert refused(path, f"llama.{key} is {odd}, expected {expected}")


@pytest.mark.parametrize("odd", [-4.0, math.nan, math.inf])
@pytest.mark.parametrize("key", ["factor", "attn_factor"])
def test_yarn_by_no_number(key, odd, gguf_tiny, tmp_path):
    floats = {f"llama.rope.scaling.{name}": value for name, value in {"factor": 4.0, key: odd}.items()}
    texts = {"llama.rope.scaling.type": "yarn"}
    path = write_gguf(tmp_path / "y.gguf", *gguf_tiny, floats=floats, texts=texts)
    assert refused(path, f"llama.rope.scaling.{key} is {odd}, expected a positive number")


def test_yarn_beyond_32_bits(gguf_tiny, tmp_path):
    scaling = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 1e30}
    path = write_gguf(tmp_path / "y.gguf", *gguf_tiny, metadata=scaling)
    assert refused(path, "damaged (yarn by 1e+30 of 512 positions (32 bits count no more than")


@pytest.mark.parametrize("factors", [[0.0] * 8, [math.nan] * 8, [1.0] * 4, [[1.0] * 8] * 2])
def test_divisors_of_the_frequencies(factors, gguf_tiny, tmp_path):
    path = write_gguf(tmp_path / "f.gguf", *gguf_tiny, rope_factors=factors)
    assert refused(path, "tensor rope_freqs.weight of shape [", "expected [8] and positive numbers")


@pytest.mark.parametrize("odd", [2**32 - 1, -1, 264, "1", 1.0, True])
def test_special_tokens_that_are_none(odd, gguf_tiny, tmp_path, caplog):
    """llama.cpp's older converters wrote -1 for none, and unsigned."""
    keys = [f"tokenizer.ggml.{name}_token_id" for name in ("bos", "eos", "unknown", "padding")]
    path = write_gguf(
        tmp_path / "t.gguf", *gguf_tiny, pre="llama-bpe", metadata=dict.fromkeys(keys, odd)
    )  # fmt: skip
    file = GGUFFile(path)
    tokenizer = file.tokenizer()
    assert (file.config.bos_token_id, file.config.eos_token_ids) == (None, ())
    assert (tokenizer.bos_token_id, tokenizer.encode("ab")) == (None, [263])
    assert [record.getMessage() for record in caplog.records] == [
        f"{path}: {key} is {odd!r}, no token of 264: taken for none" for key in (keys[1], keys[0], *keys[2:])
    ]


def test_ends_of_turns_and_messages_are_ends(gguf_tiny, tmp_path):
    ids = {"tokenizer.ggml.eot_token_id": 5, "tokenizer.ggml.eom_token_id": 7}
    file = GGUFFile(write_gguf(tmp_path / "e.gguf", *gguf_tiny, ints=ids))
    assert file.config.eos_token_ids == (2, 5, 7)
    assert {2, 5, 7} <= set(file.tokenizer().eos_token_ids)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("llama.context_length", [1, 2], "llama.context_length is [1, 2], expected a positive whole number"),
        ("llama.context_length", 0, "llama.context_length is 0, expected a positive whole number"),
        ("llama.context_length", "512", "llama.context_length is '512', expected a positive whole number"),
        ("llama.block_count", 0, "llama.block_count is 0"),
        ("llama.attention.head_count", 0, "llama.attention.head_count is 0"),
        ("llama.feed_forward_length", 0, "llama.feed_forward_length is 0"),
        ("llama.rope.dimension_count", "x", "llama.rope.dimension_count is 'x'"),
        ("llama.attention.head_count_kv", 3, "damaged (num_heads must be a multiple of num_kv_heads"),
        (
            "llama.attention.key_length",
            15,
            "damaged (head_dim must be even for RoPE, got 15): fetch it again",
        ),
        ("llama.rope.freq_base", "x", "llama.rope.freq_base is 'x', expected a number above 1"),
        ("split.count", [1], "metadata is odd or damaged (int() argument must be"),
        ("tokenizer.ggml.token_type", [3] * 8, "metadata is odd or damaged (zip() argument 2 is shorter"),
    ],
)
def test_metadata_of_another_type_or_size(key, value, words, gguf_tiny, tmp_path):
    path = write_gguf(tmp_path / "m.gguf", *gguf_tiny, metadata={key: value})
    assert refused(path, words)


def test_damaged_text(gguf_tiny, tmp_path):
    path = write_gguf(tmp_path / "u.gguf", *gguf_tiny)
    path.write_bytes(path.read_bytes().replace(TINY_CHAT_TEMPLATE[:2].encode(), b"\xff\xff"))
    assert refused(path, "its metadata is odd or damaged ('utf-8' codec can't decode byte 0xff")


def test_a_template_that_is_no_text(gguf_tiny, tmp_path, caplog):
    path = write_gguf(tmp_path / "t.gguf", *gguf_tiny, metadata={"tokenizer.chat_template": 5})
    assert not GGUFFile(path).tokenizer().has_chat_template
    assert f"{path}: tokenizer.chat_template is 5, no text: taken for none" in caplog.text


def test_a_name_of_no_parts_is_a_name(gguf_tiny, tmp_path):
    path = write_gguf(tmp_path / "x-00001-of-00000.gguf", *gguf_tiny)
    assert GGUFFile(path).config.name == "x"
