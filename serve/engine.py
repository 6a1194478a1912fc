"""The batching loop: one thread that owns the cache, dispatching step n+1 before it reads the tokens of step n."""

import contextlib
import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from serve.engine_numbers import EngineNumbers
from serve.grammar import GrammarFailure
from serve.handles import Handles, Sampled
from serve.limits import Limits
from serve.request import (
    EngineStats,
    EngineUnavailable,
    FinishReason,
    GenerationRequest,
    OutputCallback,
    RequestRejected,
    TokenCallback,
    TokenOutput,
    as_outputs,
)
from serve.runner import Runner
from serve.scheduler import Scheduler
from serve.sequence import ChunkWork, Phase, Sequence

MOST_REQUESTS = 4096  # that run or wait
NOT_NUMBERS = "the model's logits are not numbers: its weights are damaged, or too large for --dtype float16"
NO_TOKEN = -1  # what the sampler says then
PIPELINE = 2  # steps under way at most: one on the device, one queued behind it

log = logging.getLogger("tangram.engine")


def _bad_grammar(choice: int, error: GrammarFailure) -> TokenOutput:
    return TokenOutput(choice=choice, finish_reason="error", error=str(error), bad_grammar=True)


@dataclass(frozen=True)
class _UnderWay:
    handles: list[Handles]
    chunks: list[ChunkWork]


