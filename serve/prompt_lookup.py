"""What followed the last tokens of a sequence where they came before."""

from collections import deque
from collections.abc import Sequence

import numpy as np

LONGEST_PAUSE = 64  # tokens without drafts for a sequence whose drafts are wrong again and again


class PromptLookup:
    """The tokens of one sequence, to be found again."""

    def __init__(self, least: int, most: int) -> None:
        """Tokens in a row that must be, and that may be, the same as before."""
        self._least, self._most = least, most
        self._tokens, self._count = np.empty(1024, np.int32), 0
        self._pause, self._resumes = 1, 0
        # Of steps with drafts under way: tokens before each, were all drafts before it right, and tokens that it adds then.
        self.sent = deque[tuple[int, int]]()

    @property
    def tokens(self) -> np.ndarray:
        """i32[n]: those that it knows."""
        return self._tokens[: self._count]

    def read(self, tokens: Sequence[int]) -> None:
        """All tokens of the sequence: those after the ones that are known are new."""
        more = len(tokens)
        if more > len(self._tokens):
            self._tokens = np.resize(self._tokens, 2 * more)
        self._tokens[self._count : more] = tokens[self._count :]
        self._count = more

    def following(self, count: int) -> np.ndarray:
        """i32[at most `count`]: what came after the latest longest match of the last tokens; nothing during a pause."""
        known = self.tokens
        if count < 1 or self._count < max(self._resumes, 2):
            return known[:0]
        ends, matched = np.flatnonzero(known[:-1] == known[-1]), 1
        while matched < self._most and len(ends):
            longer = ends[ends >= matched]
            longer = longer[known[longer - matched] == known[-1 - matched]]
            if not len(longer):
                break
            ends, matched = longer, matched + 1
        if matched < self._least or not len(ends):
            return known[:0]
        # Where a text repeats itself the latest match has next to nothing after it.
        whole = ends[ends + count < self._count]
        end = int(whole[-1] if len(whole) else ends[0])
        return known[end + 1 : end + 1 + count]

    def coming(self, under_way: int) -> int:
        """How many of `under_way` tokens should come: drafts that follow wrong ones will be wrong, all others are right."""
        at, plain = self._count, under_way
        for before, count in self.sent:
            at += count if before == at else 1
            plain -= count
        return at - self._count + plain

    def note(self, right: int) -> None:
        """So many of the drafts sent first were right: after none come pauses, each twice as long as the one before.

        Drafts that were to follow others which turned out wrong say nothing.
        """
        before, _ = self.sent.popleft()
        if before != self._count:
            return
        self._pause = 1 if right else min(2 * self._pause, LONGEST_PAUSE)
        self._resumes = 0 if right else self._count + self._pause
