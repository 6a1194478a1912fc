"""The engine as a process of HTTP sees it: in another process, over a socket."""

import asyncio
import contextlib
import logging
import socket
from array import array
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import NoReturn

from serve import wire
from serve.grammar import Grammar
from serve.request import (
    EngineStats,
    EngineUnavailable,
    GenerationRequest,
    OutputCallback,
    PromptLogprob,
    TokenCallback,
    TokenOutput,
    as_outputs,
)
from serve.spellings import Spellings
from serve.structured import GrammarSpec

log = logging.getLogger("tangram.server")


class RemoteGrammar(Grammar):
    """Known to be good; the engine's process has it, and follows it."""

    def __init__(self, spec: GrammarSpec) -> None:
        self.spec, self.kind = spec, spec.kind

    def start(self, *, ignore_end: bool = False) -> NoReturn:
        raise NotImplementedError("it is followed in the engine's process")


class RemoteEngine:
    """An engine of `EngineProtocol`, and `Grammars` for its requests. Used on one event loop alone.

    `spellings` are those of all processes that have such an engine.
    """

    def __init__(self, facts: wire.Facts) -> None:
        self.max_model_len, self.vocab_size, self.eos_token_ids = facts
        self.ready = True
        self._next_number = 0
        self._calls: dict[int, asyncio.Future[object]] = {}
        self._receivers: dict[str, OutputCallback] = {}
        self._numbers: dict[str, range] = {}  # of each one's choices
        self._token_receivers: dict[int, tuple[str, Callable[[int], None]]] = {}  # of these
        self._parts: dict[str, list[PromptLogprob | None]] = {}
        self._running = wire.Running()
        self.spellings = Spellings(tell=lambda text, ids: self._say(wire.Spelled(text, array("i", ids))))

    @contextlib.asynccontextmanager
    async def connected(self, end: socket.socket, on_gone: Callable[[], None]) -> AsyncIterator[None]:
        """Within it the engine is there; `on_gone` is called when its process is no more."""
        reader, self._writer = await asyncio.open_unix_connection(sock=end)
        self._listening = asyncio.create_task(self._listen(reader, on_gone))
        try:
            yield
        finally:
            self._listening.cancel()
            self._writer.close()

    # Engine

    async def submit(
        self, request: GenerationRequest, on_output: OutputCallback, on_token: TokenCallback | None = None
    ) -> None:
        """See EngineProtocol."""
        grammar = request.sampling.grammar
        spec = grammar.spec if isinstance(grammar, RemoteGrammar) else None
        on_token = on_token or as_outputs(on_output)
        call = self._number(request.n)
        self._receivers[request.request_id] = on_output
        self._numbers[request.request_id] = range(call, call + request.n)
        for choice in range(request.n):
            self._token_receivers[call + choice] = request.request_id, partial(on_token, choice)
        self._running.begin(request.request_id, request.n)
        try:
            await self._call(wire.Submit(call, request, spec))
        except Exception:
            self._end(request.request_id, None)
            raise
        if request.request_id not in self._receivers:  # it was aborted before the engine had it
            self.abort(request.request_id)

    def abort(self, request_id: str, choice: int | None = None) -> None:
        """See EngineProtocol."""
        self._end(request_id, choice)
        self._say(wire.Abort(request_id, choice))

    async def stats(self) -> EngineStats:
        """See EngineProtocol."""
        stats = await self._call(wire.AskStats(self._number()))
        assert isinstance(stats, EngineStats)
        return stats

    # Grammars

    async def get(self, spec: GrammarSpec) -> Grammar:
        """See Grammars."""
        await self._call(wire.Compile(self._number(), spec))
        return RemoteGrammar(spec)

    def close(self) -> None:
        """See Grammars: there the engine's process looks after them."""

    # Messages

    def _say(self, message: object) -> None:
        self._writer.write(wire.pack(message))

    def _number(self, count: int = 1) -> int:
        """The first of so many that nothing else has."""
        number = self._next_number
        self._next_number += count
        return number

    async def _call(self, message: wire.Submit | wire.Compile | wire.AskStats) -> object:
        """The answer. Raises what the engine's process raises."""
        if self._listening.done():
            raise EngineUnavailable("the engine's process has ended")
        answer = self._calls[message.call] = asyncio.get_running_loop().create_future()
        try:
            self._say(message)
            return await answer
        except asyncio.CancelledError:
            self._say(wire.Forget(message.call))
            raise
        finally:
            del self._calls[message.call]

    async def _listen(self, reader: asyncio.StreamReader, on_gone: Callable[[], None]) -> None:
        try:
            while True:
                message = await wire.read(reader)
                self._hear(message)
                if isinstance(message, wire.PromptPart):
                    await asyncio.sleep(0)  # many may be there: others have their turn
        except EOFError:
            pass
        except Exception:
            log.exception("What the engine's process says cannot be understood")
        self.ready = False
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(EngineUnavailable("the engine's process has ended"))
        on_gone()

    def _hear(self, message: object) -> None:
        match message:
            case wire.Tokens(numbers, tokens):
                for number, token in zip(numbers, tokens, strict=True):
                    self._receive_token(number, token)
            case wire.Outputs(outputs):
                for request_id, output in outputs:
                    self._receive(request_id, output)
            case wire.PromptPart(request_id, part):
                if request_id in self._receivers:
                    self._parts.setdefault(request_id, []).extend(part)
            case wire.NotReady():
                self.ready = False
            case wire.Spelled(text, ids):
                self.spellings.learn(text, ids)
            case wire.Answer(call, value, error):
                answer = self._calls.get(call)
                if answer is None or answer.done():
                    return
                if error is None:
                    answer.set_result(value)
                else:
                    answer.set_exception(error)

    def _receive(self, request_id: str, output: TokenOutput) -> None:
        on_output = self._receivers.get(request_id)
        if on_output is None:  # it was aborted
            return
        if parts := self._parts.pop(request_id, None):
            output.prompt_logprobs = [*parts, *(output.prompt_logprobs or ())]
        if output.finish_reason:
            self._end(request_id, output.choice)
        try:
            on_output(output)
        except Exception:  # must not stop the others
            log.exception("The receiver of request %s failed", request_id)

    def _receive_token(self, number: int, token: int) -> None:
        if number not in self._token_receivers:  # it was aborted
            return
        request_id, on_token = self._token_receivers[number]
        try:
            on_token(token)
        except Exception:  # must not stop the others
            log.exception("The receiver of request %s failed", request_id)

    def _end(self, request_id: str, choice: int | None) -> None:
        if self._running.end(request_id, choice):
            del self._receivers[request_id]
            for number in self._numbers.pop(request_id):
                del self._token_receivers[number]
            self._parts.pop(request_id, None)
