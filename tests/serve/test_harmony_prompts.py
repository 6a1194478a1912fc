"""The harmony format around an answer: found in a template, where prompts leave off, and grammars over its markers."""

import json

import pytest

from models.testing import TINY_CHAT_TEMPLATE, tiny_tokenizer
from serve.grammar import Vocabulary
from serve.harmony import HarmonyReader
from serve.parts import Arguments, CallStart, Content, Thought, merged
from serve.prompts import chat_text
from serve.protocol import ChatRequest
from serve.structured import GrammarSpec
from serve.thought_prompt import ThoughtSupport
from serve.tool_formats import HARMONY as FORMAT
from serve.tool_formats import HERMES
from serve.tool_prompt import ToolSupport
from tests.serve.harmony_template import HARMONY, MARKS, START, analysis, call, final, harmony_tokenizer
from tests.serve.test_thought_grammars import ANSWERS, FORMS, WRONG, follow
from tests.serve.test_tool_formats import NAMED, TOOLS, write
from tests.serve.tool_templates import tool_tokenizer

TOKENIZER = harmony_tokenizer()
VOCABULARY = Vocabulary(TOKENIZER, 264, (0, 2))
SUPPORT = ToolSupport.of(TOKENIZER)
THOUGHTS = ThoughtSupport.of(TOKENIZER, harmony=True)
HELLO = [{"role": "user", "content": "Hi"}]


def request(**fields) -> ChatRequest:
    return ChatRequest.parse({"messages": HELLO} | fields)


# Which models


def test_the_format_follows_from_the_template():
    assert (SUPPORT.format, SUPPORT.native, SUPPORT.harmony) == (FORMAT, True, True)
    assert SUPPORT.special == THOUGHTS.special == {marker: i for i, marker in MARKS.items()}
    assert (THOUGHTS.on, ThoughtSupport.of(TOKENIZER, "none", harmony=True).on) == (True, False)
    # A template without the tokens: they would be spelled out.
    assert ToolSupport.of(tiny_tokenizer(chat_template=HARMONY)).format == HERMES
    assert ToolSupport.of(tool_tokenizer("hermes")).harmony is False


def test_the_format_may_be_told():
    support = ToolSupport.of(harmony_tokenizer(TINY_CHAT_TEMPLATE), "harmony")
    assert (support.format, support.native, len(support.special)) == (FORMAT, False, len(MARKS))
    assert ToolSupport.of(TOKENIZER, "hermes").format == HERMES
    with pytest.raises(
        ValueError, match=r"lacks special tokens of the format 'harmony' \(<\|start\|>, .*: write auto"
    ):
        ToolSupport.of(tiny_tokenizer(), "harmony")
    with pytest.raises(ValueError, match="is 'think', but calls are read as 'harmony'"):
        ThoughtSupport.of(TOKENIZER, "think", harmony=True)
    with pytest.raises(ValueError, match="is 'harmony', but calls are not read as 'harmony'"):
        ThoughtSupport.of(TOKENIZER, "harmony")


# Prompts


@pytest.mark.parametrize(
    ("prompt", "beginning"),
    [
        ("<|start|>user<|message|>Hi<|end|>" + START, "possible"),
        ("<|start|>user<|message|>Hi<|end|>", "possible"),
        (START + "<|channel|>final<|message|>Hi<|return|>", "possible"),
        (START + "<|channel|>final<|message|>", "none"),
        (START + "<|channel|>final<|message|>The sky\nis", "none"),
        (START + "<|channel|>analysis<|message|>Hm, ", "within"),
        (START + "<|channel|>analysis<|message|>Hm.<|end|>" + START, "possible"),
        ("", "possible"),
    ],
)
def test_where_an_answer_begins(prompt, beginning):
    assert THOUGHTS.beginning(request(), prompt) == beginning


def text_of(*messages, **fields) -> str:
    """The prompt, from the first message of a user on."""
    text = chat_text(SUPPORT, request(messages=[*HELLO, *messages], **fields))
    assert text.startswith("<|start|>system<|message|>Reasoning: ")
    return text[text.index("Hi<|end|>") + len("Hi<|end|>") :]


