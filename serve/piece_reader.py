"""Reading a text that comes in pieces, as if it were all there: a generator waits inside where more is needed."""

import re
import string
from collections.abc import Callable, Generator

import pydantic_core

SPACE = " \t\r\n"
ALPHANUMERIC = string.ascii_letters + string.digits
_WORD = frozenset(ALPHANUMERIC + "_-.")
_OUTSIDE = re.compile(r'["{}\[\]]')
_INSIDE = re.compile(r'["\\]')  # of a string

type Step[T] = Generator[None, None, T]  # yields where more text is needed


class PieceReader:
    """What is next in the text. What may have to wait is a generator."""

    def __init__(self) -> None:
        self._text, self._at, self._ended = "", 0, False
        self._taken = 0  # characters of all pieces
        self.raw: list[str] | None = None  # where it is a list, all that is taken is added

    def feed(self, text: str) -> None:
        """The next piece, when all before it was taken."""
        self._text, self._at = text, 0

    def end(self) -> None:
        """There is no more."""
        self._ended = True

    def more(self) -> Step[bool]:
        """Wait for text; False at its end."""
        while self._at == len(self._text):
            if self._ended:
                return False
            yield
        return True

    def peek(self) -> Step[str]:
        """The next character, not taken; empty at the end."""
        return self._text[self._at] if (yield from self.more()) else ""

    def take(self, count: int) -> str:
        """So many characters, which are there."""
        text = self._text[self._at : self._at + count]
        self._at += count
        self._taken += len(text)
        if self.raw is not None:
            self.raw.append(text)
        return text

    def run(self, chars: str) -> str:
        """Those of `chars` that come next and are there."""
        end = self._at
        while end < len(self._text) and self._text[end] in chars:
            end += 1
        return self.take(end - self._at)

    def until(self, char: str) -> tuple[str, bool]:
        """What is there of the text before `char`, and whether `char` comes next."""
        found = self._text.find(char, self._at)
        return self.take((found if found >= 0 else len(self._text)) - self._at), found >= 0

    def match(self, text: str) -> Step[int]:
        """Take what agrees with the beginning of `text`; how much that was."""
        matched = 0
        while matched < len(text) and (yield from self.peek()) == text[matched]:
            self.take(1)
            matched += 1
        return matched

    def skip(self) -> Step[None]:
        """White space within what may be a call."""
        while (char := (yield from self.peek())) and char in SPACE:
            self.take(1)

    def word(self) -> Step[str]:
        word = []
        while (char := (yield from self.peek())) and char in _WORD:
            word.append(self.take(1))
        return "".join(word)

    def value(self, out: Callable[[str], None]) -> Step[bool]:
        """One JSON value for `out`, as it comes; False if the text ends before it does. Only quotes and brackets count."""
        if (yield from self.peek()) not in ("{", "[", '"'):  # a number or a word
            out((yield from self.word()))
            return (yield from self.peek()) != ""
        depth, quoted, escaped = 0, False, False
        while (yield from self.more()):
            at = self._at
            while at < len(self._text):
                if escaped:
                    at, escaped = at + 1, False
                    continue
                found = (_INSIDE if quoted else _OUTSIDE).search(self._text, at)
                at = found.end() if found else len(self._text)
                char = found[0] if found else ""
                if char == "\\":
                    escaped = True
                elif char == '"':
                    quoted = not quoted
                elif char:
                    depth += 1 if char in "{[" else -1
                if char and depth <= 0 and not quoted:
                    out(self.take(at - self._at))
                    return True
            out(self.take(at - self._at))
        return False

    def whole(self) -> Step[str]:
        """One JSON value, all of it."""
        pieces: list[str] = []
        yield from self.value(pieces.append)
        return "".join(pieces)

    def string(self) -> Step[str | None]:
        """The text of a JSON string; None for anything else."""
        if (yield from self.peek()) != '"':
            return None
        value = from_json((yield from self.whole()))
        return value if isinstance(value, str) else None


def from_json(text: str) -> object:
    try:
        return pydantic_core.from_json(text, allow_inf_nan=False)
    except ValueError:
        return ()  # nothing that JSON could be
