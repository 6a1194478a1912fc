"""Sampling through the engine with a tiny model: seeds, penalties, logprobs, and what ends a choice."""

import re
from unittest import mock

import jax
import numpy as np
import pytest

from benchmarks.gpu_program import as_on_hopper
from serve.buckets import Shape
from serve.handles import Handles
from serve.row_sampler import RowSampler
from tangram_jax import sampling
from tangram_jax.sampling import FULL, GREEDY
from tests.serve.tiny_engine import (
    CONFIG,
    RUNNING,
    ask_all,
    dense_logits,
    greedy,
    log_softmax,
    tiny_engine,
    tiny_runner,
    tokens_of,
)

EOS = CONFIG.eos_token_ids
PENALTIES = {"presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.3}


def penalize(logits, prompt, output):
    """Repetition over prompt and output, then frequency and presence over the output, as in vLLM."""
    logits = logits.copy()
    counts = np.bincount(output, minlength=len(logits)) if output else np.zeros(len(logits))
    seen = (counts > 0) | np.isin(np.arange(len(logits)), prompt)
    repetition = PENALTIES["repetition_penalty"]
    logits[seen] = np.where(logits[seen] > 0, logits[seen] / repetition, logits[seen] * repetition)
    return logits - PENALTIES["frequency_penalty"] * counts - PENALTIES["presence_penalty"] * (counts > 0)


def test_choices_are_reproducible_and_independent_of_company(engine):
    prompt = tokens_of(33)
    sampling = {"temperature": 1.0, "top_p": 0.95, "top_k": 40, "max_tokens": 24}
    company = [engine.ask(tokens_of(n, 5), temperature=1.3, max_tokens=30) for n in (10, 70)]
    together = [a.tokens for a in engine.ask(prompt, n=3, seed=7, **sampling).wait()]
    for asked in company:
        asked.wait()
    engine.settle()
    assert len({tuple(tokens) for tokens in together}) == 3
    for choice in range(3):
        engine.forget()
        assert engine.answer(prompt, seed=7 + choice, **sampling).tokens == together[choice]
    assert engine.answer(prompt, seed=70, **sampling).tokens not in together


@pytest.mark.parametrize("beside", [False, True])
def test_choices_of_a_compressed_prompt_are_alike(beside):
    """All sample from the logits of one prefill, whether others decode beside it or not."""
    with tiny_engine("ragged") as tiny:
        company = tiny.ask(tokens_of(20, 5), max_tokens=60) if beside else None
        if company:
            company.wait_for_tokens(1)
        answers = tiny.ask(tokens_of(100), n=RUNNING - 1, max_tokens=8).wait()
        assert len({tuple(answer.tokens) for answer in answers}) == 1
        if company:
            company.wait()
        tiny.settle()


def test_without_a_seed_answers_differ(engine):
    texts = {tuple(engine.answer(tokens_of(9), temperature=2.0, max_tokens=12).tokens) for _ in range(3)}
    assert len(texts) == 3


def test_more_choices_than_rows(engine):
    answers = engine.ask(tokens_of(20), n=2 * RUNNING + 1, max_tokens=5).wait()
    engine.settle()
    assert {tuple(a.tokens) for a in answers} == {tuple(greedy(tokens_of(20), 5))}


def test_logprobs_are_those_of_the_raw_logits(engine):
    prompt = tokens_of(21)
    other = engine.ask(tokens_of(50), max_tokens=30)  # asks for none
    answer = engine.ask(prompt, logprobs=5, max_tokens=12, **PENALTIES).wait()[0]
    chosen_only = engine.ask(prompt, logprobs=0, max_tokens=3).wait()[0]
    other = other.wait()[0]
    engine.settle()
    assert answer.tokens == greedy(prompt, 12, penalize=penalize)
    want = log_softmax(dense_logits(prompt + answer.tokens))[len(prompt) - 1 : -1]
    np.testing.assert_allclose(answer.logprobs, want[np.arange(12), answer.tokens], atol=1e-3)
    for row, output in zip(want, answer.outputs, strict=True):
        ids, values = zip(*output.top_logprobs, strict=True)
        assert list(ids) == np.argsort(-row, kind="stable")[:5].tolist()
        np.testing.assert_allclose(values, row[list(ids)], atol=1e-3)
    assert [o.top_logprobs for o in chosen_only.outputs] == [[]] * 3
    np.testing.assert_allclose(chosen_only.logprobs[0], want[0][chosen_only.tokens[0]], atol=1e-3)
    assert other.logprobs == []


@pytest.mark.parametrize("length", [1, 2, 32, 33, 100])
def test_prompt_logprobs(engine, length):
    prompt = tokens_of(length)
    engine.answer(prompt, max_tokens=2)  # stored, but no help: every position must run
    answer = engine.answer(prompt, prompt_logprobs=3, max_tokens=4)
    assert answer.tokens == greedy(prompt, 4)
    assert answer.cached == 0
    scores = answer.outputs[0].prompt_logprobs
    assert len(scores) == length
    assert scores[0] is None
    want = log_softmax(dense_logits(prompt))
    for i, score in enumerate(scores[1:]):
        assert score.logprob == pytest.approx(want[i, prompt[i + 1]], abs=1e-3)
        ids, values = zip(*score.top_logprobs, strict=True)
        np.testing.assert_allclose(values, np.sort(want[i])[::-1][:3], atol=1e-3)
        np.testing.assert_allclose(values, want[i][list(ids)], atol=1e-3)
    assert all(o.prompt_logprobs is None for o in answer.outputs[1:])


def test_prompt_logprobs_beside_a_stream(engine):
    stream = engine.ask(tokens_of(10), max_tokens=60)
    stream.wait_for_tokens(3)
    scored = engine.ask(tokens_of(100), prompt_logprobs=0, max_tokens=2, n=2).wait()
    assert stream.wait()[0].tokens == greedy(tokens_of(10), 60)
    engine.settle()
    want = log_softmax(dense_logits(tokens_of(100)))[np.arange(99), tokens_of(100)[1:]]
    np.testing.assert_allclose([s.logprob for s in scored[0].outputs[0].prompt_logprobs[1:]], want, atol=1e-3)
    assert scored[1].outputs[0].prompt_logprobs is None


def test_logit_bias_changes_one_request_alone(engine):
    prompt = tokens_of(30)
    free = greedy(prompt, 12)
    other = engine.ask(prompt, max_tokens=12)
    banned = engine.ask(prompt, logit_bias=dict.fromkeys(free, -100.0), max_tokens=12)
    assert engine.answer(prompt, logit_bias={7: 100.0}, max_tokens=12, ignore_eos=True).tokens == [7] * 12
    assert other.wait()[0].tokens == free
    assert not set(free) & set(banned.wait()[0].tokens)


@pytest.mark.parametrize(
    ("sampling", "variant"),
    [
        ({}, GREEDY),
        ({"top_p": 0.5, "seed": 3}, GREEDY),
        ({"temperature": 0.7}, FULL),
        ({"logit_bias": {3: 1.0}}, FULL),
        ({"min_tokens": 2}, FULL),
        ({"frequency_penalty": 0.5}, FULL),
    ],
    ids=str,
)
def test_greedy_requests_are_spared_what_they_do_not_need(engine, sampling, variant, monkeypatch):
    seen = []
    run = engine.runner.sampler.run
    monkeypatch.setattr(
        engine.runner.sampler, "run", lambda *x, variant: seen.append(variant) or run(*x, variant=variant)
    )
    engine.answer(tokens_of(9), max_tokens=4, **sampling)
    assert set(seen) == {variant}


def test_rows_are_sent_once_as_long_as_they_are_the_same(engine):
    before = engine.runner._sent.cache_info()
    assert engine.answer(tokens_of(5), max_tokens=40).tokens == greedy(tokens_of(5), 40)
    after = engine.runner._sent.cache_info()
    assert after.misses - before.misses <= 1  # of all steps but the prompt's
    assert after.hits - before.hits <= 6  # nor are they looked for in every step


@pytest.mark.parametrize("logprobs", [None, 2])
def test_what_is_read_lies_in_the_hosts_memory(engine, monkeypatch, logprobs):
    seen = []
    read = Handles.tokens_alone
    monkeypatch.setattr(Handles, "tokens_alone", lambda handles: seen.append(handles) or read(handles))
    engine.answer(tokens_of(9), max_tokens=4, logprobs=logprobs)
    assert len(seen) == 4
    for handles in seen:
        arrays = [handles.tokens]
        if logprobs:
            arrays += [handles.logprobs, handles.top_ids, handles.top_logprobs]
        assert {array.sharding.memory_kind for array in arrays} == {"pinned_host"}
    state = engine.runner.sampler.state
    assert "pinned_host" not in {array.sharding.memory_kind for array in jax.tree.leaves(state)}


def test_drafts_of_as_many_requests_as_there_are_rows():
    """The tail of all rows, which is donated, looks like how many drafts of each are right, which the host reads."""
    sampler = RowSampler(CONFIG, 4, jax.devices()[0], part=8)
    sampler.reset()
    given = sampler._draft_arguments(4, 3, masked=False)
    lowered = sampler.run_drafts.lower(*given, variant=GREEDY).as_text()
    (results,) = re.findall(r"@main\(.*?-> \((.*?)\) \{\n", lowered, re.DOTALL)
    kinds = re.findall(r'memory_kind = "(\w+)"', results)
    aliased = {kinds[int(n)] for n in re.findall(r"tf.aliasing_output = (\d+)", lowered)}
    assert "pinned_host" in kinds and aliased == {"device"}
    *read, sampler.state, tail = sampler.run_drafts(*given, variant=GREEDY)
    assert {x.sharding.memory_kind for x in read if x is not None} == {"pinned_host"}
    assert tail.shape == (4,) and given[2].is_deleted()


def test_stop_tokens_end_a_choice(engine):
    prompt = tokens_of(30)
    free = greedy(prompt, 20)
    at = next(i for i in range(6, 20) if free[i] not in free[:i])
    stopped = engine.answer(prompt, stop_token_ids=(free[at],), max_tokens=20)
    assert stopped.tokens == free[: at + 1]
    assert stopped.finish_reason == "stop"


def test_min_tokens_bans_stop_tokens_until_then(engine):
    prompt = tokens_of(30)
    free = greedy(prompt, 20)
    stop = free[0]
    assert engine.answer(prompt, stop_token_ids=(stop,), max_tokens=20).tokens == [stop]
    want = greedy(prompt, 30, banned=(stop,), banned_until=5)
    end = next((i + 1 for i, token in enumerate(want) if token == stop), 30)
    answer = engine.answer(prompt, stop_token_ids=(stop,), min_tokens=5, max_tokens=30)
    assert answer.tokens == want[:end]
    assert end > 5
    assert answer.finish_reason == ("stop" if end < 30 else "length")


def test_eos_ends_unless_ignored(engine):
    """The random model would sample an EOS sooner or later; seeds of which one does are looked for."""
    prompt, sampling = tokens_of(12), {"temperature": 3.0, "max_tokens": 60}
    for seed in range(40):
        free = engine.answer(prompt, seed=seed, **sampling).tokens
        at = next((i for i, token in enumerate(free) if token in EOS), None)
        if at is not None:
            break
    assert at is not None
    assert len(free) == 60
    ended = engine.answer(prompt, seed=seed, ignore_eos=False, **sampling)
    assert (ended.tokens, ended.finish_reason) == (free[: at + 1], "stop")
    later = engine.answer(prompt, seed=seed, ignore_eos=False, min_tokens=at + 3, **sampling)
    assert not set(later.tokens[: at + 3]) & set(EOS)


def test_penalties_survive_preemption():
    prompts = [tokens_of(20, seed) for seed in range(4)]
    with tiny_engine() as ample:
        whole = [a.tokens for a in ask_all(ample, prompts, max_tokens=90, **PENALTIES)]
    for prompt, tokens in zip(prompts[:2], whole[:2], strict=True):
        assert tokens == greedy(prompt, 90, penalize=penalize, guess=tokens)
    assert whole[0] != greedy(prompts[0], 90)
    with tiny_engine(pages=130, max_tail=16) as small:
        pieces = [a.tokens for a in ask_all(small, prompts, max_tokens=90, **PENALTIES)]
        assert small.engine.stats().preemptions_total >= 1
        small.forget()
    assert pieces == whole


def test_what_the_compiler_is_told_on_a_gpu():
    """The loops of sampling are recorded in graphs; nothing of a step is computed twice, and no kernel of one with a chunk
    runs beside another."""
    with as_on_hopper(), mock.patch.object(jax, "jit", wraps=jax.jit) as jit:
        options = sampling.compiler_options()
        runner = tiny_runner.__wrapped__("full")
    calls = [call for call in jit.call_args_list if call.args]
    made = next(call for call in calls if call.args[0] is sampling.sample)
    of_steps = [call for call in calls if getattr(call.args[0], "__name__", "") == "run_step"]
    with_chunk, alone = (call.kwargs["compiler_options"] for call in of_steps)
    assert with_chunk == {"xla_disable_hlo_passes": "rematerialization"}
    assert alone == with_chunk | {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"}
    assert options is not None
    assert "WHILE" in options["xla_gpu_enable_command_buffer"].split(",")
    assert made.kwargs["compiler_options"] == options
    assert runner._steps[0] is not runner._steps[1]
    warmed = [(p.name, p.function) for p in runner._programs() if p.function in runner._steps]
    assert {("chunk" in name, runner._steps.index(f)) for name, f in warmed} == {(True, 0), (False, 1)}
    runner._steps = (lambda **_: "with a chunk", lambda **_: "alone")
    assert [runner._step(shape=Shape(chunk)) for chunk in (None, 8)] == ["alone", "with a chunk"]
