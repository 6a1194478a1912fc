"""Rows at rest, until their pages are needed: conversations between two turns, and what several prompts begin with."""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from serve.sequence import RowState
from tangram_jax.plan import CachePlan


@dataclass(eq=False)
class StoredSession:
    """A row at rest: `tokens` i32[cached] are in its cache."""

    state: RowState
    tokens: np.ndarray
    is_prefix: bool = False  # what several prompts begin with: they go on from copies of it
    is_used: bool = False  # of a prefix: one did
    is_spare: bool = False  # kept only where nothing else has to go for it


def common_length(a: np.ndarray, b: np.ndarray) -> int:
    """How many tokens two texts begin with that are the same. Most texts differ soon: they are compared in growing parts."""
    size, start, part = min(len(a), len(b)), 0, 64
    while start < size:
        differs = np.flatnonzero(a[start : min(start + part, size)] != b[start : min(start + part, size)])
        if differs.size:
            return start + int(differs[0])
        start, part = start + part, 2 * part
    return size


# How many prompts wait before the first that would go on from a row; None: none does.
TurnOf = Callable[[StoredSession], int | None]


def next_to_go[S: StoredSession](sessions: Iterable[S], turn_of: TurnOf) -> S | None:
    """The first, of `sessions` by last use, that no prompt waits for; else the one whose turn comes last.

    Conversations whose turns come all at once would otherwise each cost the next one its row.
    """
    latest, last = None, -1
    for session in sessions:
        turn = turn_of(session)
        if turn is None:
            return session
        if turn > last:
            latest, last = session, turn
    return latest


class SessionStore:
    """Stored rows by last use. A conversation is continued by one request at a time, which removes it from here."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._sessions: OrderedDict[int, StoredSession] = OrderedDict()
        self.turn_of: TurnOf = lambda session: None

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[StoredSession]:
        return iter(self._sessions.values())

    @property
    def full(self) -> bool:
        return len(self) >= self.capacity

    @property
    def pages(self) -> int:
        """Pages that only stored sessions own: what evicting all of them frees."""
        runs = Counter(id(run) for s in self for run in s.state.holding.shared)
        kept = {
            id(run): int(run.pages.sum()) * (runs[id(run)] - (runs[id(run)] == run.owners))
            for s in self
            for run in s.state.holding.shared
        }
        return int(sum(s.state.holding.owned.sum() for s in self)) - sum(kept.values())

    def put(self, session: StoredSession, *, first_to_go: bool = False) -> None:
        """Store it as the one that was used last, or as the one to be evicted first."""
        session.is_spare = first_to_go
        self._sessions[session.state.row] = session
        self._sessions.move_to_end(session.state.row, last=not first_to_go)

    def evict(self) -> StoredSession | None:
        """Remove and return the `next_to_go`."""
        session = next_to_go(self, self.turn_of)
        if session:
            self.remove(session)
        return session

    def remove(self, session: StoredSession) -> None:
        del self._sessions[session.state.row]

    def clear(self) -> None:
        self._sessions.clear()

    def find(
        self, prompt: np.ndarray, budgets: np.ndarray, reach_back: "ReachBack"
    ) -> tuple[StoredSession, int] | None:
        """The session that saves most of `prompt` i32[n] under `budgets`, and how many of its tokens stay."""
        return find(self, prompt, budgets, reach_back)

    def unused_prefix(self) -> StoredSession | None:
        """The least recently stored prefix from which no prompt has gone on."""
        return next((s for s in self if s.is_prefix and not s.is_used), None)


def find[S: StoredSession](
    sessions: Iterable[S], prompt: np.ndarray, budgets: np.ndarray, reach_back: "ReachBack", least: int = 1
) -> tuple[S, int] | None:
    """The one of `sessions` that saves most of `prompt` i32[n] under `budgets`; how many tokens stay, `least` or more.

    A stored row is a state, not a list of states: compressed tokens cannot be taken apart again. So the prompt must
    extend what was compressed, save for what `reach_back` allows; generated tokens after that may be cut anywhere.
    At least one token of the prompt is always left to run, for its logits.
    """
    best: tuple[S, int] | None = None
    most = least
    if len(prompt) <= least:
        return None
    for session in sessions:
        if session.state.budgets is not budgets:
            continue
        compressed = session.state.compressed
        need = max(most, compressed - reach_back.most)
        if need >= len(prompt) or len(session.tokens) < need or session.tokens[need - 1] != prompt[need - 1]:
            continue  # it has less in common; most end here
        stays = min(common_length(session.tokens, prompt), len(prompt) - 1)
        if len(prompt) < compressed or stays < compressed - reach_back(session.state) or stays < most:
            continue
        # Of two that save as much the prefix, which loses nothing by it.
        if best is None or (stays, session.is_prefix) > (most, best[0].is_prefix):
            best, most = (session, stays), stays
    return best


class ReachBack:
    """How many compressed tokens a rollback may take off: as far as every group still holds the window whole."""

    def __init__(self, plan: CachePlan) -> None:
        self._plan, self.most = plan, plan.window

    def __call__(self, state: RowState) -> int:
        return int(min(self._plan.window, self._plan.lengths(state.compressed, state.budgets).min()))
