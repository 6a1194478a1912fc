"""The batching loop: one thread that owns the cache, dispatching step n+1 before it reads the tokens of step n."""

import contextlib
import logging
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

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
    TokenOutput,
)
from serve.runner import Runner
from serve.scheduler import Scheduler
from serve.sequence import ChunkWork, Phase, RowState, Sequence

MOST_REQUESTS = 4096  # that run or wait
PIPELINE = 2  # steps under way at most: one on the device, one queued behind it
GAUGE_SECONDS = 0.2  # between two looks at all rows for the gauges that need them; at once when idle

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
        self._totals = {"steps": 0, "prompt": 0, "prefilled": 0, "generated": 0}
        self._retired = Counter[str]()  # counters of schedulers before the present one
        self._gauges: tuple[int, float | None] = 0, None  # pages_stored, retention_reached
        self._gauges_due = 0.0
        self._stats = EngineStats(pages_total=num_pages, host_bytes_total=limits.host_bytes)
        self._page_bytes = runner.cache.pool.nbytes // max(1, num_pages)

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

    def submit(self, request: GenerationRequest, on_output: OutputCallback) -> None:
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
            self._tell(lambda: self._add(request, on_output))

    def abort(self, request_id: str, choice: int | None = None) -> None:
        """See EngineProtocol. The row stays for the next turn: of an ended choice, of an ended request its first one's."""
        self._tell(lambda: self._abort(request_id, choice))

    def stats(self) -> EngineStats:
        """The snapshot of the last step."""
        return self._stats

    def start(self, progress: Callable[[str], None] | None = None) -> None:
        """Compile every program, then run the loop in a thread. Blocks while compiling."""
        began = time.perf_counter()
        for name in self._runner.warm_up():
            if progress:
                progress(name)
        log.info("Compiled all programs in %.1f s", time.perf_counter() - began)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._update_stats()
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
            self._stats = replace(self._stats, requests_running=0, requests_waiting=0)
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
            self._totals["steps"] += 1
            self._totals["prefilled"] += sum(len(chunk.tokens) for chunk in work.chunks)
        if self._under_way and (not work or len(self._under_way) >= PIPELINE):
            self._read_oldest()
        self._update_stats()

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
        self._retired.update(self._scheduler.counters)
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
        self._update_stats()
        return True

    def _add(self, request: GenerationRequest, on_output: OutputCallback) -> None:
        if request.request_id in self._sequences:
            sequence = Sequence(request, 0, on_output, 0, 0, self._runner.plan.group_ppm)
            message = f"request id {request.request_id} is in use"
            self._emit(sequence, TokenOutput(finish_reason="error", error=message))
            return
        how, base = request.sampling, request.sampling.seed
        made: list[Sequence] = []
        for choice in range(request.n):
            seed = self._random.getrandbits(63) if base is None else base + choice  # taken modulo 2**64
            self._arrivals += 1
            budgets, first = self._scheduler.budgets(request.retention), made[0] if made else None
            made.append(Sequence(request, choice, on_output, seed, self._arrivals, budgets, parent=first))
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
        for sequence, wrong, sampled in handles.results():
            if handles.counts is not None:
                self._scheduler.drafting.note(sequence, wrong, len(sampled))
            for one in sampled:
                self._take(sequence, one)

    def _take(self, sequence: Sequence, sampled: Sampled) -> None:
        """The next token of a sequence."""
        sequence.in_flight -= 1
        if sequence.phase is Phase.ENDED:
            return
        if sequence.tokens is sequence.request.prompt_ids:
            sequence.tokens = [*sequence.tokens]  # its own from here on
        sequence.tokens.append(sampled.token)
        if sequence.phase is Phase.CLOSING:
            self._scheduler.close(sequence)
            return
        self._totals["generated"] += 1
        if sequence.choice == 0 and len(sequence.tokens) == sequence.prompt_length + 1:
            self._totals["prompt"] += sequence.prompt_length
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
        if not sequence.announced:
            sequence.announced = True
            output.cached_tokens = sequence.cached_tokens or 0
            output.prompt_logprobs = sequence.prompt_logprobs
        try:
            sequence.on_output(output)
        except Exception:  # a listener that is gone must not stop the others
            log.exception("The receiver of request %s failed", sequence.request.request_id)

    def _update_stats(self) -> None:
        scheduler, counters = self._scheduler, self._retired + self._scheduler.counters
        host = scheduler.offload.store
        now = time.monotonic()
        if now >= self._gauges_due or not (self._busy or self._under_way):
            self._gauges = scheduler.sessions.pages, self._retention_reached()
            self._gauges_due = time.monotonic() + GAUGE_SECONDS
        self._stats = EngineStats(
            requests_running=len(scheduler.running),
            requests_waiting=len(scheduler.waiting),
            pages_used=scheduler.pages.used,
            pages_total=scheduler.pages.total,
            page_bytes=self._page_bytes,
            stored_sessions=len(scheduler.sessions),
            pages_stored=self._gauges[0],
            prompt_tokens_total=self._totals["prompt"],
            prefilled_tokens_total=self._totals["prefilled"],
            generation_tokens_total=self._totals["generated"],
            prefix_query_tokens_total=counters["prefix_queries"],
            prefix_hit_tokens_total=counters["prefix_hits"],
            preemptions_total=counters["preemptions"],
            tail_compressions_total=counters["tail_compressions"],
            drafts_total=counters["drafts"],
            draft_tokens_total=counters["draft_tokens"],
            accepted_tokens_total=counters["accepted_tokens"],
            steps_total=self._totals["steps"],
            host_sessions=len(host),
            host_bytes=host.used,
            host_bytes_total=host.limit,
            offloaded_tokens_total=counters["offloaded_tokens"],
            offloaded_bytes_total=counters["offloaded_bytes"],
            restored_tokens_total=counters["restored_tokens"],
            restored_bytes_total=counters["restored_bytes"],
            compilations_after_warmup=self._runner.compilations,
            retention_target=self._runner.plan.profile.retention,
            retention_reached=self._gauges[1],
        )

    def _retention_reached(self) -> float | None:
        """Entries held, of those that full KV would hold, over the tokens of all rows; None without any."""
        scheduler, plan = self._scheduler, self._runner.plan
        states = [s.state for s in scheduler.running if s.state] + [s.state for s in scheduler.sessions]
        full = sum(s.cached for s in states) * plan.group_of.size
        held = sum(s.tail for s in states) * plan.group_of.size
        alike: dict[int, list[RowState]] = {}  # by their budgets, which few have of their own
        for state in states:
            alike.setdefault(id(state.budgets), []).append(state)
        for rows in alike.values():
            held += plan.entries(np.array([s.compressed for s in rows]), rows[0].budgets)
        return held / full if full else None