class Engine:
    """Implements EngineProtocol. `start` compiles, then serves from its own thread until `stop`.

    It lives through failed steps. Where the device cannot be used any more it ends by itself: `failed` is true then, and
    `on_failure` is called, from the engine's thread, once all requests have got their error.
    """

    def __init__(self, runner: Runner, limits: Limits, *, num_pages: int, seed: int = 0) -> None:
        self._runner, self._limits, self._num_pages = runner, limits, num_pages
        self._random = random.Random(seed)
        self._scheduler = Scheduler(runner.plan, limits, num_pages, runner)
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition(threading.RLock())
        self._sequences: dict[str, list[Sequence]] = {}
        self._under_way: deque[_UnderWay] = deque()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._ready = False  # whether requests are taken in; changed under `_wake`
        self.failed = False
        self.on_failure: Callable[[], None] = lambda: None
        self._arrivals = 0
        self._numbers = EngineNumbers(runner, limits, num_pages)

    # The side of the HTTP layer: any thread

    @property
    def max_model_len(self) -> int:
        return self._limits.max_model_len

    @property
    def vocab_size(self) -> int:
        return self._runner.config.vocab_size

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self._runner.config.eos_token_ids

    @property
    def ready(self) -> bool:
        return self._ready and self._thread is not None and self._thread.is_alive()

    def submit(
        self, request: GenerationRequest, on_output: OutputCallback, on_token: TokenCallback | None = None
    ) -> None:
        """See EngineProtocol."""
        self._scheduler.check(len(request.prompt_ids), request.sampling.max_tokens, request.retention)
        try:
            self._runner.check_sampling(request.sampling)
        except ValueError as error:  # here, where it ends this request alone
            raise RequestRejected(str(error)) from error
        with self._wake:
            if not self.ready or self._stopping:
                raise EngineUnavailable("the engine is not running")
            # Some wait to be taken in.
            if len(self._sequences) + len(self._commands) >= MOST_REQUESTS:
                raise EngineUnavailable(f"{MOST_REQUESTS} requests are queued already: try again later")
            self._tell(lambda: self._add(request, on_output, on_token))

    def abort(self, request_id: str, choice: int | None = None) -> None:
        """See EngineProtocol. The row stays for the next turn: of an ended choice, of an ended request its first one's."""
        self._tell(lambda: self._abort(request_id, choice))

    def stats(self) -> EngineStats:
        """The last snapshot, of some milliseconds and a step ago at most. Before an answer's end is known its last steps
        may be missing: of an engine that is idle nothing is.
        """
        return self._numbers.snapshot

    def start(self, progress: Callable[[str], None] | None = None) -> None:
        """Compile every program, then run the loop in a thread. Blocks while compiling."""
        began = time.perf_counter()
        log.info("Compiling all programs: a minute or two, seconds where an earlier start has kept them")
        for name in self._runner.warm_up():
            if progress:
                progress(name)
        log.info("Compiled all programs in %.1f s", time.perf_counter() - began)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._numbers.update(self._scheduler, busy=False)
        self._ready = True
        self._thread.start()

    def stop(self, timeout: float = 30.0) -> None:
        """End the loop; what still runs ends with "abort"."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread:
            self._thread.join(timeout)

    def _tell(self, command: Callable[[], None]) -> None:
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    # The engine's thread

    def _run(self) -> None:
        self._runner.claim()
        while not self._stopping:
            with self._wake:
                while not (self._commands or self._under_way or self._busy or self._stopping):
                    self._wake.wait()
            try:
                self._obey()
                self.step()
            except Exception as error:
                if not self._recover(error):
                    break
        with self._wake:
            self._ready = False  # nothing is taken in from here on, so that nobody waits for nothing
        while self._commands:
            try:
                self._obey()
            except Exception:  # e.g. to give back a row of a device that is lost
                log.exception("A command failed while the engine stops")
        if self.failed:
            self._end_all("error", "the engine has lost its device and stops")
            self._numbers.snapshot = replace(self._numbers.snapshot, requests_running=0, requests_waiting=0)
            self.on_failure()
        else:
            with contextlib.suppress(Exception):
                self._read_all()  # a process that ends while copies of results are under way is aborted
            self._end_all("abort")

    def _end_all(self, reason: FinishReason, message: str | None = None) -> None:
        """What runs or waits ends; the rows are not looked after."""
        for sequences in list(self._sequences.values()):
            for sequence in sequences:
                self._emit(sequence, TokenOutput(choice=sequence.choice, finish_reason=reason, error=message))
        self._sequences.clear()

    def _obey(self) -> None:
        """Run the commands that wait now; one that fails leaves those behind it in the queue."""
        for _ in range(len(self._commands)):
            self._commands.popleft()()

    @property
    def _busy(self) -> bool:
        return bool(self._scheduler.running or self._scheduler.waiting)

    def step(self) -> None:
        """Dispatch what can run, then read the oldest results once enough is under way (or nothing else is to do)."""
        work = self._scheduler.schedule()
        if work:
            handles = self._runner.run(work, self._read_all)
            choices = self._scheduler.after_dispatch(work)
            self._under_way.append(_UnderWay([handles, *self._runner.sample_again(choices)], work.chunks))
            self._numbers.steps += 1
            self._numbers.prefilled += sum(len(chunk.tokens) for chunk in work.chunks)
        if self._under_way and (not work or len(self._under_way) >= PIPELINE):
            self._read_oldest()
        self._numbers.update(self._scheduler, busy=bool(self._busy or self._under_way))

    def _read_all(self) -> None:
        while self._under_way:
            self._read_oldest()

    def _read_oldest(self) -> None:
        done = self._under_way.popleft()
        for handles in done.handles:
            self._read(handles, done.chunks)

    def _recover(self, error: Exception) -> bool:
        """A step failed on the device: everything in the cache is lost, the engine is not, unless False comes back.

        What has not begun still waits. Copies in host memory go, too: the latest may be of what the step has spoilt.
        """
        log.exception("A step failed; all running requests end with an error")
        # Where nothing else ran, what was to be let in has failed itself, and would for ever.
        first = not (self._under_way or self._scheduler.running)
        self._under_way.clear()
        new = {s for s in self._scheduler.waiting if not s.generated}
        waits = [i for i, sequences in self._sequences.items() if new.issuperset(sequences)]
        waiting = {i: self._sequences.pop(i) for i in waits[first:]}
        self._end_all("error", f"the engine failed while running this request: {type(error).__name__}")
        self._sequences.update(waiting)
        self._numbers.retire(self._scheduler)
        self._scheduler.forget()
        try:
            self._runner.reset()
        except Exception:  # a GPU whose context is lost fails at everything from now on
            log.critical("The device cannot be used any more: the engine stops", exc_info=True)
            self.failed = True
            return False
        self._scheduler = Scheduler(self._runner.plan, self._limits, self._num_pages, self._runner)
        for sequence in (s for sequences in waiting.values() for s in sequences):
            sequence.budgets = self._scheduler.budgets(sequence.request.retention)
            self._scheduler.add(sequence)
        self._numbers.update(self._scheduler, busy=False)
        return True

    def _add(
        self, request: GenerationRequest, on_output: OutputCallback, on_token: TokenCallback | None = None
    ) -> None:
        if request.request_id in self._sequences:
            sequence = Sequence(request, 0, on_output, 0, 0, self._runner.plan.group_ppm)
            message = f"request id {request.request_id} is in use"
            self._emit(sequence, TokenOutput(finish_reason="error", error=message))
            return
        how, base = request.sampling, request.sampling.seed
        stops = frozenset(how.stop_token_ids) | {*self._runner.config.eos_token_ids, NO_TOKEN}
        made: list[Sequence] = []
        for choice in range(request.n):
            seed = self._random.getrandbits(63) if base is None else base + choice  # taken modulo 2**64
            self._arrivals += 1
            budgets, first = self._scheduler.budgets(request.retention), made[0] if made else None
            made.append(Sequence(request, choice, on_output, seed, self._arrivals, budgets, parent=first))
            made[-1].on_token, made[-1].stops = on_token, stops
        self._sequences[request.request_id] = made  # so that whatever fails from here on ends them
        try:
            for sequence in made:
                sequence.grammar = how.grammar.start(ignore_end=how.ignore_eos) if how.grammar else None
        except GrammarFailure as error:
            del self._sequences[request.request_id]
            for sequence in made:
                self._emit(sequence, _bad_grammar(sequence.choice, error))
            return
        for sequence in made:
            self._scheduler.add(sequence)

    def _abort(self, request_id: str, choice: int | None) -> None:
        for sequence in list(self._sequences.get(request_id, ())):
            if choice is None or sequence.choice == choice:
                # Of a client that left, the first choice: it may come back with the same conversation.
                sequence.keep = choice is not None or sequence.choice == 0
                self._end(sequence)

    def _end(self, sequence: Sequence) -> None:
        sequence.hand_over = None
        self._numbers.update_soon()
        self._scheduler.end(sequence)
        alive = self._sequences.get(sequence.request.request_id, [])
        if sequence in alive:
            alive.remove(sequence)
        if not alive:
            self._sequences.pop(sequence.request.request_id, None)

    # Results

    def _read(self, handles: Handles, chunks: list[ChunkWork]) -> None:
        if handles.prompt:
            handles.prompt.note(chunks[0])
        if (tokens := handles.tokens_alone()) is not None:
            self._take_tokens(handles.sequences, tokens)
            return
        for sequence, wrong, sampled in handles.results():
            if handles.counts is not None:
                self._scheduler.drafting.note(sequence, wrong, len(sampled))
            for one in sampled:
                self._take(sequence, one)

    def _take_tokens(self, sequences: list[Sequence | None], tokens: list[int]) -> None:
        """The next token of each of many sequences: `_take` without what those need not that only go on."""
        for sequence, token in zip(sequences, tokens, strict=False):
            if sequence is None:
                continue
            hand_over, so_far = sequence.hand_over, sequence.tokens
            if not hand_over or token in sequence.stops or len(so_far) + 1 >= sequence.most_tokens:
                self._take(sequence, Sampled(token))
                continue
            sequence.in_flight -= 1
            so_far.append(token)
            self._numbers.generated += 1
            try:
                hand_over(sequence.choice, token)
            except Exception:  # see `_emit`
                log.exception("The receiver of request %s failed", sequence.request.request_id)

    def _take(self, sequence: Sequence, sampled: Sampled) -> None:
        """The next token of a sequence."""
        sequence.in_flight -= 1
        if sequence.phase is Phase.ENDED:
            return
        if sampled.token == NO_TOKEN:
            self._give_up(sequence)
            return
        if sequence.tokens is sequence.request.prompt_ids:
            sequence.tokens = [*sequence.tokens]  # its own from here on
        sequence.tokens.append(sampled.token)
        if sequence.phase is Phase.CLOSING:
            self._scheduler.close(sequence)
            return
        self._numbers.generated += 1
        if sequence.choice == 0 and len(sequence.tokens) == sequence.prompt_length + 1:
            self._numbers.prompt += sequence.prompt_length
        output = TokenOutput(
            choice=sequence.choice, token_id=sampled.token, logprob=sampled.logprob, top_logprobs=sampled.top
        )
        output.finish_reason = self._finish_reason(sequence, sampled.token)
        last = self._follow_grammar(sequence, output)
        if output.finish_reason or last:
            self._end(sequence)
        self._emit(sequence, output)
        if last:
            self._emit(sequence, last)

    def _give_up(self, sequence: Sequence) -> None:
        """Of a sequence whose next logits are not numbers nothing is stored."""
        sequence.keep = False
        if sequence.phase is Phase.CLOSING:
            self._scheduler.close(sequence)
            return
        log.error("Request %s: %s", sequence.request.request_id, NOT_NUMBERS)
        self._end(sequence)
        self._emit(sequence, TokenOutput(choice=sequence.choice, finish_reason="error", error=NOT_NUMBERS))

    def _finish_reason(self, sequence: Sequence, token: int) -> FinishReason | None:
        params = sequence.sampling
        made = len(sequence.tokens) - sequence.prompt_length
        if made >= params.min_tokens:
            if token in params.stop_token_ids:
                return "stop"
            if not params.ignore_eos and token in self._runner.config.eos_token_ids:
                return "stop"
        if sequence.grammar and token in self._runner.config.eos_token_ids:
            return "stop"  # the grammar has let it pass
        return "length" if made >= params.max_tokens else None

    def _follow_grammar(self, sequence: Sequence, output: TokenOutput) -> TokenOutput | None:
        """Show the grammar of a choice its token; what to say after `output` if the choice is over now."""
        if not sequence.grammar or output.token_id is None or output.finish_reason == "stop":
            return None
        try:
            if not sequence.grammar.advance(output.token_id):
                return None
            last = TokenOutput(choice=sequence.choice, finish_reason="stop")
        except GrammarFailure as error:
            log.warning("Request %s: %s", sequence.request.request_id, error)
            if output.finish_reason:
                return None
            last = _bad_grammar(sequence.choice, error)
        output.finish_reason = None
        return last

    def _emit(self, sequence: Sequence, output: TokenOutput) -> None:
        token, on_token = output.token_id, sequence.on_token if sequence.announced else None
        if output.finish_reason or output.logprob is not None:
            on_token = None
        if not sequence.announced:
            sequence.announced = True
            if not sequence.grammar and sequence.phase in (Phase.RUNNING, Phase.WAITING):
                sequence.hand_over = sequence.on_token or as_outputs(sequence.on_output)
            output.cached_tokens = sequence.cached_tokens or 0
            output.prompt_logprobs = sequence.prompt_logprobs
        try:
            if on_token and token is not None:
                on_token(sequence.choice, token)
            else:
                sequence.on_output(output)
        except Exception:  # a listener that is gone must not stop the others
            log.exception("The receiver of request %s failed", sequence.request.request_id)