def made(*names: str, **fields):
    """A message with calls."""
    calls = [
        {"id": f"id {name}", "type": "function", "function": {"name": name, "arguments": '{"a": 1}'}} for name in names
    ]  # fmt: skip
    return {"role": "assistant", "content": None, "tool_calls": calls} | fields


def result(name: str, text: str):
    return {"role": "tool", "tool_call_id": f"id {name}", "content": text}


def called(name: str) -> str:
    return f'{START} to=functions.{name}<|channel|>commentary json<|message|>{{"a": 1}}<|call|>'


def told(name: str, text: str) -> str:
    return f'<|start|>functions.{name} to=assistant<|channel|>commentary<|message|>"{text}"<|end|>'


def test_thoughts_of_earlier_turns():
    answer = {"role": "assistant", "content": "Three", "reasoning_content": "Hm"}
    said = f"{START}<|channel|>final<|message|>Three<|end|>"
    thought = f"{START}<|channel|>analysis<|message|>Hm<|end|>"
    more = {"role": "user", "content": "More"}
    assert text_of(answer, more) == f"{said}<|start|>user<|message|>More<|end|>{START}"
    # Those before a call are shown until there is an answer.
    f = made("f", reasoning_content="Hm")
    assert text_of(f, result("f", "1")) == f"{thought}{called('f')}{told('f', '1')}{START}"
    expected = f"{called('f')}{told('f', '1')}{said}<|start|>user<|message|>More<|end|>{START}"
    assert text_of(f, result("f", "1"), answer, more) == expected
    # The template takes thoughts or text there.
    assert text_of(f | {"content": "I look."}).startswith(thought.replace("Hm", "Hm\n\nI look."))
    assert text_of(made("f", content="I look.")).startswith(thought.replace("Hm", "I look."))


def test_several_calls_of_one_message_are_told_one_by_one():
    two = made("f", "g", reasoning="Hm")
    expected = f"{START}<|channel|>analysis<|message|>Hm<|end|>{called('f')}{told('f', '1')}{called('g')}{told('g', '2')}"
    assert text_of(two, result("g", "2"), result("f", "1")) == expected + START
    odd = text_of(two, result("f", "1"), result("h", "3"))
    assert odd.endswith(f"{called('f')}{told('f', '1')}{called('g')}{told('g', '3')}{START}")


def test_system_messages():
    def text(*roles):
        return chat_text(SUPPORT, request(messages=[{"role": role, "content": role} for role in roles]))

    assert "<|start|>developer<|message|>developer<|end|><|start|>user" in text("developer", "user")
    assert "<|start|>developer<|message|>system\n\nsystem<|end|>" in chat_text(
        SUPPORT, request(messages=[{"role": r, "content": "system"} for r in ("system", "developer")] + HELLO)
    )
    with pytest.raises(Exception, match="at the beginning alone: put them first"):
        text("user", "system")


# Grammars


def form_of(beginning="possible", **fields) -> GrammarSpec | None:
    return THOUGHTS.grammar(SUPPORT.grammar(request(**fields)), beginning)


def taken(spec: GrammarSpec | None, text: str) -> str:
    assert spec is not None
    return follow(VOCABULARY, TOKENIZER, spec, text)


@pytest.mark.parametrize(
    "kind", ["json", "grammar", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("regex", "choice"))]
)
def test_the_form_is_that_of_the_last_message(kind):
    answer, wrong = ANSWERS[kind], WRONG[kind]
    spec = THOUGHTS.grammar(FORMS[kind], "possible")
    for before in ("", analysis(f"Hm: é?\n {answer}"), analysis("") + analysis("a")):
        assert taken(spec, before + final(answer)) == f"{before}{final(answer)}."
        assert taken(spec, before + final(wrong)) == before + final(wrong)[:-1]
    assert taken(spec, answer) == ""
    assert taken(spec, f"<|channel|>commentary<|message|>{answer}") == "<|channel|>"
    # In messages that the prompt has begun.
    within = THOUGHTS.grammar(FORMS[kind], "within")
    rest = f" a<|end|>{START}{analysis('b')}{final(answer)}"
    assert taken(within, rest) == f"{rest}."
    assert taken(within, final(answer)) == ""
    assert THOUGHTS.grammar(FORMS[kind], "none") is FORMS[kind]
    assert form_of() is None
    # Where thoughts are a part of the content, there are none.
    plain = ThoughtSupport.of(TOKENIZER, "none", harmony=True).grammar(FORMS[kind], "possible")
    assert taken(plain, final(answer)) == f"{final(answer)}."
    assert taken(plain, analysis("a")) == "<|channel|>"


