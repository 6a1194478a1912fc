"""Text samples: sizes, mix, determinism, and that held-out documents are never calibrated on."""

from collections import Counter

import numpy as np
import pytest

import calibrate.samples as samples
from calibrate.samples import MIX, calibration_samples, chat_tokens, heldout_samples
from models.testing import TINY_CHAT_TEMPLATE, tiny_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


def test_sizes_and_mix(tokenizer):
    made = calibration_samples(tokenizer, 20, 700)
    assert [len(sample.tokens) for sample in made] == [700] * 20
    assert {sample.tokens.dtype for sample in made} == {np.dtype(np.int32)}
    assert Counter(s.kind for s in made) == {"prose": 6, "chat": 6, "code": 4, "reference": 2, "records": 2}
    assert len({sample.tokens.tobytes() for sample in made}) == 20


def test_same_seed_same_samples(tokenizer):
    one, two = (calibration_samples(tokenizer, 10, 300, seed=3) for _ in range(2))
    other = calibration_samples(tokenizer, 10, 300, seed=4)
    for a, b, c in zip(one, two, other, strict=True):
        np.testing.assert_array_equal(a.tokens, b.tokens)
        assert (a.tokens != c.tokens).any()


@pytest.mark.parametrize("documents", [samples.BOOKS, samples.MODULES, samples.NAMES, samples.CITIES])
def test_splits_share_no_document(documents):
    assert not set(documents["calibration"]) & set(documents["heldout"])
    assert all(documents.values())


def test_splits_share_no_reference_topic_and_all_books_are_there(tokenizer):
    one, other = (samples._reference_topics(split) for split in ("calibration", "heldout"))
    assert len(one) > 20 and len(other) > 20 and not one.keys() & other.keys()
    paragraphs = [
        {p.strip() for text in topics.values() for p in text.split("\n\n")} for topics in (one, other)
    ]
    assert not paragraphs[0] & paragraphs[1]
    for split in samples.BOOKS:
        stored = {path.stem for path in (samples.TEXTS / split).glob("*.txt")}
        assert stored == set(samples.BOOKS[split])
    assert sum(path.stat().st_size for path in samples.TEXTS.rglob("*")) < 1_500_000
    sources = [
        {s.source for s in make(tokenizer, 20, 200)} for make in (calibration_samples, heldout_samples)
    ]
    assert sources[0] & sources[1] <= {"generated records"}


def test_chats_use_the_template_and_quote_the_passage(tokenizer):
    chat = calibration_samples(tokenizer, 2, 4000)[1]
    assert MIX[1] == chat.kind == "chat"
    text = tokenizer.decode(chat.tokens.tolist(), skip_special_tokens=False)
    assert text.startswith("<|im_start|>system\n")
    answer = text.split("<|im_start|>assistant\n")[1].split("<|im_end|>")[0]
    assert answer and answer in text.split("<|im_start|>assistant\n")[0]


NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if loop.index0 % 2 != (m.role == 'assistant') %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}\n{% endfor %}"
)


def test_a_template_that_takes_no_system_message():
    """As Gemma 2's: what it says goes to the user's first message."""
    tokenizer = tiny_tokenizer(chat_template=NO_SYSTEM)
    chat = heldout_samples(tokenizer, 2, 500)[1]
    text = tokenizer.decode(chat.tokens.tolist())
    assert text.startswith(
        "<user>You are a careful reader. Answer from the text that you are given.\n\nHere is"
    )
    messages = [{"role": role, "content": f"It is {role}."} for role in ("user", "user")]
    with pytest.raises(ValueError, match=r"roles must alternate .*begins with 'It is user\.'"):
        chat_tokens(tokenizer, messages)
    with pytest.raises(ValueError, match="System role not supported"):
        chat_tokens(tokenizer, [{"role": "system", "content": "x"}, *messages])


@pytest.mark.parametrize(
    "saying",
    [
        "{%- if strftime_now is defined %}{% set day = strftime_now('%d %b %Y') %}{% endif %}{{ day }} ",
        "{% macro system() %}\n{{ strftime_now('%Y-%m-%d') }} {% endmacro %}\n{{ system() }}",
        "  {% if true %}\n{{ strftime_now('%-d %B %Y, %H:%M') }} {% endif %}",
    ],
)
@pytest.mark.parametrize("template", [NO_SYSTEM, TINY_CHAT_TEMPLATE], ids=["no system", "chat"])
def test_a_template_that_says_the_date_says_the_same_on_every_day(saying, template):
    """As those of Llama 3.2, GPT-OSS and SmolLM3: a profile depended on the day, and later on it could not be stamped."""
    chat = heldout_samples(tiny_tokenizer(chat_template=saying + template), 2, 500)[1]
    text = tiny_tokenizer().decode(chat.tokens.tolist())
    assert text.startswith(("26 Jul 2024 ", "2024-07-26 ", "26 July 2024, 00:00 "))


def test_without_a_chat_template(tokenizer, monkeypatch):
    monkeypatch.setattr(type(tokenizer), "has_chat_template", False)
    chat = heldout_samples(tokenizer, 2, 500)[1]
    assert tokenizer.decode(chat.tokens.tolist()).startswith("System: You are a careful reader.")


def test_long_samples_and_bad_counts(tokenizer):
    for sample in calibration_samples(tokenizer, 7, 8_000):
        assert len(sample.tokens) == 8_000
    with pytest.raises(ValueError, match="too short"):
        calibration_samples(tokenizer, 1, 10_000_000)
    with pytest.raises(ValueError, match="at least one sample"):
        calibration_samples(tokenizer, 0, 10)
