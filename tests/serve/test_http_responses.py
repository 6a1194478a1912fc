"""POST /v1/responses: the conversation that is asked, the items and events that come back, and what is refused."""

import openai
import pytest

from serve.responses_request import conversation_of
from tests.serve.http_server import EOS, ids, named_events, serving
from tests.serve.test_tool_formats import TOOLS
from tests.serve.thought_templates import thought_tokenizer
from tests.serve.tool_answers import ANSWERS, ARGUMENTS, TWO, prompt, script

RESPONSES = "/v1/responses"
FUNCTIONS = [{"type": "function", **tool["function"]} for tool in TOOLS]


def ask(served, stream=False, **body):
    """The response as a dict; of a streamed one that of the last event, which equals what the client puts together."""
    body = {"model": "tiny", "input": "Hi"} | body
    if not stream:
        return served.openai.responses.create(**body).model_dump()
    *_, last = served.openai.responses.create(stream=True, **body)
    if last.type == "response.completed":
        with served.openai.responses.stream(**body) as events:
            assert events.get_final_response().output_text == last.response.output_text
    return last.response.model_dump()


def events_of(served, **body):
    found = named_events(served, RESPONSES, {"input": "Hi", "stream": True} | body)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


# Text


@pytest.mark.parametrize("stream", [False, True])
def test_text(served, stream):
    served.script([*ids("Hello!"), EOS], finish="stop")
    found = ask(served, stream, instructions="Be kind.", metadata={"a": "b"}, temperature=0.5)
    assert (found["status"], found["incomplete_details"], found["error"]) == ("completed", None, None)
    (item,) = found["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert [(part["type"], part["text"]) for part in item["content"]] == [("output_text", "Hello!")]
    used = found["usage"]
    assert used["output_tokens"] == 7 and used["total_tokens"] == used["input_tokens"] + 7
    assert used["input_tokens_details"]["cached_tokens"] == 0
    assert (found["temperature"], found["metadata"], found["store"]) == (0.5, {"a": "b"}, False)
    request = served.engine.requests[0]
    assert request.sampling.temperature == 0.5
    text = "".join(chr(i - 8) for i in request.prompt_ids if i >= 8)
    assert text.index("Be kind.") < text.index("Hi")


@pytest.mark.parametrize("stream", [False, True])
def test_text_that_is_cut(served, stream):
    served.script("hello", finish="length")
    found = ask(served, stream, max_output_tokens=5)
    assert found["status"] == "incomplete"
    assert found["incomplete_details"]["reason"] == "max_output_tokens"
    (item,) = found["output"]
    assert item["status"] == "incomplete" and item["content"][0]["text"] == "hello"
    assert served.engine.requests[0].sampling.max_tokens == 5


def test_an_empty_answer(served):
    served.script([EOS], finish="stop")
    (item,) = ask(served)["output"]
    assert (item["type"], item["content"]) == ("message", [])


def test_log_probabilities(served):
    served.script([*ids("ab"), EOS], finish="stop")
    found = ask(served, include=["message.output_text.logprobs"], top_logprobs=2)
    entries = found["output"][0]["content"][0]["logprobs"]
    assert [entry["token"] for entry in entries] == ["a", "b"]
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)
    assert served.engine.requests[0].sampling.logprobs == 2
    streamed = ask(served, True, include=["message.output_text.logprobs"], top_logprobs=2)
    assert streamed["output"][0]["content"][0]["logprobs"] == entries


def test_events_of_text(served):
    served.script([*ids("Hey"), EOS], finish="stop", delay=0.001)
    first, second, *middle, last = events_of(served)
    assert (first["type"], second["type"]) == ("response.created", "response.in_progress")
    assert first["response"]["status"] == "in_progress" and first["response"]["output"] == []
    kinds = [event["type"].removeprefix("response.") for event in middle]
    deltas = kinds.count("output_text.delta")
    assert kinds == [
        "output_item.added", "content_part.added", *["output_text.delta"] * deltas, "output_text.done",
        "content_part.done", "output_item.done",
    ]  # fmt: skip
    assert middle[0]["item"]["content"] == [] and middle[0]["item"]["status"] == "in_progress"
    assert "".join(e["delta"] for e in middle if "delta" in e) == "Hey" == middle[-3]["text"]
    assert {e["output_index"] for e in middle} == {0}
    assert len({e.get("item_id", e.get("item", {}).get("id")) for e in middle}) == 1
    assert last["type"] == "response.completed"
    assert last["response"]["output"] == [middle[-1]["item"]]
    assert last["response"]["id"] == first["response"]["id"]


