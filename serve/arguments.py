"""The arguments of calls, which models write as JSON, but not always."""

import json
import re
from typing import Any

import pydantic_core

_OUTSIDE = re.compile(r'"')
_INSIDE = re.compile(r'["\\\x00-\x1f]')  # of a string


class Escapes:
    """Control characters in the strings of a JSON text become escapes: models write line breaks there as they are."""

    def __init__(self) -> None:
        self._quoted = self._escaped = False

    def push(self, text: str) -> str:
        """The next piece, as it goes out."""
        out: list[str] = []
        at = 0
        while at < len(text):
            if self._escaped:
                self._escaped = False
                if text[at] < " ":  # a backslash at the end of a line, as in code
                    out.append("\\")
                else:
                    out.append(text[at])
                    at += 1
                continue
            found = (_INSIDE if self._quoted else _OUTSIDE).search(text, at)
            if found is None:
                out.append(text[at:])
                break
            char = found[0]
            out.append(text[at : found.start()])
            at = found.end()
            if char == '"':
                self._quoted = not self._quoted
            self._escaped = char == "\\"
            out.append(char if char >= " " else json.dumps(char)[1:-1])
        return "".join(out)


def object_of(arguments: str) -> dict[str, Any] | None:
    """Arguments that are an object, or the beginning of one that was cut; None for what is none."""
    try:
        found = pydantic_core.from_json(
            Escapes().push(arguments), allow_partial="trailing-strings", allow_inf_nan=False
        )
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
