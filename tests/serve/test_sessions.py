"""Which stored session a prompt continues, and what evicting them all would free."""

import numpy as np
import pytest

from serve.pages import PageBook
from serve.sequence import RowState
from serve.sessions import ReachBack, SessionStore, StoredSession
from tests.serve.loop import make_plan

PLAN = make_plan()  # budgets 0.05 to 1, a window of 8, at least 8 entries
REACH = ReachBack(PLAN)


def stored(store: SessionStore, tokens: list[int], compressed: int, row: int = 0) -> StoredSession:
    book = PageBook(1000, PLAN.num_groups)
    state = RowState(row, book.empty(), PLAN.group_ppm, compressed, len(tokens) - compressed)
    session = StoredSession(state, np.asarray(tokens, np.int32))
    store.put(session)
    return session


def take(store: SessionStore, prompt: list[int]) -> tuple[int, int] | None:
    """(row, tokens that stay)"""
    found = store.find(np.asarray(prompt, np.int32), PLAN.group_ppm, REACH)
    if found:
        store.remove(found[0])
    return (found[0].state.row, found[1]) if found else None


def test_reach_back_is_the_window_as_far_as_every_group_holds_it():
    def reach(plan, compressed):
        holding = PageBook(0, plan.num_groups).empty()
        return ReachBack(plan)(RowState(0, holding, plan.group_ppm, compressed))

    assert [reach(PLAN, n) for n in (0, 1, 5, 8, 9, 1000)] == [0, 1, 5, 8, 8, 8]
    smallest = make_plan(min_entries=0)  # 0.05 keeps 1 of 20, 2 of 40
    assert [reach(smallest, n) for n in (20, 40, 100, 1000)] == [1, 2, 5, 8]
    own = make_plan(1.0, min_entries=0, max_retention=0.5)  # of a row with a retention of its own
    state = RowState(0, PageBook(0, own.num_groups).empty(), own.budgets_at(0.05), 40)
    assert ReachBack(own)(state) == 2


TOKENS = list(range(100, 160))  # 50 compressed, a tail of 10


@pytest.mark.parametrize(
    ("prompt", "stays"),
    [
        ([*TOKENS, 1, 2], 60),  # the next turn
        (TOKENS, 59),  # the same: its last token runs again
        ([*TOKENS[:55], 1, 2, 3], 55),  # parts in the tail
        ([*TOKENS[:50], 1], 50),  # regenerate with one token more
        (TOKENS[:50], 49),  # regenerate
        ([*TOKENS[:42], *range(10)], 42),  # parts in the window, as far back as it reaches
        ([*TOKENS[:41], *range(20)], None),  # one further
        (TOKENS[:49], None),  # shorter than what is compressed
        ([*TOKENS[:45], *range(5)], 45),  # just as long
        ([*TOKENS[:45], *range(4)], None),
        ([1, *TOKENS], None),
        ([5], None),
        ([], None),
    ],
)
def test_what_a_prompt_may_continue(prompt, stays):
    store = SessionStore(4)
    stored(store, TOKENS, 50)
    assert take(store, prompt) == (None if stays is None else (0, stays))
    assert len(store) == (stays is None)


def test_short_sessions():
    store = SessionStore(4)
    stored(store, [7], 1)
    assert take(store, [7]) is None  # no token would stay
    assert take(store, [7, 8]) == (0, 1)


def test_a_row_rolled_back_into_its_window():
    """An abort may come between a rollback and the chunk: 50 were compressed, 46 are left."""
    store = SessionStore(4)
    stored(store, TOKENS[:46], 50)
    assert take(store, TOKENS[:49]) is None  # must reach 50 again
    assert take(store, [*TOKENS[:46], 1, 2, 3]) is None
    assert take(store, [*TOKENS[:46], 1, 2, 3, 4]) == (0, 46)


def test_the_session_that_saves_most():
    store = SessionStore(4)
    stored(store, TOKENS[:20], 10, row=0)
    stored(store, TOKENS[:40], 30, row=1)
    stored(store, [*TOKENS[:30], 1, 2], 25, row=2)
    assert take(store, TOKENS) == (1, 40)
    assert take(store, TOKENS) == (2, 30)
    assert take(store, TOKENS) == (0, 20)
    assert take(store, TOKENS) is None


def test_evicts_by_last_use():
    store = SessionStore(3)
    sessions = [stored(store, [i, i], 2, row=i) for i in range(3)]
    assert store.full
    assert take(store, [0, 0, 5]) == (0, 2)
    store.put(sessions[0])
    assert [s.state.row for s in store] == [1, 2, 0]
    evicted = [store.evict() for _ in range(4)]
    assert [s.state.row if s else None for s in evicted] == [1, 2, 0, None]


def test_evicts_what_no_prompt_waits_for_then_what_waits_longest():
    store = SessionStore(5)
    for row in range(5):
        stored(store, [row, row], 2, row=row)
    store.turn_of = lambda session: {0: 1, 1: 0, 2: None, 3: 2, 4: None}[session.state.row]
    evicted = [store.evict() for _ in range(6)]
    assert [s.state.row if s else None for s in evicted] == [2, 4, 3, 0, 1, None]


def test_the_prefix_that_goes_is_the_first_from_which_nothing_went_on():
    store = SessionStore(4)
    sessions = [stored(store, [i, i], 2, row=i) for i in range(4)]
    assert store.unused_prefix() is None
    for session in sessions[1:]:
        session.is_prefix = True
    sessions[1].is_used = True
    assert store.unused_prefix() is sessions[2]


def test_pages_are_those_that_nobody_else_owns():
    book, store = PageBook(100, 2), SessionStore(4)
    rows = [book.empty()]
    book.grow(rows[0], np.array([10, 5]))
    for full in ([6, 2], [8, 2]):
        rows.append(book.fork(rows[0], np.array(full)))
    assert book.used == 15 + (4 + 3) + (2 + 3)

    def put(row: int) -> None:
        store.put(StoredSession(RowState(row, rows[row], PLAN.group_ppm, 1), np.ones(1, np.int32)))

    expected = [4 + 3, 4 + 3 + 2 + 3, book.used]  # the last one brings the shared ones
    for row, pages in zip((1, 2, 0), expected, strict=True):
        put(row)
        assert store.pages == pages
    for _ in range(3):
        session = store.evict()
        assert session is not None
        book.release(session.state.holding)
        assert book.used == store.pages
    assert book.free == 100
