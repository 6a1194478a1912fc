"""Answers in the harmony format over HTTP: thoughts, content and calls, streamed and not, with forms, and in later turns."""

import json

import pytest

from models.testing import TINY_CHAT_TEMPLATE
from tests.serve.fake_engine import Script
from tests.serve.harmony_template import (
    CALL,
    RETURN,
    START,
    analysis,
    call,
    final,
    harmony_tokenizer,
    tokens_of,
)
from tests.serve.http_server import serving
from tests.serve.test_http_bad_input import CHAT, check_error
from tests.serve.test_http_thoughts import FORMS, plain_ask
from tests.serve.test_tool_formats import NAMED, TOOLS
from tests.serve.tool_answers import ARGUMENTS, HELLO, ask, calls_of

ANSWER = analysis("One, two.") + final("Three ☕\n")
PLAN = f"<|channel|>commentary<|message|>Let me see.<|end|>{START}"
WEATHER = call("get_weather", ARGUMENTS)


@pytest.fixture
def server(server_of):
    return server_of("harmony")


def script(server, text, end=RETURN, **options):
    ending = [end] if end is not None else []
    server.engine.script = Script(
        [*tokens_of(text), *ending], **{"finish": "length" if end is None else "stop", **options}
    )


def prompt(server) -> str:
    return harmony_tokenizer().decode(server.engine.requests[-1].prompt_ids, skip_special_tokens=False)


