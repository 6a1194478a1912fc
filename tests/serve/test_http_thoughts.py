"""Thoughts over HTTP: apart from the answer, streamed and not, with tools and grammars, and sent back in a later turn."""

import json

import pytest

from tests.serve.fake_engine import Script
from tests.serve.http_server import EOS, ids, serving
from tests.serve.test_http_bad_input import CHAT, check_error
from tests.serve.test_tool_formats import TOOLS
from tests.serve.thought_templates import OPENING, TEMPLATES, thought_tokenizer
from tests.serve.tool_answers import ARGUMENTS, HELLO, ask, calls_of

OFF = {"enable_thinking": False}
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'


@pytest.fixture(params=TEMPLATES)
def thinking(request, server_of):
    """A server, the tokens of a text, and what comes before thoughts in its answers."""
    tokenizer = thought_tokenizer(request.param)
    opening = "" if request.param.startswith("r1") else "<think>\n"
    return server_of(request.param), lambda text: tokenizer.encode(text, add_special_tokens=False), opening


def plain_ask(server, stream=False, messages=HELLO, **options):
    """The message and the reason of one answer without tools; of a stream, its deltas put together."""
    given = server.openai.chat.completions.create(model="tiny", messages=messages, stream=stream, **options)
    if not stream:
        choice = given.choices[0]
        return (
            choice.message.model_extra.get("reasoning_content"),
            choice.message.content,
            choice.finish_reason,
        )
    thoughts, texts, reason = [], [], None
    for chunk in given:
        (choice,) = chunk.choices
        thought = (choice.delta.model_extra or {}).get("reasoning_content")
        assert not (thought and (choice.delta.content or "".join(texts))), (
            "thoughts come first, by themselves"
        )
        thoughts.append(thought or "")
        texts.append(choice.delta.content or "")
        reason = choice.finish_reason or reason
    return "".join(thoughts) or None, "".join(texts) or None, reason


@pytest.mark.parametrize("stream", [False, True])
def test_thoughts_are_apart_from_the_answer(thinking, stream):
    server, tokens, opening = thinking
    text = f"{opening}One, two.\n</think>\n\nThree ☕\n"
    server.script([*tokens(text), EOS], finish="stop", delay=0.0003)
    assert plain_ask(server, stream) == ("One, two.", "Three ☕\n", "stop")
    found = plain_ask(server, stream, extra_body={"include_reasoning": False})
    assert found == (None, "Three ☕\n", "stop")
    assert server.engine.generated >= 2 * len(tokens(text))


@pytest.mark.parametrize("stream", [False, True])
def test_thoughts_that_never_end(thinking, stream):
    server, tokens, opening = thinking
    server.script(tokens(f"{opening}One, two"), finish="length")
    assert plain_ask(server, stream) == ("One, two", None, "length")
    found = plain_ask(server, stream, extra_body={"include_reasoning": False})
    assert found == (None, None, "length")


@pytest.mark.parametrize("stream", [False, True])
def test_answers_without_thoughts(server_of, stream):
    server = server_of("qwen")
    server.script("Three", finish="length")
    assert plain_ask(server, stream) == (None, "Three", "length")
    server.script("<think>\n\n</think>\n\nThree", finish="length")  # as one writes that was told not to think
    assert plain_ask(server, stream) == (None, "Three", "length")
    # The prompt has closed the thoughts: whatever comes is the answer.
    server.script("<think>One</think>", finish="length")
    found = plain_ask(server, stream, extra_body={"chat_template_kwargs": OFF})
    assert found == (None, "<think>One</think>", "length")
    prompt = server.engine.requests[-1].prompt_ids
    assert thought_tokenizer("qwen").decode(prompt).endswith("<think>\n\n</think>\n\n")


