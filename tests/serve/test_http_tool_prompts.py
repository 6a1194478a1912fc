"""Tools over HTTP: what the model is told of them, and of calls and results in earlier turns."""

import json

import pytest

from serve.prompts import chat_text
from serve.protocol import ChatRequest
from serve.tool_prompt import ToolSupport
from tests.serve.http_server import EOS
from tests.serve.test_http_bad_input import CHAT, check_error
from tests.serve.test_tool_formats import TOOLS, WEATHER
from tests.serve.tool_answers import ANSWERS, ARGUMENTS, HELLO, ask, calls_of, prompt, script
from tests.serve.tool_templates import tokens_of, tool_tokenizer


@pytest.fixture
def server(server_of):
    """One whose template knows no tools."""
    return server_of("generic")


# Prompts


def test_the_template_gets_the_tools(server_of):
    server = server_of("hermes")
    told = [
        {
            "type": "function",
            "function": {"name": "get_weather", "description": "Of a city", "parameters": WEATHER},
        },
        {
            "type": "function",
            "function": {"name": "ping", "parameters": {"type": "object", "properties": {}}},
        },
    ]
    tools = [
        {"type": "function", "function": {"strict": True, **told[0]["function"]}},
        {
            "function": {"name": "ping", "description": None},
            "type": "function",
            "cache_control": {"type": "ephemeral"},
        },
    ]
    ask(server, tools=tools)
    lines = "".join(json.dumps(tool, ensure_ascii=False) + "\n" for tool in told)
    assert prompt(server) == f"<tools>{lines}</tools><|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    count = server.post("/tokenize", {"messages": HELLO, "tools": tools}).json()["count"]
    assert count == len(server.engine.requests[-1].prompt_ids)
    ask(server, tools=tools, tool_choice="none")
    assert prompt(server) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    ask(server, tools=[])
    assert prompt(server) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_a_call_is_not_looked_for_where_none_may_be(server):
    script(server, ANSWERS["hermes"] % "{}")
    (choice,) = ask(server, tool_choice="none")
    assert (choice["message"]["content"], calls_of(choice)) == (ANSWERS["hermes"] % "{}", [])


def test_a_template_without_tools_gets_them_in_the_system_message(server_of):
    system = {"role": "system", "content": "Be brief."}
    for name in ("generic", "unknown"):
        server = server_of(name)
        ask(server, messages=[system, *HELLO])
        text = prompt(server)
        assert text.startswith("<|im_start|>system\nBe brief.\n\nYou can call functions.")
        assert json.dumps(TOOLS[0]["function"], ensure_ascii=False) in text
        assert '<tool_call>\n{"name": ' in text
        assert text.endswith("<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
        ask(server)
        assert prompt(server).startswith("<|im_start|>system\nYou can call functions.")


HISTORY = [
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "abcdefgh1", "type": "function", "function": {"name": "get_weather", "arguments": ARGUMENTS}},
            {"id": "abcdefgh2", "type": "function", "function": {"name": "ping", "arguments": ""}},
        ],
    },
    {"role": "tool", "tool_call_id": "abcdefgh1", "content": "sun"},
    {"role": "tool", "tool_call_id": "abcdefgh2", "name": "ping", "content": [{"type": "text", "text": "pong"}]},
    {"role": "user", "content": "So?"},
]  # fmt: skip


@pytest.mark.parametrize("choice", ["auto", "none"])
def test_calls_and_results_in_the_models_own_form(server_of, choice):
    server = server_of("hermes")
    ask(server, messages=HISTORY, tool_choice=choice)
    turns = (
        "<|im_start|>user\nWeather?<|im_end|>\n<|im_start|>assistant\n"
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}}\n</tool_call>\n'
        '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call><|im_end|>\n'
        "<|im_start|>tool\nsun<|im_end|>\n<|im_start|>tool\npong<|im_end|>\n"
        "<|im_start|>user\nSo?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert prompt(server).endswith(turns)
    assert prompt(server).startswith("<tools>" if choice == "auto" else turns)


