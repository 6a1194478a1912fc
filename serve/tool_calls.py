"""Calls of tools in generated text, found while it is generated.

What a model writes is read as text and calls, whatever the pieces in which it comes. A call is told of once its name and the
beginning of its arguments are there; from then on its arguments go out as they are written, so nobody has checked that
they are valid JSON; control characters within strings alone become escapes. What began like a call and turns out to be none
before that is text. White space around calls is neither.
"""

import secrets
from collections.abc import Collection
from typing import Literal

from serve.arguments import Escapes
from serve.parts import Arguments, CallStart, Content, Part
from serve.piece_reader import ALPHANUMERIC, SPACE, PieceReader, Step, from_json

Style = Literal["hermes", "llama3_json", "mistral"]  # of calls as a part of text
HERMES_START, HERMES_END = "<tool_call>", "</tool_call>"
LLAMA_START = "<|python_tag|>"
MISTRAL_START, MISTRAL_ID, MISTRAL_ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
MARKERS: dict[Style, tuple[str, ...]] = {
    "hermes": (HERMES_START, HERMES_END),
    "llama3_json": (LLAMA_START,),
    "mistral": (MISTRAL_START, MISTRAL_ID, MISTRAL_ARGUMENTS),
}


class CallParser(PieceReader):
    """Reads one answer. The work is proportional to the text, whatever the text."""

    def __init__(
        self,
        style: Style,
        names: Collection[str] = (),
        *,
        hidden: bool = False,
        single: bool = False,
        only: bool = False,
        demanded: bool = False,
    ) -> None:
        """`names`: of the tools, which decide where no marker does. `hidden`: markers are special tokens, and no text.

        `single`: the answer ends with its first call. `only`: nothing of other names is a call. `demanded`: the answer is
        calls alone, and what is none is cut off a call.
        """
        super().__init__()
        self._names, self._single, self._only, self._demanded = names, single, only, demanded
        self._mistral_ids = style == "mistral"
        self._hidden = MARKERS[style] if hidden else ()
        self._parts: list[Part] = []
        self._space = ""  # white space that may stand before a call
        self._told = 0  # characters up to the end of the last part
        self._calls = 0
        self._escapes = Escapes()  # of the last call
        self._open = False
        self.done = False  # nothing more is wanted
        readers = {"hermes": self._hermes, "llama3_json": self._llama3, "mistral": self._mistral}
        self._run = readers[style]()
        self._go_on()

    @property
    def called(self) -> bool:
        """Whether there were calls, and all of them whole."""
        return self._calls > 0 and not self._open

    @property
    def held(self) -> int:
        """Characters behind the last part."""
        return self._taken - self._told

    def push(self, text: str) -> list[Part]:
        """Take more text; what is known now."""
        if self.done:
            return []
        self.feed(text)
        return self._go_on()

    def finish(self) -> list[Part]:
        """The text has ended; what was held back."""
        self.end()
        return self._go_on()

    def _go_on(self) -> list[Part]:
        try:
            next(self._run)
        except StopIteration:
            self.done = True
        parts, self._parts = self._parts, []
        return [part for part in parts if not isinstance(part, Content)] if self._demanded else parts

    # Formats

    def _hermes(self) -> Step[None]:
        while (yield from self._content(HERMES_START)):
            if not (yield from self._object()):
                self._give_back(HERMES_START)
                continue
            yield from self._blank()
            matched = yield from self.match(HERMES_END)
            if matched == len(HERMES_END) or (matched and not (yield from self.more())):  # whole, or cut
                self._space = ""
            elif matched:
                self._say(HERMES_END[:matched])
            if self._single:
                return

    def _llama3(self) -> Step[None]:
        """The whole answer, or what comes after the marker, is JSON."""
        yield from self._blank()
        if (yield from self.peek()) == "{" and (yield from self._objects("")) and self._single:
            return
        while (yield from self._content(LLAMA_START)):
            if (yield from self._objects(LLAMA_START)) and self._single:
                return

    def _mistral(self) -> Step[None]:
        while (yield from self._content(MISTRAL_START)):
            yield from self.skip()
            first = yield from self.peek()
            if first == "[":
                found = yield from self._array()
            else:
                found = yield from (self._object() if first == "{" else self._named())
            if not found:
                self._give_back(MISTRAL_START)
            elif self._single:
                return

    def _objects(self, marker: str) -> Step[bool]:
        """Calls with semicolons between them; False without any."""
        self.raw = []
        if not (yield from self._object(marked=bool(marker))):
            self._give_back(marker)
            return False
        while not self._single:
            yield from self._blank()
            if (yield from self.peek()) != ";":
                break
            self.raw = []
            self.take(1)
            yield from self.skip()
            if not (yield from self.more()):
                break
            if not (yield from self._object(marked=bool(marker))):
                self._give_back("")
                break
        return True

    def _array(self) -> Step[bool]:
        """A list of calls; False without any."""
        self.take(1)
        if not (yield from self._object()):
            return False
        while not self._single:
            self.raw = []
            yield from self.skip()
            if (yield from self.peek()) == "]":
                self.take(1)
                break
            if (yield from self.peek()) != ",":
                self._give_back("")
                break
            self.take(1)
            if not (yield from self._object()):
                self._give_back("")
                break
        return True

    def _named(self) -> Step[bool]:
        """NAME[ARGS]{...}, or NAME[CALL_ID]ID[ARGS]{...}."""
        name = yield from self.word()
        call_id = ""
        if name and (yield from self.match("[")):
            if (yield from self.peek()) == MISTRAL_ID[1]:
                if (yield from self.match(MISTRAL_ID[1:])) < len(MISTRAL_ID) - 1:
                    return False
                call_id = yield from self.word()
                yield from self.match("[")
            if (yield from self.match(MISTRAL_ARGUMENTS[1:])) < len(MISTRAL_ARGUMENTS) - 1:
                return False
        yield from self.skip()
        if not name or (self._only and name not in self._names) or (yield from self.peek()) != "{":
            return False
        self._announce(name, call_id)
        yield from self._written_arguments()
        return True

    def _object(self, *, marked: bool = True) -> Step[bool]:
        """{"name": ..., "arguments": {...}}; False for anything else, which is in `raw` then.

        `marked`: a call may be of a name that no tool has, or have no arguments.
        """
        name: str | None = None
        held: str | None = None  # arguments that came before the name
        announced = False
        yield from self.skip()
        if not (yield from self.match("{")):
            return False
        while True:
            yield from self.skip()
            key = yield from self.string()
            yield from self.skip()
            if key is None or not (yield from self.match(":")):
                break
            yield from self.skip()
            if announced or key not in ("name", "arguments", "parameters"):
                # Other JSON is not held back to its end.
                if not (announced or marked or key in ("id", "type")):
                    return False
                if not (yield from self.value(lambda _: None)):
                    return announced
            elif key == "name":
                name = yield from self.string()
                if not name or not ((marked and not self._only) or name in self._names):
                    return False
            elif name is not None and (yield from self.peek()) == "{":
                self._announce(name)
                announced = True
                yield from self._written_arguments()
            else:
                held = _as_arguments((yield from self.whole()))
                if held is None:
                    return False
            if name and held is not None and not announced:
                self._announce(name)
                self._argue(held)
                announced = True
            yield from self.skip()
            if not (yield from self.match(",")):
                break
        if (yield from self.match("}")) and name and marked and not announced:
            self._announce(name)
            self._argue("{}")
            announced = True
        return announced

    def _content(self, marker: str) -> Step[bool]:
        """Text up to a marker whose first character it has only there; False at the end of all text."""
        self.raw = None
        while (yield from self.more()):
            text, found = self.until(marker[0])
            self._tell(text)
            if found:
                matched = yield from self.match(marker)
                if matched == len(marker):
                    self.raw = []
                    return True
                self._say(marker[:matched])
        if not self._calls:
            self._say("")
        return False

    def _blank(self) -> Step[None]:
        """White space that is shown only if text follows."""
        self.raw = None
        while (char := (yield from self.peek())) and char in SPACE:
            self._space += self.run(SPACE)

    def _written_arguments(self) -> Step[None]:
        self._open = True
        self._open = not (yield from self.value(self._argue))

    # What goes out

    def _say(self, text: str) -> None:
        """Content, after the white space that was held back."""
        if self._space or text:
            self._parts.append(Content(self._space + text))
        self._space, self._told = "", self._taken

    def _tell(self, text: str) -> None:
        """Content; the white space at its end is held back."""
        if body := text.rstrip(SPACE):
            self._say(body)
            self._told -= len(text) - len(body)
        self._space += text[len(body) :]

    def _give_back(self, marker: str) -> None:
        """It was no call."""
        text = marker + "".join(self.raw or ())
        self.raw = None
        for hidden in self._hidden:
            text = text.replace(hidden, "")
        self._tell(text)

    def _announce(self, name: str, call_id: str = "") -> None:
        self._parts.append(CallStart(self._calls, name, call_id or self._new_id()))
        self._calls += 1
        self._space, self.raw, self._told = "", None, self._taken
        self._escapes = Escapes()

    def _argue(self, text: str) -> None:
        self._parts.append(Arguments(self._calls - 1, self._escapes.push(text)))
        self._told = self._taken

    def _new_id(self) -> str:
        if self._mistral_ids:  # their templates take no others
            return "".join(secrets.choice(ALPHANUMERIC) for _ in range(9))
        return new_call_id()


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _as_arguments(text: str) -> str | None:
    """Arguments as an object: as it is, in a string, or null for none at all; None for anything else."""
    text = Escapes().push(text)
    value = from_json(text)
    if isinstance(value, str):
        text = Escapes().push(value)
        value = from_json(text)
    if value is None:
        return "{}"
    return text if isinstance(value, dict) else None