@pytest.mark.parametrize("stream", [False, True])
def test_thoughts_and_the_answer(server, stream):
    script(server, ANSWER, delay=0.0003)
    assert plain_ask(server, stream) == ("One, two.", "Three ☕\n", "stop")
    found = plain_ask(server, stream, extra_body={"include_reasoning": False})
    assert found == (None, "Three ☕\n", "stop")
    for raw in ({"skip_special_tokens": False}, {"include_stop_str_in_output": True}):
        assert plain_ask(server, stream, extra_body=raw) == ("One, two.", "Three ☕\n", "stop")
    script(server, "<|channel|>analysis<|message|>One", end=None)
    assert plain_ask(server, stream) == ("One", None, "length")
    script(server, "No format", end=None)
    assert plain_ask(server, stream) == (None, "No format", "length")
    script(server, ANSWER)
    assert plain_ask(server, stream, stop=["final", "ree"]) == ("One, two.", "Th", "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_calls(server, stream):
    script(server, analysis("Hm.") + PLAN + WEATHER, CALL)
    (choice,) = ask(server, stream)
    assert calls_of(choice) == [("get_weather", ARGUMENTS)]
    message = choice["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Let me see.")
    assert (choice["finish_reason"], len(server.engine.aborted)) == ("tool_calls", 0)
    # The recipient behind the role; an answer that the engine's limit ends; one whose end is none to the engine.
    script(
        server,
        WEATHER.replace(
            "<|channel|>commentary to=functions.get_weather", " to=functions.get_weather<|channel|>commentary"
        ),
    )
    assert calls_of(ask(server, stream)[0]) == [("get_weather", ARGUMENTS)]
    # The token that ends a call ends it whatever its arguments are, and as a token to stop at too.
    broken = call("get_weather", '{"city": "Oslo",}')
    if not stream:
        for end, fields in ((CALL, {}), (CALL, {"extra_body": {"stop_token_ids": [CALL]}})):
            script(server, broken, end)
            (choice,) = ask(server, **fields)
            assert calls_of(choice) == [("get_weather", '{"city": "Oslo",}')]
            assert choice["finish_reason"] == "tool_calls"
            assert choice.get("stop_reason") == (CALL if fields else None)
    if not stream:  # the helper refuses what was cut
        script(server, WEATHER[:-2], end=None)
        (choice,) = ask(server)
        assert (calls_of(choice), choice["finish_reason"]) == ([("get_weather", ARGUMENTS[:-2])], "length")
    script(server, WEATHER + "<|call|>more", end=None, finish="none")
    (choice,) = ask(server, stream)
    assert (calls_of(choice), choice["finish_reason"]) == ([("get_weather", ARGUMENTS)], "tool_calls")


@pytest.mark.parametrize("fields", [{"tool_choice": "none"}, {"tools": []}])
def test_calls_that_may_not_be_are_content(server, fields):
    script(server, analysis("Hm.") + WEATHER, CALL)
    (choice,) = ask(server, **fields)
    assert (calls_of(choice), choice["finish_reason"]) == ([], "stop")
    assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == ("Hm.", ARGUMENTS)
    assert "get_weather" not in prompt(server)


def test_choices_and_their_tokens(server):
    server.engine.scripts = {0: Script(tokens_of(ANSWER)), 1: Script(tokens_of(final("Four")))}
    answer = server.openai.chat.completions.create(model="tiny", messages=HELLO, n=2)
    found = [(c.message.model_extra["reasoning_content"], c.message.content) for c in answer.choices]
    assert found == [("One, two.", "Three ☕\n"), (None, "Four")]
    counted = len(tokens_of(analysis("One, two.")[: -len(START)]))
    assert answer.usage.completion_tokens_details.reasoning_tokens == counted
    assert answer.usage.completion_tokens == len(tokens_of(ANSWER)) + len(tokens_of(final("Four")))


def test_chunks(server):
    script(server, analysis("Hm.") + PLAN + WEATHER, CALL, delay=0.001)
    body = {"messages": HELLO, "stream": True, "tools": TOOLS, "logprobs": True, "return_token_ids": True}
    lines = server.post(CHAT, body).text.splitlines()
    choices = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    deltas = [choice["delta"] for choice in choices[1:]]
    # One kind a chunk, in the order of the messages.
    kinds = [kind for delta in deltas for kind in delta]
    assert kinds == sorted(kinds, key=["reasoning_content", "content", "tool_calls"].index)
    assert all(len(delta) <= 1 for delta in deltas)
    calls = [piece for delta in deltas for piece in delta.get("tool_calls", ())]
    assert calls[0]["function"] == {"name": "get_weather", "arguments": ""}
    assert "".join(piece["function"]["arguments"] for piece in calls) == ARGUMENTS
    # Every token comes with its log-probability, the markers included.
    tokens = [*tokens_of(analysis("Hm.") + PLAN + WEATHER), CALL]
    assert [token for c in choices for token in c.get("token_ids") or []] == tokens
    assert sum(len(c["logprobs"]["content"]) for c in choices if c["logprobs"]) == len(tokens)


def test_blocks_begin_with_their_text(server):
    """Messages of one kind stand apart where they are joined, and only there."""
    script(server, analysis("One.") + PLAN + analysis("Two.") + analysis("Three.") + final("Done."))
    blocks = server.post("/v1/messages", {"max_tokens": 999, "messages": HELLO}).json()["content"]
    found = [block.get("thinking", block.get("text")) for block in blocks]
    assert found == ["One.", "Let me see.", "Two.\n\nThree.", "Done."]
    items = server.post("/v1/responses", {"input": "Hello", "model": "tiny"}).json()["output"]
    assert [item["content"][0]["text"] for item in items] == found
    for path, body in (
        ("messages", {"max_tokens": 999, "messages": HELLO}),
        ("responses", {"input": "Hello"}),
    ):
        lines = server.post(f"/v1/{path}", body | {"stream": True}).text.splitlines()
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        deltas: dict[int, str] = {}
        for event in events:
            delta = event.get("delta")
            if isinstance(delta, dict):
                delta = delta.get("thinking", delta.get("text"))
            if delta is not None:
                at = event.get("index", event.get("output_index"))
                deltas[at] = deltas.get(at, "") + delta
        assert [*deltas.values()] == found


def test_the_parser_may_be_told_or_left_out():
    with serving(tokenizer=harmony_tokenizer(TINY_CHAT_TEMPLATE), reasoning_parser="harmony") as server:
        script(server, ANSWER)
        assert plain_ask(server) == ("One, two.", "Three ☕\n", "stop")
    with serving(tokenizer=harmony_tokenizer(), reasoning_parser="none", max_model_len=4096) as server:
        script(server, ANSWER)
        message = server.post(CHAT, {"messages": HELLO}).json()["choices"][0]["message"]
        assert message == {"role": "assistant", "content": "One, two.\n\nThree ☕\n"}
        script(server, analysis("Hm.") + WEATHER, CALL)
        assert calls_of(ask(server)[0]) == [("get_weather", ARGUMENTS)]
    with serving(tokenizer=harmony_tokenizer(), tool_call_parser="hermes") as server:
        script(server, ANSWER)
        assert plain_ask(server)[1] == "analysisOne, two.assistantfinalThree ☕\n"


# Forms


@pytest.mark.parametrize("form", [*FORMS])
def test_a_form_is_that_of_the_answer(server, form):
    fields, check = FORMS[form]
    server.engine.script = Script([], follow=True)
    answer = server.post(CHAT, {"messages": HELLO, "n": 8, "max_tokens": 3000, **fields}).json()
    messages = [choice["message"] for choice in answer["choices"]]
    assert all(check(message["content"]) for message in messages)
    assert any(message["reasoning_content"] for message in messages)
    assert not all(message["reasoning_content"] for message in messages)


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_calls_that_must_be(server, choice):
    server.engine.script = Script([], follow=True)
    found = ask(server, tool_choice=choice, n=8, max_tokens=3000)
    assert all(len(calls_of(choice)) == 1 and not choice["message"]["content"] for choice in found)
    assert {choice["finish_reason"] for choice in found} == {"tool_calls"}
    for name, arguments in (calls_of(choice)[0] for choice in found):
        assert (
            json.loads(arguments).get("city") in ("Oslo", 'Ro"me')
            if name == "get_weather"
            else arguments == "{}"
        )
    assert any(choice["message"]["reasoning_content"] for choice in found)


def test_a_form_or_calls(server):
    server.engine.script = Script([], follow=True)
    fields, check = FORMS["choice"]
    body = {"messages": HELLO, "tools": TOOLS, "n": 24, "max_tokens": 3000, **fields}
    choices = server.post(CHAT, body).json()["choices"]
    assert {choice["finish_reason"] for choice in choices} == {"stop", "tool_calls"}
    for message in (choice["message"] for choice in choices):
        assert message["content"] is None if "tool_calls" in message else check(message["content"])


# Prompts


def test_the_effort_of_reasoning(server_of):
    server = server_of("harmony")
    for effort in ("low", "medium", "high", None):
        for body in (
            {"reasoning_effort": effort},
            {"chat_template_kwargs": {"reasoning_effort": effort} if effort else {}},
        ):
            server.post(CHAT, {"messages": HELLO} | body).raise_for_status()
            assert prompt(server).startswith(
                f"<|start|>system<|message|>Reasoning: {effort or 'medium'}<|end|>"
            )
    both = {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}}
    server.openai.chat.completions.create(model="tiny", messages=HELLO, extra_body=both)
    assert "Reasoning: low" in prompt(server)
    count = server.post("/tokenize", {"messages": HELLO, "reasoning_effort": "high"}).json()["count"]
    assert count == len(server.engine.requests[-1].prompt_ids) + len("high") - len("low")
    for effort in ("none", "minimal", "xhigh"):
        response = server.post(CHAT, {"messages": HELLO, "reasoning_effort": effort})
        check_error(response, 400, "reasoning_effort", "invalid_value", "this model knows low, medium, high")
        server_of("qwen").post(CHAT, {"messages": HELLO, "reasoning_effort": effort}).raise_for_status()
    for name in ("harmony", "qwen"):
        response = server_of(name).post(CHAT, {"messages": HELLO, "reasoning_effort": "hard"})
        check_error(
            response,
            400,
            "reasoning_effort",
            "invalid_value",
            "should be 'none', 'minimal', 'low', 'medium', ",
        )


