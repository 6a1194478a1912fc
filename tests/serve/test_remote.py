"""An engine in another process, as HTTP's sees it: here both sides of the socket are on one event loop."""

import asyncio
import contextlib
import json
import pickle
import signal
import socket
import struct
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

from serve import wire
from serve.caller import Caller
from serve.errors import APIError, too_long
from serve.grammar_cache import GrammarCache
from serve.processes import HttpProcesses
from serve.remote import RemoteEngine
from serve.request import (
    EngineStats,
    EngineUnavailable,
    RequestRejected,
    TokenOutput,
)
from serve.structured import GrammarSpec
from tests.serve.fake_engine import FakeEngine, Script
from tests.serve.http_server import TOKENIZER, ids
from tests.serve.remote_pair import Pair, pair, request, with_pair

CHOICES = GrammarSpec("choice", json.dumps(["yes", "no"]), "structured_outputs")


def test_its_facts_and_numbers() -> None:
    async def test(both: Pair) -> None:
        facts = both.remote.max_model_len, both.remote.vocab_size, both.remote.eos_token_ids
        assert facts == (512, 264, (0, 2)) and both.remote.ready
        stats = await both.remote.stats()
        assert isinstance(stats, EngineStats) and stats == both.engine.stats()

    with_pair(test)


@pytest.mark.parametrize("error", [RequestRejected("too many", "n"), EngineUnavailable("queue full")])
def test_refusals_arrive_as_they_are(error: Exception) -> None:
    async def test(both: Pair) -> None:
        both.engine.reject = error
        with pytest.raises(type(error), match=str(error)) as refused:
            await both.remote.submit(request(), lambda _: None)
        assert vars(refused.value) == vars(error)
        assert not both.remote._receivers

    with_pair(test)


def test_a_fault_of_ours_is_told_and_costs_one_request(caplog: pytest.LogCaptureFixture) -> None:
    async def test(both: Pair) -> None:
        submit, both.engine.submit = both.engine.submit, None  # type: ignore[method-assign, assignment]
        with pytest.raises(RuntimeError, match="TypeError: 'NoneType' object is not callable"):
            await both.remote.submit(request(), lambda _: None)
        both.engine.submit = submit  # type: ignore[method-assign]
        assert len(await both.generate(request())) == 5

    with_pair(test)
    assert "A call of the HTTP process failed" in caplog.text


def test_what_is_aborted_ends_and_nothing_of_it_comes_late() -> None:
    async def test(both: Pair) -> None:
        came: list[TokenOutput] = []
        await both.remote.submit(request(n=2), came.append)
        await both.until(lambda: len(came) > 3)
        both.remote.abort("a", 0)
        both.remote.abort("a")
        before = len(came)
        await both.until(lambda: both.engine.live == 0)
        await both.remote.stats()  # behind all that was sent before
        assert len(came) == before
        assert both.engine.aborted == [("a", 0), ("a", None)]

    with_pair(test, Script(ids("x"), cycle=True, delay=0.001))


def test_grammars_are_compiled_by_the_engines_process() -> None:
    async def test(both: Pair) -> None:
        grammar = await both.remote.get(CHOICES)
        assert grammar.kind == "choice"
        with pytest.raises(NotImplementedError):
            grammar.start()
        assert len(await both.generate(request(grammar=grammar))) > 1
        (asked,) = both.engine.requests
        assert asked.sampling.grammar is not None and asked.sampling.grammar.start().mask.any()
        with pytest.raises(APIError, match="structured_outputs") as refused:
            await both.remote.get(CHOICES._replace(kind="grammar", text="start: ("))
        assert (refused.value.status, refused.value.param) == (400, "structured_outputs")

    with_pair(test, Script([], follow=True))


