"""Thoughts in generated text, told apart from the answer while both are generated.

Reasoning models think between <think> and </think> before they answer; many chat templates write the first tag into the
prompt. In whatever pieces the text comes: what stands between the tags is thoughts, also where the text ends before the
second one, and what comes after it is the answer. White space around the tags is neither, nor is an end tag that is cut.
"""

from collections.abc import Collection
from typing import Literal

from serve.parts import Content, Part, Thought
from serve.piece_reader import SPACE, PieceReader, Step
from serve.reader import Reader
from serve.tool_calls import CallParser

START, END = "<think>", "</think>"
# Where a generation begins: in front of an answer that may open with thoughts; just behind the first tag; further within
# the thoughts; in front of an answer without any.
Beginning = Literal["possible", "open", "within", "none"]


class AnswerReader(PieceReader, Reader):
    """Reads one answer of a chat: first its thoughts, then its text and calls."""

    def __init__(
        self,
        beginning: Beginning = "none",
        calls: CallParser | None = None,
        *,
        shown: bool = True,
        markers: Collection[int] = (),
        tags: Collection[int] = (),
    ) -> None:
        """`shown`: thoughts are told of. `markers`, `tags`: special tokens that are text for `calls`, or around thoughts."""
        super().__init__()
        self._calls, self._shown, self._tags = calls, shown, frozenset(tags)
        self.keep = self._tags.union(markers)  # special tokens that are text here
        self.thinking = beginning != "none"  # what comes now is thoughts, or may turn out to be
        self.thought = beginning in ("open", "within")  # there are thoughts, if only empty ones
        self._begun = beginning == "within"
        self._space = ""  # white space that belongs to the thoughts if they go on
        self._parts: list[Part] = []
        self._run = self._thoughts() if self.thinking else None

    @property
    def called(self) -> bool:
        """Whether there were calls, and all of them whole."""
        return self._calls is not None and self._calls.called

    @property
    def done(self) -> bool:
        """Nothing more is wanted."""
        return self._calls is not None and self._calls.done

    @property
    def held(self) -> int:
        """Characters of the text behind the last content or call, which may become a part yet."""
        return 0 if self._calls is None else self._calls.held

    def skips(self, token_id: int) -> bool:
        """Whether it is a special token that is text around thoughts alone, when those are over."""
        return token_id in self._tags and not self.thinking

    def push(self, text: str) -> list[Part]:
        """Take more text; what is known now."""
        self.feed(text)
        return self._go_on()

    def finish(self) -> list[Part]:
        """The text has ended; what was held back."""
        self.feed("")
        self.end()
        parts = self._go_on()
        return parts if self._calls is None else parts + self._calls.finish()

    def _go_on(self) -> list[Part]:
        if self._run is not None:
            try:
                next(self._run)
            except StopIteration:
                self._run = None
        if self._run is None:
            self._answer(self.take(len(self._text) - self._at))
        parts, self._parts = self._parts, []
        return parts

    def _answer(self, text: str) -> None:
        if self._calls is not None:
            self._parts += self._calls.push(text)
        elif text:
            self._parts.append(Content(text))

    def _thoughts(self) -> Step[None]:
        """Up to the answer."""
        if not self.thought and not (yield from self._opened()):
            self.thinking = False
            return
        self.thought = True
        while (yield from self.more()):
            text, found = self.until(START[0])
            self._think(text)
            if not found:
                continue
            tag = yield from self._tag()
            if tag == END:
                self.thinking = False
                yield from self.skip()
                return
            cut = tag.startswith(END[:2]) and not (yield from self.more())
            if not cut and (self._begun or tag != START):  # some open what the prompt has opened
                self._think(tag)
        if self._space and self._shown:
            self._parts.append(Thought(self._space))

    def _opened(self) -> Step[bool]:
        """Whether the first tag comes next; what was taken to see that is the answer's otherwise."""
        space, tag = [], ""
        while (char := (yield from self.peek())) and char in SPACE:
            space.append(self.take(1))
        if char == START[0] and (tag := (yield from self._tag())) == START:
            return True
        self._answer("".join(space) + tag)
        return False

    def _tag(self) -> Step[str]:
        """Take what begins like a tag: one of them, or the part that agrees."""
        self.take(1)
        tag = START if (yield from self.peek()) == START[1] else END
        return tag[: 1 + (yield from self.match(tag[1:]))]

    def _think(self, text: str) -> None:
        """Thoughts, without the white space at their ends."""
        if not self._begun:
            text = text.lstrip(SPACE)
        if body := text.rstrip(SPACE):
            self._begun = True
            if self._shown:
                self._parts.append(Thought(self._space + body))
            self._space = ""
        self._space += text[len(body) :]