PING = call("ping", "{}")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "ping"}}])
def test_calls_that_must_be(choice):
    spec = form_of(tools=TOOLS, tool_choice=choice)
    assert taken(spec, analysis("ping?") + PING) == f"{analysis('ping?')}{PING}."
    assert taken(spec, PING) == f"{PING}."
    assert taken(spec, final("No")) == "<|channel|>"
    assert taken(spec, analysis("a") + final("No")) == analysis("a") + "<|channel|>"
    weather = call("get_weather", '{"city": "Oslo"}')
    assert (taken(spec, weather) == f"{weather}.") == (choice == "required")
    assert taken(spec, weather.replace("Oslo", "Bern")) != weather.replace("Oslo", "Bern") + "."
    continued = f" sky<|end|>{START}{PING}"
    assert taken(form_of("none", tools=TOOLS, tool_choice=choice), continued) == f"{continued}."


def test_calls_or_a_form():
    fields = {"tools": TOOLS, "guided_choice": ["yes", "no"]}
    spec = form_of(**fields)
    for text in (PING, final("yes"), analysis("a") + PING, analysis("a") + final("no")):
        assert taken(spec, text) == f"{text}."
    assert taken(spec, final("x")) == final("")
    assert form_of(**fields, tool_choice="none").kind == "choice"
    said = [*HELLO, {"role": "assistant", "content": "y"}]
    spec = form_of("none", **fields, messages=said, continue_final_message=True)
    assert (spec.kind, spec.thoughts) == ("choice", "")


@pytest.mark.parametrize(
    "fields", [{"tool_choice": "required"}, {"tool_choice": NAMED}, {"guided_choice": ["a", "b"]}]
)
def test_what_a_grammar_allows_is_read(fields):
    grammar = VOCABULARY.compile(form_of(tools=TOOLS, **fields).lark)
    kinds, names = set(), set()
    for seed in range(8):
        tokens = write(grammar, seed)
        reader, parts = HarmonyReader(MARKS, names=("ping", "get_weather")), []
        for token in tokens:
            parts += (
                reader.mark(MARKS[token])
                if token in MARKS
                else reader.push(TOKENIZER.token_bytes(token).decode("latin1"))
            )
        parts = merged(parts + reader.finish())
        kinds |= {type(part) for part in parts}
        assert reader.called == (Arguments in map(type, parts)) != (Content in map(type, parts))
        for part in parts:
            if isinstance(part, Content):
                assert part.text in ("a", "b")
            elif isinstance(part, CallStart):
                names.add(part.name)
            elif isinstance(part, Arguments):
                assert isinstance(json.loads(part.text), dict)
    assert {Thought, CallStart} <= kinds and (Content in kinds) == ("guided_choice" in fields)
    assert names <= ({"get_weather"} if fields == {"tool_choice": NAMED} else {"ping", "get_weather"})


def test_faults_are_those_of_the_form():
    bad = {
        "type": "function",
        "function": {"name": "bad", "parameters": {"properties": {"a": {"type": "x"}}}},
    }
    spec = form_of(tools=[*TOOLS, bad], tool_choice="required")
    with pytest.raises(Exception, match="Invalid type: x") as caught:
        VOCABULARY.compile(spec._replace(thoughts="").lark)
    assert "the parameters of 'bad': Invalid type: x" in spec.error(str(caught.value)).message
