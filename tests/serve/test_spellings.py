"""Conversations keep the tokens in which they were written: the cache holds those, not the ones that a text encodes to."""

from types import SimpleNamespace

import pytest

from serve import spellings
from serve.prompts import chat_prompt
from serve.protocol import ChatRequest
from serve.spellings import Spellings
from serve.tool_prompt import ToolSupport
from tests.serve.http_server import EOS, TOKENIZER, ids

TOOLS = ToolSupport.of(TOKENIZER)
HELLO = {"role": "user", "content": "Hi"}
OPENING = TOKENIZER.render_chat([HELLO])
OPENING_IDS = TOKENIZER.encode(OPENING, add_special_tokens=False)


def conversation(answer: str, **options) -> ChatRequest:
    turns = [HELLO, {"role": "assistant", "content": answer}, {"role": "user", "content": "And?"}]
    return ChatRequest.model_validate({"messages": turns} | options)


def longest(known: Spellings, text: str) -> tuple[int, list[int]]:
    return next(known.beginnings(text), (0, []))


def test_known_beginnings_longest_first():
    known = Spellings()
    assert list(known.beginnings("abc")) == []
    known.remember("ab", [7])
    known.remember("abcd", [8, 9])
    assert list(known.beginnings("abcde")) == [(4, [8, 9]), (2, [7])]
    assert list(known.beginnings("abc")) == [(2, [7])]
    assert list(known.beginnings("b")) == []
    known.remember("ab", [5])
    assert list(known.beginnings("ab")) == [(2, [5])]


def test_what_was_not_asked_for_longest_is_forgotten(monkeypatch):
    known = Spellings(most=2)
    for text in ("a", "b"):
        known.remember(text, [1])
    assert longest(known, "a!") == (1, [1])
    known.remember("c", [1])
    assert [longest(known, text)[0] for text in "abc"] == [1, 0, 1]
    monkeypatch.setattr(spellings, "MOST_CHARACTERS", 10)
    known.remember("d" * 9, [1])
    assert [longest(known, text)[0] for text in ("a", "c", "d" * 9)] == [0, 1, 9]
    known.remember("e" * 11, [1])
    assert longest(known, "e" * 11) == (0, [])


def test_a_second_turn_begins_with_the_tokens_of_the_first():
    known = Spellings()
    odd = [*OPENING_IDS, 99, 98]  # "answer" in other tokens than the tokenizer's
    known.remember(OPENING + "answer", odd)
    prompt = chat_prompt(TOOLS, conversation("answer"), 512, 264, known)
    plain = TOKENIZER.encode(prompt.text, add_special_tokens=False)
    assert prompt.ids == odd + plain[len(OPENING_IDS) + len("answer") :]
    # Another answer, one that goes on in the middle of a text, and a prompt to be cut are encoded as they are.
    for request in (conversation("answers"), conversation("answer", truncate_prompt_tokens=400)):
        prompt = chat_prompt(TOOLS, request, 512, 264, known)
        text = TOKENIZER.render_chat([m.model_dump(exclude_none=True) for m in request.messages])
        assert prompt.ids == TOKENIZER.encode(text, add_special_tokens=False)
    with pytest.raises(Exception, match="maximum context length"):
        chat_prompt(TOOLS, conversation("answer"), 30, 264, known)


def test_what_fits_in_the_tokenizers_tokens_is_never_refused():
    known = Spellings()
    plain = chat_prompt(TOOLS, conversation("answer"), 512, 264, known).ids
    known.remember(OPENING + "answer", [*OPENING_IDS, *[99] * 200])
    limit = len(plain) + 100
    assert chat_prompt(TOOLS, conversation("answer"), limit, 264, known).ids == plain
    known.remember(OPENING + "answer", [*OPENING_IDS, *[99] * 50])
    assert chat_prompt(TOOLS, conversation("answer"), limit, 264, known).ids != plain
    assert chat_prompt(TOOLS, conversation("answer", max_tokens=99), limit, 264, known).ids == plain


def test_a_turn_that_was_finished_by_hand_keeps_the_turns_before():
    known = Spellings()
    first = [*OPENING_IDS, 99, 98]
    known.remember(OPENING + "answer", first)
    second = chat_prompt(TOOLS, conversation("answer"), 512, 264, known)
    known.remember(second.text + "The sky is", [*second.ids, 97])  # cut by its length
    request = conversation("answer")
    turns = [m.model_dump(exclude_none=True) for m in request.messages]
    turns += [{"role": "assistant", "content": "The sky is blue."}, HELLO]
    third = chat_prompt(TOOLS, ChatRequest.model_validate({"messages": turns}), 512, 264, known)
    assert third.ids[: len(first)] == first and 97 not in third.ids


@pytest.mark.parametrize("stream", [False, True])
def test_a_finished_answer_is_remembered(served, monkeypatch, stream):
    noted = []
    monkeypatch.setattr(Spellings, "remember", lambda self, text, ids: noted.append((text, ids)))

    def chat(**options):
        given = dict(model="tiny", messages=[HELLO], stream=stream, **options)
        answer = served.openai.chat.completions.create(**given)
        if stream:
            list(answer)

    served.script([*ids("yes ☕"), EOS], finish="stop")
    chat()
    assert noted == [(OPENING + "yes ☕", OPENING_IDS + ids("yes ☕"))]
    noted.clear()
    chat(stop="s")  # cut by a stop string
    served.script(ids("yes ☕")[:-1], finish="length")
    chat()  # ends in the middle of a character
    served.script([*ids("yes ☕")[:-1], *ids("no")], finish="length")
    chat()  # has half a character
    served.script([*ids("yes"), 3, *ids("no")], finish="length")
    chat()  # a special token that the text does not show
    served.script([*ids("yes"), 299], finish="length")
    chat()  # a token that stands for nothing
    served.script([299], finish="length")
    chat()
    served.script(ids("<|im_end|>"), finish="length")
    chat()  # written out, which is not the special token
    served.script(ids("yes"), finish="length")
    chat(extra_body={"add_special_tokens": True})
    served.openai.completions.create(model="tiny", prompt="a", max_tokens=3)
    assert noted == []


def test_a_tokenizer_with_several_spellings(served, monkeypatch):
    """End to end: the second request of a conversation extends the first one's tokens, whatever its text encodes to."""
    served.script([*ids("four"), EOS], finish="stop")
    answer = served.openai.chat.completions.create(model="tiny", messages=[HELLO]).choices[0].message
    encode = type(TOKENIZER).encode
    swapped = SimpleNamespace(calls=0)

    def other(self, text, add_special_tokens=True):
        swapped.calls += 1
        return [9 if token == ids("f")[0] else token for token in encode(self, text, add_special_tokens)]

    monkeypatch.setattr(type(TOKENIZER), "encode", other)
    turns = [HELLO, answer.model_dump(include={"role", "content"}), {"role": "user", "content": "More"}]
    served.openai.chat.completions.create(model="tiny", messages=turns)
    first, second = served.engine.requests
    assert swapped.calls
    assert second.prompt_ids[: len(first.prompt_ids) + 4] == [*first.prompt_ids, *ids("four")]
