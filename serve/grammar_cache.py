"""Compiles the grammars of requests beside the event loop and the engine, and keeps those that were used last."""

import asyncio
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from serve.errors import unavailable
from serve.grammar import Grammar, GrammarError, Stop, Vocabulary
from serve.structured import GrammarSpec
from serve.text import TextTokenizer

KEPT = 128  # compiled grammars; one may take megabytes
MOST_WAITING = 64
WAIT_SECONDS = 60.0
REFUSED_SECONDS = 60.0  # after which a refused grammar is tried again: it may have failed for want of time

log = logging.getLogger("tangram.grammar")

type _Key = tuple[str, str, str]


class Grammars(Protocol):
    """Where requests get their grammars."""

    async def get(self, spec: GrammarSpec) -> Grammar:
        """The compiled grammar. Raises APIError: 400 with what is wrong, 503 when too many others are being compiled."""

    def close(self) -> None:
        """Nothing more is compiled."""


class _Refusal(NamedTuple):
    fault: str
    until: float  # time.monotonic()


@dataclass(eq=False)
class _Job:
    """A compilation, and how many requests wait for it."""

    future: Future[Grammar | _Refusal]
    stop: Stop
    waiting: int = 0

    @property
    def is_over(self) -> bool:
        """Whether the grammar is to be compiled anew."""
        if not self.future.done():
            return False
        if self.future.exception() is not None:  # and whoever waited was cancelled just then
            return True
        found = self.future.result()
        return isinstance(found, _Refusal) and found.until <= time.monotonic()


class GrammarCache:
    """One for a server. The vocabulary is built at once, in a thread: for that long no other thread runs."""

    def __init__(self, tokenizer: TextTokenizer, vocab_size: int, end_ids: Collection[int]) -> None:
        self._source = tokenizer, vocab_size, end_ids
        self._vocabulary: Vocabulary | None = None
        self._building = threading.Lock()
        # On the event loop alone.
        self._jobs: OrderedDict[_Key, _Job] = OrderedDict()
        self._executor = ThreadPoolExecutor(2, "grammar")
        self._executor.submit(self._known)  # what is wrong with it, the first grammar says

    async def get(self, spec: GrammarSpec) -> Grammar:
        """See Grammars. Requests that come together with the same one wait for one compilation.

        It ends when the last of them is cancelled.
        """
        key = spec.kind, spec.text, spec.thoughts
        job = self._jobs.get(key)
        if job is None or job.is_over:
            if sum(not job.future.done() for job in self._jobs.values()) >= MOST_WAITING:
                raise unavailable("Too many grammars are being compiled: try again later.")
            stop = Stop()
            job = self._jobs[key] = _Job(self._executor.submit(self._compile, spec, stop), stop)
            while len(self._jobs) > KEPT:
                self._jobs.popitem(last=False)
        self._jobs.move_to_end(key)
        job.waiting += 1
        try:
            # Not cancelled with this request: others may wait for it.
            found = await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(job.future)), WAIT_SECONDS)
        except TimeoutError:
            raise unavailable(
                "The grammar of this request was not compiled in time: try again later."
            ) from None
        except OSError as error:  # no files or memory for a process: a later one may have more luck
            self._forget(key, job)
            log.warning("A grammar could not be tried: %s", error)
            raise unavailable("The server cannot compile a grammar now: try again later.") from None
        except Exception:
            self._forget(key, job)
            raise
        finally:
            job.waiting -= 1
            if not job.waiting and not job.future.done():
                job.stop.set()
                job.future.cancel()
                self._forget(key, job)
        if isinstance(found, _Refusal):
            raise spec.error(found.fault)
        return found

    def _forget(self, key: _Key, job: _Job) -> None:
        if self._jobs.get(key) is job:
            del self._jobs[key]

    def _known(self) -> Vocabulary:
        with self._building:
            if self._vocabulary is None:
                self._vocabulary = Vocabulary(*self._source)
        return self._vocabulary

    def _compile(self, spec: GrammarSpec, stop: Stop) -> Grammar | _Refusal:
        try:
            vocabulary = self._known()
            if spec.thoughts:  # its own faults, and a trial that is not spent on thoughts
                vocabulary.compile(spec._replace(thoughts="").lark, stop)
            grammar = vocabulary.compile(spec.lark, stop)
            grammar.kind = spec.kind
            return grammar
        except GrammarError as error:
            fault = str(error)
        except Exception:
            raise
        except BaseException as panic:  # those of the library are no Exception, and would end the event loop
            fault = f"it cannot be compiled ({type(panic).__name__})"
        return _Refusal(fault, time.monotonic() + REFUSED_SECONDS)

    def close(self) -> None:
        """See Grammars."""
        self._executor.shutdown(wait=False, cancel_futures=True)