def test_what_a_message_holds(server_of):
    server = server_of("qwen")
    server.script("<think>One</think>Three", finish="length")

    def message(**fields):
        return server.post(CHAT, {"messages": HELLO} | fields).json()["choices"][0]["message"]

    assert message() == {"role": "assistant", "reasoning_content": "One", "content": "Three"}
    assert message(include_reasoning=False) == {"role": "assistant", "content": "Three"}
    server.script("Three", finish="length")
    assert message() == {"role": "assistant", "reasoning_content": None, "content": "Three"}
    server.script([EOS], finish="stop")
    assert message() == {"role": "assistant", "reasoning_content": None, "content": ""}


def test_models_that_do_not_think_are_as_they_were(served, server_of):
    for server in (served, server_of("hermes")):
        server.script("<think>One</think>Three", finish="length")
        answer = server.post(CHAT, {"messages": HELLO}).json()
        assert answer["choices"][0]["message"] == {"role": "assistant", "content": "<think>One</think>Three"}
        assert "completion_tokens_details" not in answer["usage"]


def test_the_parser_may_be_told():
    with serving(reasoning_parser="think") as server:
        server.script("<think>One</think>Three", finish="length")
        assert plain_ask(server) == ("One", "Three", "length")
    with serving(tokenizer=thought_tokenizer("r1"), reasoning_parser="none") as server:
        server.script("One</think>Three", finish="length")
        assert plain_ask(server) == (None, "One</think>Three", "length")


@pytest.mark.parametrize("stream", [False, True])
def test_usage_counts_the_tokens_of_thoughts(thinking, stream):
    server, tokens, opening = thinking
    text = f"{opening}One\n</think>\n\nThree"
    server.engine.scripts = {0: Script(tokens(text)), 1: Script(tokens(f"{opening}One"))}
    options = {"stream_options": {"include_usage": True}} if stream else {}
    given = server.openai.chat.completions.create(
        model="tiny", messages=HELLO, n=2, stream=stream, extra_body={"include_reasoning": False}, **options
    )
    usage = list(given)[-1].usage if stream else given.usage
    counted = len(tokens(f"{opening}One\n</think>")) + len(tokens(f"{opening}One"))
    assert usage.completion_tokens_details.reasoning_tokens == counted
    assert usage.completion_tokens == counted + len(tokens("\n\nThree"))


def test_choices_have_thoughts_of_their_own(server_of):
    server = server_of("qwen")
    server.engine.scripts = {0: Script(ids("Three")), 1: Script(ids("<think>One</think>Four"))}
    answers = server.openai.chat.completions.create(model="tiny", messages=HELLO, n=2).choices
    found = [(c.message.model_extra["reasoning_content"], c.message.content) for c in answers]
    assert found == [(None, "Three"), ("One", "Four")]


def test_chunks(server_of):
    server = server_of("r1")
    server.script("Hm.\n</think>\n\nOk", finish="length", delay=0.001)
    body = {"messages": HELLO, "stream": True, "logprobs": True, "return_token_ids": True}
    lines = server.post(CHAT, body).text.splitlines()
    choices = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    deltas = [choice["delta"] for choice in choices[1:]]
    # One kind a chunk, thoughts first; how many characters come together depends on how busy the machine is.
    kinds = [kind for delta in deltas for kind in delta]
    assert kinds == sorted(kinds, reverse=True) and all(len(delta) <= 1 for delta in deltas)
    said = {kind: "".join(d.get(kind, "") for d in deltas) for kind in ("reasoning_content", "content")}
    assert said == {"reasoning_content": "Hm.", "content": "Ok"}
    # Every token comes with its log-probability, those that no text shows included.
    tokens = ids("Hm.\n</think>\n\nOk")
    assert [token for c in choices for token in c.get("token_ids") or []] == tokens
    assert sum(len(c["logprobs"]["content"]) for c in choices if c["logprobs"]) == len(tokens)


# Tools and forms


