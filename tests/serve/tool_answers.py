"""Answers with calls in every format, and short ways to ask for them."""

from tests.serve.fake_engine import Script
from tests.serve.http_server import EOS, Served
from tests.serve.test_tool_formats import TOOLS
from tests.serve.tool_templates import tokens_of, tool_tokenizer

HELLO = [{"role": "user", "content": "Hi"}]
ARGUMENTS = '{"city": "Oslo", "days":3}'
ANSWERS = {
    "hermes": '<tool_call>\n{"name": "get_weather", "arguments": %s}\n</tool_call>',
    "llama3_json": '{"name": "get_weather", "parameters": %s}',
    "mistral": '[TOOL_CALLS] [{"name": "get_weather", "arguments": %s}]',
    "mistral named": "[TOOL_CALLS]get_weather[ARGS]%s",
    "generic": '<tool_call>\n{"name": "get_weather", "arguments": %s}\n</tool_call>',
}
TWO = "Let me see.\n" + "\n".join([ANSWERS["hermes"] % ARGUMENTS, ANSWERS["hermes"] % "{}"])


def ask(server: Served, stream=False, messages=HELLO, **options):
    """The choices as dicts; streamed ones put together by the openai client's own helper."""
    options = {"model": "tiny", "messages": messages, "tools": TOOLS} | options
    if stream:
        with server.openai.chat.completions.stream(**options) as events:
            completion = events.get_final_completion()
    else:
        completion = server.openai.chat.completions.create(**options)
    return [choice.model_dump() for choice in completion.choices]


def calls_of(choice) -> list[tuple[str, str]]:
    found = choice["message"]["tool_calls"] or []
    return [(call["function"]["name"], call["function"]["arguments"]) for call in found]


def prompt(server: Served) -> str:
    return tool_tokenizer("generic").decode(server.engine.requests[-1].prompt_ids, skip_special_tokens=False)


def script(server: Served, text: str, **options) -> None:
    server.engine.script = Script([*tokens_of(text), EOS], finish="stop", **options)
