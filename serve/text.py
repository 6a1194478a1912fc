"""Text side of a generation: what the server needs of a tokenizer, and the search for stop strings."""

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol


class TextDetokenizer(Protocol):
    """Turns tokens into text as they come; holds back the bytes of an unfinished character."""

    def add(self, token_id: int) -> str:
        """The text that one more token completes (may be empty)."""

    @property
    def holds(self) -> bool:
        """Whether bytes of a character are held back."""

    def flush(self) -> str:
        """What is still held back, as U+FFFD."""


class TextTokenizer(Protocol):
    """The part of `models.tokenizer.Tokenizer` that the server calls; encoding runs on worker threads."""

    special_ids: frozenset[int]

    def __hash__(self) -> int: ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **options: Any
    ) -> str: ...

    def chat_template(self, with_tools: bool = False) -> str | None: ...

    def detokenizer(
        self, skip_special_tokens: bool = True, keep: Collection[int] = ()
    ) -> TextDetokenizer: ...


@functools.lru_cache(maxsize=4)
def special_texts(tokenizer: TextTokenizer) -> tuple[str, ...]:
    """How the special tokens look where they are written out."""
    texts = (tokenizer.token_bytes(i).decode("utf-8", "replace") for i in sorted(tokenizer.special_ids))
    return tuple(text for text in texts if text)


def ids_of(tokenizer: TextTokenizer, texts: Collection[str]) -> dict[str, int]:
    """The ids of those texts that are special tokens."""
    known = {tokenizer.token_bytes(i).decode("utf-8", "replace"): i for i in tokenizer.special_ids}
    return {text: known[text] for text in texts if text in known}


class StopScanner:
    """Finds the first stop string in text that comes in pieces, whatever the pieces.

    The match that ends first wins; of several that end there, the longest. Text is held back only while it may still
    be the beginning of a stop string. One Knuth-Morris-Pratt automaton a stop string: O(stops) work a character.

    >>> scanner = StopScanner(["END"])
    >>> scanner.push("one E"), scanner.push("N two EN"), scanner.push("D three"), scanner.matched
    ('one ', 'EN two ', '', 'END')
    """

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        if not all(stops):
            raise ValueError("a stop string must not be empty")
        self._stops = tuple(sorted(set(stops), key=len, reverse=True))  # longest first: wins a tie
        self._tables = _failure_tables(self._stops)
        self._states = [0] * len(self._stops)  # characters of each stop matched by the end of the text
        self._held = ""
        self._include_stop = include_stop
        self.matched: str | None = None

    def push(self, text: str, *, match: bool = True) -> str:
        """Take more text, return what may be shown now. `match=False`: text exempt from matching."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        if not match:
            self._states = [0] * len(self._stops)
            shown, self._held = self._held + text, ""
            return shown
        pending = self._held + text
        for end in range(len(self._held), len(pending)):
            for i, stop in enumerate(self._stops):
                self._states[i] = _advance(stop, self._tables[i], self._states[i], pending[end])
            for i, stop in enumerate(self._stops):
                if self._states[i] == len(stop):
                    self.matched, self._held = stop, ""
                    return pending[: end + 1 if self._include_stop else end + 1 - len(stop)]
        keep = len(pending) - max(self._states)
        self._held = pending[keep:]
        return pending[:keep]

    def finish(self) -> str:
        """The generation ended for another reason: return what was held back."""
        held, self._held = self._held, ""
        return held


@functools.lru_cache(maxsize=4)
def _failure_tables(patterns: tuple[str, ...]) -> tuple[Sequence[int], ...]:
    """Those of each; all choices of a request look for the same strings."""
    return tuple(tuple(_failure_table(pattern)) for pattern in patterns)


def _failure_table(pattern: str) -> list[int]:
    """`table[i]`: length of the longest proper border of `pattern[: i + 1]`."""
    table = [0]
    for char in pattern[1:]:
        table.append(_advance(pattern, table, table[-1], char))
    return table


def _advance(pattern: str, table: Sequence[int], state: int, char: str) -> int:
    """Length of the longest prefix of `pattern` that ends with `char`, after one of length `state` < len."""
    while state and pattern[state] != char:
        state = table[state - 1]
    return state + 1 if pattern[state] == char else 0
