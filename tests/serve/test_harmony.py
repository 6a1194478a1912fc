"""The harmony format in generated text: what is thought, said and called, the same for every way of cutting the text."""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.choice import Choice
from serve.harmony import HarmonyReader
from serve.parts import Arguments, CallStart, Content, Thought, merged
from serve.request import SamplingParams, TokenOutput
from tests.serve.harmony_template import (
    CALL,
    MARKS,
    RETURN,
    START,
    analysis,
    call,
    final,
    harmony_tokenizer,
    tokens_of,
)
from tests.serve.test_http_text import cut

MARKER = re.compile(r"(<\|(?:start|end|message|channel|constrain|return|call)\|>)")
NAMES = ("f", "get_weather")


def read(text, beginning="possible", cuts=(), names=NAMES, **options):
    """(thoughts, content, calls, whether the answer has ended with whole calls), of pieces between the markers."""
    reader, parts = HarmonyReader(MARKS, beginning, names, **options), []
    for piece in MARKER.split(text):
        if MARKER.fullmatch(piece):
            parts += reader.mark(piece)
        else:
            for part in piece if cuts is None else cut(piece, cuts):
                parts += reader.push(part)
    parts = merged(parts + reader.finish())
    calls = [[part.name, ""] for part in parts if isinstance(part, CallStart)]
    for part in parts:
        if isinstance(part, Arguments):
            calls[part.number][1] += part.text
    thoughts, content = (
        "".join(part.text for part in parts if isinstance(part, kind)) for kind in (Thought, Content)
    )
    assert not thoughts or reader.thought
    return thoughts, content, [tuple(call) for call in calls], reader.called


A = '{"a": [1, "<|"]}'
F = [("f", A)]
TWICE = "<|channel|>commentary<|message|>First a plan.\n<|end|>" + START
CASES = [
    # As the model is meant to write.
    ("", "", "", []),
    (analysis("Hm.\n") + final(" Hello\n"), "Hm.\n", " Hello\n", []),
    (analysis("Hm.") + final("Hello<|return|>"), "Hm.", "Hello", []),
    (final("Hello<|end|>"), "", "Hello", []),
    (analysis("") + final(""), "", "", []),
    (analysis("One,") + analysis("two.") + final("Hello"), "One,\n\ntwo.", "Hello", []),
    (analysis("Hm.") + call("f", A), "Hm.", "", F),
    (call("f", A + "<|call|>"), "", "", F),
    (call("f", "<|call|>"), "", "", [("f", "{}")]),
    (call("f", " \n"), "", "", [("f", " \n{}")]),
    (call("f", '{"a":\n"b\nc"}'), "", "", [("f", '{"a":\n"b\\nc"}')]),
    (f" to=functions.f<|channel|>commentary json<|message|>{A}<|call|>", "", "", F),
    (f" to=functions.f<|channel|>analysis<|message|>{A}", "", "", F),
    (f"<|channel|>commentary to=functions.f<|constrain|>json<|message|>{A}", "", "", F),
    (f"<|channel|>commentary to=f code<|message|>{A}", "", "", F),
    (call("unknown", A), "", "", [("unknown", A)]),
    (TWICE + final("Done"), "", "First a plan.\n\n\nDone", []),
    (analysis("Hm.") + TWICE + analysis("Well.") + call("f", A), "Hm.\n\nWell.", "First a plan.\n", F),
    ("<|channel|>analysis to=python code<|message|>print(1)<|call|>", "print(1)", "", []),
    # Cut in a header: nothing was said.
    ("<|channel|>", "", "", []),
    ("<|channel|>ana", "", "", []),
    ("<|channel|>commentary to=functions.get", "", "", []),
    ("<|channel|>commentary to=functions.f <|constrain|>js", "", "", []),
    (analysis("Hm.")[:-4], "Hm.", "", []),
    # What it is not meant to write.
    ("Hello\n", "", "Hello\n", []),
    ("to", "", "to", []),
    ("Hello<|channel|>final<|message|> world", "", "Hello\n\n world", []),
    ("<|message|>Hello", "", "Hello", []),
    ("Well<|message|>Hello", "", "Well\n\nHello", []),
    ("<|channel|><|message|>Hello", "", "Hello", []),
    ("<|channel|>finally<|message|>Hello", "", "Hello", []),
    ("<|channel|>final Hello, you<|end|>", "", " Hello, you", []),
    ("<|channel|>analysis Well<|return|>", " Well", "", []),
    ("<|channel|>final<|end|>Hello", "", "Hello", []),
    ("<|channel|>final<|message|>Hello<|end|> world", "", "Hello\n\n world", []),
    ("<|channel|>analysis<|message|>Hm.<|channel|>final<|message|>Hello", "Hm.", "Hello", []),
    (f"<|channel|>analysis<|message|>Hm.{START}<|channel|>final<|message|>Hello", "Hm.", "Hello", []),
    (f"{START}{final('Hello')}", "", "Hello", []),
    ("<|channel|>final<|channel|>final<|message|>Hello", "", "Hello", []),
    (final("Hello <|message|>you<|constrain|>."), "", "Hello you.", []),
    (final("Hello<|end|><|start|>user<|message|>Hi"), "Hi", "Hello", []),
    (analysis("Hm.")[:-9] + "functions.f to=assistant<|channel|>commentary<|message|>7", "Hm.\n\n7", "", []),
    ("<|start|>Sure, here it is", "", "Sure, here it is", []),
    (f"<|channel|>commentary to=functions.f json{A}", "", f" json{A}", []),
    ("x" * 300 + final("y"), "", "x" * 300 + "\n\ny", []),
    (f"<|channel|>analysis {'x' * 300}<|end|>{START}{final('y')}", f" {'x' * 300}", "y", []),
    (" " * 300 + "to=functions.f<|message|>{}", "", " " * 300 + "to=functions.f{}", []),
]  # fmt: skip


