"""Which grammars are compiled, kept, remembered as refused, and given up because nobody waits for them."""

import asyncio
import threading

import pytest

from models.testing import tiny_tokenizer
from serve import grammar, grammar_cache
from serve.errors import APIError
from serve.grammar import GrammarError, Vocabulary
from serve.grammar_cache import GrammarCache
from serve.structured import GrammarSpec

SPEC = GrammarSpec("regex", "a+", "guided_regex")


@pytest.fixture
def cache():
    cache = GrammarCache(tiny_tokenizer(), 300, (0, 2))
    yield cache
    cache.close()


@pytest.fixture
def held(monkeypatch):
    """Nothing is compiled before `go`; the texts of what was begun, and what each of them ends with."""

    class Held:
        def __init__(self):
            self.go, self.ends = threading.Event(), "a grammar"
            self.texts, self.stops = [], []

    held = Held()

    def compile(vocabulary, text, stop):
        held.texts.append(text)
        held.stops.append(stop)
        assert held.go.wait(10)
        if isinstance(held.ends, Exception):
            raise held.ends
        return compiled(vocabulary, text, stop)

    compiled = Vocabulary.compile
    monkeypatch.setattr(Vocabulary, "compile", compile)
    yield held
    held.go.set()


async def until(condition):
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


def words(count):
    return [GrammarSpec("regex", f"word{i}", "guided_regex") for i in range(count)]


def test_what_failed_once_is_compiled_anew(cache, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(grammar, "_TRIAL", grammar._TRIAL.with_name("missing.py"))
        with pytest.raises(RuntimeError, match="cannot be tried out"):
            asyncio.run(cache.get(SPEC))
    compiled = asyncio.run(cache.get(SPEC))
    assert compiled.kind == "regex"
    assert asyncio.run(cache.get(SPEC)) is compiled


def test_without_files_for_a_trial_a_grammar_has_to_wait(cache, monkeypatch):
    def no_files(*args, **kwargs):
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr("subprocess.Popen", no_files)
        with pytest.raises(APIError, match="cannot compile a grammar now: try again later") as caught:
            asyncio.run(cache.get(SPEC))
    assert caught.value.status == 503
    assert asyncio.run(cache.get(SPEC)).kind == "regex"


def test_what_failed_for_a_client_that_left_just_then_is_compiled_anew(cache, held):
    async def leave_and_come():
        first = asyncio.create_task(cache.get(SPEC))
        await until(lambda: held.texts)
        held.ends = RuntimeError("no trial")
        held.go.set()
        (job,) = cache._jobs.values()
        while not job.future.done():  # the loop has no turn before it is cancelled
            pass
        first.cancel()
        await asyncio.wait([first])
        assert first.cancelled() and cache._jobs
        held.ends = "a grammar"
        return await cache.get(SPEC)

    assert asyncio.run(leave_and_come()).kind == "regex"


def test_a_refusal_is_remembered_for_a_while(cache, held, monkeypatch):
    """What takes all the time of a trial would take it again and again; `param` is that of who asks."""
    held.go.set()
    held.ends = GrammarError("it is too large")
    for param in ("guided_regex", "structured_outputs.regex"):
        with pytest.raises(APIError, match=f"'{param}': it is too large"):
            asyncio.run(cache.get(SPEC._replace(param=param)))
    assert len(held.texts) == 1
    later = grammar_cache.time.monotonic() + grammar_cache.REFUSED_SECONDS
    monkeypatch.setattr(grammar_cache.time, "monotonic", lambda: later)
    held.ends = "a grammar"
    assert asyncio.run(cache.get(SPEC)).kind == "regex"


def test_no_more_refusals_are_remembered_than_grammars_are_kept(cache, held, monkeypatch):
    monkeypatch.setattr(grammar_cache, "KEPT", 2)
    held.go.set()
    held.ends = GrammarError("it is too large")
    for spec in words(4):
        with pytest.raises(APIError):
            asyncio.run(cache.get(spec))
    assert [text for _, text, _ in cache._jobs] == ["word2", "word3"]


def test_what_nobody_waits_for_is_given_up(cache, held):
    """Clients that leave at once could have taken all places for as long as their grammars took."""

    async def leave():
        begun = [asyncio.create_task(cache.get(spec)) for spec in words(2)]
        await until(lambda: len(held.texts) == 2)
        left = [asyncio.create_task(cache.get(spec)) for spec in words(64)[2:] for _ in range(2)]
        stays = asyncio.create_task(cache.get(words(3)[2]))  # as two of those that leave
        await asyncio.sleep(0)
        with pytest.raises(APIError, match="Too many grammars"):
            await cache.get(SPEC)
        for task in (*begun, *left):
            task.cancel()
        await asyncio.wait((*begun, *left))
        assert [text for _, text, _ in cache._jobs] == ["word2"]
        assert all(stop.is_set for stop in held.stops)
        again = asyncio.create_task(cache.get(words(1)[0]))
        held.go.set()
        await asyncio.gather(stays, again)

    asyncio.run(leave())
    assert len(held.texts) == 4
    assert [stop.is_set for stop in held.stops] == [True, True, False, False]


def test_what_is_not_compiled_in_time_is_given_up(cache, held, monkeypatch):
    monkeypatch.setattr(grammar_cache, "WAIT_SECONDS", 0.01)

    async def wait():
        found = await asyncio.gather(*map(cache.get, words(4)), return_exceptions=True)
        assert [error.status for error in found] == [503] * 4
        assert all("not compiled in time" in error.message for error in found)

    asyncio.run(wait())
    assert not cache._jobs
