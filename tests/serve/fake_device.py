"""A device without tensors: rows hold token ids, pages are counted one by one, and the next token is a hash.

The next token is a pure function of the tokens in a row and of the seed, as with a real model. So whatever the
scheduler does (chunks, forks, stored sessions, preemption, compressed tails), the output must be the one that
`expected` computes without any of it. Every rule of the cache that the scheduler relies on is asserted here.
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from models.testing import tiny_config
from serve.handles import Handles
from serve.limits import Limits
from serve.sequence import Phase, RowState, Sequence, Work
from tangram_jax.packed import packed_slots
from tangram_jax.plan import CachePlan

CONFIG = tiny_config()
VOCAB = CONFIG.vocab_size


def next_token(tokens: list[int], seed: int) -> int:
    """The model: any id but the special ones, or now and then an EOS."""
    code = zlib.crc32(np.asarray([*tokens, seed & 0xFFFF], np.int32).tobytes())
    return 2 if code % 97 == 0 else 8 + code % (VOCAB - 8)


def expected(prompt: list[int], seed: int, count: int, stops: tuple[int, ...] = (0, 2)) -> list[int]:
    """What a request must generate: up to `count` tokens, the first stop token included."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < count:
        tokens.append(next_token(tokens, seed))
        if tokens[-1] in stops:
            break
    return tokens[len(prompt) :]


class AnyText:
    """A grammar that allows everything, and what each state of it was shown."""

    def start(self, *, ignore_end: bool = False) -> "AnyText":
        del ignore_end
        state = AnyText()
        state.seen: list[int] = []  # type: ignore[misc]
        return state

    def advance(self, token: int) -> bool:
        self.seen.append(token)
        return False


def check_mask(sequence: Sequence) -> None:
    """What a grammar allows next must be known: it has seen all tokens, none is on its way."""
    if sequence.grammar is not None and sequence.phase is Phase.RUNNING:
        assert sequence.in_flight == 1  # the one that is sampled now
        assert sequence.grammar.seen == sequence.tokens[sequence.prompt_length :]  # type: ignore[attr-defined]


@dataclass
class FakeRow:
    """One row: what it holds, and its pages by group. `compressed` is the highest count it was compressed at.

    In its rings the entries of positions below `lost` are overwritten.
    """

    content: list[int] = field(default_factory=list)
    compressed: int = 0
    pages: list[list[int]] = field(default_factory=list)
    seed: int = 0
    last_token: int = 0
    lost: int = 0
    budgets: np.ndarray | None = None  # None: the plan's

    @property
    def tail(self) -> int:
        return len(self.content) - self.compressed