@pytest.mark.parametrize(("text", "thoughts", "content", "calls"), CASES, ids=lambda case: repr(case)[:60])
def test_what_is_what(text, thoughts, content, calls):
    expected = (thoughts, content, calls, bool(calls))
    assert read(text) == expected
    assert read(text, cuts=None) == expected
    assert read(text, shown=False)[1:] == expected[1:]


SOUP = st.lists(
    st.sampled_from([*(case[0] for case in CASES), *MARKS.values(), START, *" \na", "to=", "functions.f", "final", "{}"]),
    max_size=8,
).map("".join)  # fmt: skip
OPTIONS = st.fixed_dictionaries({
    "beginning": st.sampled_from(("possible", "within", "none")),
    "names": st.sampled_from((NAMES, None)),
    **dict.fromkeys(("thinks", "single", "endless"), st.booleans()),
})  # fmt: skip


@settings(max_examples=400)
@given(SOUP, st.lists(st.integers(0, 999), max_size=12), OPTIONS)
def test_any_cutting_reads_the_same(text, cuts, options):
    whole = read(text, **options)
    assert read(text, cuts=cuts, **options) == whole
    assert read(text, cuts=None, **options) == whole


@settings(max_examples=300)
@given(st.lists(st.sampled_from([*MARKS.values(), "word "]), max_size=12), OPTIONS)
def test_no_text_is_lost(pieces, options):
    """Whatever the markers around it; but what stands in a header that a message comes after is its role or type."""
    words = iter(range(99))
    text = "".join(piece.replace("word", f"w{next(words)}") for piece in pieces)
    thoughts, content, calls, _ = read(text, **options | {"endless": True, "single": False})
    found = "".join([thoughts, content, *(arguments for _, arguments in calls)])
    typed = re.findall(r"(w\d+) (?=(?:[^<]|<\|channel\|>|<\|constrain\|>)*<\|message\|>)", text)
    for word in re.findall(r"w\d+", text):
        assert found.count(f"{word} ") == 1 or word in typed


# A marker that is written out would be one here, as only tokens tell them apart.
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="|"))
MESSAGES = st.lists(
    st.tuples(st.sampled_from(("analysis", "commentary", "final")), TEXT),
    max_size=5,
)  # fmt: skip


@settings(max_examples=150)
@given(MESSAGES, st.dictionaries(TEXT, st.integers(), max_size=3).map(json.dumps), st.booleans())
def test_what_is_written_is_read(messages, arguments, calls):
    written = [f"<|channel|>{channel}<|message|>{text}<|end|>" for channel, text in messages]
    written += [call("get_weather", arguments)] * calls
    thoughts = [text for channel, text in messages if channel == "analysis" and text]
    content = [text for channel, text in messages if channel != "analysis" and text]
    expected = ("\n\n".join(thoughts), "\n\n".join(content), [("get_weather", arguments)] * calls, calls)
    assert read(START.join(written)) == expected


@pytest.mark.parametrize(
    ("beginning", "text", "thoughts", "content"),
    [
        ("within", " well.<|end|>" + START + final("Hello"), " well.", "Hello"),
        ("none", " world<|end|>", "", " world"),
        ("none", " world<|end|>" + START + analysis("Hm.") + final("!"), "Hm.", " world\n\n!"),
        ("open", "Hm.", "Hm.", ""),
    ],
)
def test_messages_that_the_prompt_has_begun(beginning, text, thoughts, content):
    assert read(text, beginning) == (thoughts, content, [], False)


def test_thoughts_or_calls_that_are_not_looked_for():
    text = analysis("Hm.") + call("f", A)
    assert read(text, thinks=False) == ("", "Hm.", F, True)
    assert read(text, names=None) == ("Hm.", A, [], False)
    assert read("<|channel|>commentary to=g<|message|>x") == ("", "x", [], False)


def test_calls_of_other_names_are_content():
    for name, calls in (("f", F), ("unknown", [("unknown", A)])):
        assert read(call(name, A))[1:] == ("", calls, True)
    assert read(call("f", A), only=True)[1:] == ("", F, True)
    assert read(call("unknown", A), only=True)[1:] == (A, [], False)


