"""From the engine's thread to the event loop, and from there to the client as server-sent events."""

import asyncio
import collections
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import Any

from pydantic_core import to_json
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from serve.errors import APIError, bad_request, unavailable
from serve.request import (
    EngineProtocol,
    EngineUnavailable,
    GenerationRequest,
    OutputCallback,
    RequestRejected,
    TokenOutput,
)

DONE = b"data: [DONE]\n\n"


def json_bytes(payload: Any) -> bytes:
    """JSON of what may hold numbers beyond the floats' range, as 1e999 is when it is read: null in their place."""
    return to_json(payload, inf_nan_mode="null")


def sse(payload: Any) -> bytes:
    """One server-sent event with a JSON payload."""
    return b"data: " + json_bytes(payload) + b"\n\n"


def named_sse(payload: dict[str, Any]) -> bytes:
    """The same with the payload's type as its name."""
    return b"event: " + payload["type"].encode() + b"\n" + sse(payload)


class OutputHub:
    """Hands outputs of the engine's thread to the event loop, with one wake-up for many outputs.

    An engine step makes one output a running request; waking the loop (a system call) once for all of them keeps
    the engine's thread fast.
    """

    def __init__(self) -> None:
        self._outputs: collections.deque[tuple[Callable[[Any], None], Any]] = collections.deque()
        self._scheduled = False

    def post[T](self, loop: asyncio.AbstractEventLoop, put: Callable[[T], None], output: T) -> None:
        """`put` gets the output on the loop. Called from any thread."""
        # Append first, then look at the flag; `_drain` clears the flag first, then looks at the outputs: so an
        # output is never left behind. A needless second wake-up does no harm.
        self._outputs.append((put, output))
        if not self._scheduled:
            self._scheduled = True
            # A closed loop: the server is gone, and the engine's thread must not die of it.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        self._scheduled = False
        while self._outputs:
            put, output = self._outputs.popleft()
            put(output)


Arrival = tuple[float, int, TokenOutput]  # time.monotonic(), index of the prompt, output


class Mailbox:
    """Outputs of one HTTP request, in order of arrival; used on the event loop alone."""

    def __init__(self) -> None:
        self._arrivals: list[Arrival] = []
        self._waiting: asyncio.Future[None] | None = None

    def put(self, arrival: Arrival) -> None:
        self._arrivals.append(arrival)
        if self._waiting and not self._waiting.done():
            self._waiting.set_result(None)

    async def take(self) -> list[Arrival]:
        """Wait for outputs, return all that are there. For one task at a time."""
        if not self._arrivals:
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        arrivals, self._arrivals = self._arrivals, []
        return arrivals


class Submission:
    """The engine requests of one HTTP request: one a prompt. Leaving the context aborts what still runs."""

    def __init__(
        self,
        engine: EngineProtocol,
        hub: OutputHub,
        requests: Sequence[GenerationRequest],
        form: str,
        interval: int,
    ) -> None:
        """`form`: the field that their grammar comes from, if they have one. `interval`: see `_receiver`."""
        self._engine, self._interval = engine, interval
        self._hub = hub
        self._requests = requests
        self._form = form
        self._submitted: list[GenerationRequest] = []
        self._mailbox = Mailbox()
        self._came: list[Arrival] = []  # and was not returned yet
        self._running = {(p, c) for p, request in enumerate(requests) for c in range(request.n)}

    async def submit(self) -> None:
        """Queue all prompts, or none; raises APIError."""
        loop = asyncio.get_running_loop()
        answers: list[Awaitable[None]] = []
        try:
            for p, request in enumerate(self._requests):
                answer = self._engine.submit(request, self._receiver(p, loop))
                self._submitted.append(request)  # whoever is cancelled while it is on its way ends it, too
                if answer is not None:
                    answers.append(answer)
            await asyncio.gather(*answers)
        except RequestRejected as error:
            self.close()
            raise bad_request(str(error), error.field, "request_rejected") from None
        except EngineUnavailable as error:
            self.close()
            raise unavailable(str(error)) from None

    def _receiver(self, p: int, loop: asyncio.AbstractEventLoop) -> OutputCallback:
        """Takes outputs of prompt `p` to the event loop: a choice's first one at once, the others `interval` together."""
        held: dict[int, list[Arrival]] = {}  # of each choice

        def on_output(output: TokenOutput) -> None:
            first = output.choice not in held
            waiting = held.setdefault(output.choice, [])
            waiting.append((time.monotonic(), p, output))
            if first or output.finish_reason or len(waiting) >= self._interval:
                for arrival in waiting:
                    self._hub.post(loop, self._mailbox.put, arrival)
                waiting.clear()

        return on_output

    def interrupt(self) -> None:
        """The server stops: end every choice that still runs, as if the engine had dropped it."""
        for p, choice in self._running:
            output = TokenOutput(choice=choice, finish_reason="abort")
            self._mailbox.put((time.monotonic(), p, output))

    async def take(self) -> list[Arrival]:
        """Wait for outputs. Raises APIError when a grammar or the engine failed, or a request was dropped.

        What came before that is returned first: its text may end the choice.
        """
        while True:
            arrivals: list[Arrival] = []
            came, self._came = self._came or await self._mailbox.take(), []
            for n, arrival in enumerate(came):
                _, p, output = arrival
                key = (p, output.choice)
                if key not in self._running:
                    continue  # came after an abort
                if fault := self._fault(output):
                    if not arrivals:
                        raise fault
                    self._came = came[n:]
                    break
                if output.finish_reason is not None:
                    self._running.discard(key)
                arrivals.append(arrival)
            if arrivals:
                return arrivals

    def _fault(self, output: TokenOutput) -> APIError | None:
        if output.finish_reason == "error":
            message = output.error or "The engine failed on this request."
            if output.bad_grammar:
                return bad_request(message, self._form, "invalid_value")
            return APIError(500, message, code="engine_error")
        if output.finish_reason == "abort":
            return unavailable("The server dropped this request: it is shutting down.")
        return None

    def stop(self, p: int, choice: int) -> None:
        """End one choice early: a stop string was found."""
        self._running.discard((p, choice))
        self._engine.abort(self._requests[p].request_id, choice)

    @property
    def running(self) -> bool:
        """Whether any choice still generates."""
        return bool(self._running)

    def close(self) -> None:
        """Abort everything that still runs; idempotent."""
        for p, request in enumerate(self._submitted):
            if any(key[0] == p for key in self._running):
                self._engine.abort(request.request_id)
        self._running.clear()
        self._submitted.clear()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_disconnected[T](receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`; when the client goes away first, `work` is cancelled and ClientDisconnect raised."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        # Wait for the cancelled work: its cleanup aborts the engine's requests.
        for pending in (task, watcher):
            pending.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


class EventStream(Response):
    """Sends events as they come; calls `on_close` in every case: at the end, on an error, on disconnect."""

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[bytes], on_close: Callable[[], None], headers: Mapping[str, str]
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers})
        del self.headers["content-length"]
        self._events = events
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_all() -> None:
            await send(
                {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            )
            async for event in self._events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        try:
            # OSError: the connection broke while we were writing.
            with contextlib.suppress(ClientDisconnect, OSError):
                await unless_disconnected(receive, send_all())
        finally:
            await self._events.aclose()
            self._on_close()  # not left to the generator: one that never started has no `finally`