def test_a_stream_that_fails_says_so(served):
    served.script("ab", error="the page pool is broken")
    last = events_of(served)[-1]
    assert last["type"] == "response.failed" and last["response"]["status"] == "failed"
    assert last["response"]["error"]["code"] == "server_error"
    assert served.post(RESPONSES, {"input": "Hi"}).status_code == 500


# Calls and thoughts


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ["generic", "llama3_json", "mistral"])
def test_a_call(server_of, name, stream):
    server = server_of(name)
    script(server, ANSWERS[name] % ARGUMENTS, delay=0.0005)
    found = ask(server, stream, tools=FUNCTIONS)
    (item,) = found["output"]
    assert (item["type"], item["name"], item["arguments"]) == ("function_call", "get_weather", ARGUMENTS)
    assert item["status"] == "completed" and item["call_id"] and item["id"].startswith("fc_")
    assert found["status"] == "completed"


@pytest.mark.parametrize("stream", [False, True])
def test_text_and_several_calls(server_of, stream):
    server = server_of("generic")
    script(server, TWO)
    text, *calls = ask(server, stream, tools=FUNCTIONS)["output"]
    assert text["content"][0]["text"] == "Let me see."
    assert [(c["name"], c["arguments"]) for c in calls] == [("get_weather", ARGUMENTS), ("get_weather", "{}")]
    assert len({c["call_id"] for c in calls}) == 2


def test_results_go_back(server_of):
    """As the client sends back what came: the very items, and the results."""
    server = server_of("generic")
    script(server, TWO)
    output = ask(server, tools=FUNCTIONS)["output"]
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": f"sunny {n}"}
        for n, item in enumerate(output[1:])
    ]
    script(server, "Fine.")
    found = ask(server, input=[{"role": "user", "content": "Hi"}, *output, *results], tools=FUNCTIONS)
    assert found["output"][0]["content"][0]["text"].startswith("Fine.")
    text = prompt(server)
    places = [text.index(part) for part in ("Let me see.", "get_weather", "sunny 0", "sunny 1")]
    assert text.count("Let me see.") == 1 and places[-2] < places[-1]


def test_a_call_that_was_cut_goes_back(server_of):
    server = server_of("generic")
    cut = (ANSWERS["generic"] % ARGUMENTS).partition("lo")[0]
    script(server, cut)
    (item,) = ask(server, tools=FUNCTIONS)["output"]
    result = {"type": "function_call_output", "call_id": item["call_id"], "output": "no JSON"}
    script(server, "Fine.")
    ask(server, input=[{"role": "user", "content": "Hi"}, item, result], tools=FUNCTIONS)
    assert cut in prompt(server)


def test_a_demanded_call(server_of):
    server = server_of("generic")
    script(server, ANSWERS["generic"] % ARGUMENTS)
    ask(server, tools=FUNCTIONS, tool_choice={"type": "function", "name": "get_weather"})
    assert server.engine.requests[-1].sampling.grammar is not None


@pytest.mark.parametrize("stream", [False, True])
def test_thoughts(server_of, stream):
    server = server_of("qwen")
    tokens = thought_tokenizer("qwen").encode(
        "<think>\nHm. Well.\n</think>\n\nYes.", add_special_tokens=False
    )
    server.script([*tokens, EOS], finish="stop")
    found = ask(server, stream)
    thoughts, answer = found["output"]
    assert thoughts["type"] == "reasoning" and thoughts["summary"] == []
    assert thoughts["content"][0]["text"].strip() == "Hm. Well."
    assert answer["content"][0]["text"] == "Yes."
    assert found["usage"]["output_tokens_details"]["reasoning_tokens"] > 0


# What is asked


