"""Text samples for calibration and evaluation: prose, chats, code, reference text and records, in a fixed mix.

All text is public domain and shipped (`calibrate/texts`), or belongs to the Python that runs this (standard modules
and the language reference), or is generated here. Calibration and held-out samples share no document. The same
(tokenizer, count, tokens, seed) gives the same samples.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import random
import re
import sysconfig
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from calibrate.dates import dated

Split = Literal["calibration", "heldout"]

TEXTS = Path(__file__).parent / "texts"
# Of ten samples: three prose, three chats, two code, one reference text, one list of records.
MIX = ("prose", "chat", "code", "prose", "records", "chat", "reference", "prose", "code", "chat")
BOOKS = {
    "calibration": ("pride_and_prejudice", "opticks", "constitution"),
    "heldout": ("persuasion", "jargon_file", "declaration"),
}
MODULES = {
    "calibration": (
        "argparse",
        "dataclasses",
        "statistics",
        "textwrap",
        "zipfile",
        "json/decoder",
        "heapq",
        "ast",
    ),
    "heldout": (
        "difflib",
        "configparser",
        "fractions",
        "csv",
        "shutil",
        "json/encoder",
        "bisect",
        "calendar",
    ),
}
NAMES = {
    "calibration": (
        "Amara Diallo",
        "Bruno Keller",
        "Chen Wei",
        "Dalia Haddad",
        "Erik Lund",
        "Farah Aziz",
        "Goran Petrov",
    ),
    "heldout": (
        "Hana Suzuki",
        "Ivo Marek",
        "Joana Silva",
        "Kofi Mensah",
        "Lena Vogel",
        "Mateo Rojas",
        "Nadia Rahman",
    ),
}
CITIES = {
    "calibration": ("Bern", "Accra", "Osaka", "Lima", "Tartu", "Perth", "Quito", "Ghent"),
    "heldout": ("Turin", "Dakar", "Busan", "Sucre", "Vilnius", "Hobart", "Cusco", "Lyon"),
}
QUESTIONS = {
    "calibration": (
        'Which sentence of the text begins with "{start}"? Quote it in full.',
        'Please repeat the sentence that starts with "{start}", word for word.',
        'I lost my place after "{start}". How does that sentence go on?',
    ),
    "heldout": (
        'Find the sentence opening with "{start}" and write it out.',
        'How does the sentence that begins "{start}" end? Give me the whole sentence.',
        'Copy out the sentence with the beginning "{start}".',
    ),
}


class TextTokenizer(Protocol):
    """What this file needs of `models.tokenizer.Tokenizer`."""

    bos_token_id: int | None

    @property
    def has_chat_template(self) -> bool: ...
    def chat_template(self, with_tools: bool = False) -> str | None: ...
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...
    def apply_chat_template(
        self, messages: list[dict[str, Any]], add_generation_prompt: bool = True, **kwargs: Any
    ) -> list[int]: ...


@dataclasses.dataclass(frozen=True, eq=False)
class TextSample:
    """One sample: `tokens` i32[n], its kind (an entry of `MIX`) and the documents that it was made from."""

    kind: str
    source: str
    tokens: np.ndarray


def distinct(samples: Sequence[TextSample]) -> list[TextSample]:
    """Without those whose tokens came before: of little text several samples may be the same one."""
    first: dict[bytes, TextSample] = {}
    for sample in samples:
        first.setdefault(sample.tokens.tobytes(), sample)
    return list(first.values())


def calibration_samples(tokenizer: TextTokenizer, count: int, tokens: int, seed: int = 0) -> list[TextSample]:
    """`count` samples of exactly `tokens` tokens each from the calibration documents, in the proportions of `MIX`."""
    return _samples("calibration", tokenizer, count, tokens, seed)


def heldout_samples(tokenizer: TextTokenizer, count: int, tokens: int, seed: int = 0) -> list[TextSample]:
    """Like `calibration_samples`, from documents that no calibration sample contains."""
    return _samples("heldout", tokenizer, count, tokens, seed)


def _samples(split: Split, tokenizer: TextTokenizer, count: int, tokens: int, seed: int) -> list[TextSample]:
    if count < 1 or tokens < 1:
        raise ValueError(f"need at least one sample of at least one token, found {count} of {tokens}")
    return [_sample(split, tokenizer, tokens, seed, index) for index in range(count)]


def _sample(split: Split, tokenizer: TextTokenizer, tokens: int, seed: int, index: int) -> TextSample:
    kind = MIX[index % len(MIX)]
    characters = 6 * tokens  # English takes 4 to 5 characters a token; too short a guess is doubled below
    while True:
        rng = random.Random(f"{split}/{kind}/{seed}/{index}")  # strings seed alike on every platform
        source, content = BUILDERS[kind](split, rng, characters)
        ids = tokenizer.encode(content) if isinstance(content, str) else chat_tokens(tokenizer, content)
        if len(ids) >= tokens:
            return TextSample(kind, source, np.asarray(ids[:tokens], np.int32))
        if characters > 100 * tokens + 10_000:
            raise ValueError(
                f"the shipped texts for {kind} samples are too short for {tokens} tokens: ask for shorter samples"
            )
        characters *= 2


def chat_tokens(tokenizer: TextTokenizer, messages: list[dict[str, Any]]) -> list[int]:
    """Token ids of a conversation by the model's template, or as a text if it has none.

    Where it says today's date it says `dates.DATE`. What a template that takes no message of the system is told by one goes
    before the first one of the user. Raises ValueError where it takes the conversation in neither form.
    """
    if not tokenizer.has_chat_template:
        return tokenizer.encode("\n\n".join(f"{m['role'].capitalize()}: {m['content']}" for m in messages))
    options = dated(tokenizer.chat_template())
    try:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=False, **options)
    except ValueError as error:
        system, *rest = messages
        try:
            if system["role"] == "system" and rest and rest[0]["role"] == "user":
                first = rest[0] | {"content": f"{system['content']}\n\n{rest[0]['content']}"}
                return tokenizer.apply_chat_template(
                    [first, *rest[1:]], add_generation_prompt=False, **options
                )
        except ValueError:
            pass  # it has something else against it
        raise ValueError(
            f"{error} (of the conversation that begins with {str(system['content'])[:60]!r})"
        ) from error


# -- builders: (split, rng, least number of characters) -> (source, text or chat messages)


def _prose(split: Split, rng: random.Random, characters: int) -> tuple[str, str]:
    return _excerpt({name: _book(split, name) for name in BOOKS[split]}, rng, characters)


def _code(split: Split, rng: random.Random, characters: int) -> tuple[str, str]:
    return _excerpt({name: _module(name) for name in MODULES[split]}, rng, characters)


def _reference(split: Split, rng: random.Random, characters: int) -> tuple[str, str]:
    topics = _reference_topics(split)
    names, texts = [], []
    for name in rng.sample(sorted(topics), len(topics)):
        names.append(name)
        texts.append(topics[name])
        if sum(map(len, texts)) >= characters:
            break
    return "python reference: " + ", ".join(names), "\n\n".join(texts)


def _chat(split: Split, rng: random.Random, characters: int) -> tuple[str, list[dict[str, str]]]:
    """Passages of a book, each followed by questions about sentences of this or an earlier passage."""
    name = rng.choice([n for n in BOOKS[split] if len(_book(split, n)) > 40_000])
    messages = [
        {"role": "system", "content": "You are a careful reader. Answer from the text that you are given."}
    ]
    seen: list[str] = []
    size = 0
    while size < characters:
        _, passage = _excerpt({name: _book(split, name)}, rng, rng.randint(900, 2000), exact=True)
        seen += [s for s in re.split(r"(?<=[.!?])\s+", passage) if 8 <= len(s.split()) <= 40]
        for turn in range(rng.randint(1, 3)):
            sentence = rng.choice(seen or [passage])
            question = rng.choice(QUESTIONS[split]).format(start=" ".join(sentence.split()[:4]))
            lead = f"Here is a passage.\n\n{passage}\n\n" if turn == 0 else ""
            messages.append({"role": "user", "content": lead + question})
            messages.append({"role": "assistant", "content": sentence})
        size = sum(len(m["content"]) for m in messages)
    return f"chat about {name}", messages


def _records(split: Split, rng: random.Random, characters: int) -> tuple[str, str]:
    """JSON records, a table and bullet lists of the same made-up data, with look-ups between them."""
    parts: list[str] = []
    size = 0
    while size < characters:
        rows: list[dict[str, Any]] = [
            {
                "id": str(uuid.UUID(int=rng.getrandbits(128), version=4)),
                "name": rng.choice(NAMES[split]),
                "city": rng.choice(CITIES[split]),
                "amount": rng.randint(100, 99_999) / 100,
                "paid": rng.random() < 0.5,
            }
            for _ in range(rng.randint(6, 14))
        ]
        style = rng.choice(("json", "table", "bullets"))
        if style == "json":
            block = json.dumps(rows, indent=2)
        elif style == "table":
            block = "\n".join(
                " | ".join(str(v) for v in row.values()) for row in [{k: k for k in rows[0]}, *rows]
            )
        else:
            block = "\n".join(
                f"* {r['name']} of {r['city']} owes {r['amount']} (order {r['id']})" for r in rows
            )
        wanted = rng.sample(rows, 3)
        looked_up = "\n".join(f"Order {r['id']}: {r['name']}, {r['city']}, {r['amount']}" for r in wanted)
        parts.append(f"{block}\n\n{looked_up}")
        size += len(parts[-1])
    return "generated records", "\n\n".join(parts)


BUILDERS: dict[str, Callable[[Split, random.Random, int], tuple[str, str | list[dict[str, str]]]]] = {
    "prose": _prose,
    "chat": _chat,
    "code": _code,
    "reference": _reference,
    "records": _records,
}

# -- documents


def _excerpt(
    documents: dict[str, str], rng: random.Random, characters: int, *, exact: bool = False
) -> tuple[str, str]:
    """Part of a document, from the start of a paragraph; documents too short for it are left out.

    Where all are too short, they are joined. With `exact` it ends with the last paragraph that fits into
    `characters` (at least one).
    """
    fitting = {n: t for n, t in documents.items() if len(t) >= characters}
    if not fitting:
        order = rng.sample(sorted(documents), len(documents))
        fitting = {", ".join(order): "\n\n".join(documents[n] for n in order)}
    name = rng.choice(sorted(fitting))
    paragraphs = fitting[name].split("\n\n")
    ends = np.cumsum([len(p) + 2 for p in paragraphs])
    starts = [
        i for i in range(len(paragraphs)) if ends[-1] - (ends[i] - len(paragraphs[i])) >= characters
    ] or [0]
    first = rng.choice(starts)
    taken: list[str] = []
    size = 0
    for paragraph in paragraphs[first:]:
        if exact and taken and size + len(paragraph) > characters:
            break
        taken.append(paragraph)
        size += len(paragraph)
        if size >= characters:
            break
    return name, "\n\n".join(taken)


@functools.cache
def _book(split: Split, name: str) -> str:
    return (TEXTS / split / f"{name}.txt").read_text(encoding="utf-8")


@functools.cache
def _module(name: str) -> str:
    path = Path(sysconfig.get_path("stdlib")) / f"{name}.py"
    if not path.exists():  # a module in one version, a package in another
        path = path.with_suffix("") / "__init__.py"
    return path.read_text(encoding="utf-8")


@functools.cache
def _reference_topics(split: Split) -> dict[str, str]:
    """Sections of Python's language reference, dealt to the two splits alternately by name.

    Sections contain each other, so held-out ones are without the paragraphs that calibration has too.
    """
    from pydoc_data import topics

    names = sorted(topics.topics)
    calibration = {name: topics.topics[name] for name in names[::2]}
    if split == "calibration":
        return calibration
    taken = {" ".join(p.split()) for text in calibration.values() for p in text.split("\n\n")}
    own = {
        name: "\n\n".join(p for p in topics.topics[name].split("\n\n") if " ".join(p.split()) not in taken)
        for name in names[1::2]
    }
    return {name: text for name, text in own.items() if text}
