"""What several prompts begin with (a system prompt, a document) is prefilled and compressed once.

A compressed row cannot be cut, so a copy must be stored when a prefill has got exactly as far as two prompts agree. That is
known when the second one comes. Copies share their full pages with the rows that go on from them.
"""

import numpy as np

from serve.rows import Rows
from serve.sequence import Phase, RowState, Sequence
from serve.sessions import StoredSession, common_length


class Prefixes:
    """Decides where copies are left, leaves them, and lets prompts go on from them."""

    def __init__(self, rows: Rows, least: int) -> None:
        self._rows, self._least = rows, least  # fewer tokens than `least` are not worth a row

    def awaited(self, sequence: Sequence, stays: int, running: list[Sequence]) -> bool:
        """Whether `sequence` is to wait for what it shares with a prompt being prefilled: a copy will be left there.

        Prompts are prefilled one after another, so little is lost by that. `stays`: tokens that it finds stored already.
        Of a row that is past the place where they part it has nothing, but leaves a copy itself for those that may come.
        """
        if (
            sequence.generated
            or sequence.parent
            or sequence.needs_prompt_logprobs
            or not self._rows.sessions.capacity
        ):
            return False
        prompt, least = sequence.prompt_array, stays + self._least
        if len(prompt) <= least:
            return False

        def common_with(tokens: np.ndarray) -> int:
            # Most differ soon, and this is asked in every step while the prompt has to wait.
            if len(tokens) < least or not np.array_equal(tokens[stays:least], prompt[stays:least]):
                return 0
            found = min(common_length(tokens, prompt), len(prompt) - 1)
            return found if found >= least else 0

        most = 0
        for other in running:
            if other.state is None or other.budgets is not sequence.budgets:
                continue
            if not (common := common_with(other.prompt_array)):
                continue
            if not other.generated and common > other.state.cached:
                other.borders[common] = sequence
                return True
            most = max(most, common)
        for s in self._rows.sessions:
            at = max(most, least - 1)  # where it must agree to have more in common
            if (
                s.state.budgets is sequence.budgets
                and len(s.tokens) > at < len(prompt)
                and s.tokens[at] == prompt[at]
            ):
                most = max(most, common_with(s.tokens))
        if most:
            sequence.borders.setdefault(most, None)
        return False

    def copy(
        self, session: StoredSession, sequence: Sequence, stays: int, wanted: np.ndarray
    ) -> RowState | None:
        """A row that goes on from `session`, which stays stored; None if it is to be continued itself.

        A shared prefix is copied wherever there is room for both. So is a conversation from whose prompt `sequence` parts
        after `stays` tokens (it may have been edited, or is another one), but only where nothing has to go for that.

        Args:
          session: taken out of the store.
          wanted: i64[M], pages that the row will need.
        """
        state, rows = session.state, self._rows
        need = rows.copied_pages(state) + rows.pages.missing(state.holding, wanted)
        if session.is_prefix:
            if not (rows.free or rows.evict()) or not rows.secure(need):
                return None
        else:
            parts = stays < state.compressed and stays < len(sequence.tokens) - 1
            if not parts or not rows.free or need > rows.pages.free:
                return None
        rows.sessions.put(session)
        session.is_used = True
        return rows.copy(state)

    def leave(self, sequence: Sequence) -> None:
        """Store a copy of the row if it has just been compressed where another prompt parts from its own."""
        state = sequence.state
        if state is None or state.tail or state.compressed not in sequence.borders:
            return
        count, sessions = state.compressed, self._rows.sessions
        waiter = sequence.borders.pop(count)
        if waiter and waiter.phase is not Phase.WAITING:
            return
        tokens = np.asarray(sequence.tokens[:count], np.int32)
        alike = (s for s in sessions if s.is_prefix and s.state.budgets is state.budgets)
        if any(np.array_equal(s.tokens, tokens) for s in alike):
            return
        # What nobody waits for costs no more than one conversation its place, however many such copies are left.
        unused = sessions.unused_prefix() if sessions.full and not waiter else None
        if unused:
            sessions.remove(unused)
            self._rows.release(unused.state)
        while sessions.full:
            self._rows.evict()
        # The pages reserved for the rest of the prompt are no part of the copy.
        rest = len(sequence.tokens), sequence.room
        self._rows.trim(state, count, 0)
        missing = self._rows.pages.missing(state.holding, self._rows.wanted(state.budgets, *rest))
        need = self._rows.copied_pages(state) + missing
        if (self._rows.free or self._rows.evict()) and self._rows.secure(need):
            sessions.put(StoredSession(self._rows.copy(state), tokens, is_prefix=True))
        self._rows.grow(state, *rest)
