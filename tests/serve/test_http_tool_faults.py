"""Tools over HTTP: what is refused, and with which words."""

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.errors import APIError
from serve.prompts import chat_text
from serve.protocol import ChatRequest
from serve.tool_prompt import ToolSupport
from tests.serve.fake_engine import Script
from tests.serve.test_http_bad_input import CHAT, HELLO, check_error, no_status
from tests.serve.test_tool_formats import PING, TOOLS
from tests.serve.tool_answers import ask
from tests.serve.tool_templates import tool_tokenizer

NAMED = {"type": "function", "function": {"name": "ping"}}

# What is refused


def function(**fields):
    return {"tools": [{"type": "function", "function": fields}]}


def turns(*messages):
    return {"messages": [*HELLO, *messages]}


def called(**fields):
    return turns({"role": "assistant", "tool_calls": [fields]})


GOOD = {"name": "f", "arguments": "{}"}
FAULTS = [
    ({"tools": {}}, "tools", "invalid_value", "list"),
    ({"tools": ["f"]}, "tools.0", "invalid_value", 'must be {"type": "function"'),
    ({"tools": [{"type": "web_search"}]}, "tools.0", "invalid_value", "'web_search' are not supported"),
    ({"tools": [{"type": "function"}]}, "tools.0.function", "missing_required_parameter", ""),
    ({"tools": [{"type": "function", "function": "f"}]}, "tools.0.function", "invalid_value", "a 'name'"),
    ({"tools": [{"type": "function", "function": GOOD}]}, "tools[].function.arguments", "unknown_parameter", ""),
    ({"tools": [{"type": "function", "name": "f"}]}, "tools[].name", "unknown_parameter", ""),
    (function(), "tools.0.function.name", "missing_required_parameter", ""),
    (function(name=""), "tools.0.function.name", "invalid_value", "1 to 128 letters"),
    (function(name="a b"), "tools.0.function.name", "invalid_value", "1 to 128 letters"),
    (function(name="f\n"), "tools.0.function.name", "invalid_value", "1 to 128 letters"),
    (function(name="f" * 129), "tools.0.function.name", "invalid_value", "1 to 128 letters"),
    (function(name=5), "tools.0.function.name", "invalid_value", "string"),
    (function(name="f", description=5), "tools.0.function.description", "invalid_value", "string"),
    (function(name="f", parameters="{}"), "tools.0.function.parameters", "invalid_value", "dictionary"),
    (function(name="f", parameters={"type": "string"}), "tools.0.function.parameters", "invalid_value", "'object'"),
    (function(name="f", paramters={}), "tools[].function.paramters", "unknown_parameter", "Did you mean"),
    (function(name="f", strict="yes"), "tools.0.function.strict", "invalid_value", ""),
    (function(name="f", defer_loading=True), "tools[].function.defer_loading", "unsupported_parameter", ""),
    ({"tools": TOOLS * 2}, "tools", "invalid_value", "two functions have the name 'get_weather'"),
    ({"tools": TOOLS * 65}, "tools", "invalid_value", "at most 128 tools"),
    (function(name="f", parameters={"enum": ["x" * 131072]}), "tools", "invalid_value", "at most 131072 characters"),
    ({"tool_choice": "required"}, "tool_choice", "invalid_value", "'required' needs 'tools'"),
    ({"tool_choice": NAMED}, "tool_choice", "invalid_value", "no tool of the name 'ping'"),
    ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice", "invalid_value", "'none', 'auto' or 'required'"),
    ({"tools": TOOLS, "tool_choice": 1}, "tool_choice", "invalid_value", "'none', 'auto' or 'required'"),
    ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice", "invalid_value", '"name"'),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {}}}, "tool_choice", "invalid_value", '"name"'),
    (
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}},
        "tool_choice",
        "invalid_value",
        "no tool of the name 'f'",
    ),
    ({"tools": TOOLS, "parallel_tool_calls": 0}, "parallel_tool_calls", "invalid_value", ""),
    ({"tools": TOOLS, "guided_grammar": 'start: "a"'}, "guided_grammar", "invalid_value", "together with 'tools'"),
    (
        {"tools": TOOLS, "guided_json": {"items": {"uniqueItems": True}}},
        "guided_json",
        "invalid_value",
        "(at '#/items')",
    ),
    ({"tools": TOOLS, "guided_regex": "a("}, "guided_regex", "invalid_value", "unclosed group"),
    (turns({"role": "tool", "content": "x"}), "messages.1", "invalid_value", "needs a 'tool_call_id'"),
    (turns({"role": "tool", "tool_call_id": "a"}), "messages.1.content", "missing_required_parameter", ""),
    (turns({"role": "tool", "tool_call_id": 1, "content": ""}), "messages.1.tool_call_id", "invalid_value", ""),
    (turns({"role": "user", "content": "x", "tool_call_id": "a"}), "messages.1", "invalid_value", "belongs to"),
    (turns({"role": "user", "content": "x", "tool_calls": [{}]}), "messages.1", "invalid_value", "the assistant"),
    (turns({"role": "assistant", "tool_calls": []}), "messages.1.content", "missing_required_parameter", ""),
    (turns({"role": "assistant", "tool_calls": "f"}), "messages.1.tool_calls", "invalid_value", "list"),
    (turns({"role": "assistant", "tool_calls": ["f"]}), "messages.1.tool_calls.0", "invalid_value", "a call must"),
    (called(function=GOOD), "messages.1.tool_calls.0.id", "missing_required_parameter", ""),
    (called(id="a", type="custom", function=GOOD), "messages.1.tool_calls.0.type", "invalid_value", "'function'"),
    (called(id="a"), "messages.1.tool_calls.0.function", "missing_required_parameter", ""),
    (called(id="a", function="f"), "messages.1.tool_calls.0.function", "invalid_value", "'arguments'"),
    (called(id="a", function={"name": "f"}), None, "missing_required_parameter", "function.arguments"),
    (called(id="a", function=GOOD | {"x": 1}), "messages[].tool_calls[].function.x", "unknown_parameter", ""),
    (called(id="a", function=GOOD | {"arguments": {}}), None, "invalid_value", "valid string"),
    (
        called(id="a", function=GOOD) | {"continue_final_message": True},
        "continue_final_message",
        "invalid_value",
        "a message with 'tool_calls' cannot be continued",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "code", "message"), FAULTS, ids=no_status)
