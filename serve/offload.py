"""The second tier: rows that must leave the pool go to host memory, and come back when a prompt extends them.

Compressed rows are small, so that bringing one back takes a small part of the time of its prefill.
"""

from collections import Counter
from dataclasses import replace

import numpy as np

from serve.host_store import HostedSession, HostStore
from serve.row_operations import RowOperations
from serve.rows import Rows
from serve.sequence import RowState, Sequence
from serve.sessions import ReachBack, StoredSession

NO_ROW = -1


class Offload:
    """Moves rows between the pool and the host's store. With a limit of 0 bytes it does nothing."""

    def __init__(
        self, rows: Rows, device: RowOperations, limit: int, least: int, counters: Counter[str]
    ) -> None:
        """`least`: fewer tokens than that are not worth it. `counters`: in which it counts."""
        self._rows, self._device, self._least, self._counters = rows, device, least, counters
        self.store = HostStore(limit)
        rows.on_evict = self._evicted

    @property
    def busy(self) -> bool:
        """Whether so much is under way that the next copy would have to wait."""
        return bool(self.store.limit) and self._device.copies_wait

    def _evicted(self, session: StoredSession) -> None:
        if not session.is_spare:
            self.keep(session.state, session.tokens, session.is_prefix)

    def preempted(self, sequence: Sequence) -> None:
        """Its row is about to be given up: it goes on from here, so that it need not prefill again."""
        state = sequence.state
        if state is None or sequence.needs_prompt_logprobs:
            return
        # A token that was sampled and fed, but not read yet, is not known: the row is kept without it.
        unread = max(state.cached - len(sequence.tokens), 0)
        state = replace(state, tail=state.tail - unread)
        self.keep(state, sequence.token_array[: state.cached])

    def keep(self, state: RowState, tokens: np.ndarray, is_prefix: bool = False) -> None:
        """Copy the row to the host, if it is worth it and there is room; the caller gives it up."""
        if not self.store.limit or state.cached < self._least:
            return
        if same := self.store.same(state, tokens):
            same.is_prefix |= is_prefix
            self.store.touch(same)
            return
        pages = self._rows.held(state)
        size = self._device.saved_bytes(int(pages.sum()))
        if not self.store.make_room(size):
            return
        saved = self._device.save(state, pages)
        if saved is None:
            return
        numbers = replace(state, row=NO_ROW, holding=self._rows.pages.empty())
        # A copy: what is kept must not be a view of the tokens of a sequence.
        self.store.put(HostedSession(numbers, np.array(tokens), is_prefix, saved=saved, size=size))
        self._counters["offloaded_tokens"] += state.cached
        self._counters["offloaded_bytes"] += size

    def find(
        self, tokens: np.ndarray, budgets: np.ndarray, reach_back: ReachBack, stays: int
    ) -> tuple[HostedSession | None, int]:
        """The row that saves most of `tokens` i32[n] and how many stay; (None, stays) if it is hardly more than `stays`."""
        return self.store.find(tokens, budgets, reach_back, stays + self._least) or (None, stays)

    def restore(
        self, session: HostedSession, stays: int, count: int, wanted: np.ndarray
    ) -> StoredSession | None:
        """Bring it back as a stored row of the pool; None if there is no room for it and for what it will grow to.

        A prefix stays here as well, and so does what a prompt of `count` tokens takes up within what was compressed, after
        `stays` tokens: it loses what comes behind. Otherwise the row is the truth from now on.

        Args:
          wanted: i64[page lists], the pages that the prompt needs.
        """
        rows, state = self._rows, session.state
        pages = rows.held(state)
        if not len(rows.sessions) and (rows.sessions.full or not rows.free):
            return None
        need = int(np.maximum(pages, wanted).sum())
        if need > rows.pages.free + rows.sessions.pages:
            return None
        self.store.touch(session)
        self.store.held = session
        try:
            while rows.sessions.full or not rows.free:
                rows.evict()
            if not rows.secure(need):
                raise RuntimeError(f"{need} pages were there, and are not any more")
            empty = rows.take(state.budgets)
            state = replace(state, row=empty.row, holding=empty.holding)
            rows.grow(state, state.compressed, max(state.tail, 0))
            self._device.load(state, pages, session.saved)
        finally:
            self.store.held = None
        parts = stays < state.compressed and stays < count - 1
        if not (session.is_prefix or parts):
            self.store.remove(session)
        self._counters["restored_tokens"] += state.cached
        self._counters["restored_bytes"] += session.size
        stored = StoredSession(state, session.tokens, session.is_prefix)
        rows.sessions.put(stored)
        return stored
