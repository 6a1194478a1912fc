"""Drafts for speculative decoding, by prompt lookup: what followed the last tokens where they came before.

Code that is edited, text that is quoted or summed up, structured answers and repeated tool calls say again what the
conversation says already. A step that verifies drafts takes hardly longer than one without, as long as few sequences run.

Steps do not wait for each other: drafts are what should come if all that is under way turns out as it was before. Where it
does not they are wrong, and the row is taken to hold more tokens than it does until the results are read.
"""

from collections import Counter

import numpy as np

from serve.limits import Limits
from serve.prompt_lookup import PromptLookup
from serve.sequence import Sequence


class Drafting:
    """Which sequences of the next step have drafts, and what they came to."""

    def __init__(self, limits: Limits, counters: Counter[str]) -> None:
        self._limits, self._counters = limits, counters

    def of(self, decode: list[Sequence], but: Sequence | None = None) -> dict[Sequence, np.ndarray]:
        """Drafts, i32[n] each, of those that have some and pages for them; all of `decode` get a token in the next step.

        `but`: one whose row is to be copied, for which it must be known what it holds.
        """
        if not 0 < len(decode) <= self._limits.drafting:
            return {}
        drafts = {}
        for sequence in decode:
            state = sequence.state
            assert state is not None
            if sequence.grammar or sequence is but:
                continue
            most = min(self._limits.drafts, sequence.left - 1, sequence.room - state.tail - 1)
            if sequence.lookup is None:
                sequence.lookup = PromptLookup(*self._limits.lookup)
            sequence.lookup.read(sequence.tokens)
            coming = sequence.lookup.coming(sequence.in_flight)
            guess = sequence.lookup.following(coming + most)[coming:]
            if len(guess):
                drafts[sequence] = guess
                sequence.lookup.sent.append((len(sequence.tokens) + coming, 1 + len(guess)))
        return drafts

    def note(self, sequence: Sequence, wrong: int, sampled: int) -> None:
        """Of the drafts of `sequence`, which has `sampled` tokens more, so many were wrong: its row has given them up."""
        sequence.in_flight -= wrong
        if sequence.state is not None:
            sequence.state.tail -= wrong
        drafted = wrong + sampled - 1
        if not drafted or sequence.lookup is None:
            return
        self._counters["drafts"] += 1
        self._counters["draft_tokens"] += drafted
        self._counters["accepted_tokens"] += sampled - 1
        sequence.lookup.read(sequence.tokens)
        sequence.lookup.note(sampled - 1)
