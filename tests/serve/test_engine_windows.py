"""The engine with tiny models that have a sliding-window layer: full retention says what dense attention says.

Most of it with one like Gemma 2, whose soft caps come on top.
"""

import numpy as np

from tests.serve.test_engine_stored import check_coming_back
from tests.serve.tiny_engine import (
    GEMMA2,
    GPT_OSS,
    MAX_TAIL,
    ask_all,
    dense_logits,
    greedy,
    tiny_engine,
    tokens_of,
)


def said(prompt: list[int], count: int, guess: list[int] | None = None) -> list[int]:
    return greedy(prompt, count, config=GEMMA2, guess=guess)


def test_requests_of_any_length_together():
    """Within the window, beyond it, and beyond the ring; answers longer than a tail."""
    with tiny_engine("gemma2") as tiny:
        prompts = [tokens_of(n, seed=n) for n in (5, 39, 41, 150)]
        for prompt, answer in zip(prompts, ask_all(tiny, prompts, max_tokens=MAX_TAIL + 20), strict=True):
            assert answer.tokens == said(prompt, MAX_TAIL + 20, answer.tokens), len(prompt)
        tiny.forget()


def test_conversations_go_on_and_are_taken_back():
    with tiny_engine("gemma2") as tiny:
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
    with tiny_engine("gemma2") as tiny:
        document = tokens_of(140, seed=3)
        prompts = [[*document, 8 + i, *tokens_of(21, seed=i)] for i in range(3)]
        answers = [tiny.answer(prompt, max_tokens=12) for prompt in prompts]
        assert [answer.cached for answer in answers] == [0, 0, 140]
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.tokens == said(prompt, 12)
        tiny.forget()


def test_choices_and_preempted_requests():
    """Choices start from copies of a row; with few pages requests wait or are computed again."""
    with tiny_engine("gemma2", pages=190, max_stored=0) as tiny:
        prompt = tokens_of(90, seed=4)
        asked = tiny.ask(prompt, n=3, max_tokens=70)
        more = [tiny.ask(tokens_of(60, seed=i), max_tokens=70) for i in (5, 6)]
        for answer in asked.wait():
            assert answer.tokens == said(prompt, 70, answer.tokens)
        for other in more:
            tokens = other.wait()[0].tokens
            assert tokens == said(other.request.prompt_ids, 70, tokens)
        tiny.settle()


def test_attention_sinks_and_bytes():
    """GPT-OSS in 8-bit keys and values: requests together, and the next turn of one of them.

    Each token is the best one by dense attention, or one that rounding may put first: logits have a deviation of 1.
    """

    def check(prompt: list[int], tokens: list[int]) -> None:
        logits = dense_logits([*prompt, *tokens], GPT_OSS)[len(prompt) - 1 : -1]
        behind = logits.max(axis=1) - np.take_along_axis(logits, np.array(tokens)[:, None], axis=1)[:, 0]
        assert behind.max() < 0.25
        assert (behind == 0).mean() > 0.8

    with tiny_engine("gpt_oss") as tiny:
        prompts = [tokens_of(n, seed=n) for n in (7, 41, 120)]
        for prompt, answer in zip(prompts, ask_all(tiny, prompts, max_tokens=20), strict=True):
            check(prompt, answer.tokens)
        turn = [*prompts[-1], *answer.tokens, *tokens_of(15, seed=1)]
        second = tiny.answer(turn, max_tokens=10)
        assert second.cached >= 139
        check(turn, second.tokens)
        page = 2 * 2 * (8 + 1) * GPT_OSS.head_dim  # eight entries of two heads, and their scales
        assert tiny.engine.stats().page_bytes == page
        tiny.forget()


def test_rings_and_bytes_come_back_from_host_memory():
    check_coming_back("gpt_oss")


DAMAGED = 9  # a token


def test_logits_that_are_no_numbers_end_their_request_alone(monkeypatch, caplog):
    """Here, as this model's head is no embedding, of which all logits would have one."""
    sampling = [{}, {"temperature": 1.0, "top_p": 0.9}, {"logprobs": 2, "n": 2}]
    well = [token for token in tokens_of(40) if token != DAMAGED]
    with tiny_engine("gpt_oss") as tiny:
        before = tiny.answer(well, max_tokens=20).tokens
        tiny.forget()
        params = tiny.runner.params
        assert "lm_head" in params
        embed = params["embed"].at[DAMAGED].set(np.nan)
        monkeypatch.setattr(tiny.runner, "params", params | {"embed": embed})
        other = tiny.ask(well, max_tokens=20)
        asked = [tiny.ask([*well, DAMAGED], max_tokens=20, **how) for how in sampling]
        answers = [answer for one in asked for answer in one.wait()]
        assert [(answer.tokens, answer.finish_reason) for answer in answers] == [([], "error")] * 4
        assert "weights are damaged, or too large for --dtype float16" in str(answers[0].outputs[-1].error)
        assert other.wait()[0].tokens == before
        tiny.settle()
        assert tiny.stored == 1
    assert caplog.text.count("logits are not numbers") == 4