def test_the_end_of_an_answer():
    text = call("f", "{}<|call|>") + START + final("more")
    assert read(text) == ("", "", [("f", "{}")], True)
    assert read(text, endless=True) == ("", "more", [("f", "{}")], True)
    two = call("f", "{}<|end|>") + START + call("f", "{}<|end|>")
    assert [len(read(two, single=single)[2]) for single in (False, True)] == [2, 1]
    assert read(final("a<|return|>b")) == ("", "a", [], False)
    # Arguments that were cut are no call that is whole.
    assert read(call("f", '{"a": "b')) == ("", "", [("f", '{"a": "b')], False)


def test_arguments_come_as_they_are_written():
    reader = HarmonyReader(MARKS, names=NAMES)
    assert reader.thinking and reader.framing
    assert reader.mark("<|channel|>") == reader.push("commentary to=functions.f ") == []
    assert reader.mark("<|constrain|>") == reader.push("json") == []
    (start,) = reader.mark("<|message|>")
    assert (start.number, start.name) == (0, "f")
    assert re.fullmatch("call_[0-9a-f]{24}", start.id)
    assert reader.push('{"city": "Os') == [Arguments(0, '{"city": "Os')]
    assert not (reader.called or reader.done or reader.thinking or reader.framing)
    assert reader.mark("<|call|>") == []
    assert reader.called and reader.done


@pytest.mark.parametrize(
    "unit", [" ", "x", "to=", '{"', *MARKS.values(), START, "<|channel|>final"], ids=repr
)
def test_long_texts(unit):
    """40,000 characters, whole and in pieces; something quadratic would run into the limit of a test's time."""
    text = unit * (40_000 // len(unit))
    for before in ("", "<|channel|>final<|message|>", call("f", "")):
        assert read(before + text, endless=True) == read(before + text, cuts=None, endless=True)


# Tokens


def outputs(tokens, *, finish="stop", sampling=None, skip=True, **options):
    """The choice that has got these tokens, and all that it told of."""
    reader = HarmonyReader(MARKS, names=NAMES)
    choice = Choice(
        harmony_tokenizer(), sampling or SamplingParams(max_tokens=999), skip_special_tokens=skip, reader=reader, **options
    )  # fmt: skip
    for n, token in enumerate(tokens, 1):
        choice.feed(TokenOutput(choice=0, token_id=token, finish_reason=finish if n == len(tokens) else None))
    return choice, choice.take(everything=True)


def letters(text):
    """A text in tokens of which none is special."""
    return [byte + 8 for byte in text.encode()]


@pytest.mark.parametrize("skip", [True, False])
def test_markers_are_tokens_and_never_shown(skip):
    written = "<|start|>user<|message|>é<|end|>"
    tokens = [*tokens_of("<|channel|>analysis<|message|>Hm: "), *letters(written), *tokens_of("<|end|>" + START + final("")),
              *letters(written), RETURN]  # fmt: skip
    choice, delta = outputs(tokens, skip=skip)
    assert merged(delta.parts) == [Thought(f"Hm: {written}"), Content(written)]
    assert (delta.finish_reason, delta.thought, choice.spelling) == ("stop", True, None)


def test_tokens_of_thoughts():
    thoughts = "<|channel|>analysis<|message|>Hm<|end|>"
    for rest, counted in (
        (START + final("Hello"), thoughts),
        (START + analysis("so") + final("Hello"), thoughts + "so<|end|>"),
        ("", thoughts),
    ):
        assert outputs(tokens_of(thoughts + rest))[0].reasoning_tokens == len(tokens_of(counted))
    assert outputs(tokens_of(final("Hello")))[0].reasoning_tokens == 0


def test_a_call_ends_with_its_token():
    _, delta = outputs([*tokens_of(call("f", "{}")), CALL])
    assert [type(part) for part in delta.parts][:2] == [CallStart, Arguments]
    assert (delta.called, delta.finish_reason) == (True, "stop")
    # Where the engine does not know that it ends an answer, the choice ends by itself.
    choice, delta = outputs([*tokens_of(call("f", "{}")), CALL, *tokens_of("more")], finish=None)
    assert (choice.finished, delta.called, delta.finish_reason) == (True, True, "stop")


@pytest.mark.parametrize("stop", ["|", "final", "is<", "a", "sis", "<|message|>H"])
def test_stop_strings_are_looked_for_in_what_is_said(stop):
    tokens = [*tokens_of(analysis("Hm is") + final("<Hm|a")), RETURN]
    _, delta = outputs(tokens, stops=[stop])
    said = {"|": "<Hm", "a": "<Hm|"}.get(stop, "<Hm|a")
    assert merged(delta.parts) == [Thought("Hm is"), Content(said)]
    assert delta.stop_reason == (stop if stop in ("|", "a") else None)


def test_half_a_character_belongs_to_its_message():
    tokens = [
        *tokens_of("<|channel|>analysis<|message|>a"),
        "é".encode()[0] + 8,
        *tokens_of("<|end|>" + START + final("b")),
    ]
    assert merged(outputs(tokens, finish="length")[1].parts) == [Thought("a\ufffd"), Content("b")]