def test_items_become_messages():
    items = [
        {"role": "developer", "content": "Short."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {
            "type": "reasoning",
            "id": "rs",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "t"}],
        },
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "r"}]},
        {"type": "function_call_output", "call_id": "2", "output": "s"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "no"}]},
        {"role": "assistant", "content": "c"},
        {"role": "assistant", "content": "d"},
    ]

    def call(number, name):
        return {"id": number, "type": "function", "function": {"name": name, "arguments": "{}"}}

    assert conversation_of(items, "Kind.").messages == [
        {"role": "system", "content": "Kind.\n\nShort."},
        {"role": "user", "content": "a"},
        {
            "role": "assistant", "reasoning_content": "t", "content": "b",
            "tool_calls": [call("1", "f"), call("2", "g")],
        },
        {"role": "tool", "tool_call_id": "1", "content": "r"},
        {"role": "tool", "tool_call_id": "2", "content": "s"},
        {"role": "assistant", "content": "c"},
        {"role": "assistant", "content": "d"},
    ]  # fmt: skip


def test_what_is_said_after_calls_is_of_the_same_answer():
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "1", "output": "s"}
    said = conversation_of(
        [{"role": "user", "content": "a"}, call, {"role": "assistant", "content": "b"}, result], None
    )
    assert [(m["role"], m["content"], len(m.get("tool_calls", ()))) for m in said.messages] == [
        ("user", "a", 0),
        ("assistant", "b", 1),
        ("tool", "s", 0),
    ]


def test_a_form_is_followed(served):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    form = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    found = ask(served, text={"format": form, "verbosity": "low"})
    assert served.engine.requests[0].sampling.grammar is not None
    assert found["text"]["format"]["type"] == "json_schema"


def test_tokens_are_counted(served):
    asked = {"model": "tiny", "input": "Hi", "instructions": "Be kind."}
    count = served.openai.responses.input_tokens.count(**asked)
    served.script([EOS], finish="stop")
    served.openai.responses.create(**asked)
    assert count.input_tokens == len(served.engine.requests[0].prompt_ids)
    assert count.object == "response.input_tokens"
    answer = served.post("/v1/responses/input_tokens", asked | {"model": "x"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


def test_what_has_no_effect_is_taken(served):
    ask(
        served, store=True, user="u", truncation="disabled", background=False, service_tier="auto",
        parallel_tool_calls=False, include=["reasoning.encrypted_content"], reasoning={"effort": "low", "summary": "auto"},
        extra_body={"moderation": {"model": "omni"}, "unheard_of": None},
    )  # fmt: skip


def test_defaults_may_be_said(server_of):
    server = server_of("generic")
    ask(server, reasoning={"context": "auto", "mode": "standard"}, extra_body={"moderation": None})
    more = {"defer_loading": False, "output_schema": None, "cache_control": {"type": "ephemeral"}}
    for callers in (None, ["direct"]):
        ask(server, tools=[FUNCTIONS[0] | more | {"allowed_callers": callers}], reasoning={"context": None})


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"input": []}, "input", "a list of items that is not empty"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input", "there is no message in it, nor a call"),
        ({"input": 3}, "input", "give a text, or a list"),
        ({"input": None}, "input", "Missing required parameter: 'input'"),
        ({"input": ["a"]}, "input", "an item must be an object"),
        (
            {"input": [{"type": "item_reference", "id": "1"}]},
            "input",
            "items of type 'item_reference' are not",
        ),
        ({"input": [{"type": {}, "id": "1"}]}, "input", "are not supported"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input",
            "'input_image' are not",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
            "input",
            "needs a string 'text'",
        ),
        ({"input": [{"role": "nobody", "content": "a"}]}, "input.0.role", "the role must be"),
        ({"input": [{"role": "user"}]}, "input.0.content", "content"),
        ({"instructions": "be", "input": [{"role": "system", "content": 5}]}, "input.0.content", "string"),
        ({"tools": [{"type": "function"}]}, "tools.0.name", "Missing required parameter: 'tools.0.name'"),
        (
            {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "foo"}}}},
            "text.format.schema",
            "Invalid type: foo",
        ),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input.0.call_id", "'input.0.call_id'"),
        ({"input": [{"type": "reasoning", "content": 3}]}, "input", "must be a list of parts"),
        ({"input": "x" * 9000}, "input", "maximum context length"),
        ({"max_output_tokens": 0}, "max_output_tokens", "greater than or equal to 1"),
        ({"max_output_tokens": 10**6}, "input", "1000000 in the completion"),
        ({"temperature": -1}, "temperature", "temperature"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "send the earlier turns in 'input'"),
        ({"background": True}, "background", "not supported"),
        ({"truncation": "some"}, "truncation", "'auto' or 'disabled'"),
        ({"metadata": dict.fromkeys(map(str, range(17)), "x")}, "metadata", "at most 16 entries"),
        ({"include": ["file_search_call.results"]}, "include", "'file_search_call.results', which is not"),
        ({"tools": [{"type": "web_search"}]}, "tools.0", "tools of type 'web_search' are not supported"),
        ({"tools": [3]}, "tools.0", "a tool must be"),
        ({"tools": TOOLS}, "tools.0", "take 'function' away"),
        (
            {"tools": [FUNCTIONS[0] | {"paramters": {}}]},
            "tools[].paramters",
            "Did you mean 'tools[].parameters'",
        ),
        (
            {"tools": [FUNCTIONS[0] | {"output_schema": {}}]},
            "tools[].output_schema",
            "'tools[].output_schema' is not",
        ),
        ({"reasoning": {"mode": "pro"}}, "reasoning.mode", "not supported"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice", "'mode', 'auto' or 'required'"),
        ({"tool_choice": {"type": "any"}}, "tool_choice", "'none', 'auto' or 'required'"),
        ({"tool_choice": {"type": "function", "name": "messages.7"}}, "tool_choice", "no tool of the name"),
        ({"text": {"format": {"type": "x"}}}, "text.format", "format"),
        ({"text": {"fromat": {}}}, "text.fromat", "Did you mean 'text.format'"),
        ({"text": 3}, "text", "text"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "low"),
        ({"top_logprobs": 21}, "top_logprobs", "20"),
        ({"inptu": "a"}, "inptu", "Did you mean 'input'"),
        ({"model": "other"}, "model", "does not exist here"),
    ],
    ids=lambda value: None if isinstance(value, str) else str(value)[:40],
)
def test_faults(served, body, param, message):
    answer = served.post(RESPONSES, {"input": "Hi"} | body)
    error = answer.json()["error"]
    assert answer.status_code in (400, 404), answer.text
    assert message in error["message"], error
    assert (error["param"] or "").startswith(param), error
    assert "messages" not in (error["param"] or "") and not served.engine.requests


