"""Answers in the harmony format, as GPT-OSS writes them, read while they are generated.

An answer is a row of messages, <|start|>HEADER<|message|>TEXT<|end|>, of which the prompt has begun the first. A header is a
role, a channel and at times a recipient and a type: `assistant<|channel|>commentary to=functions.NAME <|constrain|>json`.
The recipient may also follow the role. A message on the channel "analysis" is thoughts, one to a function is a call, and any
other is content. <|call|> and <|return|> end an answer.

The markers are special tokens, and only those count: written out in other tokens they are text. What stands where a header
should and is none is content.
"""

import re
from collections.abc import Collection, Mapping
from typing import Literal, NamedTuple

from serve.arguments import Escapes
from serve.parts import Arguments, CallStart, Content, Part, Thought
from serve.piece_reader import from_json
from serve.reader import Reader
from serve.thoughts import Beginning
from serve.tool_calls import new_call_id

START, END, MESSAGE, CHANNEL = "<|start|>", "<|end|>", "<|message|>", "<|channel|>"
CONSTRAIN, RETURN, CALL = "<|constrain|>", "<|return|>", "<|call|>"
ESSENTIAL = (START, END, MESSAGE, CHANNEL)
MARKERS = (*ESSENTIAL, CONSTRAIN, RETURN, CALL)
FUNCTIONS = "functions."  # before the name of a tool where it is a recipient

_BETWEEN = "\n\n"  # messages of one kind
_LONGEST_HEADER = 256  # characters; what is longer is none
_TO = r"(?:\s*to=(\S+))?(.*)"
_ROLE = re.compile(r"(?:\s*(assistant|user|system|developer|tool|functions\.[\w-]+)(?!\w))?" + _TO, re.DOTALL)
_CHANNEL = re.compile(r"(?:\s*(analysis|commentary|final)(?!\w))?" + _TO, re.DOTALL)
# Of which a cut may leave a part.
_WORDS = ("assistant", "analysis", "commentary", "final", "to=", "json", "code")

Kind = Literal["thought", "content", "call"]


class _Header(NamedTuple):
    """What a header says."""

    role: str
    channel: str | None
    recipient: str
    rest: str  # what is none of these
    tail: str  # what is neither role nor channel

    @classmethod
    def of(cls, texts: Mapping[str, str]) -> "_Header":
        """From the text after each of its markers."""
        found = []
        for pattern, text in (_ROLE, texts.get(START, texts.get("", ""))), (_CHANNEL, texts.get(CHANNEL, "")):
            match = next(pattern.finditer(text))  # each matches anything
            found.append((match[1], match[2], match[3], text[max(match.end(1), 0) :]))
        (role, to, rest, tail), (channel, recipient, more, end) = found
        kind = texts.get(CONSTRAIN, "")
        return cls(role or "assistant", channel, to or recipient or "", rest + more + kind, tail + end + kind)


