"""The engine with a real (tiny) model: at full retention it says what dense attention says, whatever else goes on."""

import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.testing import reference_decode
from serve.drift import DriftMonitor, Recipe
from serve.request import EngineUnavailable, GenerationRequest, RequestRejected, SamplingParams, TokenOutput
from tangram_jax.scorers import get_scorer
from tests.serve.tiny_engine import (
    CONFIG,
    GEMMA2,
    LENGTH,
    PARAMS,
    RUNNING,
    ask_all,
    dense_logits,
    greedy,
    tiny_engine,
    tiny_runner,
    tokens_of,
)

# Greedy tokens


def test_the_reference_is_the_dense_decode():
    prompt = tokens_of(20)
    ids, logits = reference_decode(PARAMS, CONFIG, prompt, 12)
    assert greedy(prompt, 12) == ids
    np.testing.assert_allclose(dense_logits(prompt)[-1], logits[0], atol=1e-4)


def test_concurrent_requests_of_many_lengths(engine):
    # Shorter and longer than the window (16), than a chunk beside decode (16), than a chunk alone (48).
    prompts = [tokens_of(n) for n in (5, 1, 40, 16, 17, 130, 48, 97)]
    answers = ask_all(engine, prompts, max_tokens=50)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.tokens == greedy(prompt, 50, guess=answer.tokens), len(prompt)
        assert answer.finish_reason == "length"
    stats = engine.engine.stats()
    assert stats.generation_tokens_total == 8 * 50
    assert stats.preemptions_total == 0
    assert stats.tail_compressions_total == 0  # nothing to compress after 48 tokens: all is kept
    assert stats.retention_reached == pytest.approx(1.0)


def test_up_to_the_last_position(engine):
    prompt = tokens_of(LENGTH - 10)
    assert engine.answer(prompt, max_tokens=10).tokens == greedy(prompt, 10)
    with pytest.raises(RequestRejected, match="exceed the maximum of 256 tokens"):
        engine.ask(prompt, max_tokens=11)


def test_more_stop_ids_than_there_is_room_for_end_their_request_alone(engine):
    other = engine.ask(tokens_of(20), max_tokens=40)
    with pytest.raises(RequestRejected, match="at most 24 stop and EOS ids; got 30"):
        engine.ask(tokens_of(5), min_tokens=2, stop_token_ids=tuple(range(30)))
    assert other.wait()[0].tokens == greedy(tokens_of(20), 40)


def test_prompt_tokens_are_counted_once(engine):
    before = engine.engine.stats().prompt_tokens_total
    for _ in range(2):  # the second is cached but for its end
        engine.answer(tokens_of(100, 77), max_tokens=60)  # tails that are compressed are no prompt
    assert engine.engine.stats().prompt_tokens_total == before + 200


def test_preemption_changes_nothing():
    """Three requests that each fit, but not together: the latest starts again, more than once."""
    prompts = [tokens_of(20, seed) for seed in range(4)]
    with tiny_engine(pages=130, max_tail=16) as tiny:
        answers = ask_all(tiny, prompts, max_tokens=110)
        assert tiny.engine.stats().preemptions_total >= 2
        tiny.forget()
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.tokens == greedy(prompt, 110, guess=answer.tokens)


@pytest.mark.parametrize(
    ("kind", "config", "compresses"),
    [("full", CONFIG, False), ("full", CONFIG, True), pytest.param("gemma2", GEMMA2, False, marks=pytest.mark.slow)],
)  # fmt: skip
def test_tails_of_eight_tokens(kind, config, compresses, monkeypatch):
    """Of rows that keep everything a tail counts as compressed, which changes as little as compressing it would."""
    prompts = [tokens_of(n) for n in (3, 60)]
    if compresses:
        monkeypatch.setattr("serve.rows.Rows.keeps_all", lambda *_: False)
    with tiny_engine(kind, max_tail=8) as tiny:
        answers = ask_all(tiny, prompts, max_tokens=40)
        assert tiny.engine.stats().tail_compressions_total == (2 * 4 if compresses else 0)
        turn = [*prompts[1], *answers[1].tokens, *tokens_of(9, 5)]
        answers.append(tiny.answer(turn, max_tokens=20))
        assert answers[2].cached == 60 + 39
        tiny.forget()
    for prompt, answer in zip([*prompts, turn], answers, strict=True):
        assert answer.tokens == greedy(prompt, len(answer.tokens), guess=answer.tokens, config=config)


