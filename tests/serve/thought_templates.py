"""Short chat templates of models that think, and tokenizers that have them."""

from functools import cache
from typing import Any

from models.testing import SPECIAL_TOKENS, tiny_tokenizer
from tests.serve.tool_templates import HERMES

OPENING = "<|im_start|>assistant\n"
# As Qwen 3's: the model opens its thoughts itself, or finds none; those of a turn with calls are shown to it again.
QWEN = HERMES.replace(
    "{{ message['content'] }}",
    "{% if message.reasoning_content %}<think>\n{{ message.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ message['content'] }}",
).replace(
    OPENING,
    OPENING + "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}",
)
# As DeepSeek-R1's: the prompt opens the thoughts, and those of earlier turns are gone.
R1 = HERMES.replace("{{ message['content'] }}", "{{ message['content'].split('</think>')[-1] }}").replace(
    OPENING, OPENING + "<think>\n"
)
TEMPLATES = {"qwen": QWEN, "r1": R1, "qwen special": QWEN, "r1 special": R1}
TAGS = {"<think>": 3, "</think>": 4}  # ids of the special tokens


@cache
def thought_tokenizer(name: str) -> Any:
    """A tiny tokenizer with one of TEMPLATES, whose tags are special tokens or bytes."""
    special = (*SPECIAL_TOKENS[:3], *TAGS, *SPECIAL_TOKENS[5:]) if "special" in name else SPECIAL_TOKENS
    return tiny_tokenizer(special, TEMPLATES[name])
