"""The engine's loop on the fake device, step by step in the test's own thread, with every invariant checked."""

import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from serve.engine import Engine
from serve.limits import Limits
from serve.request import GenerationRequest, SamplingParams, TokenOutput
from serve.scheduler import Scheduler
from serve.sequence import Sequence
from tangram_jax.plan import CachePlan
from tangram_jax.profile import BudgetProfile
from tests.serve.fake_device import FakeRunner, expected

RAGGED = np.array([[0.05, 0.4], [0.25, 1.0], [0.7, 0.3]], np.float32)


def make_plan(budgets: Any = RAGGED, **options: Any) -> CachePlan:
    """Groups of one head, pages of 4, a window of 8; ragged unless told otherwise."""
    if isinstance(budgets, float):
        profile = BudgetProfile.uniform(2, 2, budgets)
    else:
        profile = BudgetProfile.from_ratios(np.asarray(budgets)[None].repeat(2, 0), retention=0.5, alpha=0.0)
    given = {"heads_per_page": 1, "page_size": 4, "window": 8, "sinks": 2, "min_entries": 8} | options
    return CachePlan.build(profile, **given)


def make_limits(**changes: Any) -> Limits:
    given = {
        "max_running": 3,
        "max_stored": 4,
        "max_model_len": 160,
        "max_tail": 12,
        "max_chunk": 32,
        "chunks_beside_decode": (8,),
        "prompt_logprob_chunk": 16,
        "packed_chunks": (),
        "packed_places": 3,
        "least_shared": 12,
    }
    return Limits(**(given | changes))


@dataclass
class Job:
    """A request and what came back of each choice."""

    request: GenerationRequest
    outputs: list[list[TokenOutput]] = field(default_factory=list)
    aborted: bool = False

    @property
    def done(self) -> bool:
        return all(outputs and outputs[-1].finish_reason for outputs in self.outputs)

    def tokens(self, choice: int = 0) -> list[int]:
        return [o.token_id for o in self.outputs[choice] if o.token_id is not None]

    @property
    def cached(self) -> int:
        return self.outputs[0][0].cached_tokens

    def check(self) -> None:
        """Exactly the tokens of the model alone, the right end, and one end only."""
        p = self.request.sampling
        stops = p.stop_token_ids if p.ignore_eos else (0, 2, *p.stop_token_ids)
        for choice, outputs in enumerate(self.outputs):
            want = expected(self.request.prompt_ids, p.seed + choice, p.max_tokens, stops)
            if self.aborted:
                assert self.tokens(choice) == want[: len(self.tokens(choice))]
                continue
            assert self.tokens(choice) == want
            assert [o.finish_reason for o in outputs[:-1]] == [None] * (len(want) - 1)
            assert outputs[-1].finish_reason == ("stop" if want[-1] in stops else "length")


