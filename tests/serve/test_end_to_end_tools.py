"""Tools in front of the real engine: calls that a grammar demands, and the way back of their results."""

import json

import jax.numpy as jnp
import pytest

from models.registry import load_model
from serve.args import ServeConfig
from serve.build import build_engine
from tests.serve.test_end_to_end import serve
from tests.serve.tiny_engine import tiny_engine
from tests.serve.tool_templates import tool_tokenizer

# Short, as a row of the tiny engine holds 256 bytes.
SWITCH = {"enum": [{"on": 1}, {}]}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": SWITCH}}]


def converse(server, messages, tools, result, **options):
    """A call, streamed and whole alike; then the answer to its result, and how many tokens it found stored."""
    given = {"model": "tiny", "messages": messages, "tools": tools} | options
    with server.openai.chat.completions.stream(**given) as events:
        streamed = events.get_final_completion().choices[0]
    choice = server.openai.chat.completions.create(**given).choices[0]
    assert streamed.finish_reason == choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls
    assert streamed.message.tool_calls[0].function.arguments == call.function.arguments
    back = {"role": "tool", "tool_call_id": call.id, "content": result}
    options |= {"tool_choice": "auto", "messages": [*messages, choice.message, back], "max_tokens": 8}
    answer = server.openai.chat.completions.create(**given | options)
    assert answer.choices[0].message.role == "assistant"
    return call.function, answer.usage


def test_a_call_with_the_tiny_engine():
    messages = [{"role": "user", "content": "Hi"}]
    options = {"tool_choice": "required", "parallel_tool_calls": False, "temperature": 0}
    with tiny_engine() as tiny:
        with serve(tiny.engine, tool_tokenizer("hermes")) as server:
            function, usage = converse(server, messages, TOOLS, "ok", **options)
            assert function.name == "f"
            assert json.loads(function.arguments) in SWITCH["enum"]
            # All that was read and written before is found: the call went back in the tokens in which it was written.
            written = len(tool_tokenizer("hermes").encode(function.arguments)) + 50
            assert usage.prompt_tokens_details.cached_tokens > written
            assert usage.prompt_tokens - usage.prompt_tokens_details.cached_tokens < 50
            assert server.metric("tangram:compilations_after_warmup") == 0
        tiny.settle()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_call_with_the_real_model():
    """Its template knows no tools."""
    schema = {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 30},
            "unit": {"enum": ["celsius", "fahrenheit"]},
        },
        "required": ["city", "unit"],
        "additionalProperties": False,
    }
    tools = [
        {
            "type": "function",
            "function": {
                "name": "get_weather",
                "description": "The weather of a city now",
                "parameters": schema,
            },
        },
        {"type": "function", "function": {"name": "get_time", "description": "The time of day"}},
    ]
    model = load_model("smollm2-135m-instruct", progress=False)
    config = ServeConfig(max_model_len=1024, max_num_seqs=1, max_num_batched_tokens=128, retention=1.0)
    engine = build_engine(config, model, dtype=jnp.float32).engine
    engine.start()
    messages = [{"role": "user", "content": "What is the weather in Oslo, in celsius?"}]
    choice = {"type": "function", "function": {"name": "get_weather"}}
    try:
        with serve(engine, model.tokenizer) as server:
            function, usage = converse(
                server, messages, tools, "-3 degrees, snow", tool_choice=choice, temperature=0
            )
    finally:
        engine.stop()
    assert function.name == "get_weather"
    assert json.loads(function.arguments) == {"city": "Oslo", "unit": "celsius"}
    assert usage.prompt_tokens_details.cached_tokens > 0.8 * usage.prompt_tokens
