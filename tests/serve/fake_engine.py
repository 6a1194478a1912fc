"""A scripted engine on a thread of its own: what the HTTP layer sees of a real one, without a model."""

import queue
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from serve.request import (
    EngineStats,
    EngineUnavailable,
    GenerationRequest,
    OutputCallback,
    PromptLogprob,
    RequestRejected,
    TokenCallback,
    TokenOutput,
)


@dataclass
class Script:
    """What a request gets: these tokens, one a step, then `finish`; with `cycle` over and over to `max_tokens`."""

    tokens: Sequence[int]
    finish: str = "length"  # after the last token; "none": hangs until aborted
    cycle: bool = False
    delay: float = 0.0  # seconds before each token
    cached_tokens: int = 0
    error: str | None = None
    bad_grammar: bool = False  # whose error it is
    follow: bool = False  # any tokens that the request's grammar allows instead, to its end


class FakeEngine:
    """Answers every request with `script`; `scripts` maps the first choices to scripts of their own."""

    def __init__(self, script: Script, max_model_len: int = 512, vocab_size: int = 264) -> None:
        self.script = script
        self.scripts: dict[int, Script] = {}
        self.wait_for_choice: dict[int, int] = {}  # a choice that starts only when the other one has ended
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.eos_token_ids = (0, 2)
        self.ready = True
        self.reject: Exception | None = None
        self.requests: list[GenerationRequest] = []
        self.aborted: list[tuple[str, int | None]] = []
        self.generated = 0
        self._queue: queue.Queue[tuple[GenerationRequest, OutputCallback, TokenCallback | None] | None]
        self._queue = queue.Queue()
        self._live: set[tuple[str, int]] = set()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, daemon=True, name="fake-engine")
        self._thread.start()

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(timeout=10)

    def submit(
        self, request: GenerationRequest, on_output: OutputCallback, on_token: TokenCallback | None = None
    ) -> None:
        if isinstance(self.reject, (RequestRejected, EngineUnavailable)):
            raise self.reject
        self.requests.append(request)
        with self._lock:
            self._live |= {(request.request_id, c) for c in range(request.n)}
        self._queue.put((request, on_output, on_token))

    def abort(self, request_id: str, choice: int | None = None) -> None:
        with self._lock:
            self.aborted.append((request_id, choice))
            self._live = {
                key for key in self._live if key[0] != request_id or (choice is not None and key[1] != choice)
            }

    @property
    def live(self) -> int:
        """Choices that still generate."""
        with self._lock:
            return len(self._live)

    def stats(self) -> EngineStats:
        return EngineStats(
            requests_running=self.live,
            pages_used=5,
            pages_stored=2,
            pages_total=12,
            generation_tokens_total=self.generated,
            prefix_hit_tokens_total=7,
            host_bytes=5,
            restored_tokens_total=6,
            retention_reached=0.5,
        )

    def _run(self) -> None:
        """Every step gives one token to every running choice."""
        running: list[_Choice] = []
        while True:
            try:
                item = self._queue.get(block=not running, timeout=None)
                if item is None:
                    return
                request, on_output, on_token = item
                running += [
                    _Choice(request, c, self.scripts.get(c, self.script), on_output, on_token)
                    for c in range(request.n)
                ]
                continue  # let requests that came together start together
            except queue.Empty:
                pass
            time.sleep(max((choice.script.delay for choice in running), default=0.0))
            running = [choice for choice in running if self._step(choice)]

    def _step(self, choice: "_Choice") -> bool:
        key = (choice.request.request_id, choice.index)
        with self._lock:
            if key not in self._live:
                return False
            if (choice.request.request_id, self.wait_for_choice.get(choice.index)) in self._live:
                return True
        output = choice.next_output()
        if output is None:
            time.sleep(0.001)
            return True
        self.generated += output.token_id is not None
        choice.hand_over(output)
        if output.finish_reason is not None:
            with self._lock:
                self._live.discard(key)
            return False
        return True


class _Choice:
    def __init__(
        self,
        request: GenerationRequest,
        index: int,
        script: Script,
        on_output: OutputCallback,
        on_token: TokenCallback | None,
    ) -> None:
        self.request, self.index, self.script = request, index, script
        self._on_output, self._on_token = on_output, on_token
        self.position = 0
        grammar = request.sampling.grammar
        self.grammar = grammar.start() if grammar else None
        self._random = random.Random(index)
        self._ended = False

    def hand_over(self, output: TokenOutput) -> None:
        """As an engine does: a token by itself where it is nothing else."""
        token = output.token_id
        if self._on_token and token is not None and output == TokenOutput(choice=self.index, token_id=token):
            self._on_token(self.index, token)
        else:
            self._on_output(output)

    def _follow(self) -> TokenOutput:
        """A token that the grammar allows, or the end that it has come to."""
        assert self.grammar is not None
        allowed = np.flatnonzero(np.unpackbits(self.grammar.mask.view(np.uint8), bitorder="little")).tolist()
        token = self._random.choice(allowed)
        if self._ended or token in (0, 2):
            return TokenOutput(
                choice=self.index, token_id=None if self._ended else token, finish_reason="stop"
            )
        self.position += 1
        self._ended = self.grammar.advance(token)
        return TokenOutput(choice=self.index, token_id=token)

    def next_output(self) -> TokenOutput | None:
        script, sampling = self.script, self.request.sampling
        if self.position == 0 and script.error is not None:
            return TokenOutput(
                choice=self.index,
                finish_reason="error",
                error=script.error,
                bad_grammar=script.bad_grammar,
            )
        if script.follow:
            return self._follow()
        if self.position >= len(script.tokens) and not script.cycle:
            return None if script.finish == "none" else TokenOutput(choice=self.index, finish_reason="length")
        token = script.tokens[self.position % len(script.tokens)]
        self.position += 1
        output = TokenOutput(choice=self.index, token_id=token)
        if sampling.logprobs is not None:
            output.logprob = -0.5
            output.top_logprobs = [(token + i, -0.5 - i) for i in range(sampling.logprobs)]
        if self.position == 1:
            output.cached_tokens = script.cached_tokens
            if self.index == 0 and sampling.prompt_logprobs is not None:
                output.prompt_logprobs = self._prompt_logprobs(sampling.prompt_logprobs)
        last = self.position == len(script.tokens) and not script.cycle
        if last and script.finish in ("stop", "length", "abort"):
            output = replace(output, finish_reason=script.finish)
        if self.position == sampling.max_tokens and output.finish_reason is None:
            output = replace(output, finish_reason="length")
        return output

    def _prompt_logprobs(self, num_top: int) -> list[PromptLogprob | None]:
        rest = self.request.prompt_ids[1:]
        return [None, *(PromptLogprob(-1.0, [(i, -1.0)][:num_top]) for i in rest)]
