"""POST /v1/messages in Anthropic's form: what is asked, the blocks and events that come back."""

import json
import math
from unittest.mock import ANY

import httpx
import pytest

from serve.anthropic_request import messages_of
from tests.serve.http_server import EOS, ids, named_events
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
def test_arguments_with_line_breaks_in_strings(server_of, stream):
    """Models write code so; the client would give up on a stream in which it is no JSON."""
    server = server_of("hermes")
    script(server, ANSWERS["hermes"] % '{"code":\n"a\n\tb"}')
    (block,) = ask(server, stream, tools=FUNCTIONS)["content"]
    assert (block["type"], block["input"]) == ("tool_use", {"code": "a\n\tb"})


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


def test_tools_may_say_their_type_or_not(server_of):
    for kind in ({}, {"type": None}, {"type": "custom", "cache_control": {"type": "ephemeral"}}):
        ask(server_of("generic"), tools=[FUNCTIONS[0] | kind])


def test_tokens_are_counted(served):
    body = {"model": "tiny", "messages": HELLO, "system": "Be kind."}
    count = served.post(f"{MESSAGES}/count_tokens", body).json()
    served.script([EOS], finish="stop")
    ask(served, system="Be kind.")
    assert count == {"input_tokens": len(served.engine.requests[0].prompt_ids)}


@pytest.mark.parametrize("name", ["generic", "qwen"])
def test_a_prompt_may_be_read_without_an_answer(server_of, name):
    """What comes after it finds it in the cache then."""
    server = server_of(name)
    server.script(ids("x"), finish="stop")
    body = {"max_tokens": 0, "messages": HELLO, "tools": FUNCTIONS}
    found = server.post(MESSAGES, body).json()
    assert (found["content"], found["stop_reason"], found["stop_sequence"]) == ([], "max_tokens", None)
    assert found["usage"]["output_tokens"] == 0 < found["usage"]["input_tokens"]
    assert put_together(events_of(server, **body)) == found | {"id": ANY}
    assert [request.sampling.max_tokens for request in server.engine.requests] == [1, 1]


def test_a_client_that_leaves_ends_its_answer(served):
    served.script(ids("a" * 400), delay=0.01)
    body = {"model": "tiny", "max_tokens": 400, "messages": HELLO, "stream": True}
    with httpx.stream("POST", f"{served.url}{MESSAGES}", json=body, trust_env=False) as answer:
        next(line for line in answer.iter_lines() if "text_delta" in line)
    # `served` waits until nothing is left in the engine.
