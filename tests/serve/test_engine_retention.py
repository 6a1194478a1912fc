"""Requests that choose how much of their KV cache is kept, beside others in one engine."""

import pytest

from serve.request import RequestRejected
from tests.serve.tiny_engine import greedy, tiny_engine, tokens_of


@pytest.fixture(scope="module")
def engine():
    with tiny_engine("ragged") as engine:
        yield engine


def test_a_request_that_keeps_all_says_what_dense_attention_says(engine):
    """Also across turns, tails and choices, while others are compressed under the server's budgets or fewer."""
    prompt = tokens_of(120)
    with engine.held():
        others = [
            engine.ask(tokens_of(100, seed), max_tokens=60, retention=r) for seed, r in ((1, None), (2, 0.1))
        ]
        asked = engine.ask(prompt, 2, max_tokens=60, retention=1.0)
    want = greedy(prompt, 60)
    assert [answer.tokens for answer in asked.wait()] == [want, want]
    for other in others:
        assert len(other.wait()[0].tokens) == 60
    engine.settle()
    turn = [*prompt, *want, *tokens_of(9, 3)]
    answer = engine.answer(turn, max_tokens=20, retention=1.0)
    assert answer.tokens == greedy(turn, 20)
    assert answer.cached == 179
    engine.forget()


def test_pages_are_counted_by_the_request_s_own_budgets(engine):
    prompt, plan = tokens_of(200), engine.plan
    for retention in (0.1, 0.5, None, 1.0):
        engine.answer(prompt, max_tokens=1, retention=retention)
        stats, budgets = engine.engine.stats(), plan.budgets_at(retention)
        assert stats.pages_used == plan.group_pages(200, 0, budgets).sum()
        assert stats.retention_reached == pytest.approx(
            plan.entries(200, budgets) / (200 * plan.group_of.size)
        )
        engine.forget()


def test_what_is_stored_is_for_requests_of_the_same_retention(engine):
    prompt = tokens_of(150)
    assert engine.answer(prompt, retention=0.2).cached == 0
    assert engine.answer(prompt).cached == 0
    assert engine.answer(prompt, retention=0.3).cached == 0
    assert engine.answer(prompt, retention=0.2).cached > 100
    assert engine.answer(prompt).cached > 100
    engine.forget()


def test_more_than_the_server_allows_is_refused(engine):
    with pytest.raises(
        RequestRejected, match=r"kv_retention 1\.5 is above 1\.0, .*--max-retention"
    ) as refused:
        engine.ask(tokens_of(5), retention=1.5)
    assert refused.value.field == "kv_retention"
