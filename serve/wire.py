"""What the engine's process and those of HTTP say to each other: pickled messages over a socket, each behind its length."""

import asyncio
import pickle
import socket
import struct
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from serve.request import EngineProtocol, GenerationRequest, PromptLogprob, TokenOutput
from serve.structured import GrammarSpec
from serve.text import TextTokenizer

PROMPT_PART = 256  # tokens: packing their log-probabilities holds up all others
_LENGTH = struct.Struct("=Q")


class Facts(NamedTuple):
    """Of an engine; see EngineProtocol."""

    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]

    @classmethod
    def of(cls, engine: EngineProtocol) -> "Facts":
        return cls(engine.max_model_len, engine.vocab_size, engine.eos_token_ids)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What the engine's process says before all else."""

    facts: Facts
    tokenizer: TextTokenizer
    model_names: tuple[str, ...]
    app: Mapping[str, Any] = field(default_factory=dict)  # further arguments of `create_app`
    server: Mapping[str, Any] = field(default_factory=dict)  # the same of `make_server`
    log_level: str = "info"
    several: bool = False  # processes of HTTP


# Of a process of HTTP. `call`: a number for the answer.


class Submit(NamedTuple):
    """Queue this request; `grammar`: of it, for the engine's process to compile.

    Tokens of its choices come with the numbers from `call` on, which no other call has.
    """

    call: int
    request: GenerationRequest
    grammar: GrammarSpec | None


class Compile(NamedTuple):
    """Compile this grammar, and keep it for requests to come."""

    call: int
    spec: GrammarSpec


class Forget(NamedTuple):
    """Nobody waits for the answer any more."""

    call: int


class Abort(NamedTuple):
    """See EngineProtocol."""

    request_id: str
    choice: int | None


class AskStats(NamedTuple):
    """See EngineProtocol."""

    call: int


# Of either.


class Spelled(NamedTuple):
    """See Spellings: of one process of HTTP, for all others."""

    text: str
    ids: Sequence[int]


# Of the engine's process.


class Answer(NamedTuple):
    """To a call: what it returns, or raises."""

    call: int
    value: Any = None
    error: Exception | None = None


class Outputs(NamedTuple):
    """Of requests by their ids."""

    outputs: list[tuple[str, TokenOutput]]


class Tokens(NamedTuple):
    """Outputs that are tokens and nothing else, as most are: all at once, which take no time to pack."""

    numbers: array[int]  # of choices, see `Submit`
    tokens: array[int]

    @classmethod
    def none(cls) -> "Tokens":
        return cls(array("Q"), array("i"))


class PromptPart(NamedTuple):
    """The next of the `prompt_logprobs` of a request's next output, all but the last of them: see TokenOutput."""

    request_id: str
    part: list[PromptLogprob | None]


class NotReady(NamedTuple):
    """The engine takes no requests any more."""


class Running:
    """Choices that have not ended, of requests by their ids: either side keeps its own account."""

    def __init__(self) -> None:
        self._choices: dict[str, set[int]] = {}

    def begin(self, request_id: str, choices: int) -> None:
        self._choices[request_id] = set(range(choices))

    def end(self, request_id: str, choice: int | None) -> bool:
        """Of a choice, or of all; whether that was the last one of a request."""
        left = self._choices.get(request_id)
        if left is None:
            return False
        if choice is not None:
            left.discard(choice)
            if left:
                return False
        del self._choices[request_id]
        return True

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._choices))


def pack(message: object) -> bytes:
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(data)) + data


async def read(reader: asyncio.StreamReader) -> Any:
    """The next message. Raises EOFError when the other side is gone."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        return pickle.loads(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError):
        raise EOFError from None


def send(end: socket.socket, message: object) -> None:
    """Before there is an event loop. Raises EOFError when the other side is gone."""
    try:
        end.sendall(pack(message))
    except ConnectionError:
        raise EOFError from None


def receive(end: socket.socket) -> Any:
    """Before there is an event loop. Raises EOFError when the other side is gone."""
    (length,) = _LENGTH.unpack(_receive(end, _LENGTH.size))
    return pickle.loads(_receive(end, length))


def _receive(end: socket.socket, size: int) -> bytearray:
    data = bytearray()
    while len(data) < size:
        try:
            part = end.recv(size - len(data))
        except ConnectionError:
            part = b""
        if not part:
            raise EOFError
        data += part
    return data
