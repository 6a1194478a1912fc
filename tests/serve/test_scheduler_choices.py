"""The scheduler on a fake device: the choices of one request, which share its prompt."""

import pytest

from tests.serve.fake_device import expected
from tests.serve.loop import make_plan
from tests.serve.test_scheduler import loop, prompt


def test_choices_fork_the_first_one():
    plan = make_plan()
    bench = loop(plan=plan)
    job = bench.add(prompt(60), n=3, max_tokens=10, ignore_eos=True)
    prefilled = 0
    run = bench.runner.run

    def record(work, read_all):
        nonlocal prefilled
        prefilled += sum(len(chunk.tokens) for chunk in work.chunks)
        return run(work, read_all)

    bench.runner.run = record
    bench.drain()
    job.check()
    assert len({tuple(job.tokens(c)) for c in range(3)}) == 3
    forks = [call for call in bench.runner.calls if call[0] == "fork"]
    assert len(forks) == 2
    assert {call[1] for call in forks} == {forks[0][1]}
    # The forks run nothing again: their first tokens come from the logits of the first one's prompt.
    assert prefilled == bench.engine.stats().prompt_tokens_total == 60
    assert not [call for call in bench.runner.calls if call[0] == "rollback"]
    assert bench.scheduler.pages.used < 3 * plan.pages(70)


@pytest.mark.parametrize("max_stored", [0, 4])
def test_choices_that_waited_fork_another_one_once_the_first_has_ended(max_stored):
    """Of a prompt of 60 tokens each of them would run all again: with four rows the last one is the sixteenth choice."""
    bench = loop(plan=make_plan(), max_running=4, max_stored=max_stored)
    job = bench.add(prompt(60), n=16, max_tokens=12, ignore_eos=True)
    ends = [2, *(3 + choice % 7 for choice in range(1, 16))]
    left = set(range(16))
    while bench.busy:
        bench.step()
        for choice in [c for c in left if len(job.outputs[c]) >= ends[c]]:
            left.remove(choice)
            bench.abort(job, choice)
    job.check()
    window = make_plan().window
    assert bench.engine._numbers.prefilled <= 60 + 15 * (window + 1)


def test_choices_of_a_stored_prompt_sample_from_its_logits_too():
    bench = loop(plan=make_plan())
    bench.run(prompt(60), max_tokens=4, ignore_eos=True)
    before = bench.engine._numbers.prefilled
    job = bench.run(prompt(60), n=3, max_tokens=4, ignore_eos=True)
    job.check()
    assert job.cached > 0
    assert bench.engine._numbers.prefilled - before <= 8 + 1  # once the window and the last token


def test_choices_wait_for_the_pages_of_their_copies():
    """28 of the first one's 58 pages are shared, the other 30 are not: all that is not locked, and what is reserved."""
    plan = make_plan()
    assert (plan.pages(60, 9), plan.shared_pages(60)) == (58, 28)
    bench = loop(58 + 29, plan=plan, max_stored=0)
    job = bench.add(prompt(60), n=2, max_tokens=10, ignore_eos=True)
    bench.step()
    bench.step()
    assert len(bench.scheduler.running) == 1
    bench.drain()
    job.check()


def test_choices_more_than_rows():
    bench = loop(max_running=2, max_stored=1)
    job = bench.run(prompt(30), n=7, max_tokens=6)
    job.check()


def test_a_first_choice_aborted_early_does_not_hold_up_the_others():
    for steps in range(6):
        bench = loop()
        job = bench.add(prompt(60), n=3, max_tokens=10)
        for _ in range(steps):
            bench.step()
        bench.abort(job, 0)
        bench.drain()
        job.check()
        assert job.outputs[1][-1].finish_reason in ("stop", "length")
        assert job.outputs[2][-1].finish_reason in ("stop", "length")


def test_a_head_that_keeps_nothing_can_be_forked():
    """A group of budget 0 keeps no window, so a fork cannot run its end again: it is prefilled instead."""
    bench = loop(plan=make_plan([[0.0, 0.5], [0.3, 1.0]], min_entries=0))
    bench.run(prompt(40), n=3, max_tokens=6).check()


@pytest.mark.parametrize(("smallest", "steps", "forks"), [(0.05, 6, 2), (0.05, 20, 1), (0.0, 6, 1)])
def test_a_choice_that_comes_late(smallest, steps, forks):
    """Of a row whose answer is compressed too, or that holds no window, a fork could not run the prompt's end."""
    plan = make_plan([[smallest, 0.5], [0.3, 1.0]], min_entries=0)
    bench = loop(plan=plan, max_running=2, max_stored=0)
    job = bench.add(prompt(40), n=3, max_tokens=40, ignore_eos=True)
    for _ in range(steps):
        bench.step()
    assert (bench.scheduler.running[0].state.compressed > 40) == (steps == 20)
    bench.abort(job, 1)
    bench.drain()
    assert len([call for call in bench.runner.calls if call[0] == "fork"]) == forks
    for choice in (0, 2):
        assert job.tokens(choice) == expected(prompt(40), choice, 40, ())


def test_an_aborted_choice_and_an_aborted_request_are_stored():
    bench = loop()
    job = bench.add(prompt(30), max_tokens=20, ignore_eos=True)
    for _ in range(8):
        bench.step()
    bench.abort(job, 0)  # a stop string was found
    bench.drain()
    assert len(bench.scheduler.sessions) == 1
    again = bench.add([*prompt(30), *job.tokens()[:4], 9, 9], max_tokens=20, ignore_eos=True)
    for _ in range(6):
        bench.step()
    assert again.cached == 34
    bench.abort(again)  # the client is gone, and sends the same turn once more
    bench.drain()
    assert len(bench.scheduler.sessions) == 1
    third = bench.run(again.request.prompt_ids, max_tokens=20, ignore_eos=True)
    assert third.cached == 35
    third.check()


@pytest.mark.parametrize("steps", range(12))
def test_abort_at_any_step_leaves_the_first_choice_alone(steps):
    bench = loop(plan=make_plan())
    job = bench.add(prompt(70), n=2, max_tokens=30)
    for _ in range(steps):
        bench.step()
    bench.abort(job)
    bench.drain()
    assert len(bench.scheduler.sessions) == (steps > 0)
    assert not bench.engine._sequences
    bench.run(prompt(70), max_tokens=30).check()  # from as far as the first one came
    bench.evict_all()