class HarmonyReader(Reader):
    """Reads one answer. The work is proportional to the text, whatever the text."""

    def __init__(
        self,
        marks: Mapping[int, str],
        beginning: Beginning = "possible",
        names: Collection[str] | None = None,
        *,
        thinks: bool = True,
        shown: bool = True,
        single: bool = False,
        only: bool = False,
        endless: bool = False,
    ) -> None:
        """`marks`: the texts of special tokens. `names`: of the tools; None: there are no calls.

        `beginning`: "possible" is a header, "open" and "within" a message of thoughts, "none" one of content. `thinks`:
        thoughts are no content. `shown`: they are told of. `single`: the answer ends with its first call. `only`: nothing of
        other names is a call. `endless`: the answer goes on after <|return|> and <|call|>.
        """
        self.keep, self.marks = frozenset(marks), marks
        self._names, self._thinks, self._shown = names, thinks, shown
        self._single, self._only, self._endless = single, only, endless
        self._parts: list[Part] = []
        self._texts = {"": ""}  # of a header, after each of its markers; "": without <|start|>
        self._kind: Kind | None = None  # of a message; None: in a header
        self._said: set[Kind] = set()
        self._apart = False  # what comes now stands apart from an earlier message of its kind
        self._calls = 0
        self._arguments: list[str] = []  # of the last call
        self._escapes = Escapes()
        self._whole = self._done = False
        self.thought, self.thinking, self.framing = False, False, True
        if beginning != "possible":
            self._begin("content" if beginning == "none" else "thought")
        elif thinks:
            self.thinking = True

    @property
    def called(self) -> bool:
        """Whether there were calls, and all of them whole."""
        return self._calls > 0 and self._whole

    @property
    def done(self) -> bool:
        """Nothing more is wanted."""
        return self._done

    def push(self, text: str) -> list[Part]:
        """Take more text; what is known now."""
        if self._done or not text:
            return []
        if self._kind is not None:
            self._say(text)
            return self._take()
        last = next(reversed(self._texts))
        self._texts[last] += text
        if (more := sum(map(len, self._texts.values())) - _LONGEST_HEADER) > 0:
            # Cut where it is too long, so that it says the same whatever came together.
            self._texts[last] = self._texts[last][:-more]
            header = _Header.of(self._texts)
            self._give_back(header, header.tail + text[-more:])
        return self._take()

    def mark(self, marker: str) -> list[Part]:
        """Take the special token with this text; what is known now."""
        if self._done:
            return []
        if marker in (MESSAGE, CONSTRAIN) and self._kind is not None:
            return []  # there it is as little as any other special token
        # Text in front of a header is not a part of it, but behind <|start|> it may be the role of anybody.
        stray = self._kind is None and _Header.of({"": self._texts.get("", "")}).rest.strip()
        if marker in (START, END, RETURN, CALL) or self._kind is not None or stray:
            self._close()
            self._texts = {START: ""} if marker == START else {"": ""}
            ended = marker in (RETURN, CALL) and not self._endless
            self._done = ended or (self._single and self._calls > 0)
        if self._done:
            pass
        elif marker == MESSAGE:
            self._open(_Header.of(self._texts))
        elif marker == CONSTRAIN:
            self._texts.setdefault(CONSTRAIN, "")
        elif marker == CHANNEL:
            if self._texts.keys() & {CHANNEL, CONSTRAIN}:
                self._close()
                self._texts = {}
            self._texts[CHANNEL] = ""
        return self._take()

    def finish(self) -> list[Part]:
        """The text has ended; what was held back."""
        if not self._done:
            self._close(ended=True)
        return self._take()

    def _take(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts

    # Messages

    def _open(self, header: _Header) -> None:
        """The message after a header begins."""
        name = header.recipient.removeprefix(FUNCTIONS)
        addressed = name != header.recipient and not self._only
        known = self._names is not None and (addressed or name in self._names)
        if header.role == "assistant" and name and known:
            self._begin("call")
            self._parts.append(CallStart(self._calls, name, new_call_id()))
            self._calls, self._arguments, self._whole = self._calls + 1, [], False
            self._escapes = Escapes()
        elif header.role == "assistant" and header.channel != "analysis":
            self._begin("content")
        else:  # also a turn of somebody else that the model makes up
            self._begin("thought")

    def _begin(self, kind: Kind) -> None:
        self._kind = kind if kind == "call" or self._thinks else "content"
        self._apart = self._kind in self._said
        self.framing, self.thinking = False, self._kind == "thought"
        self.thought |= self.thinking

    def _close(self, *, ended: bool = False) -> None:
        """The message ends, or the header that has none; `ended`: for want of text."""
        if self._kind == "call":
            if not any(map(str.strip, self._arguments)):
                self._say("{}")
            # The token that ends a call may be no part of the text.
            self._whole = not ended or isinstance(from_json("".join(self._arguments)), dict)
        elif self._kind is None:
            header = _Header.of(self._texts)
            marked = [*self._texts] != [""]
            if (rest := header.rest.strip()) and not (
                marked and any(word.startswith(rest) for word in _WORDS)
            ):
                self._give_back(header, header.rest)
        self._kind, self.thinking, self.framing = None, False, True

    def _give_back(self, header: _Header, text: str) -> None:
        """It was no header: the text is a message."""
        self._open(header._replace(recipient=""))
        self._say(text)

    def _say(self, text: str) -> None:
        if self._kind == "call":
            self._arguments.append(self._escapes.push(text))
            self._parts.append(Arguments(self._calls - 1, self._arguments[-1]))
            return
        between = _BETWEEN if self._apart else ""
        if self._kind == "content":
            self._parts.append(Content(between + text, len(between)))
        elif self._shown:
            self._parts.append(Thought(between + text, len(between)))
        self._apart = False
        if self._kind is not None:
            self._said.add(self._kind)
