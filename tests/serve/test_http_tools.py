"""Tools over HTTP: what comes out of the calls in an answer, streamed and not, and calls that must be."""

import json
import re

import pytest

from tests.serve.fake_engine import Script
from tests.serve.http_server import EOS, ids, serving
from tests.serve.test_http_bad_input import CHAT, check_error
from tests.serve.test_tool_formats import TOOLS
from tests.serve.tool_answers import ANSWERS, ARGUMENTS, HELLO, TWO, ask, calls_of, prompt, script
from tests.serve.tool_templates import tokens_of, tool_tokenizer

NAMED = {"type": "function", "function": {"name": "ping"}}


@pytest.fixture
def server(server_of):
    """One whose template knows no tools."""
    return server_of("generic")


# Answers


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ANSWERS)
def test_a_call_in_every_format(server_of, name, stream):
    server = server_of(name)
    script(server, ANSWERS[name] % ARGUMENTS, delay=0.0005)
    (choice,) = ask(server, stream)
    assert calls_of(choice) == [("get_weather", ARGUMENTS)]
    assert choice["finish_reason"] == "tool_calls"
    assert not choice["message"]["content"]
    (call,) = choice["message"]["tool_calls"]
    assert call["type"] == "function"
    assert re.fullmatch("[0-9A-Za-z]{9}" if "mistral" in name else "call_[0-9a-f]{24}", call["id"])


def test_a_format_that_is_told():
    with serving(tokenizer=tool_tokenizer("generic"), max_model_len=4096, tool_call_parser="mistral") as told:
        script(told, ANSWERS["mistral"] % ARGUMENTS)
        (choice,) = ask(told)
        assert calls_of(choice) == [("get_weather", ARGUMENTS)]
        assert '[TOOL_CALLS] [{"name": "name-of-the-function"' in prompt(told)


@pytest.mark.parametrize("stream", [False, True])
def test_text_and_several_calls(server, stream):
    script(server, TWO)
    (choice,) = ask(server, stream)
    assert choice["message"]["content"] == "Let me see."
    assert calls_of(choice) == [("get_weather", ARGUMENTS), ("get_weather", "{}")]
    first, second = choice["message"]["tool_calls"]
    assert first["id"] != second["id"]


def test_an_answer_with_calls_alone_has_no_content(server):
    script(server, ANSWERS["hermes"] % "{}")
    message = server.post(CHAT, {"messages": HELLO, "tools": TOOLS}).json()["choices"][0]["message"]
    assert message.keys() == {"role", "content", "tool_calls"}
    assert message["content"] is None
    script(server, "hi\n")
    message = server.post(CHAT, {"messages": HELLO, "tools": TOOLS}).json()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "hi\n"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("name", "text", "content"),
    [
        ("generic", "<tool_call> is how a call begins", "<tool_call> is how a call begins"),
        ("generic", '<tool_call>{"nome": 1}</tool_call>', '<tool_call>{"nome": 1}</tool_call>'),
        ("llama3_json", '{"name": "Anna", "parameters": {}}', '{"name": "Anna", "parameters": {}}'),
        ("llama3_json", "<|python_tag|>print(1)", "print(1)"),
        ("mistral", "[TOOL_CALLS] what?", " what?"),
    ],
    ids=["marker", "no name", "no tool", "code", "special marker"],
)
def test_what_is_no_call_is_text(server_of, name, text, content, stream):
    server = server_of(name)
    script(server, text)
    (choice,) = ask(server, stream)
    assert (choice["message"]["content"], calls_of(choice), choice["finish_reason"]) == (content, [], "stop")