def test_who_leaves_while_a_grammar_is_compiled_stops_that(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped: list[str] = []

    async def compile_for_ever(self: GrammarCache, spec: GrammarSpec) -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            stopped.append(spec.text)
            raise

    async def test(both: Pair) -> None:
        grammar = await both.remote.get(CHOICES)
        monkeypatch.setattr(GrammarCache, "get", compile_for_ever)  # as if it were forgotten
        for call in (
            both.remote.get(CHOICES),
            both.remote.submit(request(grammar=grammar), lambda _: None),
        ):
            waiting = asyncio.ensure_future(call)
            await asyncio.sleep(0.05)
            waiting.cancel()
            await asyncio.wait([waiting])
        both.remote.abort("a")  # as `Submission` does
        await both.until(lambda: len(stopped) == 2)
        assert both.engine.requests == []

    with_pair(test)


def test_an_abort_may_overtake_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a request with several prompts, one of which is refused."""

    async def test(both: Pair) -> None:
        grammar, go = await both.remote.get(CHOICES), asyncio.Event()
        get = GrammarCache.get

        async def slowly(self: GrammarCache, spec: GrammarSpec) -> Any:
            await go.wait()
            return await get(self, spec)

        monkeypatch.setattr(GrammarCache, "get", slowly)
        submitting = asyncio.ensure_future(both.remote.submit(request(grammar=grammar), lambda _: None))
        await both.remote.stats()  # the request is there
        both.remote.abort("a")
        go.set()
        await submitting
        await both.until(lambda: len(both.engine.aborted) == 2 and both.engine.live == 0)

    with_pair(test, Script(ids("x"), cycle=True, delay=0.001))


def test_nobody_waits_for_an_engine_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(both: Pair) -> None:
        monkeypatch.setattr(Caller, "_stats", lambda _: asyncio.sleep(60))
        waiting = asyncio.ensure_future(both.remote.stats())
        await asyncio.sleep(0.05)
        both.end.shutdown(socket.SHUT_RDWR)
        with pytest.raises(EngineUnavailable, match="the engine's process has ended"):
            await waiting
        assert both.gone == [True] and not both.remote.ready
        with pytest.raises(EngineUnavailable, match="the engine's process has ended"):
            await both.remote.submit(request(), lambda _: None)

    with_pair(test)


def test_what_a_process_that_is_gone_has_left_is_aborted() -> None:
    async def run() -> None:
        async with pair(Script(ids("x"), cycle=True, delay=0.001)) as both:
            await both.remote.submit(request("a", n=2), lambda _: None)
            await both.remote.submit(request("b"), lambda _: None)
            both.remote.abort("a", 1)
            both.remote._receivers.clear()

    asyncio.run(run())  # `pair` looks


def test_others_learn_how_texts_were_spelled() -> None:
    async def test(both: Pair) -> None:
        both.remote.spellings.remember("a text", [4, 5])
        await both.until(lambda: bool(both.told))
        async with pair(Script([])) as others:
            others.remote.spellings.learn(*both.told[0])
            assert list(others.remote.spellings.beginnings("a text goes on")) == [(6, [4, 5])]
            await others.remote.stats()
            assert others.told == []  # it is not told twice

    with_pair(test)


def test_errors_survive_the_way() -> None:
    error = too_long(8, 9, "prompt")
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), vars(copy)) == (APIError, str(error), vars(error))


def test_messages_may_come_in_pieces() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        message = wire.pack(["x" * 100])
        theirs.sendall(message[:5])
        theirs.setblocking(False)
        asyncio.run(_send_later(theirs, message[5:], lambda: wire.receive(ours)))
        theirs.close()
        with pytest.raises(EOFError):
            wire.receive(ours)
        with pytest.raises(EOFError):
            wire.send(ours, "x" * 2**20)


async def _send_later(end: socket.socket, data: bytes, receive: Callable[[], object]) -> None:
    waiting = asyncio.ensure_future(asyncio.to_thread(receive))
    await asyncio.sleep(0.02)
    end.sendall(data)
    assert await waiting == ["x" * 100]


@pytest.mark.parametrize("side", ["engine", "http"])
def test_what_cannot_be_understood_ends_a_process_and_not_the_other(
    side: str, caplog: pytest.LogCaptureFixture
) -> None:
    garbage = struct.pack("=Q", 3) + b"abc"

    async def run() -> None:
        ours, theirs = socket.socketpair()
        if side == "engine":
            caller = Caller(FakeEngine(Script([])), mock.Mock(), mock.Mock())
            theirs.sendall(garbage)
            with pytest.raises(pickle.UnpicklingError):  # `HttpProcesses` ends the process
                await caller.serve(ours)
            theirs.close()
            return
        remote, gone = RemoteEngine(wire.Facts(1, 1, ())), asyncio.Event()
        async with remote.connected(theirs, gone.set):
            waiting = asyncio.ensure_future(remote.stats())
            await asyncio.sleep(0.01)
            ours.sendall(garbage)
            await gone.wait()
            with pytest.raises(EngineUnavailable):
                await waiting
        ours.close()

    asyncio.run(asyncio.wait_for(run(), 20))
    assert ("cannot be understood" in caplog.text) == (side == "http")


def test_all_processes_hear_what_others_have_learnt_and_that_the_engine_is_lost() -> None:
    async def run() -> None:
        http = HttpProcesses(socket.socket(), 0)
        http._loop, http._grammars = asyncio.get_running_loop(), mock.Mock()
        http._setup = wire.Setup(facts=wire.Facts(1, 1, ()), tokenizer=TOKENIZER, model_names=("tiny",))
        pairs = [socket.socketpair() for _ in range(3)]
        http._processes = [mock.Mock(end=ours) for ours, _ in pairs]
        serving = [asyncio.ensure_future(http._serve(place, FakeEngine(Script([])))) for place in range(3)]
        first, *others = remotes = [RemoteEngine(http._setup.facts) for _ in pairs]
        async with contextlib.AsyncExitStack() as stack:
            for remote, (_, theirs) in zip(remotes, pairs, strict=True):
                assert await asyncio.to_thread(wire.receive, theirs) is None  # it may begin
                await stack.enter_async_context(remote.connected(theirs, lambda: None))
            first.spellings.remember("a text", [4, 5])
            for other in others:
                while not list(other.spellings.beginnings("a text goes on")):
                    await asyncio.sleep(0.002)
            http.fail()
            while any(remote.ready for remote in remotes):
                await asyncio.sleep(0.002)
            for process in http._processes:
                assert isinstance(process, mock.Mock)
                process.signal.assert_called_once_with(signal.SIGTERM)
        await asyncio.gather(*serving)
        assert not http._callers

    asyncio.run(asyncio.wait_for(run(), 20))


def test_others_are_not_told_while_they_hang() -> None:
    async def run() -> None:
        ours, theirs = socket.socketpair()  # from which nobody reads
        caller = Caller(FakeEngine(Script([])), mock.Mock(), mock.Mock())
        serving = asyncio.ensure_future(caller.serve(ours))
        await asyncio.sleep(0.01)
        for _ in range(100):
            caller.say(wire.Spelled("x" * 2**18, []), dropped=True)
        assert caller._writer is not None
        assert 2**19 < caller._writer.transport.get_write_buffer_size() < 2**21
        theirs.close()
        await serving

    asyncio.run(asyncio.wait_for(run(), 20))
