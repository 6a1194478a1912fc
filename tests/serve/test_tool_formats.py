"""Formats of calls: which one a chat template asks for, and grammars of each over a tokenizer with special markers."""

import json
import random

import numpy as np
import pytest

from serve.errors import APIError
from serve.grammar import Grammar, GrammarError, Vocabulary
from serve.parts import Arguments, CallStart, Content, merged
from serve.protocol import ChatRequest
from serve.tool_calls import CallParser
from serve.tool_formats import HERMES, LLAMA3_JSON, MISTRAL, MISTRAL_NAMED, chosen_format, mentions_tools
from serve.tool_prompt import ToolSupport
from tests.serve.tool_templates import TEMPLATES, tool_tokenizer

SINGLE_TEMPLATES = {name: text for name, text in TEMPLATES.items() if isinstance(text, str)}
WEATHER = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"city": {"enum": ["Oslo", 'Ro"me']}},
}
PING = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "ping", "parameters": PING}},
]
NAMED = {"type": "function", "function": {"name": "get_weather"}}


@pytest.mark.parametrize(
    ("name", "form", "native"),
    [
        ("hermes", HERMES, True),
        ("llama3_json", LLAMA3_JSON, True),
        ("mistral", MISTRAL, True),
        ("mistral named", MISTRAL_NAMED, True),
        ("generic", HERMES, False),
        ("unknown", HERMES, False),
        ("several", HERMES, True),
    ],
    ids=lambda case: case if isinstance(case, str) else "",
)
def test_the_format_follows_from_the_template(name, form, native):
    support = ToolSupport.of(tool_tokenizer(name))
    assert (support.format, support.native) == (form, native)


def test_a_format_may_be_told():
    support = ToolSupport.of(tool_tokenizer("unknown"), "llama3_json")
    assert (support.format, support.native, support.special) == (LLAMA3_JSON, True, {"<|python_tag|>": 3})
    support = ToolSupport.of(tool_tokenizer("generic"), "mistral")
    assert (support.format, support.native) == (MISTRAL, False)
    assert support.special == {"[TOOL_CALLS]": 4, "[ARGS]": 5}
    assert chosen_format(TEMPLATES["mistral named"], "mistral") == MISTRAL_NAMED
    assert chosen_format("{{ '[TOOL_CALLS][' }}", "auto").first == "[TOOL_CALLS]["
    assert chosen_format("", "auto") is None


def test_tools_are_a_variable_of_the_template():
    assert not mentions_tools("You have no tools. {{ 'tools' }} {# tools #}")
    assert mentions_tools("{% generation %}{% for t in tools %}{% endfor %}{% break %}")
    assert not mentions_tools("{{ 'tools ")


def request(**fields) -> ChatRequest:
    return ChatRequest.parse({"messages": [{"role": "user", "content": "x"}], "tools": TOOLS} | fields)


def write(grammar: Grammar, seed: int) -> list[int]:
    """Random tokens of the grammar."""
    state, choose, tokens = grammar.start(), random.Random(seed), []
    while len(tokens) < 3000:
        allowed = np.flatnonzero(np.unpackbits(state.mask.view(np.uint8), bitorder="little")).tolist()
        token = choose.choice(allowed)
        if token in (0, 2):
            return tokens
        tokens.append(token)
        if state.advance(token):
            return tokens
    raise AssertionError("the grammar never ended")


@pytest.mark.parametrize("name", [*SINGLE_TEMPLATES])
@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "required"},
        {"tool_choice": "required", "parallel_tool_calls": False},
        {"tool_choice": NAMED},
    ],
    ids=["required", "one", "named"],
)
def test_what_a_grammar_allows_is_calls(name, fields):
    tokenizer = tool_tokenizer(name)
    support, asked = ToolSupport.of(tokenizer), request(**fields)
    spec = support.grammar(asked)
    assert (spec.kind, spec.param) == ("tools", "tools")
    grammar = Vocabulary(tokenizer, 264, (0, 2)).compile(spec.lark)
    counts, called = set(), set()
    for seed in range(10):
        tokens = write(grammar, seed)
        detokenizer = tokenizer.detokenizer(True, support.special.values())
        parser = support.parser(asked)
        assert isinstance(parser, CallParser)
        parts = merged([p for t in tokens for p in parser.push(detokenizer.add(t))] + parser.finish())
        assert parser.called
        assert not any(isinstance(part, Content) for part in parts)
        starts = [part for part in parts if isinstance(part, CallStart)]
        arguments = [json.loads(part.text) for part in parts if isinstance(part, Arguments)]
        for start, given in zip(starts, arguments, strict=True):
            assert given == {} if start.name == "ping" else given["city"] in ("Oslo", 'Ro"me')
        counts.add(len(starts))
        called |= {start.name for start in starts}
        # As the template writes them: the next turn has the same text, and keeps its tokens.
        if name in ("hermes", "llama3_json", "generic"):
            calls = [(s.name, json.dumps(a)) for s, a in zip(starts, arguments, strict=True)]
            assert tokenizer.decode(tokens) == support.format.write(calls)
    single = fields != {"tool_choice": "required"} or not support.format.several
    assert counts == {1} if single else len(counts) > 1
    assert called == ({"get_weather"} if fields["tool_choice"] == NAMED else {"get_weather", "ping"})


def test_markers_are_special_tokens_in_a_grammar():
    support = ToolSupport.of(tool_tokenizer("mistral named"))
    spec = support.grammar(request(tool_choice=NAMED))
    tokens = write(Vocabulary(support.tokenizer, 264, (0, 2)).compile(spec.lark), 0)
    assert (tokens[0], tokens.count(4), tokens.count(5)) == (4, 1, 1)


def test_auto_and_none_need_no_grammar():
    support = ToolSupport.of(tool_tokenizer("hermes"))
    for choice in (None, "auto", "none"):
        assert support.grammar(request(tool_choice=choice)) is None
    assert support.parser(request(tool_choice="none")) is None
    assert support.parser(request(tools=[])) is None


@pytest.mark.parametrize(
    ("schema", "fault"),
    [
        ({"type": "object", "properties": {"a": {"type": "obect"}}}, "Invalid type: obect"),
        (
            {"properties": {"a": {"items": {"uniqueItems": True}}}},
            "[\"uniqueItems\"] (at '#/properties/a/items')",
        ),
        ({"$ref": "#/$defs/b"}, "Pointer '/$defs/b' does not exist"),
    ],
    ids=lambda case: "" if isinstance(case, dict) else case[:20],
)
def test_a_bad_schema_is_named(schema, fault):
    bad = {"type": "function", "function": {"name": "bad_one", "parameters": schema}}
    tokenizer = tool_tokenizer("hermes")
    spec = ToolSupport.of(tokenizer).grammar(request(tools=[*TOOLS, bad], tool_choice="required"))
    with pytest.raises(GrammarError) as caught:
        Vocabulary(tokenizer, 264, (0, 2)).compile(spec.lark)
    error = spec.error(str(caught.value))
    assert isinstance(error, APIError)
    assert (error.status, error.param) == (400, "tools")
    assert "the parameters of 'bad_one': " in error.message
    assert fault in error.message
    assert spec.error("it is too large").message == "Invalid value for 'tools': it is too large."
    assert "line" not in spec.error("line 1, column 1: odd").message
