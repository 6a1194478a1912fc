"""Speculative decoding changes how many steps an answer takes, and nothing else."""

import itertools

import numpy as np
import pytest

from serve.prompt_lookup import PromptLookup
from tests.serve.test_engine_grammar import regex
from tests.serve.tiny_engine import GEMMA2, GPT_OSS, ask_all, greedy, tiny_engine, tokens_of

DRAFTS = 3


@pytest.fixture(scope="module")
def engine():
    with tiny_engine(drafts=DRAFTS) as tiny:
        yield tiny


@pytest.fixture(scope="module")
def plain():
    with tiny_engine() as tiny:
        yield tiny


@pytest.fixture(autouse=True)
def forgotten(engine, plain):
    for tiny in (engine, plain):
        tiny.forget()


class Oracle:
    """Drafts that are right, but for every so many."""

    def __init__(
        self, monkeypatch, answers: list[tuple[list[int], list[int]]], wrong_each: int | None = None
    ):
        wholes = [prompt + answer for prompt, answer in answers]
        count = itertools.count(1)

        def following(lookup: PromptLookup, most: int) -> np.ndarray:
            known = lookup.tokens.tolist()
            whole = next((w for w in wholes if w[: len(known)] == known), [])
            guess = np.array(whole[len(known) : len(known) + most], np.int32)
            if wrong_each and len(guess) and next(count) % wrong_each == 0:
                guess[-1] ^= 1
            return guess

        monkeypatch.setattr(PromptLookup, "following", following)


def steps_of(tiny, prompt, **sampling):
    """The answer, and the steps that it took."""
    before = tiny.engine.stats()
    answer = tiny.answer(prompt, **sampling)
    return answer, tiny.engine.stats().steps_total - before.steps_total


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.9, "seed": 5},
        {"temperature": 0.7, "seed": 6, "presence_penalty": 1.0, "repetition_penalty": 1.3},
        {"logprobs": 3},
        {"temperature": 0.8, "seed": 7, "logprobs": 0, "min_tokens": 9, "stop_token_ids": (11, 12, 13)},
    ],
    ids=str,
)
def test_the_same_answers_in_fewer_steps(engine, plain, sampling, monkeypatch):
    prompt = tokens_of(40)
    want, all_steps = steps_of(plain, prompt, max_tokens=60, **sampling)
    Oracle(monkeypatch, [(prompt, want.tokens)], wrong_each=4)
    before = engine.engine.stats()
    got, steps = steps_of(engine, prompt, max_tokens=60, **sampling)
    assert (got.tokens, got.finish_reason) == (want.tokens, want.finish_reason)
    np.testing.assert_allclose(got.logprobs, want.logprobs, atol=1e-4)
    for one, other in zip(got.outputs, want.outputs, strict=True):
        assert [t for t, _ in one.top_logprobs or []] == [t for t, _ in other.top_logprobs or []]
    assert steps < 0.8 * all_steps  # a draft that is wrong spoils those of the step after it
    after = engine.engine.stats()
    drafted = after.draft_tokens_total - before.draft_tokens_total
    accepted = after.accepted_tokens_total - before.accepted_tokens_total
    assert 0 < accepted < drafted <= DRAFTS * (after.drafts_total - before.drafts_total)


def test_prompt_lookup_finds_what_repeats(engine):
    before = engine.engine.stats().accepted_tokens_total
    answer, steps = steps_of(engine, tokens_of(12), max_tokens=40, logit_bias={50: 100.0})
    assert answer.tokens == [50] * 40
    assert steps < 30
    assert engine.engine.stats().accepted_tokens_total > before + 10


def test_wrong_drafts_change_nothing(engine):
    prompts = [tokens_of(12) * 4, tokens_of(30, 1), tokens_of(12, 2) * 3]
    before = engine.engine.stats().draft_tokens_total
    for prompt, answer in zip(prompts, ask_all(engine, prompts, max_tokens=70), strict=True):
        assert answer.tokens == greedy(prompt, 70, guess=answer.tokens)
    assert engine.engine.stats().draft_tokens_total > before


def test_a_stop_among_the_drafts_ends_the_answer_and_the_conversation_goes_on(engine, monkeypatch):
    prompt = tokens_of(30, 3)
    whole = greedy(prompt, 20)
    Oracle(monkeypatch, [(prompt, whole)])
    at = next(i for i in range(5, 20) if whole[i] not in whole[:i] and i % (DRAFTS + 1) not in (0, DRAFTS))
    answer = engine.answer(prompt, max_tokens=20, stop_token_ids=(whole[at],))
    assert (answer.tokens, answer.finish_reason) == (whole[: at + 1], "stop")
    longer = prompt + whole[:at] + tokens_of(9)
    monkeypatch.undo()
    again = engine.answer(longer, max_tokens=12)
    assert again.tokens == greedy(longer, 12)
    assert again.cached >= len(prompt)


def test_never_more_than_was_asked_for(engine, monkeypatch):
    prompt = tokens_of(20, 4)
    whole = greedy(prompt, 30)
    Oracle(monkeypatch, [(prompt, whole)])
    for count in range(1, 12):
        answer = engine.answer(prompt, max_tokens=count)
        assert (answer.tokens, answer.finish_reason) == (whole[:count], "length")


def test_grammars_go_without_beside_those_that_draft(engine, monkeypatch):
    prompt = tokens_of(25, 5)
    whole = greedy(prompt, 40)
    Oracle(monkeypatch, [(prompt, whole)])
    with engine.held():
        free = engine.ask(prompt, max_tokens=40)
        bound = engine.ask(prompt, max_tokens=10, grammar=regex("[a-z]{30}"))
    assert free.wait()[0].tokens == whole
    assert len(bound.wait()[0].tokens) == 10
    engine.settle()


@pytest.mark.slow  # `test_engine_random` has windows, and drafts, by default
@pytest.mark.parametrize(("kind", "config"), [("gemma2", GEMMA2), ("gpt_oss", GPT_OSS)])
def test_with_windows(kind, config, monkeypatch):
    prompt = tokens_of(60, 6)
    with tiny_engine(kind) as tiny:
        want, all_steps = steps_of(tiny, prompt, max_tokens=90)
    Oracle(monkeypatch, [(prompt, want.tokens)], wrong_each=5)
    with tiny_engine(kind, drafts=DRAFTS) as tiny:
        got, steps = steps_of(tiny, prompt, max_tokens=90)
        assert tiny.engine.stats().accepted_tokens_total > 0
    if kind == "gemma2":  # in bytes, tokens of one step see each other exactly: the answer may be another
        assert got.tokens == want.tokens == greedy(prompt, 90, guess=want.tokens, config=config)
        assert steps < 0.8 * all_steps
    assert len(got.tokens) == 90
