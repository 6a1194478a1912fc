"""The store of rows in host memory: its limit, and the order in which they go."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.host_store import HostedSession, HostStore
from serve.pages import Holding
from serve.sequence import RowState
from serve.sessions import ReachBack
from tests.serve.loop import make_plan

PLAN = make_plan()
REACH = ReachBack(PLAN)


def hosted(tokens: list[int], size: int = 1, compressed: int | None = None, **options) -> HostedSession:
    compressed = len(tokens) if compressed is None else compressed
    state = RowState(-1, Holding(np.zeros(1, np.int64)), PLAN.group_ppm, compressed, len(tokens) - compressed)
    return HostedSession(state, np.asarray(tokens, np.int32), saved=None, size=size, **options)


def test_the_least_recently_used_go_first_and_only_as_many_as_must():
    store = HostStore(10)
    sessions = [hosted([i] * 9, size=3) for i in range(3)]
    for session in sessions:
        assert store.make_room(3)
        store.put(session)
    store.touch(sessions[0])
    assert store.make_room(1) and len(store) == 3
    assert store.make_room(4)
    assert list(store) == [sessions[2], sessions[0]]
    assert store.used == 6


def test_what_a_prompt_waits_for_goes_last():
    store = HostStore(4)
    sessions = [hosted([i] * 9) for i in range(4)]
    for session in sessions:
        store.put(session)
    store.turn_of = lambda session: {0: 0, 1: 1, 2: None, 3: 2}[int(session.tokens[0])]
    store.held = sessions[3]
    assert store.make_room(2)
    assert list(store) == [sessions[0], sessions[3]]


def test_what_is_too_large_costs_nothing_its_place():
    store = HostStore(10)
    store.put(hosted([1], size=10))
    assert not store.make_room(11)
    assert len(store) == 1
    with pytest.raises(ValueError, match="1 bytes do not fit beside 10 of 10"):
        store.put(hosted([2], size=1))
    assert not HostStore(0).make_room(1)


def test_what_is_being_brought_back_stays():
    store = HostStore(10)
    first, second = hosted([1], size=6), hosted([2], size=4)
    store.put(first)
    store.put(second)
    store.held = first
    assert not store.make_room(5) and len(store) == 2
    assert store.make_room(4)
    assert list(store) == [first]
    store.held = None
    assert store.make_room(5) and not len(store)


@given(
    st.lists(st.tuples(st.integers(1, 12), st.sampled_from(["put", "touch", "remove"])), max_size=30),
    st.integers(0, 30),
)
def test_never_more_than_the_limit(operations, limit):
    store, order = HostStore(limit), []
    for i, (size, what) in enumerate(operations):
        if what == "put":
            if store.make_room(size):
                session = hosted([i], size=size)
                store.put(session)
                order.append(session)
            else:
                assert size > limit
        elif order and (session := order[size % len(order)]) in list(store):
            getattr(store, what)(session)
            order.remove(session)
            if what == "touch":
                order.append(session)
        assert store.used == sum(s.size for s in store) <= limit
        # What is left are those used last.
        assert list(store) == order[len(order) - len(store) :]
        order = list(store)


def test_finds_as_the_other_store_does():
    store = HostStore(10)
    text = list(range(100, 160))
    for session in (hosted(text[:40], compressed=30), hosted(text[:50], compressed=45), hosted([7] * 60)):
        store.put(session)
    prompt = np.asarray([*text, 1], np.int32)
    budgets = PLAN.group_ppm
    found = store.find(prompt, budgets, REACH, 50)
    assert found and (len(found[0].tokens), found[1]) == (50, 50)
    assert store.find(prompt, budgets, REACH, 51) is None
    assert store.find(prompt[1:], budgets, REACH, 1) is None
    assert store.find(prompt[:1], budgets, REACH, 1) is None
    state = found[0].state
    assert store.same(state, prompt[:50]) is found[0]
    assert store.same(replace(state, row=3), prompt[:50]) is found[0]
    assert store.same(replace(state, tail=4), prompt[:49]) is None
    other = budgets.copy()  # of a row with a retention of its own
    assert store.find(prompt, other, REACH, 1) is None
    assert store.same(replace(state, budgets=other), prompt[:50]) is None
    assert store.same(state, prompt[1:51]) is None
