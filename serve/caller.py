"""A process of HTTP as the engine's process sees it: what it asks for, and what it is told."""

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import socket
from collections.abc import Awaitable, Callable, Iterable
from functools import partial

from serve import wire
from serve.errors import APIError
from serve.grammar_cache import Grammars
from serve.request import EngineProtocol, EngineUnavailable, GenerationRequest, RequestRejected, TokenOutput
from serve.structured import GrammarSpec

_MUCH = 2**20  # bytes

# A choice's number and a token, or the numbers of a request's choices, its id and an output.
type _Output = tuple[int, int] | tuple[range, str, TokenOutput]

log = logging.getLogger("tangram.server")


class Caller:
    """One connection. Used on the event loop, except that the engine's thread hands over outputs."""

    def __init__(
        self, engine: EngineProtocol, grammars: Grammars, on_spelled: Callable[[wire.Spelled], None]
    ) -> None:
        """`on_spelled`: tells the others."""
        self._engine, self._grammars, self._on_spelled = engine, grammars, on_spelled
        self._loop = asyncio.get_running_loop()
        self._writer: asyncio.StreamWriter | None = None
        self._running = wire.Running()
        self._answering: dict[int, asyncio.Task[None]] = {}  # calls
        self._sending: set[asyncio.Task[None]] = set()
        self._outputs: list[_Output] = []  # since the last message
        self._scheduled = False
        # Requests with long parts on their way, and what is to come behind these.
        self._behind: dict[range, list[_Output]] = {}

    async def serve(self, end: socket.socket) -> None:
        """Do what it asks for, until it is gone; what it has left running is aborted then."""
        reader, self._writer = await asyncio.open_unix_connection(sock=end)
        try:
            while True:
                self._hear(await wire.read(reader))
        except EOFError:
            pass
        finally:
            self._writer.close()
            for task in [*self._answering.values(), *self._sending]:
                task.cancel()
            for request_id in self._running:
                self._engine.abort(request_id)

    def _hear(self, message: object) -> None:
        match message:
            case wire.Submit(call, request, spec):
                self._answer(call, partial(self._submit, call, request, spec))
            case wire.Compile(call, spec):
                self._answer(call, partial(self._compile, spec))
            case wire.AskStats(call):
                self._answer(call, self._stats)
            case wire.Forget(call) if call in self._answering:
                self._answering[call].cancel()
            case wire.Spelled():
                self._on_spelled(message)
            case wire.Abort(request_id, choice):
                self._running.end(request_id, choice)
                self._engine.abort(request_id, choice)

    def _answer(self, call: int, doing: Callable[[], Awaitable[object]]) -> None:
        async def answer() -> None:
            try:
                self.say(wire.Answer(call, await doing()))
            except (RequestRejected, EngineUnavailable, APIError) as error:
                self.say(wire.Answer(call, error=error))
            except Exception as error:  # it may hold anything
                log.exception("A call of the HTTP process failed")
                self.say(wire.Answer(call, error=RuntimeError(f"{type(error).__name__}: {error}")))

        task = self._answering[call] = self._loop.create_task(answer())
        task.add_done_callback(lambda _: self._answering.pop(call))

    def say(self, message: object, dropped: bool = False) -> None:
        """To the process, if it is there; `dropped`: unless it hangs, and much waits for it already."""
        if self._writer is None or self._writer.is_closing():
            return
        if not dropped or self._writer.transport.get_write_buffer_size() < _MUCH:
            self._writer.write(wire.pack(message))

    async def _submit(self, call: int, request: GenerationRequest, spec: GrammarSpec | None) -> None:
        if spec:  # compiled already, unless many others were since
            grammar = await self._grammars.get(spec)
            sampling = dataclasses.replace(request.sampling, grammar=grammar)
            request = dataclasses.replace(request, sampling=sampling)
        self._running.begin(request.request_id, request.n)
        try:
            on_output = partial(self._post, range(call, call + request.n), request.request_id)
            answer = self._engine.submit(request, on_output, partial(self._post_token, call))
            if answer is not None:
                await answer
        except Exception:
            self._running.end(request.request_id, None)
            raise

    async def _compile(self, spec: GrammarSpec) -> None:
        await self._grammars.get(spec)

    async def _stats(self) -> object:
        return self._engine.stats()

    def _post(self, numbers: range, request_id: str, output: TokenOutput) -> None:
        """On the engine's thread, which is to lose no time; a step's outputs go together."""
        self._outputs.append((numbers, request_id, output))
        if not self._scheduled:  # see OutputHub
            self._schedule()

    def _post_token(self, first: int, choice: int, token: int) -> None:
        """The same of what is nothing but a token, of a request whose choices are numbered from `first` on."""
        self._outputs.append((first + choice, token))
        if not self._scheduled:
            self._schedule()

    def _schedule(self) -> None:
        self._scheduled = True
        with contextlib.suppress(RuntimeError):  # a closed loop: the server is gone
            self._loop.call_soon_threadsafe(self._send)

    def _send(self) -> None:
        self._scheduled = False
        outputs = self._outputs[:]
        del self._outputs[: len(outputs)]  # more may have come
        self._say_all(output for output in outputs if not (self._behind and self._waits(output)))

    def _waits(self, output: _Output) -> bool:
        """Whether it has to come behind long parts, where it is put then."""
        number = output[0] if len(output) == 2 else output[0].start
        for numbers, behind in self._behind.items():
            if number in numbers:
                behind.append(output)
                return True
        return False

    def _say_all(self, outputs: Iterable[_Output]) -> None:
        """Each choice's in their order, and as few messages as that takes: tokens, then others."""
        tokens, others, in_others = wire.Tokens.none(), wire.Outputs([]), set[int]()
        for output in outputs:
            if len(output) == 2:
                number, token = output
                if number in in_others:
                    self._say_both(tokens, others)
                    tokens, others, in_others = wire.Tokens.none(), wire.Outputs([]), set()
                tokens.numbers.append(number)
                tokens.tokens.append(token)
                continue
            numbers, request_id, whole = output
            in_others.add(numbers[whole.choice])
            if whole.finish_reason:
                self._running.end(request_id, whole.choice)
            if len(whole.prompt_logprobs or ()) > wire.PROMPT_PART:
                self._behind[numbers] = []
                self._sending.add(task := self._loop.create_task(self._send_parts(*output)))
                task.add_done_callback(self._sending.discard)
            else:
                others.outputs.append((request_id, whole))
        self._say_both(tokens, others)

    def _say_both(self, tokens: wire.Tokens, others: wire.Outputs) -> None:
        if tokens.numbers:
            self.say(tokens)
        if others.outputs:
            self.say(others)

    async def _send_parts(self, numbers: range, request_id: str, output: TokenOutput) -> None:
        """An output in pieces, between which others have their turn, and then what came behind it."""
        *parts, last = itertools.batched(output.prompt_logprobs or (), wire.PROMPT_PART)
        for part in parts:
            self.say(wire.PromptPart(request_id, list(part)))
            await asyncio.sleep(0)
        output = dataclasses.replace(output, prompt_logprobs=list(last))
        self._say_all([(numbers, request_id, output), *self._behind.pop(numbers)])