def test_a_prompt_whose_answer_was_compressed_answers_once_more():
    with tiny_engine(max_tail=8) as tiny:
        first, again = (tiny.answer(tokens_of(60), max_tokens=30) for _ in range(2))
        assert first.tokens == again.tokens == greedy(tokens_of(60), 30)
        assert (first.cached, again.cached) == (0, 59)
        following = tiny.answer([*tokens_of(60), *first.tokens, 9, 9], max_tokens=4)
        assert following.tokens == greedy([*tokens_of(60), *first.tokens, 9, 9], 4)
        assert following.cached == 89
        tiny.forget()


# Conversations


def test_a_conversation_goes_on_where_it_ended(engine):
    text = tokens_of(40)
    for turn in range(4):
        answer = engine.answer(text, max_tokens=12)
        assert answer.tokens == greedy(text, 12)
        assert answer.cached == (0 if turn == 0 else len(text) - 9 - 1)  # the last token was never fed
        text = text + answer.tokens + tokens_of(9, turn)
    stats = engine.engine.stats()
    assert stats.stored_sessions == 1
    asked = [40 + 21 * turn for turn in range(4)]
    assert stats.prefix_query_tokens_total == sum(asked)
    assert stats.prefix_hit_tokens_total == sum(n - 10 for n in asked[1:])
    # What is prefilled again: the new tokens, and of what is stored as much as a window of queries lacks.
    assert stats.prefilled_tokens_total <= 40 + 3 * (10 + 16) + 4 * 16
    assert stats.prompt_tokens_total == sum(asked)


def test_regenerate_and_edit(engine):
    prompt = tokens_of(60)
    first = engine.answer(prompt, max_tokens=20)
    again = engine.answer(prompt, max_tokens=20)
    assert (again.tokens, again.cached) == (first.tokens, 59)
    edited = [*prompt, *first.tokens[:7], *tokens_of(5)]  # a turn that cuts the answer short
    branch = engine.answer(edited, max_tokens=20)
    assert (branch.tokens, branch.cached) == (greedy(edited, 20), 67)
    other = [*prompt[:30], *tokens_of(31, 9)]  # differs in what was compressed: from scratch
    assert (engine.answer(other, max_tokens=5).tokens, engine.stored) == (greedy(other, 5), 2)


def test_choices_stored_side_by_side_are_each_continued(engine):
    prompt = tokens_of(50)
    answers = engine.ask(prompt, n=3, seed=1, temperature=1.0, max_tokens=10).wait()
    engine.settle()
    assert engine.stored == 3
    for answer in answers:
        text = [*prompt, *answer.tokens, *tokens_of(4)]
        turn = engine.answer(text, max_tokens=10)
        assert (turn.tokens, turn.cached) == (greedy(text, 10), 59)


def test_stored_sessions_make_room():
    with tiny_engine(pages=110) as tiny:
        for seed in range(5):
            prompt = tokens_of(100, seed)  # 13 pages in each of 4 groups: two fit
            assert tiny.answer(prompt, max_tokens=4).tokens == greedy(prompt, 4)
        assert tiny.stored == 2
        tiny.forget()


# Ends before the end


@pytest.mark.parametrize("after", [0, 1, 5])
def test_abort_leaves_first_choices_alone(engine, after):
    doomed = [engine.ask(tokens_of(90, seed), n=2, max_tokens=150) for seed in range(3)]
    stays = engine.ask(tokens_of(30), max_tokens=40)
    if after:
        doomed[0].wait_for_tokens(after)
    for asked in doomed:
        asked.abort()
    assert stays.wait()[0].tokens == greedy(tokens_of(30), 40)
    engine.settle()
    stats = engine.engine.stats()
    assert 1 <= engine.stored <= 4
    assert stats.pages_used == stats.pages_stored >= engine.plan.pages(30, 39)
    engine.forget()


def test_abort_of_one_choice(engine):
    asked = engine.ask(tokens_of(40), n=3, max_tokens=60)
    asked.wait_for_tokens(4, choice=1)
    asked.abort(1)
    want = greedy(tokens_of(40), 60)
    asked.until(lambda: asked.answers[0].finish_reason and asked.answers[2].finish_reason, 60)
    engine.settle()
    assert asked.answers[0].tokens == asked.answers[2].tokens == want
    cut = asked.answers[1].tokens
    assert 4 <= len(cut) < 60
    assert cut == want[: len(cut)]


def test_unknown_and_finished_ids_are_ignored(engine):
    asked = engine.ask(tokens_of(5), max_tokens=2)
    asked.wait()
    asked.abort()
    asked.abort(7)
    engine.engine.abort("nobody")
    assert engine.answer(tokens_of(5), max_tokens=2).tokens == asked.answers[0].tokens


