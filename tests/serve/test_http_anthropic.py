"""POST /v1/messages in Anthropic's form: what is asked, the blocks and events that come back, and what is refused."""

import json
import math

import httpx
import pytest

from serve.anthropic_request import messages_of
from tests.serve.http_server import EOS, ids, named_events, serving
from tests.serve.test_tool_formats import TOOLS
from tests.serve.thought_templates import thought_tokenizer
from tests.serve.tool_answers import ANSWERS, ARGUMENTS, TWO, prompt, script
from tests.serve.tool_templates import tokens_of

MESSAGES = "/v1/messages"
HELLO = [{"role": "user", "content": "Hi"}]
FUNCTIONS = [
    {"name": f["name"], "description": f.get("description", ""), "input_schema": f["parameters"]}
    for f in (tool["function"] for tool in TOOLS)
]


def called(*more, **fields):
    """A body with a call in its third message, after one that becomes two."""
    results = [{"type": "tool_result", "tool_use_id": "0"}, {"type": "text", "text": "a"}]
    call = {"type": "tool_use", "id": "1", "name": "f", "input": {}} | fields
    answer = [{"type": "text", "text": "b"}, call, *more]
    turns = (("user", results), ("user", "c"), ("assistant", answer))
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def events_of(served, **body):
    whole = {"model": "tiny", "max_tokens": 400, "messages": HELLO, "stream": True} | body
    return named_events(served, MESSAGES, whole)


def put_together(events):
    """The message as a client makes it of its events."""
    message, texts = dict(events[0]["message"]), {}
    assert (
        events[0]["type"] == "message_start" and message["content"] == [] and message["stop_reason"] is None
    )
    for event in events[1:]:
        if event["type"] == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
            texts[event["index"]] = ""
        elif event["type"] == "content_block_delta":
            assert event["index"] == len(message["content"]) - 1
            if event["delta"]["type"] == "signature_delta":
                message["content"][-1]["signature"] += event["delta"]["signature"]
            else:
                texts[event["index"]] += next(v for k, v in event["delta"].items() if k != "type")
        elif event["type"] == "message_delta":
            message |= event["delta"] | {"usage": event["usage"]}
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    for index, block in enumerate(message["content"]):
        if block["type"] == "tool_use":
            block["input"] = json.loads(texts[index] or "{}")
        else:
            block[block["type"]] = texts[index]
    return message


def ask(served, stream=False, **body):
    if stream:
        return put_together(events_of(served, **body))
    answer = served.post(MESSAGES, {"model": "tiny", "max_tokens": 400, "messages": HELLO} | body)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("stream", [False, True])
def test_text(served, stream):
    served.script([*ids("Hello!"), EOS], finish="stop", cached_tokens=5)
    found = ask(served, stream, system=[{"type": "text", "text": "Be kind."}], temperature=0.5, top_k=3)
    assert (found["type"], found["role"], found["model"]) == ("message", "assistant", "tiny")
    assert found["content"] == [{"type": "text", "text": "Hello!"}]
    assert (found["stop_reason"], found["stop_sequence"]) == ("end_turn", None)
    (request,) = served.engine.requests
    used = found["usage"]
    assert used["input_tokens"] + 5 == len(request.prompt_ids) and used["cache_read_input_tokens"] == 5
    assert used["output_tokens"] == 7
    assert (request.sampling.temperature, request.sampling.top_k) == (0.5, 3)
    assert request.sampling.max_tokens == 400
    text = "".join(chr(i - 8) for i in request.prompt_ids if i >= 8)
    assert text.index("Be kind.") < text.index("Hi")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("options", "finish", "reason", "sequence", "text"),
    [
        ({}, "length", "max_tokens", None, "hello"),
        ({"stop_sequences": ["l"]}, "stop", "stop_sequence", "l", "he"),
    ],
    ids=["cut", "stopped"],
)
def test_how_it_ends(served, stream, options, finish, reason, sequence, text):
    served.script("hello", finish=finish)
    found = ask(served, stream, **options)
    assert (found["stop_reason"], found["stop_sequence"]) == (reason, sequence)
    assert found["content"] == [{"type": "text", "text": text}]


def test_more_tokens_than_there_is_room_for(served):
    """What clients ask for that know large models; elsewhere a 400."""
    served.script(ids("a"), cycle=True)
    found = ask(served, max_tokens=32_000)
    (request,) = served.engine.requests
    assert request.sampling.max_tokens == 512 - len(request.prompt_ids) == found["usage"]["output_tokens"]
    assert found["stop_reason"] == "model_context_window_exceeded"


@pytest.mark.parametrize("stream", [False, True])
def test_an_empty_answer(served, stream):
    served.script([EOS], finish="stop")
    assert ask(served, stream)["content"] == []


