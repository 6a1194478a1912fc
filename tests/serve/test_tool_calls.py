"""Calls in generated text: what is one and what is not, and the same for every way of cutting the text."""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.parts import Arguments, CallStart, Content, merged
from serve.tool_calls import CallParser
from serve.tool_formats import HERMES, LLAMA3_JSON, MISTRAL, MISTRAL_NAMED
from tests.serve.test_http_text import cut

NAMES = ("f", "get_weather")
FORMATS = {"hermes": HERMES, "llama3": LLAMA3_JSON, "mistral": MISTRAL, "mistral named": MISTRAL_NAMED}


def read(style: str, *pieces: str, **options):
    """(content, [(name, arguments)], whether the answer has ended with whole calls)."""
    parser = CallParser(style, NAMES, **options)
    parts = merged([part for piece in pieces for part in parser.push(piece)] + parser.finish())
    calls = [[part.name, ""] for part in parts if isinstance(part, CallStart)]
    for part in parts:
        if isinstance(part, Arguments):
            calls[part.number][1] += part.text
    content = "".join(part.text for part in parts if isinstance(part, Content))
    return content, [tuple(call) for call in calls], parser.called


CALL = '<tool_call>\n{"name": "f", "arguments": {"a": [1, "}"]}}\n</tool_call>'
A = '{"a": [1, "}"]}'
HERMES_TEXTS = [
    ("", "", []),
    ("just text\n", "just text\n", []),
    ("  \n", "  \n", []),
    (CALL, "", [("f", A)]),
    (f"I look.\n\n{CALL}\n", "I look.", [("f", A)]),
    (f"\n{CALL}\n{CALL}\n\n", "", [("f", A), ("f", A)]),
    (f"{CALL}{CALL}", "", [("f", A), ("f", A)]),
    (f"a {CALL} b \n", "a b", [("f", A)]),
    ('<tool_call>{"name": "unknown"}</tool_call>', "", [("unknown", "{}")]),
    ('<tool_call>{"name":"f","arguments":null}</tool_call>', "", [("f", "{}")]),
    ('<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", [("f", '{"a": 1}')]),
    ('<tool_call>{"id": [{"name": "x"}], "name": "f", "parameters": {}, "n": -1.5}', "", [("f", "{}")]),
    ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
    ('<tool_call>{"name": "f", "arguments": {"a": "\\"}\\\\"}}', "", [("f", '{"a": "\\"}\\\\"}')]),
    ('<tool_call>{"name": "f", "arguments": {"a":\n"b\nc"}}', "", [("f", '{"a":\n"b\\nc"}')]),
    ('<tool_call>{"arguments": {"a": "b\nc"}, "name": "f"}', "", [("f", '{"a": "b\\nc"}')]),
    ('<tool_call>{"name": "f", "arguments": "{\\"a\\": \n\\"b\\nc\\"}"}', "", [("f", '{"a": \n"b\\nc"}')]),
    ('<tool_call>{"nome": "a\nb"}', '<tool_call>{"nome": "a\nb"}', []),
    ('<tool_call>{"name": "f", "arguments": {"a": 1}\n</tool_call>ok', "ok", [("f", '{"a": 1}')]),
    ('<tool_call>{"name": "f", "arguments": {}}</tool_', "", [("f", "{}")]),  # cut
    ('<tool_call>{"name": "f", "arguments": {}}</tool_ x', "</tool_ x", [("f", "{}")]),
    ("a <tool_call> b", "a <tool_call> b", []),
    ("a <tool_call>", "a <tool_call>", []),
    ("a <tool_cal", "a <tool_cal", []),
    ("a <<b <tool_<", "a <<b <tool_<", []),
    (f"<tool_call>{CALL}", "<tool_call>", [("f", A)]),
    (f'<tool_call>{{"name": {CALL}', '<tool_call>{"name":', [("f", A)]),
    ('<tool_call>{"name": ""}</tool_call>', '<tool_call>{"name": ""}</tool_call>', []),
    ('<tool_call>{"name": 5, ', '<tool_call>{"name": 5, ', []),
    ('<tool_call>{"arguments": {}} ', '<tool_call>{"arguments": {}} ', []),
    ('<tool_call>{"arguments": {]}, "name": "f"}', '<tool_call>{"arguments": {]}, "name": "f"}', []),
    ('<tool_call>{"name": "f", "arguments": [1]}', '<tool_call>{"name": "f", "arguments": [1]}', []),
    ('<tool_call>{"name": "f", "arguments": "no"}', '<tool_call>{"name": "f", "arguments": "no"}', []),
    ('<tool_call>{"name": "f', '<tool_call>{"name": "f', []),
    ('<tool_call>{"name": "\\ud83d\\x", ', '<tool_call>{"name": "\\ud83d\\x", ', []),
    ("<tool_call>{}</tool_call>", "<tool_call>{}</tool_call>", []),
    ("<tool_call>[1]</tool_call>", "<tool_call>[1]</tool_call>", []),
]
LLAMA_TEXTS = [
    ('{"name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
    (' \n{"name": "f", "arguments": {}}\n', "", [("f", "{}")]),
    (
        '{"name": "f", "parameters": {}}; {"name": "get_weather", "parameters": {}};',
        "",
        [("f", "{}"), ("get_weather", "{}")],
    ),
    ('{"name": "f", "parameters": {}}; and more', "; and more", [("f", "{}")]),
    ('{"name": "f", "parameters": {}} then', " then", [("f", "{}")]),
    ('{"name": "Anna", "parameters": {}}', '{"name": "Anna", "parameters": {}}', []),
    ('{"name": "f", "age": 5}', '{"name": "f", "age": 5}', []),
    ('{"answer": 42}\n', '{"answer": 42}\n', []),
    ("{", "{", []),
    ('Text {"name": "f", "parameters": {}}', 'Text {"name": "f", "parameters": {}}', []),
    ('<|python_tag|>{"name": "x", "parameters": {}}', "", [("x", "{}")]),
    ('Wait. <|python_tag|> {"name": "f", "parameters": {}}', "Wait.", [("f", "{}")]),
    ("<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
]
MISTRAL_TEXTS = [
    ('[TOOL_CALLS] [{"name": "f", "arguments": {"a": [1]}}]', "", [("f", '{"a": [1]}')]),
    ('[TOOL_CALLS][{"name":"f","arguments":{}}, {"arguments":{},"name":"g"}]\n', "", [("f", "{}"), ("g", "{}")]),
    ('Hm. [TOOL_CALLS]{"name": "f", "arguments": {}}', "Hm.", [("f", "{}")]),
    ('[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]get_weather[ARGS] {}', "", [("f", '{"a": 1}'), ("get_weather", "{}")]),
    ('[TOOL_CALLS]f[CALL_ID]abcDEF123[ARGS]{"a": 1}', "", [("f", '{"a": 1}')]),
    ('[TOOL_CALLS]f{"a": 1}', "", [("f", '{"a": 1}')]),
    ("[TOOL_CALLS] []", "[TOOL_CALLS] []", []),
    ("[TOOL_CALLS] none", "[TOOL_CALLS] none", []),
    ("[TOOL_CALLS]f[ARGX]{}", "[TOOL_CALLS]f[ARGX]{}", []),
    ("[TOOL_CALLS]f[CALLS]{}", "[TOOL_CALLS]f[CALLS]{}", []),
    ('[TOOL_CALLS][{"name": "f", "arguments": {}}, 5]', ", 5]", [("f", "{}")]),
    ('[TOOL_CALLS][{"name": "f", "arguments": {}} 5', " 5", [("f", "{}")]),
    ("a list [1, [2]] [TOOL", "a list [1, [2]] [TOOL", []),
]  # fmt: skip
ALL = [
    (style, *case)
    for style, cases in (("hermes", HERMES_TEXTS), ("llama3_json", LLAMA_TEXTS), ("mistral", MISTRAL_TEXTS))
    for case in cases
]


@pytest.mark.parametrize(("style", "text", "content", "calls"), ALL, ids=lambda case: repr(case)[:50])
def test_what_is_a_call(style, text, content, calls):
    assert read(style, text) == (content, calls, bool(calls))
    assert read(style, *text) == (content, calls, bool(calls))


SOUP = st.lists(
    st.sampled_from(
        [text for _, text, _, _ in ALL]
        + [*'{}[]":,;\\ \n<', '"name"', '"f"', '"arguments"', "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]"]
    ),
    max_size=14,
).map("".join)  # fmt: skip


@settings(max_examples=400)
@given(
    SOUP,
    st.sampled_from(["hermes", "llama3_json", "mistral"]),
    st.lists(st.integers(0, 999), max_size=12),
    st.booleans(),
    st.booleans(),
)
def test_any_cutting_reads_the_same(text, style, cuts, hidden, single):
    whole = read(style, text, hidden=hidden, single=single)
    assert read(style, *cut(text, cuts), hidden=hidden, single=single) == whole
    assert read(style, *text, hidden=hidden, single=single) == whole
    if not whole[1] and not hidden:
        assert whole[0] == text


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
CALLS = st.lists(
    st.tuples(st.sampled_from(NAMES), st.dictionaries(st.text(), VALUES, max_size=3).map(json.dumps)),
    min_size=1,
    max_size=4,
)


@settings(max_examples=150)
@given(CALLS, st.sampled_from(sorted(FORMATS)), st.lists(st.integers(0, 999), max_size=8), st.booleans())
def test_what_is_written_is_read(calls, name, cuts, single):
    form = FORMATS[name]
    content, found, whole = read(form.style, *cut(form.write(calls), cuts), single=single)
    assert (content, found, whole) == ("", calls[:1] if single else calls, True)


def test_arguments_come_as_they_are_written():
    parser = CallParser("hermes")
    assert parser.push("Let me see <tool") == [Content("Let me see")]
    assert parser.push('_call>\n{"name": "f", "argu') == []
    start, *rest = parser.push('ments": {"city": "Os')
    assert (start.number, start.name) == (0, "f")
    assert re.fullmatch("call_[0-9a-f]{24}", start.id)
    assert rest == [Arguments(0, '{"city": "Os')]
    assert parser.push('lo"') == [Arguments(0, 'lo"')]
    assert not parser.called
    assert parser.push("}}\n</tool_c") == [Arguments(0, "}")]
    assert parser.push("all>\n \nDone") == [Content("\n \nDone")]
    assert parser.finish() == []
    assert parser.called


def test_arguments_that_end_too_early():
    assert read("hermes", '<tool_call>{"name": "f", "arguments": {"a": "b') == (
        "",
        [("f", '{"a": "b')],
        False,
    )
    assert read("mistral", "[TOOL_CALLS]f[ARGS]{") == ("", [("f", "{")], False)
    two = '{"name": "f", "parameters": {}}; {"name": "f", "parameters": {"'
    assert read("llama3_json", two) == ("", [("f", "{}"), ("f", '{"')], False)


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("several", [False, True])
def test_what_is_cut_off_a_demanded_call_is_no_text(form, several):
    """A grammar allows nothing but calls: what is none yet is one that the last token came too early for."""
    whole = form.write([("f", A)] * (1 + (several and form.several)))
    for end in range(len(whole)):
        content, calls, _ = read(form.style, whole[:end], demanded=True)
        assert content == "" and all(name == "f" for name, _ in calls), whole[:end]
    assert read("hermes", "<tool_call>{")[0]


def test_a_single_call_ends_the_answer():
    parser = CallParser("hermes", single=True)
    parser.push(CALL[:-1])
    assert not parser.done
    parser.push(CALL[-1])
    assert parser.done
    assert parser.push("more") == parser.finish() == []
    assert read("hermes", f"{CALL} {CALL}", single=True) == ("", [("f", A)], True)
    assert read("hermes", "no call", single=True) == ("no call", [], False)
    for text in ('[TOOL_CALLS][{"name": "f", "arguments": {}}, {', "[TOOL_CALLS]f[ARGS]{}[TOOL"):
        assert read("mistral", text, single=True) == ("", [("f", "{}")], True)
    assert read("llama3_json", '{"name": "f", "parameters": {}}; {', single=True) == ("", [("f", "{}")], True)
    assert read("llama3_json", '<|python_tag|>{"name": "f"} x', single=True) == ("", [("f", "{}")], True)


def test_special_markers_are_never_content():
    assert read("mistral", "a [TOOL_CALLS]f[ARGS] no", hidden=True) == ("a f no", [], False)
    assert read("llama3_json", "<|python_tag|>print(1)", hidden=True) == ("print(1)", [], False)


def test_ids():
    parser = CallParser("mistral")
    parts = parser.push("[TOOL_CALLS]f[CALL_ID]abcDEF123[ARGS]{}[TOOL_CALLS]g[ARGS]{}")
    first, second = (part for part in parts if isinstance(part, CallStart))
    assert first.id == "abcDEF123"
    assert re.fullmatch("[0-9A-Za-z]{9}", second.id)


@pytest.mark.parametrize("style", ["hermes", "llama3_json", "mistral"])
@pytest.mark.parametrize(
    "unit", ["<", "[", " ", "<tool_call>", "[TOOL_CALLS][", '<tool_call>{"a":', "{[", '"\\', "x"], ids=repr
)
def test_long_texts(style, unit):
    """100,000 characters, whole and in pieces; something quadratic would run into the limit of a test's time."""
    text = unit * (100_000 // len(unit))
    assert read(style, text)[0] == text
    opened = {"hermes": '<tool_call>{"name": "f", "arguments": {', "mistral": "[TOOL_CALLS]f[ARGS]{"}.get(
        style
    )
    if opened:
        read(style, opened + text)
    read(style, *[text[i : i + 50] for i in range(0, len(text), 50)])
