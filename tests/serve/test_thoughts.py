"""Thoughts in generated text: what belongs to them, the same for every way of cutting the text; and where answers begin."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from models.testing import SPECIAL_TOKENS, TINY_CHAT_TEMPLATE, tiny_tokenizer
from serve.choice import Choice
from serve.parts import Arguments, CallStart, Content, Thought, merged
from serve.protocol import ChatRequest
from serve.request import SamplingParams, TokenOutput
from serve.thought_prompt import NO_THOUGHTS, ThoughtSupport
from serve.thoughts import AnswerReader
from serve.tool_calls import CallParser
from tests.serve.test_http_text import cut
from tests.serve.thought_templates import QWEN, R1, TAGS, thought_tokenizer
from tests.serve.tool_templates import HERMES

CALL = '<tool_call>{"name": "f", "arguments": {"a": "</think>"}}</tool_call>'
BEGINNINGS = ("possible", "open", "within", "none")


def read(beginning, *pieces, calls=False, **options):
    """(thoughts, content, arguments of calls), and whether there were thoughts."""
    reader = AnswerReader(beginning, CallParser("hermes", ("f",)) if calls else None, **options)
    parts = merged([part for piece in pieces for part in reader.push(piece)] + reader.finish())
    kinds = [type(part) for part in parts]
    assert Thought not in kinds[1:], "thoughts come first, in one piece"
    texts = ["".join(p.text for p in parts if isinstance(p, kind)) for kind in (Thought, Content, Arguments)]
    assert reader.called <= (CallStart in kinds) <= calls
    assert not reader.thinking or not texts[1]
    return *texts, reader.thought


CASES = [
    ("possible", "", "", "", False),
    ("possible", "Hello\n", "", "Hello\n", False),
    ("possible", " \n", "", " \n", False),
    ("possible", " \nHello", "", " \nHello", False),
    ("possible", "<think>\nHm.\n</think>\n\nHello\n", "Hm.", "Hello\n", True),
    ("possible", "\n <think>a  b</think>c", "a  b", "c", True),
    ("possible", "<think>\n\n</think>\n\nHello", "", "Hello", True),
    ("possible", "<think>a</think>", "a", "", True),
    ("possible", "<think>a</think>\n\n", "a", "", True),
    ("possible", "<think>a\n", "a\n", "", True),
    ("possible", "<think>", "", "", True),
    ("possible", "<think>\n", "", "", True),
    ("possible", "<think>a < b </think </thinx> <</think>b</think>", "a < b </think </thinx> <", "b</think>", True),
    ("possible", "<think>a <think> b</think>c<think>d</think>", "a <think> b", "c<think>d</think>", True),
    ("possible", "<thin", "", "<thin", False),
    ("possible", " <thing>a</think>b", "", " <thing>a</think>b", False),
    ("possible", "</think>a", "", "</think>a", False),
    ("possible", "<<think>a</think>", "", "<<think>a</think>", False),
    ("possible", "a <think>b</think>", "", "a <think>b</think>", False),
    ("open", "Hm.\n</think>\n\nHello", "Hm.", "Hello", True),
    ("open", "\nHm.", "Hm.", "", True),
    ("open", "</think>Hello", "", "Hello", True),
    ("open", "\n<think>\nHm.</think>Hello", "Hm.", "Hello", True),
    ("open", "<b</think>Hello", "<b", "Hello", True),
    ("open", "Hm. </th", "Hm. ", "", True),
    ("open", "Hm. </thx", "Hm. </thx", "", True),
    ("open", "Hm. <", "Hm. <", "", True),
    ("open", "</", "", "", True),
    ("open", "", "", "", True),
    ("within", " well.\n</think>\n\nHello", " well.", "Hello", True),
    ("within", "<think>a", "<think>a", "", True),
    ("none", "<think>a</think> b", "", "<think>a</think> b", False),
    ("none", "</think> b", "", "</think> b", False),
]  # fmt: skip


@pytest.mark.parametrize(("beginning", "text", "thoughts", "content", "thought"), CASES)
def test_what_is_thought(beginning, text, thoughts, content, thought):
    expected = (thoughts, content, "", thought)
    assert read(beginning, text) == expected
    assert read(beginning, *text) == expected
    assert read(beginning, *text, shown=False) == ("", content, "", thought)


@pytest.mark.parametrize("split", [list, lambda text: [text]], ids=["letters", "whole"])
def test_calls_come_after_the_thoughts(split):
    arguments = '{"a": "</think>"}'
    other = CALL.replace("</think>", "b")
    assert read("open", *split(f"{other}</think>\n{CALL}"), calls=True) == (other, "", arguments, True)
    assert read("possible", *split(f"<think>f?</think>\n{CALL}"), calls=True) == ("f?", "", arguments, True)
    assert read("possible", *split(f"Well.\n{CALL}"), calls=True) == ("", "Well.", arguments, False)
    assert read("possible", *split(CALL), calls=True) == ("", "", arguments, False)


SOUP = st.lists(
    st.sampled_from(
        [*(case[1] for case in CASES), CALL, *"<>/ \nthik", "<think>", "</think>", "<tool_call>"]
    ),
    max_size=10,
).map("".join)


@example("Hm. </th", "open", [], False)
@settings(max_examples=400)
@given(SOUP, st.sampled_from(BEGINNINGS), st.lists(st.integers(0, 999), max_size=12), st.booleans())
def test_any_cutting_reads_the_same(text, beginning, cuts, calls):
    whole = read(beginning, text, calls=calls)
    assert read(beginning, *cut(text, cuts), calls=calls) == whole
    assert read(beginning, *text, calls=calls) == whole
    thoughts, content, _, thought = whole
    if calls:
        return
    # White space around tags is all that is lost.
    if not thought:
        assert content == text
    elif "</think>" not in text:
        cut_tags = ["</think>"[:count] for count in range(2, 8)]  # none of the thoughts
        cut_tag = next((tag for tag in reversed(cut_tags) if text.endswith(tag)), "")
        assert content == "" and text.removesuffix(cut_tag).endswith(thoughts)
    else:
        before, after = text.split("</think>", 1)
        assert content == after.lstrip() and before.rstrip().endswith(thoughts)


@pytest.mark.parametrize("unit", ["<", " ", "a \n", "<think>", "</thin"], ids=repr)
def test_long_texts(unit):
    """40,000 characters, whole and in pieces; something quadratic would run into the limit of a test's time."""
    text = unit * (40_000 // len(unit)) + "."
    for beginning in BEGINNINGS:
        thoughts, content, *_ = read(beginning, f"<think>a{text}")
        assert (thoughts + content).endswith(f"a{text}")
        assert read(beginning, *text) == read(beginning, text)


# Tokens


def outputs(tokens, *, beginning, skip=True, tags=TAGS, finish="length", **options):
    """The choice that has got these tokens, and all that it told of."""
    reader = AnswerReader(beginning, tags=tags.values())
    tokenizer = thought_tokenizer("qwen special" if tags else "qwen")
    choice = Choice(
        tokenizer, SamplingParams(max_tokens=99), skip_special_tokens=skip, reader=reader, **options
    )
    for n, token in enumerate(tokens, 1):
        choice.feed(TokenOutput(choice=0, token_id=token, finish_reason=finish if n == len(tokens) else None))
    return choice, choice.take(everything=True)


def spelled(text, special=True):
    tokenizer = thought_tokenizer("qwen special" if special else "qwen")
    return tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("special", [False, True], ids=["text", "special"])
@pytest.mark.parametrize(
    ("beginning", "text", "thoughts", "content", "last"),
    [
        ("possible", "<think>\nHm</think>\n\nHi", "Hm", "Hi", "</think>"),
        ("possible", "<think>\nHm", "Hm", "", "Hm"),
        ("possible", " Hi", "", " Hi", None),
        ("open", "Hm</think>Hi", "Hm", "Hi", "</think>"),
        ("none", "Hi", "", "Hi", None),
    ],
)
def test_tags_are_seen_and_counted_but_never_shown(special, beginning, text, thoughts, content, last):
    choice, delta = outputs(spelled(text, special), beginning=beginning, tags=TAGS if special else {})
    expected = [Thought(thoughts)] * bool(thoughts) + [Content(content)] * bool(content)
    assert merged(delta.parts) == expected
    counted = "" if last is None else text[: text.index(last) + len(last)]
    assert choice.reasoning_tokens == len(spelled(counted, special))


def test_special_tags_within_the_answer_are_skipped_as_all_special_tokens_are():
    tokens = spelled("<think>a</think>b<think>c</think>d<|endoftext|>")
    assert merged(outputs(tokens, beginning="possible")[1].parts) == [Thought("a"), Content("bcd")]
    shown = merged(outputs(tokens, beginning="possible", skip=False)[1].parts)
    assert shown == [Thought("a"), Content("b<think>c</think>d<|endoftext|>")]
    # Written in other tokens they are text that the model wants to show.
    tokens = [*spelled("a</think>The tag "), *spelled("<think>", special=False)]
    assert merged(outputs(tokens, beginning="open")[1].parts) == [Thought("a"), Content("The tag <think>")]
    tokens = spelled("a<think>b</think>c")
    assert merged(outputs(tokens, beginning="none")[1].parts) == [Content("abc")]


def test_what_is_remembered_of_an_answer_is_its_whole_text():
    tokens = spelled("<think>\nHm</think>\n\nHi", special=False)
    choice, _ = outputs(tokens, beginning="possible", tags={})
    assert choice.spelling == ("<think>\nHm</think>\n\nHi", tokens)
    choice, _ = outputs(spelled("<think>\nHm</think>\n\nHi"), beginning="possible")
    assert choice.spelling is None  # as of any text with special tokens


def test_stop_strings_are_looked_for_in_the_thoughts_too():
    choice, delta = outputs(spelled("<think>one two</think>three"), beginning="possible", stops=["two"])
    assert (merged(delta.parts), delta.stop_reason) == ([Thought("one ")], "two")
    assert choice.reasoning_tokens == len(spelled("<think>one two"))


# Templates and prompts


@pytest.mark.parametrize(
    ("template", "parser", "on"),
    [
        (QWEN, "auto", True),
        (R1, "auto", True),
        (TINY_CHAT_TEMPLATE + "{% if add_generation_prompt %}<think>\n{% endif %}", "auto", True),
        ({"default": HERMES, "tool_use": QWEN}, "auto", True),
        (HERMES, "auto", False),
        (HERMES, "think", True),
        (QWEN, "none", False),
    ],
    ids=["qwen", "r1", "opened", "tool use", "none", "told", "not wanted"],
)
def test_thoughts_follow_from_the_template_or_are_told(template, parser, on):
    # The vocabulary says nothing: models that never think share theirs with others.
    tokenizer = tiny_tokenizer((*SPECIAL_TOKENS[:3], *TAGS, *SPECIAL_TOKENS[5:]), template)
    support = ThoughtSupport.of(tokenizer, parser)
    assert (support.on, support.special) == (on, TAGS)
    assert ThoughtSupport.of(tiny_tokenizer(), parser) == ThoughtSupport(parser == "think", {})


def request(*turns, **fields) -> ChatRequest:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]
    return ChatRequest.parse({"messages": messages} | fields)


SUPPORT = ThoughtSupport(True, {})


@pytest.mark.parametrize(
    ("prompt", "beginning"),
    [
        ("Hi<|im_end|>assistant\n", "possible"),
        ("<think>", "open"),
        ("assistant\n<think>\n", "open"),
        ("assistant\n<think>\n\n</think>\n\n", "none"),
        ("assistant\n</think>", "none"),
        ("What is <think>?<|im_end|>assistant\n", "possible"),
        ("", "possible"),
    ],
)
def test_where_an_answer_begins(prompt, beginning):
    assert SUPPORT.beginning(request("Hi"), prompt) == beginning
    assert NO_THOUGHTS.beginning(request("Hi"), prompt) == "none"


@pytest.mark.parametrize(
    ("said", "beginning"),
    [
        ("The sky is", "none"),
        ("<think>\n", "open"),
        ("\n<think>\nHm,", "within"),
        ("<think>\nHm.\n</think>\n\nThe sky", "none"),
        ("", "open"),
    ],
)
def test_where_a_continued_answer_begins(said, beginning):
    asked = request("Hi", said, continue_final_message=True)
    assert SUPPORT.beginning(asked, "assistant\n<think>\n" + said.strip()) == beginning
