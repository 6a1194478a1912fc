"""Drafts for speculative decoding, by prompt lookup: what followed the last tokens where they came before.

Code that is edited, text that is quoted or summed up, structured answers and repeated tool calls say again what the
conversation says already. A step that verifies drafts takes hardly longer than one without, as long as few sequences run.
"""

from collections import Counter
from collections.abc import Iterable

import numpy as np

from serve.limits import Limits
from serve.prompt_lookup import PromptLookup
from serve.sequence import Sequence


class Drafting:
    """Which sequences of the next step have drafts, and what they came to."""

    def __init__(self, limits: Limits, counters: Counter[str]) -> None:
        self._limits, self._counters = limits, counters

    def due(self, running: list[Sequence]) -> bool:
        """Whether one of the `running` would have drafts if the tokens under way were as they were before.

        Then these are worth waiting for. False where the next step is for a chunk, or where too many run.
        """
        limits = self._limits
        if not 0 < len(running) <= limits.drafting or not limits.drafts:
            return False
        if not all(s.decodes(limits.max_tail) for s in running):
            return False
        return any(not s.grammar and len(self._following(s, s.in_flight + 1)) > s.in_flight for s in running)

    def of(self, decode: Iterable[Sequence]) -> dict[Sequence, np.ndarray]:
        """Drafts, i32[n] each, of those that have some and pages for them; all of `decode` get a token in the next step."""
        decode = list(decode)
        if not 0 < len(decode) <= self._limits.drafting:
            return {}
        drafts = {}
        for sequence in decode:
            state = sequence.state
            assert state is not None
            if sequence.in_flight or sequence.grammar:
                continue
            most = min(self._limits.drafts, sequence.left - 1, sequence.room - state.tail - 1)
            guess = self._following(sequence, most)
            if len(guess):
                drafts[sequence] = guess
        return drafts

    def note(self, sequence: Sequence, wrong: int, sampled: int) -> None:
        """Of the drafts of `sequence`, which has `sampled` tokens more, so many were wrong: its row has given them up."""
        sequence.in_flight -= wrong
        if sequence.state is not None:
            sequence.state.tail -= wrong
        drafted = wrong + sampled - 1
        if not drafted:
            return
        self._counters["drafts"] += 1
        self._counters["draft_tokens"] += drafted
        self._counters["accepted_tokens"] += sampled - 1
        if sequence.lookup is not None:
            sequence.lookup.note(sampled - 1)

    def _following(self, sequence: Sequence, count: int) -> np.ndarray:
        if sequence.lookup is None:
            sequence.lookup = PromptLookup(*self._limits.lookup)
        sequence.lookup.read(sequence.tokens)
        return sequence.lookup.following(count)
