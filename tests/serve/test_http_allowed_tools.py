"""`allowed_tools`: the model is told of all tools, and may call some of them."""

import pytest

from tests.serve.fake_engine import Script
from tests.serve.test_http_bad_input import CHAT, check_error
from tests.serve.test_http_responses import FUNCTIONS, RESPONSES
from tests.serve.test_tool_formats import TOOLS
from tests.serve.tool_answers import ANSWERS, ARGUMENTS, HELLO, TWO, ask, calls_of, prompt, script

PING, WEATHER = ({"type": "function", "function": {"name": name}} for name in ("ping", "get_weather"))


def allowed(*tools, mode="auto"):
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [*tools]}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ANSWERS)
def test_other_calls_are_text(server_of, name, stream):
    server = server_of(name)
    text = ANSWERS[name] % ARGUMENTS
    script(server, text)
    (choice,) = ask(server, stream, tool_choice=allowed(PING))
    assert (calls_of(choice), choice["finish_reason"]) == ([], "stop")
    hidden = ("[TOOL_CALLS]", "[ARGS]") if "mistral" in name else ()  # special tokens
    for marker in hidden:
        text = text.replace(marker, "")
    assert choice["message"]["content"] == text
    (choice,) = ask(server, stream, tool_choice=allowed(PING, WEATHER))
    assert (calls_of(choice), choice["finish_reason"]) == ([("get_weather", ARGUMENTS)], "tool_calls")


def test_the_model_is_told_of_all_tools(server_of):
    server = server_of("generic")
    prompts = []
    for choice in (None, allowed(PING), allowed(WEATHER, mode="required")):
        script(server, "Fine.")
        ask(server, tool_choice=choice)
        prompts.append(prompt(server))
    assert "get_weather" in prompts[0] and prompts == [prompts[0]] * 3


@pytest.mark.parametrize("name", ANSWERS)
def test_one_of_them_must_be_called(server_of, name):
    server = server_of(name)
    server.engine.script = Script([], follow=True)
    for only in (PING, WEATHER):
        for choice in ask(server, tool_choice=allowed(only, mode="required"), n=8):
            assert {called for called, _ in calls_of(choice)} == {only["function"]["name"]}
            assert choice["finish_reason"] == "tool_calls"


def test_a_form_or_calls_of_them(server_of):
    server = server_of("generic")
    server.engine.script = Script([], follow=True)
    choices = ask(server, tool_choice=allowed(PING), n=40, extra_body={"guided_choice": ["yes"]})
    assert {choice["message"]["content"] for choice in choices} == {"yes", None}
    assert {called for choice in choices for called, _ in calls_of(choice)} == {"ping"}


def test_responses_have_it_flat(server_of):
    server = server_of("generic")
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "ping"}]}
    script(server, TWO)
    answer = server.openai.responses.create(model="tiny", input="Hi", tools=FUNCTIONS, tool_choice=choice)
    assert [item.type for item in answer.output] == ["message"] and answer.output_text == TWO
    assert answer.tool_choice.model_dump() == choice
    server.engine.script = Script([], follow=True)
    choice["mode"] = "required"
    answer = server.openai.responses.create(model="tiny", input="Hi", tools=FUNCTIONS, tool_choice=choice)
    assert {item.name for item in answer.output} == {"ping"}
    choice["tools"].append({"type": "function", "name": "pong"})
    body = {"input": "Hi", "tools": FUNCTIONS, "tool_choice": choice}
    check_error(server.post(RESPONSES, body), 400, "tool_choice", "invalid_value", "of the name 'pong'")


NEEDS = "'allowed_tools' needs a 'mode', 'auto' or 'required', and as 'tools' some of the functions"


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"type": "allowed_tools"}, NEEDS),
        ({"type": "allowed_tools", "mode": "auto", "tools": [PING]}, NEEDS),
        (allowed(PING, mode="none"), NEEDS),
        (allowed(PING, mode=[]), NEEDS),
        (allowed(), NEEDS),
        (allowed(*[PING] * 129), NEEDS),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": "ping"}}, NEEDS),
        (allowed("ping"), '{"type": "function", "function": {"name": ...}}'),
        (allowed({"type": "web_search"}), '{"type": "function", "function": {"name": ...}}'),
        (allowed(PING, {"type": "function", "function": {"name": "pong"}}), "there is no tool of the name 'pong'"),
    ],
)  # fmt: skip
def test_faults(server_of, choice, message):
    server = server_of("generic")
    answer = server.post(CHAT, {"messages": HELLO, "tools": TOOLS, "tool_choice": choice})
    check_error(answer, 400, "tool_choice", "invalid_value", message)
    assert server.engine.requests == []
