"""Needle questions: one made-up fact inside held-out prose, asked for at the end."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

import numpy as np

from calibrate.dates import dated
from calibrate.samples import CITIES, TEXTS
from models.tokenizer import Tokenizer
from serve.harmony_prompt import beginning_of
from serve.thoughts import END, START
from serve.tool_formats import HARMONY
from serve.tool_prompt import ToolSupport

BOOK = "persuasion"
FACT = "The secret key of the {city} office is {number}."
QUESTION = "\n\nWhat is the secret key of the {city} office? Answer with the number only."


@dataclass(frozen=True, eq=False)
class Needle:
    """`context` i32[a] holds the fact, `question` i32[b] the question and the start of the answer."""

    context: np.ndarray
    question: np.ndarray
    answer: str
    depth: float  # where the fact stands, as a fraction of the text's words


def make_needles(tokenizer: Tokenizer, count: int, tokens: int, seed: int = 0) -> list[Needle]:
    """`count` questions of `tokens` tokens (chat format included) or a few less; depths spread to within a sentence.

    The answer is to begin at once, as thoughts would take all the tokens that there are for it.
    Raises ValueError where the book is too short for that, or the question alone longer, or there is no chat template.
    """
    if count and not tokenizer.has_chat_template:
        raise ValueError("the model has no chat template to ask in")
    harmony = ToolSupport.of(tokenizer).harmony
    words = (TEXTS / "heldout" / f"{BOOK}.txt").read_text(encoding="utf-8").split()
    return [
        _make_needle(
            tokenizer, harmony, words, tokens, (index + 0.5) / count, random.Random(f"needle/{seed}/{index}")
        )
        for index in range(count)
    ]


def _make_needle(
    tokenizer: Tokenizer, harmony: bool, words: list[str], tokens: int, depth: float, rng: random.Random
) -> Needle:
    """Sized by binary search on real token counts, to within a word; the fact follows the sentence end next to `depth`."""
    city, number = rng.choice(CITIES["heldout"]), str(rng.randint(10_000, 99_999))
    ends = [0, *(i + 1 for i, word in enumerate(words) if re.search(r"[.!?][\"”’]?$", word))]
    start = ends[rng.randrange(len(ends) // 2)]
    hay, ends = words[start:], [end - start for end in ends if end >= start]
    options = dated(tokenizer.chat_template())
    fact, asked = FACT.format(city=city, number=number), QUESTION.format(city=city)

    def place(length: int) -> int:
        return min((end for end in ends if end <= length), key=lambda end: abs(end - depth * length))

    def prompt(length: int) -> tuple[list[int], list[int]]:
        at = place(length)
        text = " ".join([*hay[:at], fact, *hay[at:length]])
        messages = [{"role": "user", "content": text + asked}]
        rendered = tokenizer.render_chat(messages, True, enable_thinking=False, **options)
        before, found, after = (rendered + _to_answer(rendered, harmony)).partition(asked)
        if not found:
            raise ValueError("the chat template changes what the user says")
        ids = tokenizer.encode(before, add_special_tokens=False)
        return ids, tokenizer.encode(asked + after, add_special_tokens=False)

    low, high = 0, min(len(hay), tokens)
    if (there := sum(map(len, prompt(high)))) <= tokens:
        raise ValueError(f"the book ends after {there} tokens: ask for fewer than {tokens}")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if sum(map(len, prompt(middle))) <= tokens else (low, middle)
    if not low:
        least = sum(map(len, prompt(1)))
        raise ValueError(f"the question with one word of text has {least} tokens: ask for more than {tokens}")
    context, question = (np.asarray(ids, np.int32) for ids in prompt(low))
    return Needle(context, question, number, place(low) / max(low, 1))


def _to_answer(prompt: str, harmony: bool) -> str:
    """What leads from the end of a prompt to the answer itself: past the thoughts that some templates open regardless."""
    if harmony:
        return HARMONY.answer if beginning_of(prompt) == "possible" else ""
    return f"\n{END}\n\n" if prompt.rstrip().endswith(START) else ""