class Loop:
    """`Engine` with a `FakeRunner`; `step` runs one engine step and checks what must hold after each."""

    def __init__(self, plan: CachePlan, limits: Limits, num_pages: int) -> None:
        self.runner = FakeRunner(plan, limits, num_pages)
        self.engine = Engine(self.runner, limits, num_pages=num_pages)  # type: ignore[arg-type]
        self.jobs: list[Job] = []
        self._ids = itertools.count()
        self._idle_steps = 0

    @property
    def scheduler(self) -> Scheduler:
        return self.engine._scheduler

    def add(self, prompt: list[int], n: int = 1, *, retention: float | None = None, **sampling: Any) -> Job:
        given = {"max_tokens": 8, "seed": 0} | sampling
        request = GenerationRequest(
            request_id=str(next(self._ids)),
            prompt_ids=list(prompt),
            sampling=SamplingParams(**given),
            n=n,
            retention=retention,
        )
        self.scheduler.check(len(prompt), request.sampling.max_tokens, retention)
        job = Job(request, [[] for _ in range(n)])
        self.jobs.append(job)
        self.engine._add(request, lambda output: job.outputs[output.choice].append(output))
        return job

    def abort(self, job: Job, choice: int | None = None) -> None:
        job.aborted = True
        self.engine._abort(job.request.request_id, choice)

    @property
    def busy(self) -> bool:
        return bool(self.engine._busy or self.engine._under_way)

    def step(self) -> None:
        before = self.engine._numbers.steps, len(self.engine._under_way)
        self.engine.step()
        after = self.engine._numbers.steps, len(self.engine._under_way)
        self._idle_steps = self._idle_steps + 1 if before == after else 0
        assert self._idle_steps < 2 or not self.engine._busy, "nothing can run, and nothing ever will"
        self.check()

    def drain(self, most: int = 100_000) -> None:
        for _ in range(most):
            if not self.busy:
                return
            self.step()
        raise AssertionError("requests never end")

    def run(self, *args: Any, **kwargs: Any) -> Job:
        """One request from its start to its end, the loop idle afterwards."""
        job = self.add(*args, **kwargs)
        self.drain()
        return job

    def converse(self, texts: list[list[int]], turns: int) -> list[int]:
        """All conversations send each turn at once; of how many the cache held anything, turn by turn."""
        found = []
        for turn in range(turns):
            jobs = [self.add(text, max_tokens=6, ignore_eos=True) for text in texts]
            self.drain()
            for job in jobs:
                job.check()
            found.append(sum(job.cached > 0 for job in jobs))
            texts = [[*text, *job.tokens(), turn] for text, job in zip(texts, jobs, strict=True)]
        return found

    def check(self) -> None:
        """The host's books equal the device's; first come, first served; every sequence adds up."""
        scheduler, runner = self.scheduler, self.runner
        assert scheduler.pages.free == len(runner.free)
        assert len(scheduler.sessions) <= scheduler.limits.max_stored
        arrivals = [s.arrival for s in [*scheduler.running, *scheduler.waiting]]
        assert arrivals == sorted(arrivals)
        assert len(scheduler.running) <= scheduler.limits.max_running
        for s in scheduler.running:
            self._check_sequence(s)
        rows = [s.state.row for s in scheduler.running if s.state]
        for session in scheduler.sessions:
            rows.append(session.state.row)
            row = runner.rows[session.state.row]
            assert session.tokens.tolist() == row.content
            assert session.state.cached == len(row.content)
        assert len(rows) == len(set(rows))
        self._check_host()
        self._check_steady()
        if not self.busy:
            assert scheduler.pages.used == scheduler.sessions.pages
            assert len(rows) + len(scheduler.rows.free) == len(runner.rows)

    def _check_steady(self) -> None:
        """Where the next steps are to be the same, all that run can take part in them, and want to."""
        scheduler = self.scheduler
        if not scheduler._steady:
            return
        assert scheduler._steady.decode == scheduler.running
        for s in scheduler.running:
            assert s.state is not None and not s.due and not s.unsure
            assert 0 < scheduler._more_steps <= min(s.room - s.state.tail, s.left)
            assert s.may_decode

    def _check_host(self) -> None:
        """Copies are whole, and no more than there is memory for."""
        store = self.scheduler.offload.store
        assert store.used == sum(session.size for session in store) <= store.limit
        for session in () if self.busy else store:
            saved: Any = session.saved
            assert saved.content == session.tokens.tolist()
            assert (saved.compressed, saved.tail) == (session.state.compressed, session.state.tail)
            assert session.size == self.scheduler.rows.held(session.state).sum()

    def _check_sequence(self, s: Sequence) -> None:
        assert s.state is not None
        row = self.runner.rows[s.state.row]
        assert (s.state.compressed, s.state.tail) == (row.compressed, row.tail)
        assert s.state.cached + s.to_feed == len(s.tokens) + s.in_flight
        assert s.state.holding.owned.tolist() == [len(pages) for pages in row.pages]
        known = min(len(s.tokens), len(row.content))
        assert row.content[:known] == s.tokens[:known]
        assert s.generated <= s.sampling.max_tokens

    def evict_all(self) -> None:
        """Throw the stored sessions away: after that not a page is in use."""
        while self.scheduler.rows.evict():
            pass
        assert self.scheduler.pages.free == self.scheduler.pages.total == len(self.runner.free)
