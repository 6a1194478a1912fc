"""What several prompts begin with (a system prompt, a document) is prefilled and compressed once.

A compressed row cannot be cut, so a copy must be stored when a prefill has got exactly as far as two prompts agree: known is
that from the second prompt on. Copies share their full pages with the rows that go on from them.
"""

import numpy as np

from serve.rows import Rows
from serve.sequence import RowState, Sequence
from serve.sessions import StoredSession, common_length


class Prefixes:
    """Decides where copies are left, leaves them, and lets prompts go on from them."""

    def __init__(self, rows: Rows, least: int) -> None:
        self._rows, self._least = rows, least  # fewer tokens than `least` are not worth a row

    def awaited(self, sequence: Sequence, stays: int, running: list[Sequence]) -> bool:
        """Whether `sequence` is to wait for what it shares with a prompt that is being prefilled: a copy will be left there.

        It loses nothing by that: prompts are prefilled one after another. `stays`: tokens that it finds stored already. With
        a stored prompt that cannot be cut where they part it shares nothing, but leaves a copy itself on its way.
        """
        if (
            sequence.generated
            or sequence.parent
            or sequence.needs_prompt_logprobs
            or not self._rows.sessions.capacity
        ):
            return False
        prompt, least = sequence.token_array, stays + self._least
        most = len(prompt) - 1
        for other in running:
            state = other.state
            if state is None or other.generated or not other.keep or len(other.tokens) < least:
                continue
            common = min(common_length(other.token_array, prompt), most)
            if common >= max(least, state.cached + 1):
                other.borders.add(common)
                return True
        common = min(self._rows.sessions.longest_prefix(prompt), most)
        if common >= least:
            sequence.borders.add(common)
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
        return rows.copy(state)

    def leave(self, sequence: Sequence) -> None:
        """Store a copy of the row if it has just been compressed where another prompt parts from its own."""
        state = sequence.state
        if state is None or state.tail or state.compressed not in sequence.borders:
            return
        count = state.compressed
        sequence.borders.discard(count)
        tokens = np.asarray(sequence.tokens[:count], np.int32)
        if any(s.is_prefix and np.array_equal(s.tokens, tokens) for s in self._rows.sessions):
            return
        while self._rows.sessions.full:
            self._rows.evict()
        # The pages reserved for the rest of the prompt are no part of the copy.
        rest = len(sequence.tokens), sequence.room
        self._rows.trim(state, count, 0)
        missing = self._rows.pages.missing(state.holding, self._rows.wanted(*rest))
        need = self._rows.copied_pages(state) + missing
        if (self._rows.free or self._rows.evict()) and self._rows.secure(need):
            self._rows.sessions.put(StoredSession(self._rows.copy(state), tokens, is_prefix=True))
        self._rows.grow(state, *rest)