@pytest.mark.parametrize("name", ["generic", "unknown", "several"])
def test_calls_and_results_as_text(server_of, name):
    """Where the template does not take them; of several templates the default one, as no tools are given."""
    server = server_of(name)
    body = {"messages": [HISTORY[0], HISTORY[1] | {"content": "I look."}, *HISTORY[2:]]}
    server.post(CHAT, body).raise_for_status()
    assert prompt(server) == (
        "<|im_start|>user\nWeather?<|im_end|>\n<|im_start|>assistant\nI look.\n"
        f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nsun\n</tool_response>\n<tool_response>\npong\n</tool_response>\nSo?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("arguments", "written"),
    [
        (None, "{}"),
        ("null", "{}"),
        ('{"city": "Os\nlo"}', '{"city": "Os\\nlo"}'),
        ('{"city": "Os', '{"city": "Os"}'),  # cut
        ('{"city": "Oslo",}', '{"arguments": "{\\"city\\": \\"Oslo\\",}"}'),
        ("[1]", '{"arguments": "[1]"}'),
        ("[" * 10_000, json.dumps({"arguments": "[" * 10_000})),
    ],
    ids=lambda text: None if text is None else text[:20],
)
def test_arguments_that_are_no_object(server_of, arguments, written):
    """The server tells of them as the model writes them; refused in a later turn, they would end the conversation."""
    called = {"id": "abcdefgh1", "type": "function", "function": {"name": "ping", "arguments": arguments}}
    messages = [HISTORY[0], {"role": "assistant", "tool_calls": [called]}, HISTORY[2]]
    body = {"messages": messages, "tools": TOOLS}
    told = [
        (support, ChatRequest.parse(body))
        for support in (ToolSupport.of(tool_tokenizer(name)) for name in ("hermes", "generic"))
    ]
    assert f'{{"name": "ping", "arguments": {written}}}' in chat_text(*told[0])
    as_text = written if arguments in (None, "null") else arguments
    assert f'{{"name": "ping", "arguments": {as_text}}}' in chat_text(*told[1])
    if len(written) < 1000:
        server_of("hermes").post(CHAT, body).raise_for_status()


def test_what_a_template_refuses_is_a_400(server_of):
    body = {"messages": HISTORY, "tools": TOOLS}
    check_error(server_of("llama3_json").post(CHAT, body), 400, "messages", None, "only one call")
    calls = [call | {"id": "short"} for call in HISTORY[1]["tool_calls"]]
    body["messages"] = [HISTORY[0], HISTORY[1] | {"tool_calls": calls}]
    check_error(server_of("mistral").post(CHAT, body), 400, "messages", None, "ids of nine")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_goes_back_as_it_came(server_of, name, stream):
    """As an object of the client, and dumped with all its nulls; twice, as an agent would."""
    server = server_of(name)
    script(server, ANSWERS[name] % '{"city": "Oslo"}')
    options = {"model": "tiny", "tools": TOOLS}
    messages = list(HELLO)
    for dump in (False, True):
        if stream:
            with server.openai.chat.completions.stream(messages=messages, **options) as events:
                message = events.get_final_completion().choices[0].message
        else:
            message = server.openai.chat.completions.create(messages=messages, **options).choices[0].message
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sun"}
        messages += [message.model_dump() if dump else message, result]
    script(server, "It is sunny.")
    assert server.openai.chat.completions.create(messages=messages, **options).choices[0].message.content
    assert prompt(server).count(ANSWERS[name] % '{"city": "Oslo"}') == 2


@pytest.mark.parametrize("name", ["hermes", "generic"])
def test_an_answer_with_calls_keeps_its_tokens(server_of, name, monkeypatch):
    """The next turn begins with the tokens of this one, whatever its text would encode to."""
    server = server_of(name)
    tokens = tokens_of("Let me see.\n" + ANSWERS[name] % '{"city": "Oslo"}')
    server.script([*tokens, EOS], finish="stop")
    message = (
        server.openai.chat.completions.create(model="tiny", messages=HELLO, tools=TOOLS).choices[0].message
    )
    first = server.engine.requests[-1].prompt_ids
    encoded = []
    encode = type(tool_tokenizer(name)).encode

    def spy(self, text, add_special_tokens=True):
        encoded.append(text)
        return encode(self, text, add_special_tokens)

    monkeypatch.setattr(type(tool_tokenizer(name)), "encode", spy)
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sun"}
    server.openai.chat.completions.create(model="tiny", messages=[*HELLO, message, result], tools=TOOLS)
    second = server.engine.requests[-1].prompt_ids
    assert second[: len(first) + len(tokens)] == first + tokens
    assert all(text.startswith("<|im_end|>") for text in encoded)  # the rest alone


def test_a_message_may_go_on_with_a_call(server):
    body = {"messages": [*HELLO, {"role": "assistant", "content": "I see"}], "continue_final_message": True}
    script(server, ": " + ANSWERS["hermes"] % "{}")
    message = server.post(CHAT, body | {"tools": TOOLS}).json()["choices"][0]["message"]
    assert message["content"] == ":"
    assert len(message["tool_calls"]) == 1
    assert prompt(server).endswith("<|im_start|>assistant\nI see")