def test_chunks_come_as_the_arguments_are_written(server):
    script(server, TWO, delay=0.001)
    body = {"messages": HELLO, "tools": TOOLS, "stream": True, "logprobs": True, "return_token_ids": True}
    lines = server.post(CHAT, body).text.splitlines()
    choices = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    deltas = [choice["delta"] for choice in choices[1:]]
    pieces = [delta["tool_calls"] for delta in deltas if "tool_calls" in delta]
    assert all(len(piece) == 1 for piece in pieces)
    starts = [piece[0] for piece in pieces if "id" in piece[0]]
    assert [(start["index"], start["type"], start["function"]) for start in starts] == [
        (i, "function", {"name": "get_weather", "arguments": ""}) for i in range(2)
    ]
    rest = [piece[0] for piece in pieces if "id" not in piece[0]]
    assert all(piece.keys() == {"index", "function"} for piece in rest)
    assert "".join(piece["function"]["arguments"] for piece in rest if piece["index"] == 0) == ARGUMENTS
    assert sum(piece["index"] == 0 for piece in rest) > 1  # not all at once
    assert "".join(delta.get("content") or "" for delta in deltas) == "Let me see."
    assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["tool_calls"]
    # Every token comes with its log-probability, those that no text shows included.
    tokens = [*tokens_of(TWO), EOS]
    assert [token for c in choices for token in c.get("token_ids") or []] == tokens
    assert sum(len(c["logprobs"]["content"]) for c in choices if c["logprobs"]) == len(tokens)


def test_logprobs_and_tokens_of_an_answer_with_calls(server):
    script(server, TWO)
    body = {"messages": HELLO, "tools": TOOLS, "logprobs": True, "return_token_ids": True}
    answer = server.post(CHAT, body).json()
    choice, tokens = answer["choices"][0], [*tokens_of(TWO), EOS]
    assert choice["token_ids"] == tokens
    assert len(choice["logprobs"]["content"]) == answer["usage"]["completion_tokens"] == len(tokens)


@pytest.mark.parametrize("stream", [False, True])
def test_ends_of_answers(server, stream):
    """At the limit of tokens the reason is "length"; a stop string in the middle of a call ends no whole call."""
    text = ANSWERS["hermes"] % ARGUMENTS
    server.engine.scripts = {
        0: Script(tokens_of(text), finish="length"),
        1: Script(tokens_of(text[: text.index(", ")]), finish="length"),
        2: Script(tokens_of(text[: text.index("3}")]), finish="length"),
    }
    body = {"messages": HELLO, "tools": TOOLS, "n": 3, "stream": stream}
    answer = server.post(CHAT, body)
    if stream:
        lines = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        reasons = {c["choices"][0]["index"]: c["choices"][0]["finish_reason"] for c in lines}
        assert reasons == {0: "length", 1: "length", 2: "length"}
        return
    whole, none, cut = answer.json()["choices"]
    assert {c["finish_reason"] for c in (whole, none, cut)} == {"length"}
    assert whole["message"]["tool_calls"][0]["function"]["arguments"] == ARGUMENTS
    assert none["message"] == {"role": "assistant", "content": text[: text.index(", ")]}
    assert cut["message"]["tool_calls"][0]["function"]["arguments"] == ARGUMENTS[:-2]


@pytest.mark.parametrize(
    ("stop", "calls", "reason"),
    [
        ("</tool_call>", [("get_weather", ARGUMENTS)], "tool_calls"),
        ("days", [("get_weather", '{"city": "Oslo", "')], "stop"),
        ("see", [], "stop"),
    ],
)
def test_stop_strings(server, stop, calls, reason):
    script(server, TWO)
    (choice,) = ask(server, stop=stop)
    assert (calls_of(choice), choice["finish_reason"], choice["stop_reason"]) == (calls, reason, stop)


def test_choices_have_calls_of_their_own(server):
    server.engine.scripts = {
        0: Script([*ids("no need"), EOS], finish="stop"),
        1: Script([*ids(TWO), EOS], finish="stop"),
    }
    first, second = ask(server, stream=True, n=2)
    assert (first["message"]["content"], first["finish_reason"]) == ("no need", "stop")
    assert (len(calls_of(second)), second["finish_reason"]) == (2, "tool_calls")


