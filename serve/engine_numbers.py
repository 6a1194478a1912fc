"""What an engine counts, and its snapshots for `EngineProtocol.stats`."""

import time
from collections import Counter

import numpy as np

from serve.limits import Limits
from serve.request import EngineStats
from serve.runner import Runner
from serve.scheduler import Scheduler
from serve.sequence import RowState

# Between two snapshots while the engine is busy: one takes hundredths of a millisecond.
SNAPSHOT_SECONDS = 0.005
GAUGE_SECONDS = 0.2  # the same of those gauges that look at all rows


class EngineNumbers:
    """Of one engine, whose runner and limits it has, over all its schedulers."""

    def __init__(self, runner: Runner, limits: Limits, num_pages: int) -> None:
        self._runner, self._plan = runner, runner.plan
        self.steps = self.prompt = self.prefilled = self.generated = 0  # tokens, but for the steps
        self._retired = Counter[str]()  # counters of schedulers before the present one
        self._page_bytes = runner.cache.pool.nbytes // max(1, num_pages)
        self._gauges: tuple[int, float | None] = 0, None  # pages_stored, retention_reached
        self._due = self._gauges_due = 0.0
        self.snapshot = EngineStats(pages_total=num_pages, host_bytes_total=limits.host_bytes)

    def retire(self, scheduler: Scheduler) -> None:
        """Another one takes its place."""
        self._retired.update(scheduler.counters)

    def update_soon(self) -> None:
        """The next snapshot is due: somebody's answer is over, who may ask."""
        self._due = 0.0

    def update(self, scheduler: Scheduler, busy: bool) -> None:
        """Take a snapshot if one is due, as it always is of an engine that is not busy."""
        now = time.monotonic()
        if busy and now < self._due:
            return
        if not busy or now >= self._gauges_due:
            self._gauges = scheduler.sessions.pages, self._retention_reached(scheduler)
            self._gauges_due = time.monotonic() + GAUGE_SECONDS
        counters, host = self._retired + scheduler.counters, scheduler.offload.store
        self.snapshot = EngineStats(
            requests_running=len(scheduler.running),
            requests_waiting=len(scheduler.waiting),
            pages_used=scheduler.pages.used,
            pages_total=scheduler.pages.total,
            page_bytes=self._page_bytes,
            stored_sessions=len(scheduler.sessions),
            pages_stored=self._gauges[0],
            prompt_tokens_total=self.prompt,
            prefilled_tokens_total=self.prefilled,
            generation_tokens_total=self.generated,
            prefix_query_tokens_total=counters["prefix_queries"],
            prefix_hit_tokens_total=counters["prefix_hits"],
            preemptions_total=counters["preemptions"],
            tail_compressions_total=counters["tail_compressions"],
            drafts_total=counters["drafts"],
            draft_tokens_total=counters["draft_tokens"],
            accepted_tokens_total=counters["accepted_tokens"],
            steps_total=self.steps,
            host_sessions=len(host),
            host_bytes=host.used,
            host_bytes_total=host.limit,
            offloaded_tokens_total=counters["offloaded_tokens"],
            offloaded_bytes_total=counters["offloaded_bytes"],
            restored_tokens_total=counters["restored_tokens"],
            restored_bytes_total=counters["restored_bytes"],
            compilations_after_warmup=self._runner.compilations,
            retention_target=self._plan.profile.retention,
            retention_reached=self._gauges[1],
        )
        self._due = time.monotonic() + SNAPSHOT_SECONDS

    def _retention_reached(self, scheduler: Scheduler) -> float | None:
        """Entries held, of those that full KV would hold, over the tokens of all rows; None without any."""
        plan = self._plan
        states = [s.state for s in scheduler.running if s.state] + [s.state for s in scheduler.sessions]
        full = sum(s.cached for s in states) * plan.group_of.size
        held = sum(s.tail for s in states) * plan.group_of.size
        alike: dict[int, list[RowState]] = {}  # by their budgets, which few have of their own
        for state in states:
            alike.setdefault(id(state.budgets), []).append(state)
        for rows in alike.values():
            held += plan.entries(np.array([s.compressed for s in rows]), rows[0].budgets)
        return held / full if full else None
