"""Samples from a directory of one's own texts: what the service really sees is the best calibration for it.

Each .txt file is a document, and so is each line of a .jsonl file: {"text": ...}, {"prompt": ...} or {"messages": [...]}.
Nothing of the texts leaves this process: a profile records their number and a digest.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import random
from pathlib import Path
from typing import Any

import numpy as np

from calibrate.samples import TextSample, TextTokenizer, chat_tokens

HELDOUT_EVERY = 3  # of three documents, one is held out
TOKEN_CHARACTERS = (
    64  # no text has so many a token: what a sample needs of a long document is cut out before it is encoded
)
LONG = 4096  # characters of a paragraph: samples begin within longer ones too, as of logs, which have no empty lines

Content = str | list[dict[str, Any]]


@dataclasses.dataclass(frozen=True, eq=False)
class OwnTexts:
    """Documents in an order that depends on their contents alone; every third is held out where `heldout` is wanted."""

    documents: tuple[Content, ...]
    files: int

    @classmethod
    def read(cls, directory: Path) -> OwnTexts:
        """All .txt and .jsonl files in `directory` and below. Raises ValueError with what is wrong with which line."""
        if not directory.is_dir():
            raise ValueError(f"--texts {directory} is not a directory: put .txt or .jsonl files into one")
        paths = sorted(
            p for p in directory.rglob("*") if p.is_file() and p.suffix.lower() in (".txt", ".jsonl")
        )
        found: dict[str, Content] = {}  # the same text twice is one document
        for path in paths:
            try:
                text = path.read_text(encoding="utf-8-sig")  # a mark of byte order is no part of the text
            except UnicodeDecodeError as error:
                raise ValueError(f"{path} is not UTF-8 text: {error}") from error
            contents: list[Content] = [text]
            if path.suffix.lower() == ".jsonl":
                lines = enumerate(text.split("\n"), 1)
                contents = [_of_line(path, number, line) for number, line in lines if line.strip()]
            found |= {_digest(content): content for content in contents if content and str(content).strip()}
        if not found:
            raise ValueError(
                f'--texts {directory} has no text: put .txt files into it, or .jsonl files with lines {{"text": ...}}'
            )
        return cls(tuple(found[key] for key in sorted(found)), len(paths))

    @property
    def provenance(self) -> dict[str, Any]:
        """For a profile: how many, and a digest that the same texts have again."""
        return {"files": self.files, "documents": len(self.documents), "digest": _digest(self.documents)}

    def samples(
        self, tokenizer: TextTokenizer, count: int, heldout: int, tokens: int, seed: int = 0
    ) -> tuple[list[TextSample], list[TextSample]]:
        """`count` calibration and `heldout` held-out samples of exactly `tokens` tokens, which share no document.

        Each begins at a paragraph or conversation at random, or at a line or word of a long paragraph; after the end of a
        document another follows. Raises ValueError where there is too little text.
        """
        if heldout and len(self.documents) < 2:
            raise ValueError(
                "--texts has a single document, which leaves none to hold out: give more, or write --heldout 0"
            )
        dealt: tuple[list[Content], list[Content]] = ([], [])
        for i, document in enumerate(self.documents):
            dealt[bool(heldout) and i % HELDOUT_EVERY == 1].append(document)
        encode = functools.cache(functools.partial(_encode, tokenizer))
        out = []
        for name, documents, number in zip(("calibration", "heldout"), dealt, (count, heldout), strict=True):
            starts = [(i, start) for i, document in enumerate(documents) for start in _starts(document)]
            out.append(
                [
                    _sample(documents, starts, encode, tokens, random.Random(f"own/{name}/{seed}/{index}"))
                    for index in range(number)
                ]
            )
        return out[0], out[1]


def _sample(
    documents: list[Content], starts: list[tuple[int, int]], encode: Any, tokens: int, rng: random.Random
) -> TextSample:
    first, start = rng.choice(starts)  # long documents have more of them, and are chosen more often
    others = [i for i in range(len(documents)) if i != first]
    rng.shuffle(others)
    most = tokens * TOKEN_CHARACTERS
    ids = list(encode(_from(documents[first], start, most), True))
    kind = "own text" if isinstance(documents[first], str) else "own chat"
    # Where it began late in its document, the whole document may come in the end.
    for i in [*others, first]:
        if len(ids) >= tokens:
            break
        ids += encode(_from(documents[i], 0, most), not ids)
    if len(ids) < tokens:
        raise ValueError(
            f"--texts has too little text for samples of {tokens} tokens: give more, or a smaller --sample-tokens"
        )
    return TextSample(kind, "own texts", np.asarray(ids[:tokens], np.int32))


def _encode(tokenizer: TextTokenizer, content: str, begins: bool) -> tuple[int, ...]:
    """`begins`: it comes first in its sample, where a prompt has what begins a text, and nowhere else."""
    text = json.loads(content)
    if isinstance(text, str):
        return tuple(tokenizer.encode(text, add_special_tokens=begins))
    ids = chat_tokens(tokenizer, text)
    return tuple(ids[1:] if not begins and ids[:1] == [tokenizer.bos_token_id] else ids)


def _from(document: Content, start: int, most: int) -> str:
    """The rest of a document, of a text no more than `most` characters, as JSON: something that a cache can hash."""
    return json.dumps(document[start : start + most] if isinstance(document, str) else document)


def _starts(document: Content) -> list[int]:
    """The characters at which a sample may begin. A conversation begins at its beginning."""
    if not isinstance(document, str):
        return [0]
    out, begin = [], 0
    for paragraph in document.split("\n\n"):
        if paragraph.strip():
            out.append(begin)
        for at in range(LONG, len(paragraph), LONG):
            lines_and_words = (paragraph.find(end, at, at + LONG) + 1 for end in "\n ")
            out.append(begin + next(filter(None, lines_and_words), at))
        begin += len(paragraph) + 2
    return out or [0]


def _of_line(path: Path, number: int, line: str) -> Content:
    where = f"{path}, line {number}"
    try:
        content = _content(json.loads(line))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON: {error}") from error
    if content is None:
        raise ValueError(
            f'{where} must be {{"text": ...}}, {{"prompt": ...}} or {{"messages": [...]}} of texts'
        )
    try:
        json.dumps(content, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise ValueError(
            f"{where} has half of a character ({half!a}), which is no text: take it out"
        ) from error
    return content


def _content(found: Any) -> Content | None:
    if isinstance(found, dict):
        for key in ("text", "prompt"):
            if isinstance(found.get(key), str):
                return found[key]
        messages = found.get("messages")
        if isinstance(messages, list) and all(
            isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
            for m in messages
        ):
            return [{"role": m["role"], "content": m["content"]} for m in messages]
    return None


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]