@pytest.mark.parametrize("stream", [False, True])
def test_calls_are_looked_for_in_the_answer_alone(thinking, stream):
    server, tokens, opening = thinking
    server.script([*tokens(f"{opening}{CALL}?\n</think>\n\nLet me see.\n{CALL}"), EOS], finish="stop")
    (choice,) = ask(server, stream)
    assert calls_of(choice) == [("get_weather", ARGUMENTS)]
    message = choice["message"]
    assert (message["reasoning_content"], message["content"]) == (f"{CALL}?", "Let me see.")
    assert choice["finish_reason"] == "tool_calls"
    server.script([*tokens(f"{opening}{CALL}"), EOS], finish="stop")
    (choice,) = ask(server, stream)
    assert (calls_of(choice), choice["message"]["reasoning_content"]) == ([], CALL)
    assert (choice["message"]["content"] or None, choice["finish_reason"]) == (None, "stop")


FORMS = {
    "schema": ({"response_format": {"type": "json_object"}}, lambda text: json.loads(text) is not None),
    "choice": ({"structured_outputs": {"choice": ["yes", "no"]}}, ("yes", "no").__contains__),
    "regex": ({"guided_regex": "[0-9]{3}"}, str.isdigit),
    "grammar": ({"guided_grammar": 'start: "(" thoughts ")"\nthoughts: "a"'}, "(a)".__eq__),
}


@pytest.mark.parametrize("name", ["qwen special", "r1 special"])
@pytest.mark.parametrize("form", FORMS)
def test_a_form_comes_after_thoughts(server_of, name, form):
    server, (fields, check) = server_of(name), FORMS[form]
    server.engine.script = Script([], follow=True)
    answer = server.post(CHAT, {"messages": HELLO, "n": 8, "max_tokens": 3000, **fields}).json()
    messages = [choice["message"] for choice in answer["choices"]]
    assert all(message["content"] is not None and check(message["content"]) for message in messages)
    assert any(message["reasoning_content"] for message in messages)
    if name.startswith("qwen"):
        assert not all(message["reasoning_content"] for message in messages)
        fields = fields | {"chat_template_kwargs": OFF}
        answer = server.post(CHAT, {"messages": HELLO, "n": 8, **fields}).json()
        for message in (choice["message"] for choice in answer["choices"]):
            assert check(message["content"]) and message["reasoning_content"] is None


@pytest.mark.parametrize("name", ["qwen special", "r1 special"])
def test_calls_that_must_be_come_after_thoughts(server_of, name):
    server = server_of(name)
    server.engine.script = Script([], follow=True)
    found = ask(server, tool_choice="required", n=8, parallel_tool_calls=False, max_tokens=3000)
    assert all(len(calls_of(choice)) == 1 and not choice["message"]["content"] for choice in found)
    assert {choice["finish_reason"] for choice in found} == {"tool_calls"}
    assert any(choice["message"]["reasoning_content"] for choice in found)


@pytest.mark.parametrize("form", ["schema", "choice", "regex"])
def test_a_form_or_calls_come_after_thoughts(server_of, form):
    server, (fields, check) = server_of("r1 special"), FORMS[form]
    server.engine.script = Script([], follow=True)
    body = {"messages": HELLO, "tools": TOOLS, "n": 24, "max_tokens": 3000, **fields}
    choices = server.post(CHAT, body).json()["choices"]
    assert {choice["finish_reason"] for choice in choices} == {"stop", "tool_calls"}
    for message in (choice["message"] for choice in choices):
        assert message["content"] is None if "tool_calls" in message else check(message["content"])


