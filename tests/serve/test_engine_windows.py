"""The engine with a tiny model that has a sliding-window layer: full retention says what dense attention says."""

from tests.serve.tiny_engine import MAX_TAIL, WINDOWED, ask_all, greedy, tiny_engine, tokens_of


def said(prompt: list[int], count: int) -> list[int]:
    return greedy(prompt, count, config=WINDOWED)


def test_requests_of_any_length_together():
    """Within the window, beyond it, and beyond the ring; answers longer than a tail."""
    with tiny_engine("window") as tiny:
        prompts = [tokens_of(n, seed=n) for n in (5, 39, 41, 150)]
        for prompt, answer in zip(prompts, ask_all(tiny, prompts, max_tokens=MAX_TAIL + 20), strict=True):
            assert answer.tokens == said(prompt, MAX_TAIL + 20), len(prompt)
        tiny.forget()


def test_conversations_go_on_and_are_taken_back():
    with tiny_engine("window") as tiny:
        prompt = tokens_of(120)
        first = tiny.answer(prompt, max_tokens=30)
        turn = [*prompt, *first.tokens, *tokens_of(15, seed=1)]
        second = tiny.answer(turn, max_tokens=10)
        assert second.cached >= 149
        assert second.tokens == said(turn, 10)
        other = [*turn[:-9], *tokens_of(20, seed=2)]  # the last message written again
        third = tiny.answer(other, max_tokens=10)
        assert third.tokens == said(other, 10)
        again = tiny.answer(turn, max_tokens=10)
        assert again.tokens == said(turn, 10)
        tiny.forget()


def test_prompts_that_begin_alike():
    with tiny_engine("window") as tiny:
        document = tokens_of(140, seed=3)
        prompts = [[*document, 8 + i, *tokens_of(21, seed=i)] for i in range(3)]
        answers = [tiny.answer(prompt, max_tokens=12) for prompt in prompts]
        assert [answer.cached for answer in answers] == [0, 0, 140]
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.tokens == said(prompt, 12)
        tiny.forget()


def test_choices_and_preempted_requests():
    """Choices start from copies of a row; with few pages requests wait or are computed again."""
    with tiny_engine("window", pages=190, max_stored=0) as tiny:
        prompt = tokens_of(90, seed=4)
        asked = tiny.ask(prompt, n=3, max_tokens=70)
        more = [tiny.ask(tokens_of(60, seed=i), max_tokens=70) for i in (5, 6)]
        for answer in asked.wait():
            assert answer.tokens == said(prompt, 70)
        for other in more:
            assert other.wait()[0].tokens == said(other.request.prompt_ids, 70)
        tiny.settle()
