"""Grammars through the engine with a tiny model of random weights: what comes out has the form, and nobody else notices."""

import functools
import json
import re

import numpy as np
import pytest

from models.testing import tiny_tokenizer
from serve.grammar import Grammar, GrammarFailure, GrammarState, Vocabulary
from serve.sequence import Phase
from serve.structured import GrammarSpec
from tests.serve.tiny_engine import (
    CONFIG,
    RUNNING,
    ask_all,
    dense_logits,
    greedy,
    log_softmax,
    tiny_engine,
    tokens_of,
)

EOS = CONFIG.eos_token_ids
TOKENIZER = tiny_tokenizer()
VOCABULARY = Vocabulary(TOKENIZER, CONFIG.vocab_size, EOS)
COLOURS = ("red", "green", "blue")
PAINT = {
    "type": "object",
    "properties": {"colour": {"enum": COLOURS}, "coats": {"type": "integer", "minimum": 1, "maximum": 12}},
    "required": ["colour", "coats"],
    "additionalProperties": False,
}  # fmt: skip


@functools.cache
def compiled(kind: str, text: str) -> Grammar:
    return VOCABULARY.compile(GrammarSpec(kind, text, "x").lark)  # type: ignore[arg-type]


def regex(text: str) -> Grammar:
    return compiled("regex", text)


def schema(value) -> Grammar:
    return compiled("json", json.dumps(value))


def text(answer) -> str:
    return TOKENIZER.decode([t for t in answer.tokens if t not in EOS])


def paints(answer) -> bool:
    value = json.loads(text(answer))
    return value["colour"] in COLOURS and 1 <= value["coats"] <= 12 and len(value) == 2


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 3}], ids=str)
def test_every_choice_has_the_form(engine, sampling):
    cases = [
        (regex(r"[a-f]{3,9}-[0-9]{2}"), lambda t: re.fullmatch(r"[a-f]{3,9}-[0-9]{2}", t)),
        (compiled("choice", json.dumps(COLOURS)), lambda t: t in COLOURS),
        (schema({"type": "array", "items": {"type": "integer", "minimum": 5, "maximum": 30}, "minItems": 1, "maxItems": 2}),
         lambda t: 1 <= len(json.loads(t)) <= 2 and all(5 <= i <= 30 for i in json.loads(t))),
        (compiled("grammar", 'start: "<" word ("," word)? ">"\nword: /[x-z]{2}/'),
         lambda t: re.fullmatch(r"<[x-z]{2}(,[x-z]{2})?>", t)),
    ]  # fmt: skip
    asked = [
        engine.ask(tokens_of(20, i), n=3, max_tokens=180, grammar=g, **sampling)
        for i, (g, _) in enumerate(cases)
    ]
    for request, (_, check) in zip(asked, cases, strict=True):
        for answer in request.wait():
            assert check(text(answer)), text(answer)
            assert answer.finish_reason == "stop"
    engine.settle()


def test_an_object_with_a_schema(engine):
    answers = engine.ask(
        tokens_of(40), n=3, temperature=1.0, seed=1, max_tokens=200, grammar=schema(PAINT)
    ).wait()
    assert all(paints(answer) for answer in answers)
    assert len({text(answer) for answer in answers}) == 3
    one = {
        "type": "object",
        "properties": {"a": {"const": 5}},
        "required": ["a"],
        "additionalProperties": False,
    }
    assert json.loads(text(engine.answer(tokens_of(9), max_tokens=200, grammar=schema(one)))) == {"a": 5}


def test_more_choices_than_rows(engine):
    answers = engine.ask(
        tokens_of(20), n=2 * RUNNING + 1, temperature=1.0, max_tokens=9, grammar=regex("[a-c]{2,7}")
    ).wait()
    assert all(re.fullmatch("[a-c]{2,7}", text(answer)) for answer in answers)


def test_a_grammar_that_cannot_be_started_ends_its_request_alone(engine, monkeypatch):
    broken = compiled("regex", "x+y")

    def lost(**_):
        raise GrammarFailure("lost")

    with monkeypatch.context() as patch:
        patch.setattr(broken, "start", lost)
        answers = engine.ask(tokens_of(9), 3, grammar=broken).wait()
    last = [a.outputs[-1] for a in answers]
    assert [(o.finish_reason, o.error, o.bad_grammar) for o in last] == [("error", "lost", True)] * 3
    engine.settle()
    assert len(engine.answer(tokens_of(9), max_tokens=3).tokens) == 3