@pytest.mark.parametrize("stream", [False, True])
def test_without_parallel_calls_the_first_one_ends_the_answer(server, stream):
    script(server, TWO)
    (choice,) = ask(server, stream, parallel_tool_calls=False)
    assert calls_of(choice) == [("get_weather", ARGUMENTS)]
    assert choice["finish_reason"] == "tool_calls"
    assert server.engine.aborted == [(server.engine.requests[0].request_id, 0)]


def test_special_tokens_may_be_shown(server_of):
    server = server_of("mistral")
    script(server, "[TOOL_CALLS] what?")
    (choice,) = ask(server, extra_body={"skip_special_tokens": False})
    assert choice["message"]["content"] == "[TOOL_CALLS] what?"


# Grammars


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_calls_that_must_be(server_of, name, choice, stream):
    server = server_of(name)
    server.engine.script = Script([], follow=True)
    found = ask(server, stream, tool_choice=choice, n=2, parallel_tool_calls=False)
    for answer in found:
        ((called, arguments),) = calls_of(answer)
        assert answer["finish_reason"] == "tool_calls"
        assert not answer["message"]["content"]
        assert called == "ping" or (
            choice == "required" and json.loads(arguments)["city"] in ("Oslo", 'Ro"me')
        )


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize(
    ("form", "check"),
    [
        ({"response_format": {"type": "json_object"}}, lambda text: isinstance(json.loads(text), dict)),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, lambda text: text in ("yes", "no")),
        ({"guided_regex": "[0-9]{3}"}, lambda text: text.isdigit()),
    ],
    ids=["json", "choice", "regex"],
)
def test_an_answer_has_its_form_or_calls(server_of, name, form, check):
    server = server_of(name)
    server.engine.script = Script([], follow=True)
    body = {"messages": HELLO, "tools": TOOLS, "n": 40, **form}
    reasons = set()
    for choice in server.post(CHAT, body).json()["choices"]:
        message = choice["message"]
        reasons.add(choice["finish_reason"])
        if "tool_calls" in message:
            assert message["content"] is None
            assert {call["function"]["name"] for call in message["tool_calls"]} <= {"get_weather", "ping"}
        else:
            assert check(message["content"])
    assert "stop" in reasons
    assert "tool_calls" in reasons or name == "llama3_json"  # there JSON begins like a call


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_calls_that_must_be_come_before_a_form(server_of, choice):
    """Agents ask so: each of their turns has the form of the last one, and the first must call."""
    server = server_of("generic")
    server.engine.script = Script([], follow=True)
    for form in ({"response_format": {"type": "json_object"}}, {"guided_grammar": 'start: "a"'}):
        (answer,) = ask(server, tool_choice=choice, parallel_tool_calls=False, extra_body=form)
        assert len(calls_of(answer)) == 1 and answer["finish_reason"] == "tool_calls"


def test_grammars_of_tools_are_counted_and_their_faults_named(server):
    server.engine.script = Script([], follow=True)
    ask(server, tool_choice="required")
    assert 'structured_requests_total{kind="tools"' in server.http.get("/metrics").text
    bad = {
        "type": "function",
        "function": {"name": "bad", "parameters": {"properties": {"a": {"type": "x"}}}},
    }
    body = {"messages": HELLO, "tools": [*TOOLS, bad], "tool_choice": "required"}
    check_error(
        server.post(CHAT, body), 400, "tools", "invalid_value", "the parameters of 'bad': Invalid type: x"
    )
    server.script("fine")
    assert ask(server, tools=body["tools"])[0]["message"]["content"] == "fine"  # nothing is compiled
    content = json.dumps(body).replace('"x"', "1e999")
    answer = server.http.post(CHAT, content=content, headers={"Content-Type": "application/json"})
    check_error(answer, 400, "tools", "invalid_value", "the parameters of 'bad': a number in the schema")