def test_faults(server_of, fields, param, code, message):
    served = server_of("generic")
    response = served.post(CHAT, {"messages": HELLO, **fields})
    error = response.json()["error"]
    check_error(response, 400, param or error["param"], code or error["code"], message)
    assert served.engine.requests == []


def test_what_means_no_tools(served):
    for fields in (
        {"tools": None, "tool_choice": None, "parallel_tool_calls": None},
        {"tools": [], "tool_choice": "auto", "parallel_tool_calls": False},
        {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}},
        {"functions": [], "function_call": "none"},
        {"tools": [], "max_token": None, "stream": False},
    ):
        answer = served.post(CHAT, {"messages": HELLO, **fields})
        assert answer.json()["choices"][0]["message"] == {"role": "assistant", "content": "hello"}
    served.engine.script = Script([], follow=True)
    body = {"messages": HELLO, "tools": TOOLS, "tool_choice": "none", "guided_choice": ["a"]}
    assert served.post(CHAT, body).json()["choices"][0]["message"]["content"] == "a"


def test_the_openai_client_tells_of_bad_tools(served):
    with pytest.raises(openai.BadRequestError, match="letters, digits"):
        ask(served, tools=[{"type": "function", "function": {"name": "a b", "parameters": PING}}])


VALUES = st.sampled_from(
    [
        None,
        True,
        7,
        "f",
        "auto",
        "required",
        "",
        [],
        {},
        ["f"],
        "{}",
        "[1]",
        "function",
        "tool",
        "allowed_tools",
    ]
)
OBJECTS = st.recursive(
    VALUES,
    lambda inner: st.lists(inner, max_size=2)
    | st.dictionaries(
        st.sampled_from(
            [
                "type", "function", "name", "arguments", "parameters", "description", "id", "strict",
                "allowed_tools", "mode", "tools",
            ]
        ),
        inner,
        max_size=4,
    ),
    max_leaves=12,
)  # fmt: skip


@settings(max_examples=400)
@given(
    st.dictionaries(
        st.sampled_from(["tools", "tool_choice", "parallel_tool_calls", "guided_regex"]), OBJECTS
    ),
    st.dictionaries(st.sampled_from(["role", "content", "tool_calls", "tool_call_id", "name"]), OBJECTS),
)
def test_any_json_is_accepted_or_refused_with_an_api_error(fields, message):
    """And what is accepted can be shown to the model, and has a grammar or none."""
    support = ToolSupport.of(tool_tokenizer("hermes"))
    for messages in (HELLO, [*HELLO, message], [*HELLO, {"role": "assistant"} | message]):
        try:
            request = ChatRequest.parse({"messages": messages} | fields)
            chat_text(support, request)
        except APIError as error:
            assert error.status == 400
            continue
        support.parser(request)
        support.grammar(request)
