"""POST /v1/messages: what is refused, and with which words."""

import pytest

from tests.serve.http_server import serving
from tests.serve.test_http_anthropic import FUNCTIONS, HELLO, MESSAGES


def called(*more, **fields):
    """A body with a call in its third message, after one that becomes two."""
    results = [{"type": "tool_result", "tool_use_id": "0"}, {"type": "text", "text": "a"}]
    call = {"type": "tool_use", "id": "1", "name": "f", "input": {}} | fields
    answer = [{"type": "text", "text": "b"}, call, *more]
    turns = (("user", results), ("user", "c"), ("assistant", answer))
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"max_tokens": None}, "Missing required parameter: 'max_tokens'"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"messages": []}, "give 1 to 4096 messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": [3]}, "whose 'role' is 'user' or 'assistant'"),
        (
            {"messages": [{"role": "user", "content": 3}]},
            "'messages.0.content': give a text or a list of blocks",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "blocks of type 'image' are not"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "needs a string 'text'"),
        (
            {
                "messages": [*HELLO, {"role": "user", "content": [{"type": "tool_result"}]}],
                "system": "Be kind.",
            },
            "'messages.1.content.0.tool_use_id': give a string",
        ),
        (called(name=""), "'messages.2.content.1.name': give a string that is not empty"),
        (called(id=3), "'messages.2.content.1.id': give a string"),
        (called(*[{"type": "tool_use", "id": "1", "name": "f", "input": {}}] * 128), "at most 128 blocks"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "is_error": "no"}]}]},
            "'messages.0.content.0.is_error': give true or false",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "input": "x"}]}]},
            "give an object",
        ),
        (
            {"messages": [{"role": "user", "content": "x" * 600}]},
            "the prompt is too long: 619 tokens > 511 maximum",
        ),
        ({"system": 3}, "'system': give a text or a list of blocks"),
        ({"stop_sequences": [""]}, "'stop_sequences"),
        ({"stop_sequences": ["a"] * 99}, "stop_sequences"),
        ({"temperature": -1}, "temperature"),
        (
            {"tools": [{"type": "web_search_20250305", "name": "s"}]},
            "tools of type 'web_search_20250305' are not",
        ),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "a name has 1 to 128 letters"),
        ({"tools": FUNCTIONS, "tool_choice": {"type": "some"}}, "'auto', 'any', 'tool' or 'none'"),
        (
            {"tools": FUNCTIONS, "tool_choice": {"type": "tool", "name": "x"}},
            "there is no tool of the name 'x'",
        ),
        ({"tools": FUNCTIONS, "tool_choice": {"type": "tool"}}, "'tool_choice.name': give the name"),
        ({"tool_choice": {}}, "'auto', 'any', 'tool' or 'none'"),
        ({"tool_choice": {"type": []}}, "'auto', 'any', 'tool' or 'none'"),
        ({"tool_choice": {"type": {}}}, "'auto', 'any', 'tool' or 'none'"),
        ({"tool_choice": {"type": "auto", "paralel": True}}, "no field 'paralel'"),
        (
            {"tool_choice": {"type": "auto", "disable_parallel_tool_use": "false"}},
            "disable_parallel_tool_use': give true or false",
        ),
        ({"tools": [{"input_schema": {}}]}, "'tools.0.name'"),
        ({"system": 0}, "'system': give a text or a list of blocks"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "foo"}}}},
            "'output_config.format.schema': Invalid type: foo",
        ),
        ({"thinking": {"type": "maybe"}}, "thinking"),
        ({"output_config": {"format": {"type": "xml"}}}, '"json_schema"'),
        ({"mcp_servers": [{}]}, "not supported"),
        ({"mex_tokens": 3}, "Did you mean 'max_tokens'"),
    ],
    ids=lambda value: None if isinstance(value, str) else str(value)[:40],
)
def test_faults(served, body, message):
    answer = served.post(MESSAGES, {"model": "tiny", "max_tokens": 20, "messages": HELLO} | body)
    assert answer.status_code == 400, answer.text
    found = answer.json()
    assert found.keys() == {"type", "error"} and found["type"] == "error"
    assert found["error"]["type"] == "invalid_request_error" and message in found["error"]["message"], found
    assert not served.engine.requests


@pytest.mark.parametrize("thread", [{"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}])
def test_threads_are_refused_with_what_its_client_goes_on_after(served, thread):
    """`client.beta.messages.tool_runner` asks for one, and sends the whole conversation again after this error alone."""
    wanted = {"model": "tiny", "max_tokens": 5, "messages": HELLO, "thread": thread}
    answer = served.post(MESSAGES, wanted)
    assert answer.status_code == 400
    assert answer.json()["error"] == {
        "type": "invalid_request_error",
        "message": "'thread' is not supported by this server: send the whole conversation in 'messages'.",
        "details": {"error_code": "thread_unsupported_request"},
    }


def test_other_errors_have_its_form_too(served):
    wanted = {"max_tokens": 5, "messages": HELLO}
    other = served.post(MESSAGES, wanted | {"model": "x"})
    assert (other.status_code, other.json()["error"]["type"]) == (404, "not_found_error")
    served.engine.ready = False
    answer = served.post(MESSAGES, wanted)
    assert (answer.status_code, answer.json()["error"]["type"]) == (503, "overloaded_error")


def test_keys_are_asked_for():
    with serving(api_keys=("secret",)) as closed:
        wanted = {"max_tokens": 5, "messages": HELLO}
        refused = closed.post(MESSAGES, wanted, headers={"x-api-key": "wrong"})
        assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
        for headers in ({"x-api-key": "secret"}, {"authorization": "Bearer secret"}):
            assert closed.post(MESSAGES, wanted, headers=headers).status_code == 200
