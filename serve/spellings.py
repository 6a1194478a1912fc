"""The tokens of texts that this server wrote: a client sends the text back, and its tokens are not in it.

A model may write a text in other tokens than the tokenizer would. Encoded anew, such an answer differs from what the cache
holds, and a row that was compressed past the difference is lost for the next turn.
"""

import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

MOST_CHARACTERS = 2**25  # of all texts together


class Spellings:
    """Conversations as text and as tokens, the least recently used forgotten first. For any thread."""

    def __init__(self, most: int = 256, tell: Callable[[str, Sequence[int]], None] | None = None) -> None:
        """`tell` is called with what is remembered, for others who are to learn it."""
        self._most, self._tell = most, tell
        self._tokens: OrderedDict[str, array[int]] = OrderedDict()
        self._characters = 0
        self._lock = threading.Lock()

    def remember(self, text: str, ids: Sequence[int]) -> None:
        """`text` was read and written as the tokens `ids`."""
        self.learn(text, ids)
        if self._tell:
            self._tell(text, ids)

    def learn(self, text: str, ids: Sequence[int]) -> None:
        """The same of another process's text."""
        tokens = array("i", ids)
        with self._lock:
            self._forget(text)
            self._tokens[text] = tokens
            self._characters += len(text)
            while len(self._tokens) > self._most or self._characters > MOST_CHARACTERS:
                self._forget(next(iter(self._tokens)))

    def _forget(self, text: str) -> None:
        if self._tokens.pop(text, None) is not None:
            self._characters -= len(text)

    def beginnings(self, text: str) -> Iterator[tuple[int, list[int]]]:
        """The known texts that `text` begins with, longest first: the characters and the tokens of each."""
        with self._lock:
            known = sorted((t for t in self._tokens if text.startswith(t)), key=len, reverse=True)
        for beginning in known:
            with self._lock:
                tokens = self._tokens.get(beginning)
                if tokens is None:
                    continue
                self._tokens.move_to_end(beginning)
            yield len(beginning), tokens.tolist()
