"""The engine with real (tiny) models: prompts that go on from stored rows say what they say alone.

Of rows that several prompts begin with, and of conversations that were pushed out to host memory meanwhile.
"""

import numpy as np
import pytest

from tests.serve.tiny_engine import HOST, MAX_TAIL, ask_all, greedy, tiny_engine, tiny_runner, tokens_of

DOCUMENT = tokens_of(140, seed=1)


def ask(question: int, length: int = 21) -> list[int]:
    return [*DOCUMENT, 8 + question, *tokens_of(length, seed=50 + question)]


def test_shared_prefixes_change_no_answer():
    with tiny_engine("full") as tiny:
        with tiny.held():
            first = [tiny.ask(ask(i), max_tokens=12) for i in range(2)]
        answers = [asked.wait()[0] for asked in first]
        assert [a.cached for a in answers] == [0, 140]
        answers += [tiny.answer(ask(i), max_tokens=12) for i in (2, 3)]
        assert [a.cached for a in answers[2:]] == [140, 140]
        for i, answer in enumerate(answers):
            assert answer.tokens == greedy(ask(i), 12, guess=answer.tokens), i
        tiny.settle()
        tiny.forget()


def test_a_shared_prefix_holds_what_a_prompt_of_its_length_holds():
    with tiny_engine("ragged") as tiny:
        for i in range(3):
            tiny.answer(ask(i), max_tokens=4)
        tiny.settle()
        (state,) = (s.state for s in tiny.engine._scheduler.sessions if s.is_prefix)
        assert (state.compressed, state.tail) == (140, 0)
        np.testing.assert_array_equal(state.holding.owned, tiny.plan.group_pages(140))
        cache = tiny.runner.cache
        assert (int(cache.tokens[state.row]), int(cache.tail[state.row])) == (140, 0)
        assert int(cache.num_free) == cache.num_pages - tiny.engine.stats().pages_used
        tiny.forget()


# Pushed out to host memory


def converse(tiny, prompt, retention, pushed_out):
    """Three turns: (tokens, log-probabilities, tokens found) of each."""
    out = []
    text = list(prompt)
    for turn in range(3):
        answer = tiny.answer(text, retention=retention, max_tokens=10, logprobs=1)
        out.append((answer.tokens, answer.logprobs, answer.cached))
        text += [*answer.tokens, *tokens_of(7, seed=turn)]
        if pushed_out:
            tiny.forget()
    return out


@pytest.mark.parametrize(("kind", "retention"), [("full", None), ("ragged", None), ("ragged", 0.7)])
def test_a_conversation_that_comes_back_goes_on_as_if_it_had_stayed(kind, retention):
    check_coming_back(kind, retention)


def check_coming_back(kind, retention=None):
    """To the last bit, under compression too; nothing compiles meanwhile (`settle`)."""
    with tiny_engine(kind, host_bytes=HOST) as tiny:
        stayed = converse(tiny, tokens_of(140), retention, pushed_out=False)
        assert [cached for *_, cached in stayed] == [0, 149, 166]
        stats = tiny.engine.stats()
        assert (stats.host_sessions, stats.offloaded_tokens_total) == (0, 0)
        tiny.forget()
    with tiny_engine(kind, host_bytes=HOST) as tiny:
        assert converse(tiny, tokens_of(140), retention, pushed_out=True) == stayed
        stats = tiny.engine.stats()
        assert (stats.host_sessions, stats.pages_used, stats.stored_sessions) == (1, 0, 0)
        assert stats.offloaded_tokens_total == 149 + 166 + 183
        assert stats.restored_tokens_total == 149 + 166
        assert stats.host_bytes == stats.offloaded_bytes_total - stats.restored_bytes_total
        budgets = tiny.plan.budgets_at(retention)
        least = tiny.plan.group_pages(166, 17, budgets).sum() * stats.page_bytes
        assert 0 < stats.host_bytes <= stats.host_bytes_total == HOST
        assert stats.host_bytes >= least * 0.9


def test_more_conversations_than_the_pool_holds():
    """Pages for one and a half; turns of all of them at once, some preempted."""
    one = tiny_runner("full").plan.pages(220)
    with tiny_engine("full", pages=one * 3 // 2, host_bytes=HOST) as tiny:
        prompts = [tokens_of(150, seed) for seed in range(3)]
        for turn in range(2):
            answers = ask_all(tiny, prompts, max_tokens=20)
            for prompt, answer in zip(prompts, answers, strict=True):
                assert answer.tokens == greedy(prompt, 20, guess=answer.tokens)
                assert answer.cached == (0 if turn == 0 else len(prompt) - 6)
            prompts = [[*p, *a.tokens, *tokens_of(5, turn)] for p, a in zip(prompts, answers, strict=True)]
        stats = tiny.engine.stats()
        assert stats.restored_tokens_total >= 2 * 169


def test_preempted_requests_do_not_prefill_again():
    plan = tiny_runner("full").plan
    begin, end = (2 * plan.pages(n) for n in (100 + MAX_TAIL, 198))
    begin += plan.num_groups * MAX_TAIL // 2 // plan.page_size  # that the first one soon wants
    assert begin < end
    with tiny_engine("full", pages=(begin + end) // 2, host_bytes=HOST) as tiny:
        prompts = [tokens_of(100, seed) for seed in range(2)]
        answers = ask_all(tiny, prompts, max_tokens=98)
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.tokens == greedy(prompt, 98, guess=answer.tokens)
        stats = tiny.engine.stats()
        assert stats.preemptions_total >= 1
        assert stats.restored_tokens_total >= 100
        assert stats.prefilled_tokens_total < 2 * 100 + 100


def test_a_failed_step_takes_the_copies_with_it(monkeypatch):
    with tiny_engine("full", host_bytes=HOST) as tiny:
        prompt = tokens_of(140)
        first = tiny.answer(prompt, max_tokens=5)
        tiny.forget()
        assert tiny.engine.stats().host_sessions == 1

        def fail(*args, **kwargs):
            raise RuntimeError("out of memory on the device")

        with monkeypatch.context() as patch:
            patch.setattr(tiny.runner, "_step", fail)
            assert tiny.answer([9, 9, 9], settle=False).finish_reason == "error"
        tiny.settle()
        assert (tiny.engine.stats().host_sessions, tiny.engine.stats().host_bytes) == (0, 0)
        again = tiny.answer([*prompt, *first.tokens, 9], max_tokens=5)
        assert again.cached == 0
        assert again.tokens == greedy([*prompt, *first.tokens, 9], 5)
