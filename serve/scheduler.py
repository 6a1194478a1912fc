"""Which sequences run in the next step: exact page counts, first come first served, nothing over-allocated.

The scheduler decides in plain numbers and tells the device what to do with rows through `RowOperations`; it never
touches a tensor. A sequence is in one of two states, by how many of its tokens are not in the cache yet: one means
decode, more means a chunk. So the first prefill, a continued conversation, the compression of a long tail and the way
back from preemption are the same thing.
"""

from collections import Counter, deque
from functools import lru_cache
from itertools import islice

import numpy as np

from serve.chunks import Chunks
from serve.drafting import Drafting
from serve.host_store import HostedSession
from serve.limits import Limits
from serve.offload import Offload
from serve.prefixes import Prefixes
from serve.request import RequestRejected
from serve.row_operations import RowOperations
from serve.rows import Rows
from serve.sequence import Phase, RowState, Sequence, Work
from serve.sessions import ReachBack, StoredSession, find
from tangram_jax.cache import row_layout
from tangram_jax.plan import CachePlan

RETENTIONS = 256  # different ones that are remembered
NEXT = 64  # waiting prompts for which stored rows are spared
SOON = 16  # tail tokens: whoever has room for no more gets pages as soon as another one must


class Scheduler:
    """Owns rows, pages, waiting and running sequences, and stored sessions."""

    def __init__(self, plan: CachePlan, limits: Limits, num_pages: int, device: RowOperations) -> None:
        self.plan, self.limits, self._device = plan, limits, device
        self.rows = Rows(plan, limits.max_running + limits.max_stored, limits.max_stored, num_pages, device)
        self.pages, self.sessions = self.rows.pages, self.rows.sessions
        self._prefixes = Prefixes(self.rows, limits.least_shared)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._closing: list[Sequence] = []
        self._scored_last = False  # the last step was a chunk of a prompt whose log-probabilities are wanted
        # What goes on as it is, and for how many more steps, unless something happens.
        self._steady: Work | None = None
        self._more_steps = 0
        self._has_grown = False  # a row that decodes got pages for the next step
        self.counters = Counter[str]()
        self.drafting = Drafting(limits, self.counters)
        self._reach_back = ReachBack(plan)
        # The same array for the same retention: rows with equal budgets are told by that. One that was forgotten is made
        # anew, and what is stored under it is not found.
        self.budgets = lru_cache(maxsize=RETENTIONS)(plan.budgets_at)
        self._chunks = Chunks(plan, limits, self.rows, self._reach_back, self.counters, self._obtain)
        self.offload = Offload(self.rows, device, limits.host_bytes, limits.least_shared, self.counters)
        self.sessions.turn_of = self.offload.store.turn_of = self._turn_of

    # Admission

    def check(self, prompt_length: int, max_tokens: int, retention: float | None = None) -> None:
        """Raises RequestRejected for what could never run, even alone."""
        try:
            budgets = self.budgets(retention)
        except ValueError as error:
            most = self.plan.max_retention  # in full: one that is rounded up would be refused
            raise RequestRejected(
                f"kv_retention {retention} is above {most}, the most that a request may ask for here (one that asks for "
                f"nothing may keep more, by the profile's margin): ask for at most {most}, leave it out, or start the "
                "server with a higher --max-retention",
                "kv_retention",
            ) from error
        total = prompt_length + max_tokens
        if total > self.limits.max_model_len:
            raise RequestRejected(
                f"{prompt_length} prompt tokens and {max_tokens} to generate exceed the maximum of "
                f"{self.limits.max_model_len} tokens: shorten the prompt or lower max_tokens"
            )
        need = row_layout(self.plan, total, self.limits.max_tail, budgets).width
        if need > self.pages.total:
            raise RequestRejected(
                f"a request of {total} tokens can take {need} KV pages, the pool has {self.pages.total}: shorten it, "
                "or start the server with more KV memory or a lower retention"
            )

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def schedule(self) -> Work | None:
        """The next step, with all its pages reserved; None when nothing can run now."""
        work = self._steady
        if work and (not self.waiting or len(self.running) >= self.limits.max_running):
            self._more_steps -= 1
        else:
            work = self._next()
        self._steady = work if self._more_steps else None
        if not work:
            return None
        for sequence in work.decode:
            state = sequence.state
            assert state is not None
            count = 1 + len(work.drafts[sequence]) if sequence in work.drafts else 1
            state.tail += count
            sequence.in_flight += count
        return work

    def _next(self) -> Work | None:
        """The next step from all that run or wait; its tokens are not counted yet."""
        self._admit()
        self._chunks.tend(self.running)
        max_tail, self._has_grown = self.limits.max_tail, False
        decode = [s for s in list(self.running) if s.decodes(max_tail) and self._make_room(s)]
        # The program that scores a prompt has no place for others: they take turns, so that streams go on.
        chunks = self._chunks.next(self.running, len(decode), score=not (decode and self._scored_last))
        decode = [s for s in decode if s.state is not None]  # others may have preempted it since
        if self._has_grown:
            self._make_more_room(decode)
        parent = self.waiting[0].parent if self.waiting else None
        work = Work(chunks, decode, {} if chunks else self.drafting.of(decode, but=parent))
        self._scored_last = work.scores_prompt
        if self._scored_last:
            decode.clear()
        self._more_steps = 0
        if not chunks and len(decode) == len(self.running) > self.limits.drafting:
            # All that run have pages for so many tokens, and want them; of each the next one is on its way.
            self._more_steps = min(min(s.room - s.state.tail, s.left) for s in decode if s.state) - 1
        return work if chunks or decode else None

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.limits.max_running:
            sequence = self.waiting[0]
            if sequence.in_flight:  # preempted, with a token still to be read
                return
            if sequence.parent and sequence.parent.phase in (Phase.CLOSING, Phase.ENDED):
                # Another choice that still has the prompt, which would run again otherwise.
                sequence.parent = next((s for s in self.running if s.request is sequence.request), None)
            if sequence.parent and sequence.parent.unsure:
                return  # its row cannot be copied yet
            forked = self._fork_parent(sequence)
            if not forked and not self._give_row(sequence):
                return
            self._run_first()

    def _run_first(self) -> None:
        """The first in the queue has its row now."""
        sequence = self.waiting.popleft()
        sequence.phase = Phase.RUNNING
        self.running.append(sequence)
        self._device.start(sequence)

    def _give_row(self, sequence: Sequence) -> bool:
        """A row with pages for all tokens so far: a stored one that they extend, or an empty one."""
        parent = sequence.parent
        if parent is not None and parent.phase in (Phase.WAITING, Phase.RUNNING) and parent.generated == 0:
            return False  # the parent's prompt is on its way: fork that
        if any(s.keep and sequence.continues(s) for s in self._closing):
            return False  # a fast client: the turn before will be stored when its last step is in
        session, stays = self._stored(sequence)
        hosted, stays = self._hosted(sequence, stays)
        if self._prefixes.awaited(sequence, stays, self.running):
            return False
        # The first sampled token is fed back only if more may follow.
        room = self.limits.room(sequence.left - 1)
        wanted = self.rows.wanted(sequence.budgets, len(sequence.tokens), room)
        missing = self.pages.missing(session.state.holding if session else self.pages.empty(), wanted)
        if self.running and not self.rows.could_secure(missing + self._soon()):
            return False  # it would soon be preempted, and all of it run again
        if (hosted or missing > self.pages.free) and self.running and self.offload.busy:
            return False  # copies take their time: others go on meanwhile
        if hosted:
            restored = self.offload.restore(hosted, stays, len(sequence.tokens), wanted)
            session, stays = (restored, stays) if restored else self._stored(sequence)
        if session:
            self.sessions.remove(session)
            state = self._prefixes.copy(session, sequence, stays, wanted) or session.state
        elif self.rows.free or self.rows.evict():
            state = self.rows.take(sequence.budgets)
        else:
            return False
        if not self.rows.secure(self.pages.missing(state.holding, wanted)):
            if session:
                self.sessions.put(session)
            else:
                self.rows.release(state)
            return False
        # Once: what it has left behind when it was preempted is its own.
        if sequence.generated == 0 and sequence.cached_tokens is None:
            self.counters["prefix_queries"] += len(sequence.tokens)
            self.counters["prefix_hits"] += stays
            sequence.cached_tokens = stays
        sequence.continued = sequence.continued or (session is not None and state is session.state)
        if state.cached > stays:
            self.rows.rollback(state, state.cached - stays)
        self.rows.grow(state, len(sequence.tokens), room)
        sequence.state, sequence.room = state, room
        return True

    def _soon(self) -> int:
        """Pages that those who run will want before long: on average half of what is reserved at a time."""
        tokens = sum(self.limits.room(s.left) for s in self.running) // 2
        return tokens * self.plan.num_groups // self.plan.page_size

    def _stored(self, sequence: Sequence) -> tuple[StoredSession | None, int]:
        """The stored row that saves most of its prefill, and how many tokens stay."""
        if sequence.needs_prompt_logprobs or not self.limits.max_stored:
            return None, 0
        return self.sessions.find(sequence.token_array, sequence.budgets, self._reach_back) or (None, 0)

    def _turn_of(self, session: StoredSession) -> int | None:
        """How many prompts wait before the first of the next ones that would go on from a stored row."""
        for turn, sequence in enumerate(islice(self.waiting, NEXT)):
            given = sequence.token_array, sequence.budgets, self._reach_back, self.limits.least_shared
            if not sequence.needs_prompt_logprobs and find([session], *given):
                return turn
        return None

    def _hosted(self, sequence: Sequence, stays: int) -> tuple[HostedSession | None, int]:
        """The same of those in host memory, if there is one that saves more than `stays` tokens."""
        if sequence.needs_prompt_logprobs or not self.limits.host_bytes:
            return None, stays
        return self.offload.find(sequence.token_array, sequence.budgets, self._reach_back, stays)

    def _fork_parent(self, sequence: Sequence) -> bool:
        """Share the prompt's pages of another choice of the same request, as soon as it has been prefilled."""
        parent = sequence.parent
        state = parent.state if parent else None
        # A row that was stored may have been compressed so far before its prompt ran again.
        if parent is None or state is None or not parent.generated:
            return False
        if sequence.generated or state.compressed != sequence.prompt_length:
            return False
        back = min(self._reach_back(state), sequence.prompt_length)
        # Without a token to go back the prompt could not be run again for its logits: some head keeps nothing.
        if back < 1 or not self._fork(sequence, parent):
            return False
        assert sequence.state is not None
        self.rows.rollback(sequence.state, state.tail + back)
        return True

    def _fork_choices(self, parent: Sequence) -> list[Sequence]:
        """Let the other choices of a prompt begin whose last chunk is on its way: they sample from the same logits."""
        begun: list[Sequence] = []
        if len(parent.tokens) != parent.prompt_length:
            return begun
        while self.waiting and len(self.running) < self.limits.max_running:
            sequence = self.waiting[0]
            if sequence.parent is not parent or sequence.generated or not self._fork(sequence, parent):
                break
            self._run_first()
            sequence.in_flight += 1
            begun.append(sequence)
        return begun

    def _fork(self, sequence: Sequence, parent: Sequence) -> bool:
        """Give `sequence` a row like its parent's, if there is room."""
        state = parent.state
        assert state is not None
        if not (self.rows.free or self.rows.evict()) or not self.rows.secure(self.rows.copied_pages(state)):
            return False
        sequence.state, sequence.room = self.rows.copy(state), parent.room
        return True

    # Pages

    def _make_room(self, sequence: Sequence) -> bool:
        """Pages for one more tail token, others preempted if it must be; False if it was preempted itself."""
        state = sequence.state
        if state is None:
            return False
        if state.tail < sequence.room:
            return True
        room, wanted = self._more_room(sequence, state)
        if not self._obtain(sequence, wanted):
            return False
        self.rows.grow(state, state.compressed, room)
        sequence.room, self._has_grown = room, True
        return True

    def _more_room(self, sequence: Sequence, state: RowState) -> tuple[int, np.ndarray]:
        """Tail tokens to have room for next, and the pages that this takes."""
        room = min(state.tail + self.limits.room(sequence.left), self.limits.max_tail)
        return room, self.rows.wanted(state.budgets, state.compressed, room)

    def _make_more_room(self, decode: list[Sequence]) -> None:
        """Free pages for those who will want some soon: all together they cost hardly more than one."""
        for sequence in decode:
            state = sequence.state
            if state is None or sequence.room - state.tail > SOON:
                continue
            room, wanted = self._more_room(sequence, state)
            if room > sequence.room and self.pages.missing(state.holding, wanted) <= self.pages.free:
                self.rows.grow(state, state.compressed, room)
                sequence.room = room

    def _obtain(self, sequence: Sequence, wanted: np.ndarray) -> bool:
        """Free what `sequence` misses of `wanted`; the latest arrival goes back to the queue if nothing else helps."""
        assert sequence.state is not None
        while not self.rows.secure(self.pages.missing(sequence.state.holding, wanted)):
            victim = max(self.running, key=lambda s: s.arrival)
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        assert sequence.state is not None
        self.counters["preemptions"] += 1
        self.offload.preempted(sequence)
        self.rows.release(sequence.state)
        sequence.state, sequence.phase, sequence.due = None, Phase.WAITING, False
        self.running.remove(sequence)
        self.waiting.appendleft(sequence)

    def after_dispatch(self, work: Work) -> list[Sequence]:
        """To be called when `work` is on its way: gives back the pages that a compression no longer needs.

        Returns the sequences whose first token is to be sampled from the logits of their parents' chunks as well.
        """
        begun: list[Sequence] = []
        for chunk in work.chunks:
            sequence, state = chunk.sequence, chunk.sequence.state
            if state is None:
                continue
            if chunk.last:
                self.rows.trim(state, state.compressed, sequence.room)
            self._prefixes.leave(sequence)
            if chunk.last:
                begun += self._fork_choices(sequence)
        return begun

    # Ends

    def forget(self) -> None:
        """Let go of all that runs, waits or is stored, the device apart: somebody else schedules from now on.

        `python -m serve` has the garbage collector look away from what was there at the start, as the first scheduler was.
        """
        for sequences in (self.running, self.waiting, self._closing):
            sequences.clear()
        self._steady = None
        self._chunks.clear()
        self.sessions.clear()
        self.offload.store.clear()

    def end(self, sequence: Sequence) -> None:
        """`sequence` generates no more; its row is given up or stored once nothing of it is in flight."""
        self._steady = None
        if sequence.phase is Phase.WAITING:
            if sequence in self.waiting:
                self.waiting.remove(sequence)
        elif sequence.phase is Phase.RUNNING:
            self.running.remove(sequence)
        sequence.phase = Phase.CLOSING
        self._closing.append(sequence)
        self.close(sequence)

    def close(self, sequence: Sequence) -> None:
        """Let go of the row of an ended sequence, if all results are in."""
        if sequence.phase is not Phase.CLOSING or sequence.in_flight:
            return
        sequence.phase = Phase.ENDED
        self._closing.remove(sequence)
        state = sequence.state
        sequence.state = None
        if state is None:
            return
        if not sequence.keep or not self.limits.max_stored or state.cached < 1:
            self.rows.release(state)
            return
        # What was given up before its first token, and was no conversation before, costs no other one its place, nor
        # does any choice but the first: a client goes on from one of them.
        unread = len(sequence.tokens) == sequence.prompt_length and not sequence.continued
        spare = unread or sequence.choice > 0
        if spare and self.sessions.full:
            self.rows.release(state)
            return
        while self.sessions.full:
            self.rows.evict()
        self.rows.trim(state, state.compressed, max(state.tail, 0))
        tokens = np.asarray(sequence.tokens[: state.cached], np.int32)
        self.sessions.put(StoredSession(state, tokens), first_to_go=spare)
