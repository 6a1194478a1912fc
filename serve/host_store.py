"""Rows at rest in host memory: what had to leave the pool, by last use, within a limit of bytes."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from serve.sequence import RowState
from serve.sessions import ReachBack, StoredSession, TurnOf, find, next_to_go


@dataclass(eq=False, kw_only=True)
class HostedSession(StoredSession):
    """A row whose pages are elsewhere: its state has the numbers, but neither a row nor pages."""

    saved: object  # what the device gave for them
    size: int  # bytes that it takes


class HostStore:
    """Never more than `limit` bytes: those go first that are `next_to_go`, by last use."""

    def __init__(self, limit: int) -> None:
        self.limit, self.used = limit, 0
        self.held: HostedSession | None = None  # does not go: it is being brought back
        self.turn_of: TurnOf = lambda session: None
        self._sessions: dict[HostedSession, None] = {}  # in order of their last use

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[HostedSession]:
        return iter(self._sessions)

    def make_room(self, size: int) -> bool:
        """Let go of as many as it takes to put `size` bytes; of none if it cannot be done."""
        held = self.held.size if self.held in self._sessions else 0
        if size > self.limit - held:
            return False
        while self.used + size > self.limit:
            session = next_to_go((s for s in self if s is not self.held), self.turn_of)
            assert session
            self.remove(session)
        return True

    def put(self, session: HostedSession) -> None:
        """Raises ValueError where `make_room` was not asked."""
        if self.used + session.size > self.limit:
            raise ValueError(f"{session.size} bytes do not fit beside {self.used} of {self.limit}")
        self._sessions[session] = None
        self.used += session.size

    def remove(self, session: HostedSession) -> None:
        del self._sessions[session]
        self.used -= session.size

    def clear(self) -> None:
        self._sessions.clear()
        self.used, self.held = 0, None

    def touch(self, session: HostedSession) -> None:
        """It is the one used last."""
        self._sessions[session] = self._sessions.pop(session)

    def same(self, state: RowState, tokens: np.ndarray) -> HostedSession | None:
        """The one that is just such a row."""
        return next((s for s in self if s.state.like(state) and np.array_equal(s.tokens, tokens)), None)

    def find(
        self, prompt: np.ndarray, budgets: np.ndarray, reach_back: ReachBack, least: int
    ) -> tuple[HostedSession, int] | None:
        """As `SessionStore.find`, of those that save at least `least` tokens."""
        return find(self, prompt, budgets, reach_back, least)