class FakeDevice:
    """RowOperations and `run`, in the order in which a device would do them."""

    def __init__(self, plan: CachePlan, limits: Limits, num_pages: int) -> None:
        self.plan, self.limits, self.num_pages = plan, limits, num_pages
        self.calls: list[tuple[Any, ...]] = []
        self.packed = 0  # steps of several chunks
        self.reset()

    def reset(self) -> None:
        self.free = list(range(self.num_pages))
        self.owners = [0] * self.num_pages
        self.rows = [self._empty() for _ in range(self.limits.max_running + self.limits.max_stored)]

    def _empty(self) -> FakeRow:
        return FakeRow(pages=[[] for _ in range(self.plan.num_page_lists)])

    def _take(self) -> int:
        assert self.free, "the scheduler took a page that is not free"
        page = self.free.pop()
        self.owners[page] = 1
        return page

    def _give(self, page: int) -> None:
        self.owners[page] -= 1
        assert self.owners[page] >= 0
        if not self.owners[page]:
            self.free.append(page)

    # RowOperations

    def set_budgets(self, row: int, budgets: np.ndarray) -> None:
        self.calls.append(("set_budgets", row))
        assert not any(self.rows[row].pages)
        self.rows[row].budgets = budgets

    def reserve(self, row: int, tokens: int, tail: int) -> None:
        self.calls.append(("reserve", row, tokens, tail))
        state = self.rows[row]
        needed = self.plan.group_pages(tokens, tail, state.budgets)
        for pages, wanted in zip(state.pages, needed, strict=True):
            while len(pages) < wanted:
                pages.append(self._take())

    def trim(self, row: int, tokens: int, tail: int) -> None:
        self.calls.append(("trim", row, tokens, tail))
        state = self.rows[row]
        shared = self.plan.shared_group_pages(state.compressed, state.budgets)
        wanted = self.plan.group_pages(tokens, tail, state.budgets)
        assert (wanted >= shared).all()
        for pages, count in zip(state.pages, wanted, strict=True):
            while len(pages) > count:
                self._give(pages.pop())

    def rollback(self, row: int, count: int) -> None:
        self.calls.append(("rollback", row, count))
        assert count >= 0
        state = self.rows[row]
        state.content = state.content[: len(state.content) - count]
        reach = min(self.plan.window, self.plan.lengths(state.compressed, state.budgets).min())
        assert state.tail >= -reach, "rolled back into locked entries"

    def settle(self, row: int, tokens: int) -> None:
        self.calls.append(("settle", row, tokens))
        state = self.rows[row]
        assert tokens == len(state.content)
        assert (self.plan.lengths(tokens, state.budgets) == tokens).all()
        state.compressed = tokens

    def fork(self, src: int, dst: int) -> None:
        self.calls.append(("fork", src, dst))
        source = self.rows[src]
        assert not any(self.rows[dst].pages)
        assert src != dst
        pages = []
        shared = self.plan.shared_group_pages(source.compressed, source.budgets)
        for full, own in zip(shared, source.pages, strict=True):
            for page in own[:full]:
                self.owners[page] += 1
            pages.append(own[:full] + [self._take() for _ in own[full:]])
        self.rows[dst] = replace(source, content=list(source.content), pages=pages, seed=0, last_token=0)

    def release(self, row: int) -> None:
        self.calls.append(("release", row))
        for pages in self.rows[row].pages:
            for page in pages:
                self._give(page)
        self.rows[row] = self._empty()

    def start(self, sequence: Sequence) -> None:
        assert sequence.state is not None
        budgets = self.rows[sequence.state.row].budgets
        assert sequence.budgets is (self.plan.group_ppm if budgets is None else budgets)
        self.calls.append(("start", sequence.state.row))
        assert not sequence.in_flight
        row = self.rows[sequence.state.row]
        row.seed, row.last_token = sequence.seed, sequence.tokens[-1]

    copies_wait = False  # of `RowOperations`: for a while after a copy

    def saved_bytes(self, pages: int) -> int:
        return pages

    def save(self, state: RowState, pages: np.ndarray) -> object | None:
        """Only the tokens that were asked for; a row loses nothing by it."""
        self.calls.append(("save", state.row, int(pages.sum())))
        row = self.rows[state.row]
        assert state.compressed == row.compressed
        assert state.cached <= len(row.content)
        assert (pages == self.plan.group_pages(state.compressed, max(state.tail, 0), row.budgets)).all()
        assert (pages <= [len(own) for own in row.pages]).all()
        self.copies_wait = True
        return replace(row, content=row.content[: state.cached], pages=[])

    def load(self, state: RowState, pages: np.ndarray, saved: Any) -> None:
        self.calls.append(("load", state.row, int(pages.sum())))
        row = self.rows[state.row]
        assert (row.content, row.compressed) == ([], 0)
        assert row.budgets is saved.budgets
        assert pages.tolist() == [len(own) for own in row.pages]
        assert all(self.owners[page] == 1 for own in row.pages for page in own)
        row.content, row.compressed, row.lost = list(saved.content), saved.compressed, saved.lost
        assert (state.compressed, state.tail) == (row.compressed, row.tail)
        self.copies_wait = True

    # Steps

    def run(self, work: Work, read_all: Callable[[], None]) -> Handles:
        """The tokens sampled, as a list in the order of the sequences (None where the sample means nothing)."""
        self.copies_wait = False
        sequences: list[Sequence | None] = []
        rows: list[int] = []
        limits = self.limits
        most = limits.chunks_beside_decode[-1] if work.decode else limits.max_chunk
        if len(work.chunks) > 1:
            most = limits.packed_chunks[-1]
            assert len(work.chunks) <= limits.packed_places
            assert limits.packed_places + len(work.decode) <= limits.max_running + 1
            assert not work.scores_prompt
        if work.scores_prompt:
            most = limits.prompt_logprob_chunk
            assert not work.decode
        slots = packed_slots if len(work.chunks) > 1 else int
        assert sum(slots(len(chunk.tokens)) for chunk in work.chunks) <= most
        for chunk in work.chunks:
            assert chunk.sequence.state is not None
            assert chunk.sequence.state.row not in rows
            row = self.rows[chunk.sequence.state.row]
            assert len(chunk.tokens) >= 1
            assert chunk.start == len(row.content)
            self._enter_rings(row, len(chunk.tokens), whole_pages=True)
            row.content += chunk.tokens.tolist()
            assert len(row.content) >= row.compressed, "a chunk after a rollback must reach the old count"
            row.compressed = len(row.content)
            self._check_pages(row)
            sequences.append(chunk.sequence if chunk.last else None)
            rows.append(chunk.sequence.state.row)
        self.packed += len(work.chunks) > 1
        assert len(work.decode) <= self.limits.max_running
        for sequence in work.decode:
            assert sequence.state is not None
            assert sequence.state.row not in rows
            row = self.rows[sequence.state.row]
            assert 0 <= row.tail < self.limits.max_tail
            self._enter_rings(row, 1)
            row.content.append(row.last_token)
            self._check_pages(row)
            sequences.append(sequence)
            rows.append(sequence.state.row)
        if any(s.grammar for s in sequences if s):
            read_all()
        tokens = np.zeros(len(rows), np.int32)
        for i, (s, r) in enumerate(zip(sequences, rows, strict=True)):
            if s is not None:
                check_mask(s)
                row = self.rows[r]
                tokens[i] = row.last_token = next_token(row.content, row.seed)
        return Handles(sequences, tokens)  # type: ignore[arg-type]

    def sample_again(self, sequences: list[Sequence]) -> list[Handles]:
        handles = []
        for sequence in sequences:
            assert sequence.state is not None
            assert (sequence.in_flight, sequence.generated) == (1, 1)
            check_mask(sequence)
            row = self.rows[sequence.state.row]
            assert row.content == sequence.tokens
            row.last_token = next_token(row.content, row.seed)
            handles.append(Handles([sequence], np.asarray([row.last_token], np.int32)))  # type: ignore[arg-type]
        return handles

    def _enter_rings(self, row: FakeRow, count: int, whole_pages: bool = False) -> None:
        """All that a window still shows must be there; then `count` tokens overwrite what is oldest."""
        if not (rings := self.plan.rings):
            return
        held = len(row.content)
        assert held - (rings.window - 1) >= row.lost or not row.lost, "a ring lost what its window shows"
        first = held + count - rings.slots
        if whole_pages:
            first = ((held + count - 1) // rings.page_size - rings.pages + 1) * rings.page_size
        row.lost = max(row.lost, first)

    def _check_pages(self, row: FakeRow) -> None:
        """Every entry has its page, no page beyond what a row of the table can hold, one owner where it is written."""
        need = self.plan.group_pages(row.compressed, row.tail, row.budgets)
        longest = self.limits.max_model_len
        entries = np.minimum(self.plan.lengths(longest, row.budgets) + self.limits.max_tail, longest)
        most = self.plan.group_pages(longest, 0, row.budgets)
        most[: len(entries)] = -(-entries // self.plan.page_size)
        shared = self.plan.shared_group_pages(row.compressed, row.budgets)
        for m, pages in enumerate(row.pages):
            assert need[m] <= len(pages) <= most[m]
            for page in pages[shared[m] :]:
                assert self.owners[page] == 1, "entries that can change lie in a shared page"
        assert len(row.content) <= longest


class FakeRunner(FakeDevice):
    """What the engine sees of a runner."""

    config = CONFIG
    compilations = 0

    def __init__(self, plan: CachePlan, limits: Limits, num_pages: int) -> None:
        super().__init__(plan, limits, num_pages)
        self.cache = SimpleNamespace(pool=np.zeros(num_pages))

    def warm_up(self) -> list[str]:
        return []
