"""Short chat templates that know tools, one for each format of calls, and tokenizers that have them."""

from functools import cache
from typing import Any

from models.testing import SPECIAL_TOKENS, TINY_CHAT_TEMPLATE, tiny_tokenizer

_TURNS = (
    "{{% for message in messages %}}<|im_start|>{{{{ message['role'] }}}}\n{{{{ message['content'] }}}}{calls}<|im_end|>\n"
    "{{% endfor %}}{{% if add_generation_prompt %}}<|im_start|>assistant\n{{% endif %}}"
)
_TOLD = "{% if tools is not none %}<tools>{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}</tools>{% endif %}"
_EACH = "{% for call in message.tool_calls %}"
HERMES = _TOLD + _TURNS.format(
    calls=_EACH + "{{ '\n' if message.content or not loop.first else '' }}"
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}"
)
LLAMA3_JSON = (
    "{% if tools is not none %}Environment: ipython\n{% endif %}"
    + _TOLD
    + _TURNS.format(
        calls="{% if message.tool_calls %}{% if message.tool_calls | length != 1 %}{{ raise_exception('only one call') }}"
        "{% endif %}" + _EACH + '{"name": "{{ call.function.name }}", "parameters": {{ call.function.arguments | tojson }}}'
        "{% endfor %}{% endif %}"
    )
)  # fmt: skip
MISTRAL = _TOLD + _TURNS.format(
    calls="{% if message.tool_calls %}[TOOL_CALLS] ["
    + _EACH
    + "{% if call.id | length != 9 %}{{ raise_exception('ids of nine') }}{% endif %}"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "{% if not loop.last %}, {% endif %}{% endfor %}]{% endif %}"
)
MISTRAL_NAMED = _TOLD + _TURNS.format(
    calls=_EACH
    + "[TOOL_CALLS]{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}{% endfor %}"
)
UNKNOWN = _TOLD + _TURNS.format(calls=_EACH + "<call {{ call.function.name }}/>{% endfor %}")
NAMED_TEMPLATES = {"default": TINY_CHAT_TEMPLATE, "tool_use": HERMES}
TEMPLATES = {
    "hermes": HERMES,
    "llama3_json": LLAMA3_JSON,
    "mistral": MISTRAL,
    "mistral named": MISTRAL_NAMED,
    "generic": TINY_CHAT_TEMPLATE,
    "unknown": UNKNOWN,
    "several": NAMED_TEMPLATES,
}
MARKERS = ("<|python_tag|>", "[TOOL_CALLS]", "[ARGS]")  # ids 3, 4, 5


@cache
def tool_tokenizer(name: str) -> Any:
    """A tiny tokenizer with one of TEMPLATES, whose markers are special tokens."""
    return tiny_tokenizer((*SPECIAL_TOKENS[:3], *MARKERS, *SPECIAL_TOKENS[6:]), TEMPLATES[name])


def tokens_of(text: str) -> list[int]:
    """A text in tokens of such a tokenizer, the special ones recognised."""
    return tool_tokenizer("generic").encode(text, add_special_tokens=False)
