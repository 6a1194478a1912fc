"""Which tokens are prefilled in the next step: a chunk of the first sequence that needs one, or several short ones at once.

Every other step is for who came first, so that nobody waits for ever, and the others for those with the fewest tokens to go:
short prompts do not wait for a long one, nor streams for a crowd of prompts until their tails are compressed. What a short
prompt costs is a step, not its tokens: the weights are read for it alone. So short prompts, what is new in conversations
and tails to be compressed are packed into one chunk of the sizes that run beside decode steps.
"""

from collections import Counter
from collections.abc import Callable, Iterable

import numpy as np

from serve.limits import Limits
from serve.rows import Rows
from serve.sequence import ChunkWork, RowState, Sequence
from serve.sessions import ReachBack, StoredSession
from tangram_jax.packed import packed_slots
from tangram_jax.plan import CachePlan


class Chunks:
    """Makes the chunks of a step; their pages are reserved and the mirrors of their rows moved on."""

    def __init__(
        self,
        plan: CachePlan,
        limits: Limits,
        rows: Rows,
        reach_back: ReachBack,
        counters: Counter[str],
        obtain: Callable[[Sequence, np.ndarray], bool],
    ) -> None:
        """`obtain` frees the pages that a sequence needs, others preempted if it must be; False if it was itself."""
        self._plan, self._limits, self._rows, self._counters = plan, limits, rows, counters
        self._reach_back, self._obtain = reach_back, obtain
        self._ready: list[Sequence] = []  # of the last step, in the order in which they became so
        self._by_length = False  # whether the shortest one is next

    def next(self, running: Iterable[Sequence], decoding: int, score: bool) -> list[ChunkWork]:
        """The chunks of the next step, beside `decoding` sequences; prompt log-probabilities only if `score`, and alone."""
        ready = [s for s in self._in_order(running) if score or not s.needs_prompt_logprobs]
        if not ready:
            return []
        if self._by_length:
            ready.sort(key=lambda s: s.to_feed)
        self._by_length = not self._by_length
        first, *others = ready
        group = self._group(first, others, decoding)
        if first.needs_prompt_logprobs:
            most = self._limits.prompt_logprob_chunk
        elif group:
            most = self._limits.packed_chunks[-1]
        else:
            assert first.state is not None
            ahead = self._end(first) - first.state.cached
            most = self._limits.chunk_size(ahead, beside_decode=decoding > 0)
        work = self._chunk(first, most)
        if not work:
            return []  # it was preempted itself, after all who came later
        # Those that it preempted have no row any more; the others preempt nobody.
        chunks = [self._chunk(s, most, preempt=False) for s in group if s.state]
        return [work, *(c for c in chunks if c)]

    def clear(self) -> None:
        """Nobody is ready any more."""
        self._ready.clear()

    def tend(self, running: Iterable[Sequence]) -> None:
        """Full tails are due to be compressed, and nearly full ones with them where one chunk takes several.

        From then on these are full at the same time. Rows that keep everything come out of a compression as they were:
        their full tails only count as compressed.
        """
        limits, nearly_full = self._limits, self._limits.nearly_full
        full: list[Sequence] = []
        near: list[tuple[RowState, Sequence]] = []
        for sequence in running:
            state = sequence.state
            if state is None or state.tail < nearly_full or not sequence.may_decode:
                continue
            if state.tail < limits.max_tail and not sequence.due:
                near.append((state, sequence))
            elif not self._rows.keeps_all(state):
                full.append(sequence)
            elif not sequence.unsure:
                self._leave_prompt(sequence)
                sequence.room -= state.tail
                self._rows.settle(state)
        # Not behind prompts: who still has room in its tail need not stand still for them.
        if limits.packed_chunks and not all(s.due for s in full) and all(s.due for s in self._ready):
            fit = min(limits.packed_places, limits.packed_chunks[-1] // packed_slots(self._plan.window))
            near.sort(key=lambda pair: -pair[0].tail)
            others = [sequence for state, sequence in near if not self._rows.keeps_all(state)]
            full += others[: max(fit - len(full), 0)]
        for sequence in full:
            sequence.due = True

    def _in_order(self, running: Iterable[Sequence]) -> list[Sequence]:
        """Those that are ready, the one first that has been so for longest."""
        ready = {s: None for s in running if self._is_ready(s)}
        before = [s for s in self._ready if s in ready]
        self._ready = list(dict.fromkeys(before) | ready)
        return self._ready

    def _is_ready(self, sequence: Sequence) -> bool:
        if sequence.state is None or sequence.in_flight or sequence.left < 1:
            return False
        return not sequence.decodes(self._limits.max_tail)

    def _group(self, first: Sequence, others: Iterable[Sequence], decoding: int) -> list[Sequence]:
        """Those of `others`, first come first served, whose chunks fit whole into one program with that of `first`."""
        limits = self._limits
        if not limits.packed_chunks or decoding > limits.decode_beside_packed or first.needs_prompt_logprobs:
            return []
        most, totals, group = limits.packed_chunks[-1], [packed_slots(self._tokens(first))], []
        for sequence in others:
            if len(totals) == limits.packed_places:
                break
            # One that is too long for this step is the first of the next: it loses nothing.
            total = totals[-1] + packed_slots(self._tokens(sequence))
            if total <= most and not sequence.needs_prompt_logprobs:
                totals.append(total)
                group.append(sequence)
        while group and not limits.worth_packing(totals[-1], len(totals)):
            totals.pop()
            group.pop()
        return group

    def _tokens(self, sequence: Sequence) -> int:
        """Of its next chunk, if that is not cut."""
        assert sequence.state is not None
        return self._end(sequence) - sequence.state.cached + max(self._again(sequence), 0)

    def _end(self, sequence: Sequence) -> int:
        """The count of tokens at which the next chunk ends at the latest."""
        state = sequence.state
        assert state is not None
        # A row that was rolled back into its window must come at least as far as it was compressed.
        least = max(state.cached + 1, state.compressed)
        return min((b for b in sequence.borders if b >= least), default=len(sequence.tokens))

    def _again(self, sequence: Sequence) -> int:
        """Tokens to run again, if any: scoring wants a full window of queries, and the window and the tail are whole."""
        state, end = sequence.state, self._end(sequence)
        assert state is not None
        short = min(self._plan.window, end) - (end - state.cached)
        return min(short, state.tail + self._reach_back(state))

    def _chunk(self, sequence: Sequence, most: int, *, preempt: bool = True) -> ChunkWork | None:
        """The next chunk of `sequence`; None if there are no pages for it, or none without preempting others."""
        state = sequence.state
        assert state is not None
        known, end = len(sequence.tokens), self._end(sequence)
        room = self._limits.room(sequence.left - 1)
        last = end == known and known - state.cached <= most
        wanted = self._rows.wanted(state.budgets, known, room)
        # Looked up first: what is left behind for a compression is left once.
        if last and not preempt and not self._rows.could_secure(self._missing(sequence, wanted)):
            return None
        compresses, sequence.due = sequence.due, False
        if compresses:
            self._leave_prompt(sequence)
        back = self._again(sequence)
        if last and not (self._obtain if preempt else self._secure)(sequence, wanted):
            return None
        if compresses:
            self._counters["tail_compressions"] += 1
        if back > 0:
            self._rows.rollback(state, back)
        start = state.cached
        count = min(most, end - start)
        last = start + count == known
        self._rows.grow(state, known, room)
        state.compressed, state.tail = start + count, 0
        following = None
        if sequence.needs_prompt_logprobs:
            following = np.asarray([*sequence.tokens[start + 1 : start + count + 1], 0][:count], np.int32)
        if last:
            sequence.in_flight += 1
            sequence.room = room
        tokens = np.asarray(sequence.tokens[start : start + count], np.int32)
        return ChunkWork(sequence, tokens, start, last, following)

    def _secure(self, sequence: Sequence, wanted: np.ndarray) -> bool:
        return self._rows.secure(self._missing(sequence, wanted))

    def _missing(self, sequence: Sequence, wanted: np.ndarray) -> int:
        assert sequence.state is not None
        return self._rows.pages.missing(sequence.state.holding, wanted)

    def _leave_prompt(self, sequence: Sequence) -> None:
        """Store the prompt of a generation that is about to be compressed for the first time: it may be asked once more.

        Only where nothing else has to go, and as the first to go.
        """
        state, rows = sequence.state, self._rows
        if state is None or state.compressed != sequence.prompt_length:
            return
        if sequence.choice or not sequence.keep:
            return
        if not rows.free or len(rows.sessions) >= self._limits.max_stored:
            return
        if rows.copied_pages(state) > rows.pages.free:
            return
        prompt = rows.copy(state)
        rows.rollback(prompt, prompt.tail)
        rows.trim(prompt, prompt.compressed, 0)
        tokens = np.asarray(sequence.tokens[: prompt.compressed], np.int32)
        rows.sessions.put(StoredSession(prompt, tokens), first_to_go=True)