def test_a_stream_that_fails_says_so(served):
    served.script("ab", error="the page pool is broken")
    last = events_of(served)[-1]
    assert last["type"] == "error" and last["error"]["type"] == "api_error"
    assert "the page pool is broken" in last["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ["generic", "llama3_json", "mistral"])
def test_a_call(server_of, name, stream):
    server = server_of(name)
    script(server, ANSWERS[name] % ARGUMENTS, delay=0.0005)
    found = ask(server, stream, tools=FUNCTIONS)
    (block,) = found["content"]
    assert (block["type"], block["name"], block["input"]) == (
        "tool_use",
        "get_weather",
        json.loads(ARGUMENTS),
    )
    assert found["stop_reason"] == "tool_use"


def test_a_call_that_is_cut_has_what_is_there(server_of):
    server = server_of("generic")
    text = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Os'
    server.script(tokens_of(text), finish="length")
    found = ask(server, tools=FUNCTIONS)
    assert found["stop_reason"] == "max_tokens"
    assert found["content"][0]["input"] == {"city": "Os"}


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_was_begun_goes_on(server_of, stream):
    server = server_of("generic")
    for content in ("It is", [{"type": "text", "text": "It is"}]):
        script(server, " blue.")
        message = ask(server, stream, messages=[*HELLO, {"role": "assistant", "content": content}])
        assert message["content"] == [{"type": "text", "text": " blue."}]
        assert prompt(server).endswith("It is")
    script(server, "Fine.")  # of nothing, nothing is gone on with
    ask(server, stream, messages=[*HELLO, {"role": "assistant", "content": ""}])
    assert prompt(server).count("assistant") == 2


@pytest.mark.parametrize("stream", [False, True])
def test_a_number_beyond_all_floats_is_null(server_of, stream):
    server = server_of("generic")
    name = FUNCTIONS[0]["name"]
    script(server, ANSWERS["hermes"].replace("get_weather", name) % '{"x": 1e999}')
    content = ask(server, stream, tools=FUNCTIONS)["content"]
    # A stream has the arguments as they were written.
    assert (content[-1]["type"], content[-1]["input"]) == ("tool_use", {"x": math.inf if stream else None})


@pytest.mark.parametrize("stream", [False, True])
def test_a_turn_with_calls_goes_on(server_of, stream):
    """What came goes back as it is, with the results."""
    server = server_of("generic")
    script(server, TWO)
    content = ask(server, stream, tools=FUNCTIONS)["content"]
    assert [block["type"] for block in content] == ["text", "tool_use", "tool_use"]
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": f"sunny {n}"}
        for n, block in enumerate(content[1:])
    ]
    turn = [*results, {"type": "text", "text": "Well?", "cache_control": {"type": "ephemeral"}}]
    script(server, "Fine.")
    messages = [*HELLO, {"role": "assistant", "content": content}, {"role": "user", "content": turn}]
    assert ask(server, messages=messages, tools=FUNCTIONS)["content"][0]["text"].startswith("Fine.")
    text = prompt(server)
    places = [text.index(part) for part in ("Let me see.", "sunny 0", "sunny 1", "Well?")]
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("choice", "demanded"),
    [({"type": "any"}, True), ({"type": "tool", "name": "ping"}, True), ({"type": "auto"}, False)],
)
def test_calls_that_must_be(server_of, choice, demanded):
    server = server_of("generic")
    script(server, ANSWERS["generic"] % ARGUMENTS)
    ask(server, tools=FUNCTIONS, tool_choice=choice | {"disable_parallel_tool_use": True})
    assert (server.engine.requests[-1].sampling.grammar is not None) == demanded


@pytest.mark.parametrize("stream", [False, True])
def test_thoughts(server_of, stream):
    server = server_of("qwen")
    tokens = thought_tokenizer("qwen").encode(
        "<think>\nHm. Well.\n</think>\n\nYes.", add_special_tokens=False
    )
    server.script([*tokens, EOS], finish="stop")
    thoughts, answer = ask(server, stream, thinking={"type": "enabled", "budget_tokens": 100})["content"]
    assert thoughts["type"] == "thinking" and thoughts["thinking"].strip() == "Hm. Well."
    assert thoughts["signature"] == "unsigned" and answer == {"type": "text", "text": "Yes."}


def test_blocks_become_messages():
    given = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "t", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "c"},
                {"type": "tool_use", "id": "1", "name": "f", "input": {"x": 1, "y": math.inf}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "1",
                    "content": [{"type": "text", "text": "r"}],
                    "is_error": False,
                },
                {"type": "tool_result", "tool_use_id": "2", "content": "no such f", "is_error": True},
                {"type": "tool_result", "tool_use_id": "3", "is_error": True},
            ],
        },
    ]
    function = {"name": "f", "arguments": '{"x":1,"y":null}'}
    assert messages_of(given, "s") == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a\nb"},
        {
            "role": "assistant", "content": "c", "reasoning_content": "t",
            "tool_calls": [{"id": "1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "r"},
        {"role": "tool", "tool_call_id": "2", "content": "Error: no such f"},
        {"role": "tool", "tool_call_id": "3", "content": "Error: "},
    ]  # fmt: skip


@pytest.mark.parametrize("where", ["output_config", "output_format"])
def test_a_form_is_followed(served, where):
    form = {"type": "json_schema", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}
    ask(served, **{where: {"format": form} if where == "output_config" else form})
    assert served.engine.requests[0].sampling.grammar is not None


def test_what_has_no_effect_is_taken(served):
    ask(
        served, metadata={"user_id": "u"}, service_tier="auto", speed="fast", diagnostics={"previous_message_id": None},
        cache_control={"type": "ephemeral"}, context_management={"edits": []}, inference_geo="us",
    )  # fmt: skip


def test_tokens_are_counted(served):
    body = {"model": "tiny", "messages": HELLO, "system": "Be kind."}
    count = served.post(f"{MESSAGES}/count_tokens", body).json()
    served.script([EOS], finish="stop")
    ask(served, system="Be kind.")
    assert count == {"input_tokens": len(served.engine.requests[0].prompt_ids)}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"max_tokens": None}, "Missing required parameter: 'max_tokens'"),
        ({"max_tokens": 0}, "max_tokens"),
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


def test_a_client_that_leaves_ends_its_answer(served):
    served.script(ids("a" * 400), delay=0.01)
    body = {"model": "tiny", "max_tokens": 400, "messages": HELLO, "stream": True}
    with httpx.stream("POST", f"{served.url}{MESSAGES}", json=body, trust_env=False) as answer:
        next(line for line in answer.iter_lines() if "text_delta" in line)
    # `served` waits until nothing is left in the engine.
