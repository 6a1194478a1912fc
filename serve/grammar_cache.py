"""Compiles the grammars of requests beside the event loop and the engine, and keeps those that were used last."""

import asyncio
import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from serve.errors import unavailable
from serve.grammar import Grammar, GrammarError, Vocabulary
from serve.structured import GrammarSpec
from serve.text import TextTokenizer

KEPT = 128  # compiled grammars; one may take megabytes
MOST_WAITING = 64
WAIT_SECONDS = 60.0
REFUSED_SECONDS = 60.0  # after which a refused grammar is tried again: it may have failed for want of time

log = logging.getLogger("tangram.grammar")

type _Key = tuple[str, str, str]


class _Refusal(NamedTuple):
    fault: str
    until: float  # time.monotonic()


type _Future = Future[Grammar | _Refusal]


class GrammarCache:
    """One for a server. The vocabulary is built at once, in a thread: for that long no other thread runs."""

    def __init__(self, tokenizer: TextTokenizer, vocab_size: int, end_ids: Collection[int]) -> None:
        self._source = tokenizer, vocab_size, end_ids
        self._vocabulary: Vocabulary | None = None
        self._building = threading.Lock()
        # On the event loop alone.
        self._grammars: OrderedDict[_Key, _Future] = OrderedDict()
        self._waiting: Counter[_Future] = Counter()
        self._executor = ThreadPoolExecutor(2, "grammar")
        self._executor.submit(self._known)  # what is wrong with it, the first grammar says

    async def get(self, spec: GrammarSpec) -> Grammar:
        """The compiled grammar. Requests that come together with the same one wait for one compilation.

        Raises APIError: 400 with what is wrong, 503 when too many others are being compiled. Cancelled, it takes what has
        not begun and nobody else waits for out of the queue.
        """
        key = spec.kind, spec.text, spec.thoughts
        future = self._grammars.get(key)
        if future is None or _is_over(future):
            if sum(not f.done() for f in self._grammars.values()) >= MOST_WAITING:
                raise unavailable("Too many grammars are being compiled: try again later.")
            future = self._grammars[key] = self._executor.submit(self._compile, spec)
            while len(self._grammars) > KEPT:
                self._grammars.popitem(last=False)
        self._grammars.move_to_end(key)
        self._waiting[future] += 1
        try:
            # Not cancelled with this request: others may wait for it.
            found = await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(future)), WAIT_SECONDS)
        except TimeoutError:
            raise unavailable(
                "The grammar of this request was not compiled in time: try again later."
            ) from None
        except OSError as error:  # no files or memory for a process: a later one may have more luck
            self._forget(key, future)
            log.warning("A grammar could not be tried: %s", error)
            raise unavailable("The server cannot compile a grammar now: try again later.") from None
        except Exception:
            self._forget(key, future)
            raise
        finally:
            self._leave(key, future)
        if isinstance(found, _Refusal):
            raise spec.error(found.fault)
        return found

    def _leave(self, key: _Key, future: _Future) -> None:
        """A request no longer waits; what has not begun has to have one that does."""
        self._waiting[future] -= 1
        if not self._waiting[future]:
            del self._waiting[future]
            if future.cancel():
                self._forget(key, future)

    def _forget(self, key: _Key, future: _Future) -> None:
        if self._grammars.get(key) is future:
            del self._grammars[key]

    def _known(self) -> Vocabulary:
        with self._building:
            if self._vocabulary is None:
                self._vocabulary = Vocabulary(*self._source)
        return self._vocabulary

    def _compile(self, spec: GrammarSpec) -> Grammar | _Refusal:
        try:
            vocabulary = self._known()
            if spec.thoughts:  # its own faults, and a trial that is not spent on thoughts
                vocabulary.compile(spec._replace(thoughts="").lark)
            grammar = vocabulary.compile(spec.lark)
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
        """Nothing more is compiled."""
        self._executor.shutdown(wait=False, cancel_futures=True)


def _is_over(future: _Future) -> bool:
    """Whether a grammar is to be compiled anew."""
    if not future.done():
        return False
    if future.exception() is not None:  # its clients had left before it failed
        return True
    found = future.result()
    return isinstance(found, _Refusal) and found.until <= time.monotonic()