def test_others_say_what_they_say_alone(engine):
    """The tokens of requests without a grammar, greedy or not, do not depend on the masks of other rows."""
    seeded = {"temperature": 1.0, "top_p": 0.9, "seed": 5, "max_tokens": 40}
    alone = engine.answer(tokens_of(15), **seeded).tokens
    bound = {"temperature": 1.0, "seed": 8, "max_tokens": 40, "grammar": regex("([a-z]{3} ){12}")}
    bound_alone = engine.answer(tokens_of(30), **bound).tokens
    engine.forget()
    asked = [
        engine.ask(tokens_of(30), **bound),
        engine.ask(tokens_of(50), max_tokens=40),
        engine.ask(tokens_of(15), **seeded),
    ]
    got = [a.wait()[0].tokens for a in asked]
    assert got == [bound_alone, greedy(tokens_of(50), 40), alone]


def test_every_step_decodes_all(engine, monkeypatch):
    """A step is dispatched before the last token of a choice with a grammar was read, and sampled after that."""
    steps, sampled, letters = (
        [],
        [],
        regex("[a-z]{30}"),
    )  # compiled before: the other one would not wait for it
    run, sample = engine.runner.run, engine.runner.sampler.sample

    def watch(work, read_all):
        steps.append({s.request.request_id: s.in_flight for s in work.decode})
        return run(work, read_all)

    def watch_sampling(logits, sequences, *rest):
        sampled.extend(s.in_flight for s in sequences if s and s.grammar and s.phase is Phase.RUNNING)
        return sample(logits, sequences, *rest)

    monkeypatch.setattr(engine.runner, "run", watch)
    monkeypatch.setattr(engine.runner.sampler, "sample", watch_sampling)
    free = engine.ask(tokens_of(10), max_tokens=45)
    free.wait_for_tokens(2)
    bound = engine.ask(tokens_of(12), max_tokens=20, grammar=letters)
    assert re.fullmatch("[a-z]{20}", text(bound.wait()[0]))
    free.wait()
    engine.settle()
    of_bound = [i for i, step in enumerate(steps) if bound.request.request_id in step]
    assert of_bound == list(range(of_bound[0], of_bound[0] + 19))  # the first token came with the prompt
    assert sum(free.request.request_id in step for step in steps) == 44
    for job in (bound, free):
        assert max(step.get(job.request.request_id, 0) for step in steps) == 2  # steps overlap
    assert set(sampled) == {1}


@pytest.mark.parametrize("sampling", [{}, {"ignore_eos": False}, {"min_tokens": 9}], ids=str)
def test_a_grammar_at_its_end_ends_the_choice(engine, sampling):
    """Over ignore_eos and min_tokens, and the last token is shown: "stop" comes after it."""
    engine.answer(tokens_of(9), max_tokens=1)
    before = engine.engine.stats().steps_total
    answer = engine.answer(tokens_of(9, 7), max_tokens=20, grammar=regex("[a-c]{5}"), **sampling)
    assert engine.engine.stats().steps_total - before <= 6  # one was under way
    assert re.fullmatch("[a-c]{5}", text(answer))
    assert [o.finish_reason for o in answer.outputs] == [None] * 5 + ["stop"]
    assert answer.outputs[-1].token_id is None


def test_length_within_the_grammar_and_stop_at_its_end(engine):
    within = engine.answer(tokens_of(9), max_tokens=4, grammar=regex("[a-c]{5}"))
    assert (within.finish_reason, len(within.tokens)) == ("length", 4)
    at = engine.answer(tokens_of(9), max_tokens=5, grammar=regex("[a-c]{5}"))
    assert (at.finish_reason, len(at.tokens)) == ("stop", 5)


def test_an_end_token_where_the_grammar_accepts(engine):
    """ "a*" may end at any time: by an EOS, not before min_tokens, never with ignore_eos."""
    asked = {"temperature": 1.0, "seed": 2, "max_tokens": 30, "logit_bias": dict.fromkeys(EOS, 6.0)}
    free = engine.answer(tokens_of(9), ignore_eos=False, grammar=regex("a*b"), **asked)
    assert not set(free.tokens) & set(EOS)  # never where it does not accept
    ended = engine.answer(tokens_of(9), ignore_eos=False, grammar=regex("a(aa)*"), **asked)
    assert (ended.finish_reason, len(ended.tokens) % 2) == ("stop", 0)
    assert ended.tokens[-1] in EOS
    later = engine.answer(tokens_of(9), ignore_eos=False, min_tokens=12, grammar=regex("a*"), **asked)
    assert later.tokens[:12] == TOKENIZER.encode("a" * 12)
    assert later.finish_reason == "stop"
    never = engine.answer(tokens_of(9), grammar=regex("a*"), **asked)
    assert (text(never), never.finish_reason) == ("a" * 30, "length")


