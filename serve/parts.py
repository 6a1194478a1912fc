"""What an answer is made of, in pieces as they are generated: thoughts, text, and calls of tools."""

from itertools import groupby
from typing import NamedTuple


class Thought(NamedTuple):
    """What the model thinks before it answers."""

    text: str
    gap: int = 0  # characters in front that keep it apart from earlier thoughts


class Content(NamedTuple):
    """Text of the answer."""

    text: str
    gap: int = 0  # as of thoughts


class CallStart(NamedTuple):
    """Call `number` of its answer; its arguments follow."""

    number: int
    name: str
    id: str


class Arguments(NamedTuple):
    """A piece of the arguments of call `number`."""

    number: int
    text: str


Part = Thought | Content | CallStart | Arguments


def merged(parts: list[Part]) -> list[Part]:
    """The same with what belongs together in one piece."""
    if len(parts) < 2:  # as nearly always
        return parts
    result: list[Part] = []
    for kind, group in groupby(parts, type):
        if kind is CallStart:
            result += group
        else:  # arguments of two calls have a CallStart between them
            found = [part for part in group if not isinstance(part, CallStart)]
            result.append(found[0]._replace(text="".join(part.text for part in found)))
    return result
