"""Texts and conversations of which `make_golden.py` stores the token ids.

No numeric characters besides ASCII digits: reading a GGUF file, transformers ignores that SmolLM splits them off.
"""

TEXTS = (
    "The lighthouse keeper's log, 14 March 1887: wind SW, 1024 mbar; we'll relight the lamp at dusk.\n\n"
    "def area(radius):\n    return 3.14159 * radius ** 2  # m²\n",
    "Grüße aus Köln! Привет, мир. 你好，世界。 🙂👩‍🚀 naïve café — ×",
    "  leading spaces,\ttabs,\r\nand   runs    of spaces   ",
    "<|im_start|>user\nWhat's 12345 + 67890?<|im_end|>\n",
)
# For SentencePiece: runs of spaces and newlines, characters that it has no piece for; no special tokens written out.
PIECE_TEXTS = (
    *TEXTS[:3],
    "a",
    " a",
    "def make_tiny(name: str, kind: str, changes: dict) -> None:\n    torch.manual_seed(0)\n\n\n        x  =   y     z",
    "<b>bold</b> \n \n\n\n 100000 ∑ \u2581 end  ",
)
MESSAGES = (
    [{"role": "user", "content": "What is the capital of France?"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "2 + 2?"},
    ],
)