def test_a_stop_token_ends_it_as_anywhere(engine):
    stop = TOKENIZER.encode("b")[0]
    answer = engine.answer(
        tokens_of(9),
        temperature=1.0,
        seed=1,
        max_tokens=60,
        stop_token_ids=(stop,),
        grammar=regex("[ab]{60}"),
    )
    assert (answer.finish_reason, answer.tokens.index(stop)) == ("stop", len(answer.tokens) - 1)


def test_parameters_of_sampling_come_after_the_mask(engine):
    a, b = TOKENIZER.encode("ab")
    chosen = engine.answer(
        tokens_of(9), max_tokens=9, logit_bias={b: 100.0, 7: 100.0}, grammar=regex("[ab]{9}")
    )
    assert chosen.tokens == [b] * 9
    forced = engine.answer(
        tokens_of(9), max_tokens=3, logit_bias={a: -100.0}, grammar=regex("a{3}"), top_k=1, temperature=1.0
    )
    assert forced.tokens == [a] * 3


def test_logprobs_are_those_without_the_grammar(engine):
    prompt = tokens_of(21)
    answer = engine.answer(prompt, logprobs=4, max_tokens=6, prompt_logprobs=2, grammar=regex("[a-z]{6}"))
    want = log_softmax(dense_logits(prompt + answer.tokens))[len(prompt) - 1 : -1]
    np.testing.assert_allclose(answer.logprobs, want[np.arange(6), answer.tokens], atol=1e-3)
    for row, output in zip(want, answer.outputs[:-1], strict=True):
        assert [i for i, _ in output.top_logprobs] == np.argsort(-row, kind="stable")[:4].tolist()
    assert len(answer.outputs[0].prompt_logprobs) == 21
    rows = np.array([[i in TOKENIZER.encode("abcdefghijklmnopqrstuvwxyz") for i in range(CONFIG.vocab_size)]])
    assert answer.tokens == np.where(rows, want, -np.inf).argmax(-1).tolist()


def test_grammars_survive_preemption():
    prompts = [tokens_of(20, seed) for seed in range(4)]
    sampling = {"max_tokens": 90, "temperature": 1.0, "seed": 4, "grammar": regex("([a-z]{2}[0-9]){30}")}
    with tiny_engine(max_tail=16) as ample:
        whole = ask_all(ample, prompts, **sampling)
        assert ample.engine.stats().preemptions_total == 0
    with tiny_engine(pages=130, max_tail=16) as small:
        pieces = ask_all(small, prompts, **sampling)
        assert small.engine.stats().preemptions_total >= 1
        small.forget()
    assert [a.tokens for a in pieces] == [a.tokens for a in whole]
    assert all(re.fullmatch("([a-z]{2}[0-9]){30}", text(answer)) for answer in pieces)


def test_grammars_go_on_while_tails_are_compressed():
    with tiny_engine("ragged", max_tail=16) as tiny:
        answers = ask_all(
            tiny, [tokens_of(60, i) for i in range(3)], max_tokens=60, grammar=regex("([a-e]{4};){12}")
        )
        assert tiny.engine.stats().tail_compressions_total >= 6
        assert all(re.fullmatch("([a-e]{4};){12}", text(answer)) for answer in answers)
        again = tiny.answer(
            tokens_of(60) + answers[0].tokens, max_tokens=60, grammar=regex("([x-z]{4};){12}")
        )  # from what is stored
        assert again.cached
        assert re.fullmatch("([x-z]{4};){12}", text(again))


def test_a_failure_ends_one_request_alone(engine, monkeypatch):
    advance = GrammarState.advance

    def fail(state, token):
        if fail.left == 0:
            raise GrammarFailure("the grammar of this request cannot be followed any further: lost")
        fail.left -= 1
        return advance(state, token)

    fail.left = 3
    monkeypatch.setattr(GrammarState, "advance", fail)
    other = engine.ask(tokens_of(10), max_tokens=30)
    broken = engine.ask(tokens_of(12), max_tokens=20, grammar=regex("[a-z]{20}")).wait()[0]
    assert (len(broken.tokens), broken.finish_reason) == (4, "error")
    assert "cannot be followed" in broken.outputs[-1].error and broken.outputs[-1].bad_grammar
    assert other.wait()[0].tokens == greedy(tokens_of(10), 30)
    engine.settle()
    monkeypatch.undo()
    assert engine.answer(tokens_of(12), max_tokens=9, grammar=regex("[a-z]{3}")).finish_reason == "stop"


def test_aborts(engine):
    asked = engine.ask(tokens_of(12), n=2, max_tokens=100, grammar=regex("[a-z]{100}"))
    asked.wait_for_tokens(3)
    asked.abort()
    engine.settle()
    assert len(asked.answers[0].tokens) < 100
