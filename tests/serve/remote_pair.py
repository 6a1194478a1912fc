"""An engine in another process and who speaks for it there: both sides of the socket on one event loop."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from serve import wire
from serve.caller import Caller
from serve.grammar_cache import GrammarCache
from serve.remote import RemoteEngine
from serve.request import (
    GenerationRequest,
    SamplingParams,
    TokenOutput,
)
from tests.serve.fake_engine import FakeEngine, Script
from tests.serve.http_server import TOKENIZER, ids


@dataclass
class Pair:
    """Both ends, and the engine behind them."""

    engine: FakeEngine
    remote: RemoteEngine
    end: socket.socket  # of the engine's process
    gone: list[bool]
    told: list[wire.Spelled]  # what other processes of HTTP are to learn

    async def generate(self, request: GenerationRequest) -> list[TokenOutput]:
        """All outputs of all choices."""
        outputs: asyncio.Queue[TokenOutput] = asyncio.Queue()
        await self.remote.submit(request, outputs.put_nowait)
        came: list[TokenOutput] = []
        while sum(output.finish_reason is not None for output in came) < request.n:
            came.append(await outputs.get())
        return came

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                await asyncio.sleep(0.002)


@contextlib.asynccontextmanager
async def pair(script: Script) -> AsyncIterator[Pair]:
    ours, theirs = socket.socketpair()
    engine, told = FakeEngine(script), list[wire.Spelled]()
    grammars = GrammarCache(TOKENIZER, engine.vocab_size, engine.eos_token_ids)
    serving = asyncio.create_task(Caller(engine, grammars, told.append).serve(ours))
    gone: list[bool] = []
    remote = RemoteEngine(wire.Facts.of(engine))
    try:
        async with remote.connected(theirs, lambda: gone.append(True)):
            both = Pair(engine, remote, ours, gone, told)
            yield both
        await asyncio.wait_for(serving, 10)  # it hears that nobody is there
        await both.until(lambda: engine.live == 0)
        assert not remote._receivers
    finally:
        grammars.close()
        await asyncio.to_thread(engine.close)


def with_pair(test: Callable[[Pair], Awaitable[None]], script: Script | None = None) -> None:
    async def run() -> None:
        async with asyncio.timeout(30), pair(script or Script(ids("hello"), cached_tokens=3)) as both:
            await test(both)

    asyncio.run(run())


def request(name: str = "a", n: int = 1, **sampling: Any) -> GenerationRequest:
    params = SamplingParams(max_tokens=40, **sampling)
    return GenerationRequest(request_id=name, prompt_ids=ids("hi"), sampling=params, n=n)
