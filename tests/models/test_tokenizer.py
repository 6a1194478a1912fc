"""Encoding, decoding, chat templates, and streaming text that never shows half a character."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from models.testing import TINY_VOCAB_SIZE, tiny_config, tiny_tokenizer
from models.tokenizer import ChatTemplateError, Tokenizer

TOKENIZER = tiny_tokenizer()
FLAG = "👩‍🚀🇩🇪é漢"
# Surrogates cannot be encoded in UTF-8, so no tokenizer accepts them.
any_text = st.text(st.characters(exclude_categories=["Cs"]))
any_ids = st.lists(st.integers(0, TINY_VOCAB_SIZE - 1), max_size=40)


@given(any_text)
def test_round_trip(text):
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text


def test_tiny_tokenizer_fits_the_tiny_model():
    assert TOKENIZER.vocab_size == tiny_config().vocab_size == TINY_VOCAB_SIZE == 264
    assert TOKENIZER.eos_token_ids == tiny_config().eos_token_ids
    assert TOKENIZER.bos_token_id == tiny_config().bos_token_id
    assert TOKENIZER.encode("A<|im_end|>") == [ord("A") + 8, 2]


@given(any_ids)
def test_streaming_equals_decoding_at_once(ids):
    for skip in (True, False):
        detokenizer = TOKENIZER.detokenizer(skip_special_tokens=skip)
        streamed = "".join([detokenizer.add(i) for i in ids]) + detokenizer.flush()
        expected = TOKENIZER._backend.decode(ids, skip_special_tokens=skip)
        assert streamed == TOKENIZER.decode(ids, skip_special_tokens=skip) == expected


@given(any_text)
def test_streaming_valid_text_never_shows_a_replacement_character(text):
    detokenizer = TOKENIZER.detokenizer(skip_special_tokens=False)
    shown = ""
    for token in TOKENIZER.encode(text, add_special_tokens=False):
        shown += detokenizer.add(token)
        assert text.startswith(shown)
    assert shown == text
    assert detokenizer.flush() == ""


def test_streaming_holds_back_incomplete_characters():
    detokenizer = TOKENIZER.detokenizer()
    pieces = [detokenizer.add(i) for i in TOKENIZER.encode("é🙂", add_special_tokens=False)]
    assert pieces == ["", "é", "", "", "", "🙂"]
    assert detokenizer.add(0xF0 + 8) == ""
    assert detokenizer.flush() == "\ufffd"


def test_special_tokens_that_are_kept():
    ids = TOKENIZER.encode("<|im_start|>a<|im_end|>")
    detokenizer = TOKENIZER.detokenizer(keep=[2])
    assert [detokenizer.add(i) for i in ids] == ["", "a", "<|im_end|>"]
    assert TOKENIZER.decode(ids) == "a"


def test_an_invalid_byte_is_replaced_as_soon_as_it_is_known_to_be_invalid():
    detokenizer = TOKENIZER.detokenizer()
    assert detokenizer.add(0xC3 + 8) == ""
    assert detokenizer.add(ord("a") + 8) == "\ufffda"


def test_token_bytes():
    assert TOKENIZER.token_bytes(0xC3 + 8) == b"\xc3"
    assert TOKENIZER.token_bytes(2) == b"<|im_end|>"
    assert TOKENIZER.token_bytes(TINY_VOCAB_SIZE) == TOKENIZER.token_bytes(-1) == b""


def test_chat_template():
    messages = [{"role": "user", "content": FLAG}]
    text = f"<|im_start|>user\n{FLAG}<|im_end|>\n"
    assert TOKENIZER.render_chat(messages, add_generation_prompt=False) == text
    ids = TOKENIZER.apply_chat_template(messages)
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text + "<|im_start|>assistant\n"
    assert ids[0] == 1


def test_the_template_for_tools():
    assert TOKENIZER.chat_template(with_tools=True) == TOKENIZER.chat_template()
    several = tiny_tokenizer(chat_template={"default": "{{ 1 }}", "tool_use": "{{ tools[0].name }}"})
    assert (several.chat_template(), several.chat_template(with_tools=True)) == (
        "{{ 1 }}",
        "{{ tools[0].name }}",
    )
    message = {"role": "user", "content": "x"}
    assert several.render_chat([message]) == "1"
    assert several.render_chat([message], tools=[{"name": "f"}]) == "f"
    assert tiny_tokenizer(chat_template={"default": "{{ 1 }}"}).chat_template(with_tools=True) == "{{ 1 }}"
    for tools_only in ({"tool_use": "{{ 1 }}"}, {"tool_use": "{{ 1 }}", "default": 5}):
        several = tiny_tokenizer(chat_template=tools_only)
        assert (several.chat_template(), several.chat_template(with_tools=True)) == (None, "{{ 1 }}")
        assert several.has_chat_template and several.chat_template_fault()


def test_a_template_that_is_no_text():
    tokenizer = tiny_tokenizer()
    tokenizer._fast.chat_template = 5
    assert (tokenizer.chat_template(), tokenizer.has_chat_template) == (None, False)
    assert tokenizer.chat_template_fault() == "no text: 5"
    with pytest.raises(ChatTemplateError, match="no chat template"):
        tokenizer.render_chat([{"role": "user", "content": "x"}])


def test_another_chat_template():
    tokenizer = tiny_tokenizer(chat_template={"default": "{{ 1 }}", "tool_use": "{{ 2 }}"})
    with pytest.raises(ChatTemplateError, match=r"line 2: .*'endif'"):
        tokenizer.use_chat_template("\n{% endif %}")
    assert tokenizer.chat_template() == "{{ 1 }}"
    tokenizer.use_chat_template(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% break %}{% endfor %}"
    )
    messages = [{"role": "user", "content": "x"}, {"role": "user", "content": "y"}]
    assert (
        tokenizer.render_chat(messages)
        == tokenizer.render_chat(messages, tools=[{"name": "f"}])
        == "user: x\n"
    )
    tokenizer.use_chat_template("{{ raise_exception('the first message must be of the system') }}")
    assert tokenizer.has_chat_template


def test_chat_template_errors():
    tokenizer = tiny_tokenizer()
    tokenizer._fast.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ChatTemplateError, match="roles must alternate"):
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}])
    tokenizer._fast.chat_template = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(ChatTemplateError, match="unsafe"):  # the template is untrusted input
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}])
    tokenizer._fast.chat_template = None
    assert not tokenizer.has_chat_template
    with pytest.raises(ChatTemplateError, match="no chat template"):
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}])


def sentencepiece_tokenizer() -> Tokenizer:
    """The structure of Llama 2's: a marker for spaces, bytes as tokens of their own."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "a", "b", "▁a"]
    backend = Backend(
        models.BPE(
            vocab={p: i for i, p in enumerate(pieces)},
            merges=[("▁", "a")],
            byte_fallback=True,
            unk_token="<unk>",
        )
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", bos_token="<s>"))


def test_sentencepiece_with_byte_fallback():
    tokenizer = sentencepiece_tokenizer()
    text = "a b  ab 🙂é"
    ids = tokenizer.encode(text)
    detokenizer = tokenizer.detokenizer()
    assert "".join([detokenizer.add(i) for i in ids]) == text
    assert tokenizer._backend.decode(ids) == text
    assert tokenizer.eos_token_ids == (2,)


def test_what_it_was_trained_with_cuts_and_pads_no_text(tmp_path):
    tiny_tokenizer().save(str(tmp_path))
    file = tmp_path / "tokenizer.json"
    text = "a text of more than eight tokens"
    expected = tiny_tokenizer().encode(text)
    backend = Backend.from_file(str(file))
    backend.enable_truncation(8)
    backend.enable_padding(length=64)
    backend.save(str(file))
    assert len(backend.encode(text)) == 64 and '"max_length":8' in file.read_text().replace(" ", "")
    assert Tokenizer(PreTrainedTokenizerFast.from_pretrained(tmp_path)).encode(text) == expected


def test_unknown_decoder_is_refused():
    backend = Backend(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(ValueError, match="byte-level BPE"):
        Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]"))