@pytest.mark.parametrize("failing", ["step", "sampling"])
def test_a_device_failure_ends_what_runs_and_nothing_else(engine, monkeypatch, caplog, failing):
    calls = []
    owner, name = (engine.runner, "_step") if failing == "step" else (engine.runner.sampler, "run")
    whole = getattr(owner, name)

    def fail_once(*args, **kwargs):
        calls.append(1)
        if len(calls) == 12:
            raise RuntimeError("out of memory on the device")
        return whole(*args, **kwargs)

    monkeypatch.setattr(owner, name, fail_once)
    engine.answer(tokens_of(10), max_tokens=3)
    asked = [engine.ask(tokens_of(30, seed), max_tokens=100) for seed in range(RUNNING + 1)]
    waits = asked.pop()  # has not begun
    for a in asked:
        last = a.wait()[0].outputs[-1]
        assert last.finish_reason == "error"
        assert last.error == "the engine failed while running this request: RuntimeError"
    assert waits.wait()[0].tokens == greedy(tokens_of(30, RUNNING), 100)
    engine.settle()
    assert engine.engine.stats().pages_used == engine.engine.stats().pages_stored
    assert "out of memory on the device" in caplog.text
    assert engine.engine.ready
    assert engine.answer(tokens_of(30), max_tokens=20).tokens == greedy(tokens_of(30), 20)


def test_a_lost_device_ends_the_engine_and_everyone_hears_of_it(monkeypatch, caplog):
    with tiny_engine() as tiny:
        told = threading.Event()
        tiny.engine.on_failure = told.set
        running = tiny.ask(tokens_of(20), max_tokens=200)
        running.wait_for_tokens(3)
        late = []

        def fail(*args, **kwargs):
            # Asked for while the engine finds out: it must not wait for ever.
            late.append(tiny.ask(tokens_of(9), max_tokens=5))
            raise RuntimeError("the context is lost")

        monkeypatch.setattr(tiny.runner, "_step", fail)
        monkeypatch.setattr(tiny.runner, "_new_cache", fail)
        assert (
            running.wait()[0].outputs[-1].error
            == "the engine failed while running this request: RuntimeError"
        )
        assert told.wait(10)
        assert len(late) == 2
        for asked in late:
            assert asked.wait()[0].outputs[-1].error == "the engine has lost its device and stops"
        assert tiny.engine.failed
        assert not tiny.engine.ready
        with pytest.raises(EngineUnavailable, match="not running"):
            tiny.ask(tokens_of(5))
        assert "The device cannot be used any more" in caplog.text
        monkeypatch.undo()
        tiny.runner.reset()


def test_a_command_that_fails_at_the_end_leaves_nobody_waiting(monkeypatch, caplog):
    with tiny_engine() as tiny:
        running = tiny.ask(tokens_of(20), max_tokens=200)
        running.wait_for_tokens(3)
        step, entered, leave = tiny.engine.step, threading.Event(), threading.Event()

        def wait_and_step():
            entered.set()
            assert leave.wait(30)
            step()

        monkeypatch.setattr(tiny.engine, "step", wait_and_step)
        assert entered.wait(30)
        monkeypatch.setattr(tiny.engine, "_abort", lambda *_: 1 / 0)
        running.abort()
        late = tiny.ask(tokens_of(9), max_tokens=5)
        stopping = threading.Thread(target=tiny.engine.stop)
        stopping.start()
        while not tiny.engine._stopping:
            time.sleep(0.01)
        leave.set()
        assert [a.wait()[0].finish_reason for a in (running, late)] == ["abort", "abort"]
        stopping.join()
        assert "A command failed while the engine stops" in caplog.text
    tiny.runner.reset()


def test_a_receiver_that_fails_does_not_disturb_the_others(engine, caplog):
    def fail(output):
        raise ConnectionError("gone")

    sampling = SamplingParams(max_tokens=10, temperature=0.0)
    bad = GenerationRequest(request_id="bad", prompt_ids=tokens_of(20), sampling=sampling)
    engine.engine.submit(bad, fail)
    assert engine.answer(tokens_of(21), max_tokens=10).tokens == greedy(tokens_of(21), 10)
    assert "The receiver of request bad failed" in caplog.text