CALL = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}


@pytest.mark.parametrize(
    ("item", "param", "message"),
    [
        (CALL | {"arguments": 3}, "input.4.arguments", "valid string"),
        (CALL | {"name": ""}, "input.4.name", "at least 1 character"),
        (CALL | {"call_id": 3}, "input.4.call_id", "valid string"),
        ({"role": "assistant", "content": 3}, "input.4.content", "valid string"),
        ({"type": "function_call_output", "output": "s"}, "input.4", "needs a 'call_id'"),
        ({"type": "function_call_output", "call_id": "1", "output": 3}, "input.4.output", "valid string"),
        ({"role": "nobody", "content": "a"}, "input.4.role", "the role must be"),
    ],
    ids=str,
)
def test_faults_name_the_item_that_was_sent(served, item, param, message):
    """Whatever message it has become a part of."""
    thoughts = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "t"}]}
    items = [{"role": "developer", "content": "Short."}, {"role": "user", "content": "a"}, thoughts, CALL]
    answer = served.post(RESPONSES, {"instructions": "Kind.", "input": [*items, item]})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert f"'{param}': " in error["message"] and message in error["message"]


def test_keys_are_asked_for():
    with serving(api_keys=("secret",)) as closed:
        assert closed.post(RESPONSES, {"input": "Hi"}).status_code == 401
        assert ask(closed)["status"] in ("completed", "incomplete")


def test_a_client_that_leaves_ends_its_answer(served):
    served.script(ids("a" * 400), delay=0.01)
    with served.openai.responses.create(model="tiny", input="Hi", stream=True) as events:
        for event in events:
            if event.type == "response.output_text.delta":
                break
    # `served` waits until nothing is left in the engine.


def test_the_engine_is_not_ready(served):
    served.engine.ready = False
    with pytest.raises(openai.InternalServerError, match="not ready"):
        ask(served)
