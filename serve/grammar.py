"""Grammars that bound what is generated: compiled once, then followed token by token for every choice.

`llguidance` does the parsing. It sees tokens as the bytes that they stand for, so any tokenizer will do.
"""

import contextlib
import json
import logging
import re
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from llguidance.numpy import get_bitmask_shape

from serve.grammar_trial import parser_limits
from serve.text import TextTokenizer

TRIAL_SECONDS = 20.0  # after which a trial is ended; by itself it ends after far fewer seconds of a processor
# Seconds of the engine's thread, in which all others wait, after which a choice ends: so many, and more for every token.
SLOW_STEP, SLOW_TOKEN = 0.25, 0.002
# Without it the text that must come next is put into tokens by the tokenizer: that calls Python from the engine's thread,
# and knows no limit (`x{1000}` nested three times).
_NO_FORCING = '\n%llguidance {"no_forcing": true}\n'
_TRIAL = Path(__file__).with_name("grammar_trial.py")

log = logging.getLogger("tangram.grammar")


class GrammarError(ValueError):
    """A grammar that cannot be followed, with what is wrong: the fault of who wrote it."""


class GrammarFailure(RuntimeError):
    """A choice whose grammar cannot be followed any further: it ends with an error."""


def _plain(message: str) -> str:
    """An error of the library on one line, without its drawings of where it is."""
    lines = [line for line in message.splitlines() if line and not line[0].isspace() and line[0] != "<"]
    return re.sub(r"^at (\d+)\((\d+)\):", r"line \1, column \2:", " ".join(lines))[:500]


