"""Short prompts that come together share steps, and are answered as each would be alone."""

import numpy as np
import pytest

from serve import runner
from serve.inputs import inputs_of
from tests.serve.tiny_engine import BUCKETS, RUNNING, ask_all, greedy, tiny_engine, tokens_of

FULL = {"retention": 1.0}  # whatever the others keep: exact, and equal to dense attention
SHORT = [tokens_of(size, seed) for seed, size in enumerate((5, 9, 3, 12, 8, 17, 1, 10))]


@pytest.fixture(scope="module")
def tiny():
    with tiny_engine("ragged", few=RUNNING) as engine:
        yield engine


@pytest.fixture
def steps(tiny, monkeypatch):
    """(tokens of each chunk, sequences that decode) of every step from here on; nothing is stored."""
    tiny.forget()
    seen, run = [], tiny.runner.run

    def record(work, read_all):
        seen.append(([len(chunk.tokens) for chunk in work.chunks], len(work.decode)))
        return run(work, read_all)

    monkeypatch.setattr(tiny.runner, "run", record)
    return seen


def together(steps) -> int:
    return sum(len(chunks) > 1 for chunks, _ in steps)


def test_short_prompts_share_steps_and_get_the_answers_that_each_gets_alone(tiny, steps):
    alone = [tiny.answer(prompt, max_tokens=6, **FULL).tokens for prompt in SHORT]
    assert not together(steps)
    apart = len(steps)
    tiny.forget()
    steps.clear()
    answers = ask_all(tiny, SHORT, max_tokens=6, **FULL)
    assert [a.tokens for a in answers] == alone == [greedy(prompt, 6) for prompt in SHORT]
    assert together(steps) >= 2
    assert steps[0][0] == [5, 9, 3]  # first come, first served
    assert len(steps) < apart / 2
    assert all(sum(chunks) <= BUCKETS.packed_chunks[-1] for chunks, _ in steps if len(chunks) > 1)


def test_seeds_and_log_probabilities_are_those_of_each_alone(tiny, steps):
    ways = [{"temperature": 1.0, "seed": 7, "logprobs": 2}, {"temperature": 0.8, "seed": 8, "top_k": 20}, {}]
    alone = [tiny.answer(prompt, **how, **FULL) for prompt, how in zip(SHORT, ways, strict=False)]
    tiny.forget()
    steps.clear()
    with tiny.held():
        asked = [tiny.ask(prompt, **how, **FULL) for prompt, how in zip(SHORT, ways, strict=False)]
    answers = [a.wait()[0] for a in asked]
    tiny.settle()
    assert together(steps)
    assert [a.tokens for a in answers] == [a.tokens for a in alone]
    np.testing.assert_allclose(answers[0].logprobs, alone[0].logprobs, atol=1e-4)


def test_choices_of_packed_prompts_sample_from_their_own_prompts_logits(tiny, steps):
    wanted = list(
        zip(SHORT[:2], (1, 2), strict=True)
    )  # a second one of the first would keep the others waiting
    for seed in range(6):
        how = {"temperature": 0.5, "seed": seed, "max_tokens": 5, **FULL}
        alone = [[a.tokens for a in tiny.ask(prompt, n, **how).wait()] for prompt, n in wanted]
        tiny.settle()
        tiny.forget()
        steps.clear()
        with tiny.held():
            asked = [tiny.ask(prompt, n, **how) for prompt, n in wanted]
        got = [[a.tokens for a in one.wait()] for one in asked]
        tiny.settle()
        tiny.forget()
        assert steps[0][0] == [5, 9]
        assert got == alone


def test_a_long_prompt_between_short_ones_is_unharmed(tiny, steps):
    prompts = [SHORT[0], tokens_of(150), SHORT[1], SHORT[2]]
    answers = ask_all(tiny, prompts, max_tokens=10, **FULL)
    assert [a.tokens for a in answers] == [greedy(prompt, 10) for prompt in prompts]
    # The short ones behind it fill the first step; after that it has every step until it is read.
    assert steps[0][0] == [5, 9, 3]
    long = [chunks[0] for chunks, _ in steps[1:] if chunks]
    assert sum(long) == 150 and max(long) <= 48
    assert all(len(chunks) == 1 for chunks, _ in steps[1 : 1 + len(long)])


def test_prompts_to_be_scored_stay_alone(tiny, steps):
    with tiny.held():
        asked = [
            tiny.ask(prompt, prompt_logprobs=0 if i == 1 else None, **FULL)
            for i, prompt in enumerate(SHORT[:4])
        ]
    answers = [a.wait()[0] for a in asked]
    tiny.settle()
    assert [a.tokens for a in answers] == [greedy(prompt, 8) for prompt in SHORT[:4]]
    assert steps[0][0] == [5, 3, 12]
    assert [9] in [chunks for chunks, _ in steps]
    assert len(answers[1].outputs[0].prompt_logprobs) == 9


def test_conversations_and_long_generations_share_steps_too(tiny, monkeypatch):
    kinds, run = [], tiny.runner.run

    def record(work, read_all):
        kinds.append([chunk.sequence.generated > 1 for chunk in work.chunks])
        return run(work, read_all)

    monkeypatch.setattr(tiny.runner, "run", record)
    monkeypatch.setattr("serve.rows.Rows.keeps_all", lambda *_: False)  # compressed, with nothing to lose
    first = ask_all(tiny, SHORT[:3], max_tokens=60, **FULL)
    turns = [p + a.tokens + [9, 9] for p, a in zip(SHORT[:3], first, strict=True)]
    second = ask_all(tiny, turns, max_tokens=4, **FULL)
    assert [a.tokens for a in first] == [greedy(p, 60) for p in SHORT[:3]]
    assert [a.tokens for a in second] == [greedy(p, 4) for p in turns]
    assert all(a.cached for a in second)
    assert [True, True] in kinds  # tails of 48 tokens, to be compressed


def test_few_decode_tokens_beside_a_chunk_take_a_program_of_few_slots(tiny, monkeypatch):
    """Up to three beside one chunk and one beside several; two beside several take all slots. The tokens are the same."""
    tiny.forget()
    seen = set()

    def record(work, buckets, num_rows):
        given = inputs_of(work, buckets, num_rows)
        if given.shape.chunk and given.shape.slots:
            seen.add((len(work.chunks) > 1, len(work.decode), given.shape.slots))
        return given

    monkeypatch.setattr(runner, "inputs_of", record)
    prompts = [tokens_of(30, 9), *SHORT[:2], tokens_of(20, 10), *SHORT[:2]]
    asked = []
    for long, *short in (prompts[:3], prompts[3:]):
        asked.append(tiny.ask(long, max_tokens=60, **FULL))
        asked[-1].wait_for_tokens(1)
        with tiny.held():
            asked += [tiny.ask(prompt, max_tokens=1, **FULL) for prompt in short]
        for one in asked[-2:]:
            one.wait()
    answers = [one.wait()[0].tokens for one in asked]
    tiny.settle()
    few, all_of_them = RUNNING - BUCKETS.places, RUNNING + 1 - BUCKETS.places
    assert seen == {(False, 0, RUNNING - 1), (False, 1, RUNNING - 1), (True, 1, few), (True, 2, all_of_them)}
    assert answers == [greedy(p, n) for p, n in zip(prompts, (60, 1, 1, 60, 1, 1), strict=True)]
