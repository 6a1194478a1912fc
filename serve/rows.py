"""Rows of the cache and their pages, in the host's mirror and on the device at once."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from serve.pages import PageBook
from serve.row_operations import RowOperations
from serve.sequence import RowState
from serve.sessions import SessionStore, StoredSession
from tangram_jax.plan import PPM, CachePlan


class Rows:
    """Who owns which row and how many pages. Stored sessions give theirs up when they are needed."""

    def __init__(
        self, plan: CachePlan, count: int, max_stored: int, num_pages: int, device: RowOperations
    ) -> None:
        self._plan, self._device = plan, device
        self.pages = PageBook(num_pages, plan.num_page_lists)
        self.sessions = SessionStore(max_stored)
        self.free = list(range(count))[::-1]
        self._wanted: tuple[np.ndarray, int, int, np.ndarray] | None = (
            None  # the last: it is mostly asked for twice
        )
        self.on_evict: Callable[[StoredSession], None] = lambda session: None  # called before its row is gone

    def wanted(self, budgets: np.ndarray, tokens: int, tail: int) -> np.ndarray:
        """Pages of each page list of the plan, i64[...]."""
        last = self._wanted
        if last is None or last[0] is not budgets or last[1:3] != (tokens, tail):
            pages = self._plan.group_pages(tokens, tail, budgets).astype(np.int64)
            last = self._wanted = budgets, tokens, tail, pages
        return last[3]

    def held(self, state: RowState) -> np.ndarray:
        """Those that hold something of a row, i64[...]: it may have more."""
        return self.wanted(state.budgets, state.compressed, max(state.tail, 0))

    def _shareable(self, state: RowState) -> np.ndarray:
        return self._plan.shared_group_pages(state.compressed, state.budgets).astype(np.int64)

    def take(self, budgets: np.ndarray) -> RowState:
        """An empty row; there must be a free one."""
        row = self.free.pop()
        if budgets is not self._plan.group_ppm:
            self._device.set_budgets(row, budgets)
        return RowState(row, self.pages.empty(), budgets)

    def copied_pages(self, state: RowState) -> int:
        return self.pages.fork_cost(state.holding, self._shareable(state))

    def copy(self, state: RowState) -> RowState:
        """Another row like it; there must be a free one, and the pages."""
        row, holding = self.free.pop(), self.pages.fork(state.holding, self._shareable(state))
        self._device.fork(state.row, row)
        return replace(state, row=row, holding=holding)

    def secure(self, need: int) -> bool:
        """Free `need` pages at the cost of stored sessions, but only if that is enough."""
        if not self.could_secure(need):
            return False
        while need > self.pages.free:
            if not self.evict():
                return False
        return True

    def could_secure(self, need: int) -> bool:
        return need <= self.pages.free or need <= self.pages.free + self.sessions.pages

    def evict(self) -> bool:
        session = self.sessions.evict()
        if session is None:
            return False
        self.on_evict(session)
        self.release(session.state)
        return True

    def release(self, state: RowState) -> None:
        self.pages.release(state.holding)
        self._device.release(state.row)
        self.free.append(state.row)

    def grow(self, state: RowState, tokens: int, tail: int) -> None:
        wanted = self.wanted(state.budgets, tokens, tail)
        if self.pages.grow(state.holding, wanted):
            self._device.reserve(state.row, tokens, tail)

    def trim(self, state: RowState, tokens: int, tail: int) -> None:
        wanted = self.wanted(state.budgets, tokens, tail)
        if self.pages.trim(state.holding, wanted):
            self._device.trim(state.row, tokens, tail)

    def keeps_all(self, state: RowState) -> bool:
        return bool((state.budgets == PPM).all())

    def settle(self, state: RowState) -> None:
        """The tail of a row that keeps everything counts as compressed."""
        state.compressed, state.tail = state.cached, 0
        self._device.settle(state.row, state.compressed)

    def rollback(self, state: RowState, count: int) -> None:
        state.tail -= count
        self._device.rollback(state.row, count)