class Stop:
    """Ends the trial of a grammar from another thread, now or as soon as it begins."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._trial: subprocess.Popen[bytes] | None = None
        self.is_set = False

    def set(self) -> None:
        with self._lock:
            self.is_set = True
            if self._trial is not None:
                self._trial.kill()

    @contextlib.contextmanager
    def ending(self, trial: "subprocess.Popen[bytes]") -> Iterator[None]:
        """Ends this trial, at the end of the block at the latest."""
        with self._lock:
            self._trial = trial
            if self.is_set:
                trial.kill()
        try:
            yield
        finally:
            trial.kill()
            with self._lock:
                self._trial = None


class Vocabulary:
    """What the library knows of a tokenizer. Takes a second or two for a large one."""

    def __init__(self, tokenizer: TextTokenizer, vocab_size: int, end_ids: Collection[int]) -> None:
        """Tokens from `vocab_size` on do not exist; those below it that stand for no bytes are never allowed.

        `end_ids` end a generation: all are allowed where a grammar may end. Raises GrammarError without any.
        """
        self.size = vocab_size
        self.end_ids = frozenset(i for i in end_ids if i < vocab_size)
        if not self.end_ids:
            raise GrammarError("the model has no token that ends a text, so that no grammar could end")
        self.special = {
            i: tokenizer.token_bytes(i).decode("utf-8", "replace")
            for i in sorted(tokenizer.special_ids)
            if i < vocab_size
        }
        self.end_mask = np.zeros(get_bitmask_shape(1, vocab_size)[1], np.uint32)
        for i in self.end_ids:
            self.end_mask[i // 32] |= np.uint32(1 << i % 32)
        ends = sorted(self.end_ids)
        self.tokenizer = LLTokenizer(
            TokenizerWrapper(_Tokens(tokenizer, vocab_size, self.special, ends[0])),
            n_vocab=vocab_size,
            eos_token=ends,
        )

    def compile(self, text: str, stop: Stop | None = None) -> "Grammar":
        """A grammar in Lark's notation as the library has it. Raises GrammarError. Call it from a worker thread.

        It is tried in another process first, which can be ended and may crash; `stop` ends that.
        """
        began = time.perf_counter()
        text += _NO_FORCING
        self._try(text, stop)
        tried = time.perf_counter()
        matcher = LLMatcher(self.tokenizer, text, log_level=0, limits=parser_limits())
        if matcher.is_error():
            raise GrammarError(_plain(matcher.get_error()))
        grammar = Grammar(self, matcher)
        log.debug(
            "A grammar of %d characters: tried in %.0f ms, compiled in %.0f ms",
            len(text), (tried - began) * 1e3, (time.perf_counter() - tried) * 1e3,
        )  # fmt: skip
        return grammar

    def _try(self, text: str, stop: Stop | None) -> None:
        given = json.dumps({"grammar": text, "vocab": self.size, "special": self.special}).encode()
        command = [sys.executable, "-P", str(_TRIAL)]  # -P: files beside it have the names of other modules
        pipe = subprocess.PIPE
        with (
            subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe) as trial,
            (stop or Stop()).ending(trial),
        ):
            try:
                said, failed = trial.communicate(given, timeout=TRIAL_SECONDS)
            except subprocess.TimeoutExpired:
                raise GrammarError("it takes too long to compile: make it simpler") from None
        if trial.returncode < 0:  # by a signal: no stack, memory or time was left
            raise GrammarError("it is too large, or nested too deep, to be compiled: make it simpler")
        if trial.returncode:
            raise RuntimeError(f"grammars cannot be tried out: {failed.decode(errors='replace')[-500:]}")
        if said:
            raise GrammarError(_plain(said.decode("utf-8", "replace")))


class _Tokens:
    """The attributes that the library reads of a tokenizer. Nothing is ever encoded: see `_NO_FORCING`."""

    bos_token_id = None

    def __init__(self, tokenizer: TextTokenizer, size: int, special: Collection[int], end_id: int) -> None:
        self.tokens = [tokenizer.token_bytes(i) for i in range(size)]
        self.special_token_ids = sorted(special)
        self.eos_token_id = end_id
        self._encode = tokenizer.encode

    def __call__(self, text: bytes) -> list[int]:
        return self._encode(text.decode("utf-8", "replace"), add_special_tokens=False)


class Grammar:
    """A compiled grammar. May be shared: every choice gets a state of its own."""

    kind = ""  # for /metrics

    def __init__(self, vocabulary: Vocabulary, matcher: Any) -> None:
        self._vocabulary, self._matcher = vocabulary, matcher
        self._lock = threading.Lock()
        self._first = np.zeros_like(vocabulary.end_mask)
        _fill(matcher, self._first)
        if matcher.is_error():
            raise GrammarError(_plain(matcher.get_error()))
        if not (self._first & ~vocabulary.end_mask).any():
            raise GrammarError("it allows no text at all, or only the empty one")

    def start(self, *, ignore_end: bool = False) -> "GrammarState":
        """The state before the first token. `ignore_end`: go on as long as the grammar can. Raises GrammarFailure."""
        with self._lock:  # the library refuses to copy what another thread uses
            try:
                matcher = self._matcher.deep_copy()
            except BaseException as panic:
                raise _failure(panic) from panic
        return GrammarState(matcher, self._first.copy(), self._vocabulary, ignore_end)


class GrammarState:
    """Where one choice is in its grammar. `mask` u32[mask_words(V)] has the bits of the tokens that may come next."""

    def __init__(self, matcher: Any, mask: np.ndarray, vocabulary: Vocabulary, ignore_end: bool) -> None:
        self._matcher, self._vocabulary, self._ignore_end = matcher, vocabulary, ignore_end
        self.mask = mask
        self._left = SLOW_STEP
        self._only_end()

    def advance(self, token: int) -> bool:
        """Take a token in that the mask allowed and is no end token; True if nothing but an end can follow.

        Raises GrammarFailure where the grammar cannot go on.
        """
        began = time.thread_time()
        try:
            if self._matcher.consume_token(token):
                if self._matcher.is_stopped() and not self._matcher.is_error():
                    self.mask[:] = self._vocabulary.end_mask
                    return True
                _fill(self._matcher, self.mask)
            error = self._matcher.get_error()
        except BaseException as panic:
            raise _failure(panic) from panic
        if error:
            raise _failure(error)
        self._left = min(SLOW_STEP, self._left + SLOW_TOKEN - (time.thread_time() - began))
        if self._left < 0:
            raise GrammarFailure(
                "the grammar of this request takes too long for every token: make it simpler"
            )
        return self._only_end()

    def _only_end(self) -> bool:
        """Whether nothing but an end can follow."""
        others = self.mask & ~self._vocabulary.end_mask
        if not others.any():
            return True
        if self._ignore_end:
            self.mask[:] = others
        return False


def _failure(why: BaseException | str) -> BaseException:
    """The GrammarFailure for an error or a panic of the library, which is no Exception; what ends the process as it is."""
    if isinstance(why, (KeyboardInterrupt, SystemExit)):
        return why
    said = why if isinstance(why, str) else f"{type(why).__name__}: {why}"
    return GrammarFailure(
        f"the grammar of this request cannot be followed any further, make it simpler: {_plain(said)}"
    )


def _fill(matcher: Any, mask: np.ndarray) -> None:
    matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