def test_an_id_in_use_is_an_error_of_the_second(engine):
    first = engine.ask(tokens_of(20), max_tokens=50)
    outputs: list[TokenOutput] = []
    engine.engine.submit(first.request, outputs.append)
    assert first.wait()[0].tokens == greedy(tokens_of(20), 50)
    assert [(o.finish_reason, o.error) for o in outputs] == [
        ("error", f"request id {first.request.request_id} is in use")
    ]


def test_stop_ends_everything_and_refuses_more():
    with tiny_engine() as tiny:
        asked = [tiny.ask(tokens_of(20, seed), max_tokens=200) for seed in range(6)]
        asked[0].wait_for_tokens(2)
        tiny.engine.stop()
        for a in asked:
            assert a.wait()[0].finish_reason == "abort"
        with pytest.raises(EngineUnavailable):
            tiny.ask(tokens_of(3))


def test_a_compilation_would_be_counted(engine):
    """The zero that every other test sees is not the zero of a broken counter."""
    jax.jit(lambda x: x * 3 + 1)(jnp.ones(7)).block_until_ready()  # on another thread: not the engine's
    engine.settle()
    engine.engine._tell(lambda: jax.jit(lambda x: x * 5 + 2)(jnp.ones(7)))
    engine.answer(tokens_of(3), settle=False)
    assert engine.engine.stats().compilations_after_warmup >= 1
    engine.runner.compilations = 0


# Compressed


def test_ragged_budgets_hold_what_the_plan_says():
    with tiny_engine("ragged") as tiny:
        plan, prompts = tiny.plan, [tokens_of(n) for n in (150, 40, 3, 97)]
        assert len(set(plan.group_budgets.tolist())) == plan.num_groups
        for prompt in prompts:
            tiny.forget()
            assert len(tiny.answer(prompt, max_tokens=30).tokens) == 30
            assert tiny.engine.stats().pages_used == plan.pages(len(prompt), 29)
            held = plan.entries(len(prompt)) + 29 * plan.group_of.size
            full = (len(prompt) + 29) * plan.group_of.size
            assert tiny.engine.stats().retention_reached == pytest.approx(held / full)
        tiny.forget()
        # In company, past the longest tail, with choices; then the next turn compresses the tail.
        asked = [tiny.ask(prompt, n=2, max_tokens=90) for prompt in prompts]
        answers = [a.wait()[0] for a in asked]
        assert all(len(a.tokens) == 90 for a in answers)
        tiny.settle()
        assert tiny.engine.stats().tail_compressions_total == 8
        last = [*prompts[3], *answers[3].tokens, *tokens_of(5)]
        turn = tiny.answer(last, max_tokens=1)
        assert turn.cached == len(last) - 6
        rows = [s.state for s in tiny.engine._scheduler.sessions if s.state.cached == len(last)]
        assert [(row.compressed, row.tail) for row in rows] == [(len(last), 0)]
        np.testing.assert_array_equal(rows[0].holding.owned, plan.group_pages(len(last)))
        cache = tiny.runner.cache
        assert (int(cache.tokens[rows[0].row]), int(cache.tail[rows[0].row])) == (len(last), 0)
        assert int(cache.num_free) == cache.num_pages - tiny.engine.stats().pages_used
        tiny.forget()


def test_short_prompts_are_exact_under_ragged_budgets():
    """The first chunk attends to all of itself: its first token is dense, whatever is kept of it."""
    with tiny_engine("ragged") as tiny:
        for length in (1, 20, 48):
            assert tiny.answer(tokens_of(length), max_tokens=1).tokens == greedy(tokens_of(length), 1)
        tiny.forget()


def test_measuring_prompts_changes_no_answer_and_compiles_nothing_after_warm_up():
    plan = tiny_runner("ragged").plan
    monitor = DriftMonitor(
        CONFIG, plan, Recipe(scorer=get_scorer("keydiff"), tokens=48, retention=0.4), interval=0.0
    )
    with tiny_engine("ragged", drift=monitor) as tiny:
        for length in (48, 47, 20):
            assert tiny.answer(tokens_of(length), max_tokens=1).tokens == greedy(tokens_of(length), 1)
        tiny.forget()
    assert monitor.stats().measured_total == 1 and monitor.stats().too_short_total == 2


def test_ragged_preemption_completes_and_frees():
    with tiny_engine("ragged", pages=110, max_tail=16) as tiny:
        prompts = [tokens_of(40, seed) for seed in range(6)]
        answers = ask_all(tiny, prompts, max_tokens=100)
        assert all(len(a.tokens) == 100 for a in answers)
        assert tiny.engine.stats().preemptions_total >= 1
        tiny.forget()