def test_faults_of_a_form_are_named_as_without_thoughts(server_of):
    server = server_of("r1")
    schema = {"type": "object", "properties": {"a": {"type": "x"}}}
    body = {"messages": HELLO, "response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
    check_error(
        server.post(CHAT, body), 400, "response_format.json_schema.schema", "invalid_value", "Invalid type: x"
    )
    body = {"messages": HELLO, "guided_grammar": 'start: "a"\n}'}
    check_error(server.post(CHAT, body), 400, "guided_grammar", "invalid_value", "2(1): expecting rule")
    bad = {"type": "function", "function": {"name": "bad", "parameters": schema}}
    body = {"messages": HELLO, "tools": [*TOOLS, bad], "tool_choice": "required"}
    check_error(
        server.post(CHAT, body), 400, "tools", "invalid_value", "the parameters of 'bad': Invalid type: x"
    )


# Later turns


def prompt(server) -> str:
    return thought_tokenizer("qwen").decode(server.engine.requests[-1].prompt_ids, skip_special_tokens=False)


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_thoughts_sent_back_are_for_templates_that_name_them(server_of, field):
    turns = [
        *HELLO,
        {"role": "assistant", "content": "Three", field: "One"},
        {"role": "user", "content": "More"},
    ]
    for name, written in (
        ("qwen", "<think>\nOne\n</think>\n\nThree<|im_end|>"),
        ("r1", "Three<|im_end|>"),
        ("hermes", "Three<|im_end|>"),
        ("generic", "Three<|im_end|>"),
    ):
        server = server_of(name)
        server.post(CHAT, {"messages": turns}).raise_for_status()
        assert OPENING + written in prompt(server)


def test_an_answer_with_a_call_goes_back_as_it_came(server_of):
    """With its thoughts where the template takes them; the tokens of the turn are those that were generated."""
    server = server_of("qwen")
    text = f"<think>\nThe weather?\n</think>\n\n{CALL.replace('3', ' 3')}"
    tokens = ids(text)
    server.script([*tokens, EOS], finish="stop")
    answer = (
        server.openai.chat.completions.create(model="tiny", messages=HELLO, tools=TOOLS).choices[0].message
    )
    result = {"role": "tool", "tool_call_id": answer.tool_calls[0].id, "content": "clear"}
    messages = [*HELLO, answer, result]
    server.openai.chat.completions.create(model="tiny", messages=messages, tools=TOOLS)
    first, second = server.engine.requests
    assert second.prompt_ids[: len(first.prompt_ids) + len(tokens)] == [*first.prompt_ids, *tokens]


def test_thoughts_of_others_and_odd_ones(server_of):
    server = server_of("qwen")
    server.post(CHAT, {"messages": [{"role": "user", "content": "Hi", "reasoning": {}}]}).raise_for_status()
    assert "<think>" not in prompt(server)
    turns = [*HELLO, {"role": "assistant", "content": "Three", "reasoning_content": None}, *HELLO]
    server.post(CHAT, {"messages": turns}).raise_for_status()
    turns[1]["reasoning_content"] = ["One"]
    response = server.post(CHAT, {"messages": turns})
    check_error(response, 400, "messages.1.reasoning_content", "invalid_value", "valid string")
    turns[1] = {"role": "assistant", "reasoning_content": "One"}  # it was cut before its answer
    server.post(CHAT, {"messages": turns}).raise_for_status()
    assert "<think>\nOne\n</think>\n\n<|im_end|>" in prompt(server)


@pytest.mark.parametrize("name", ["qwen", "qwen special"])
def test_a_message_may_be_continued_within_its_thoughts(server_of, name):
    server = server_of(name)
    tokenizer = thought_tokenizer(name)
    server.script(tokenizer.encode(" two.\n</think>\n\nThree", add_special_tokens=False), finish="length")
    messages = [*HELLO, {"role": "assistant", "content": "<think>\nOne,"}]
    body = {"continue_final_message": True, "add_generation_prompt": False}
    assert plain_ask(server, messages=messages, extra_body=body) == (" two.", "Three", "length")


def test_the_field_include_reasoning(server_of):
    response = server_of("qwen").post(CHAT, {"messages": HELLO, "include_reasoning": "no"})
    check_error(response, 400, "include_reasoning", "invalid_value", "valid boolean")
