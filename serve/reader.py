"""What reads one answer of a chat while it is generated: text in, thoughts, content and calls out."""

from collections.abc import Collection, Mapping
from types import MappingProxyType

from serve.parts import Part


class Reader:
    """Of one choice; readers of the formats say more."""

    keep: Collection[int] = frozenset()  # special tokens that are text here
    marks: Mapping[int, str] = MappingProxyType({})  # those of them that `mark` is told of, and their texts
    thinking = False  # what comes now is thoughts, or may turn out to be
    thought = False  # there are thoughts, if only empty ones
    framing = False  # what comes now is not said by the model: no stop string is looked for in it

    @property
    def called(self) -> bool:
        """Whether there were calls, and all of them whole."""
        return False

    @property
    def done(self) -> bool:
        """Nothing more is wanted."""
        return False

    @property
    def held(self) -> int:
        """Characters of the text behind the last content or call, which may become a part yet."""
        return 0

    def skips(self, token_id: int) -> bool:
        """Whether this special token of `keep` is no text any more."""
        return False

    def push(self, text: str) -> list[Part]:
        """Take more text; what is known now."""
        raise NotImplementedError

    def mark(self, marker: str) -> list[Part]:
        """Take the special token of `marks` with this text; what is known now."""
        raise NotImplementedError

    def finish(self) -> list[Part]:
        """The text has ended; what was held back."""
        raise NotImplementedError