def test_an_answer_goes_back_as_it_came(server):
    script(server, analysis("Hm.") + WEATHER, CALL)
    answer = (
        server.openai.chat.completions.create(model="tiny", messages=HELLO, tools=TOOLS).choices[0].message
    )
    result = {"role": "tool", "tool_call_id": answer.tool_calls[0].id, "content": "clear"}
    script(server, ANSWER)
    turns = [{"role": "developer", "content": "Be brief."}, *HELLO, answer, result]
    more = server.openai.chat.completions.create(model="tiny", messages=turns, tools=TOOLS).choices[0].message
    text = prompt(server)
    assert "<|start|>developer<|message|>Be brief.// {" in text
    compact = json.dumps(json.loads(ARGUMENTS))
    assert text.endswith(
        f"{START}<|channel|>analysis<|message|>Hm.<|end|>"
        f"{START} to=functions.get_weather<|channel|>commentary json<|message|>{compact}<|call|>"
        f'<|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>"clear"<|end|>{START}'
    )
    # The thoughts are gone with the answer.
    server.openai.chat.completions.create(model="tiny", messages=[*turns, more, *HELLO])
    assert "analysis" not in prompt(server)
    assert f"{START}<|channel|>final<|message|>Three ☕\n<|end|>" in prompt(server)
    response = server.post(CHAT, {"messages": [*HELLO, {"role": "system", "content": "No."}]})
    check_error(response, 400, "messages", "invalid_value", "at the beginning alone: put them first")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("said", "written", "expected", "ending"),
    [
        ({"content": "The sky"}, " is blue", (None, " is blue"), "final<|message|>The sky"),
        ({"content": "", "reasoning_content": "One,"}, f" two.<|end|>{START}{final('Three')}", (" two.", "Three"),
         "analysis<|message|>One,"),
        ({"content": "Th", "reasoning_content": "One"}, "ree", (None, "ree"), "final<|message|>Th"),
        ({"content": ""}, "Three", (None, "Three"), "final<|message|>"),
    ],
    ids=["content", "thoughts", "both", "empty"],
)  # fmt: skip
def test_a_message_may_be_continued(server, stream, said, written, expected, ending):
    script(server, written)
    messages = [*HELLO, {"role": "assistant"} | said]
    body = {"continue_final_message": True, "add_generation_prompt": False}
    assert plain_ask(server, stream, messages=messages, extra_body=body) == (*expected, "stop")
    assert prompt(server).endswith(f"{START}<|channel|>{ending}")


@pytest.mark.parametrize("text", ["hello there", "x" * 300, "assistant and more"])
def test_responses_have_log_probabilities_of_text_in_no_message(server, text):
    script(server, text, end=None)
    body = {
        "input": "hi",
        "max_output_tokens": 400,
        "top_logprobs": 1,
        "include": ["message.output_text.logprobs"],
    }
    (item,) = server.post("/v1/responses", body).json()["output"]
    (content,) = item["content"]
    assert "".join(entry["token"] for entry in content["logprobs"]) == content["text"]
    assert content["text"] and text.endswith(content["text"])
