"""The engine with a real (tiny) model: prompts that begin alike say what they say alone."""

import numpy as np

from tests.serve.tiny_engine import greedy, tiny_engine, tokens_of

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
            assert answer.tokens == greedy(ask(i), 12), i
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
