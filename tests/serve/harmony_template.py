"""A short chat template in the harmony format, with the habits of GPT-OSS's, and a tokenizer that has it."""

from functools import cache
from typing import Any

from models.testing import tiny_tokenizer

# Ids 0 to 7. 0 and 2 end a generation.
MARKERS = ("<|return|>", "<|start|>", "<|call|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>")
MARKS = dict(enumerate(MARKERS))
RETURN, CALL = 0, 2
START = "<|start|>assistant"
# System messages count first alone, tools have descriptions, a message has one call, with thoughts or text before it, and
# thoughts are shown before calls that no answer has come after.
HARMONY = (
    "<|start|>system<|message|>Reasoning: {{ 'medium' if reasoning_effort is not defined else reasoning_effort }}<|end|>"
    "{% set told = messages[0].content if messages[0].role in ('developer', 'system') else '' %}"
    "{% if told or tools %}<|start|>developer<|message|>{{ told }}{% for tool in tools or [] %}"
    "{{ '// ' + tool.function.description }}{{ tool.function | tojson }}{% endfor %}<|end|>{% endif %}"
    "{% set called = namespace(name=none) %}{% for message in messages %}{% if message.role == 'user' %}"
    "<|start|>user<|message|>{{ message.content }}<|end|>"
    "{% elif message.role == 'tool' %}<|start|>functions.{{ called.name }} to=assistant<|channel|>commentary<|message|>"
    "{{ message.content | tojson }}<|end|>"
    "{% elif message.role == 'assistant' and 'tool_calls' in message %}"
    "{% if message.content and message.thinking %}{{ raise_exception('thoughts or text') }}{% endif %}"
    "{% set call = message.tool_calls[0].function %}{% set called.name = call.name %}"
    "{% set later = messages[loop.index:] | selectattr('role', 'equalto', 'assistant') | rejectattr('tool_calls') | list %}"
    "{% if message.thinking and not later %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ message.thinking }}<|end|>{% endif %}"
    "<|start|>assistant to=functions.{{ call.name }}<|channel|>commentary json<|message|>"
    "{{ call.arguments | tojson }}<|call|>"
    "{% elif message.role == 'assistant' %}{% set last = loop.last and not add_generation_prompt %}"
    "{% if last and message.thinking %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ message.thinking }}<|end|>{% endif %}"
    "<|start|>assistant<|channel|>final<|message|>{{ message.content }}{{ '<|return|>' if last else '<|end|>' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)


@cache
def harmony_tokenizer(template: str = HARMONY) -> Any:
    """A tiny tokenizer whose special tokens are the markers."""
    return tiny_tokenizer((*MARKERS, "<|endoftext|>"), template)


def tokens_of(text: str) -> list[int]:
    """A text in its tokens, the markers recognised."""
    return harmony_tokenizer().encode(text, add_special_tokens=False)


def analysis(text: str) -> str:
    """A message of thoughts, and the beginning of the next message."""
    return f"<|channel|>analysis<|message|>{text}<|end|>{START}"


def final(text: str) -> str:
    return f"<|channel|>final<|message|>{text}"


def call(name: str, arguments: str) -> str:
    return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}"
