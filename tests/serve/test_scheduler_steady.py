"""Steps that are as the one before: nobody is looked at, pages come for many at once, tokens go out by themselves."""

from collections import Counter
from unittest import mock

import numpy as np
import pytest

from serve.request import GenerationRequest, SamplingParams, TokenOutput
from serve.scheduler import SOON, Scheduler
from tests.serve.fake_device import VOCAB, AnyText, expected
from tests.serve.loop import Loop, make_limits, make_plan

PLAN = make_plan()


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([seed, length]).integers(8, VOCAB, length).tolist()


def loop(**limits) -> Loop:
    return Loop(PLAN, make_limits(**({"max_tail": 100, "max_running": 4} | limits)), 4000)


def looks(bench: Loop) -> mock._patch:
    """Counts how often all sequences are looked at."""
    return mock.patch.object(Scheduler, "_next", autospec=True, side_effect=Scheduler._next)


def until_all_decode(bench: Loop) -> None:
    while bench.scheduler.waiting or not all(s.generated > 1 for s in bench.scheduler.running):
        bench.step()


def test_steps_alike_are_planned_once():
    bench = loop()
    jobs = [bench.add(prompt(9, n), max_tokens=60, ignore_eos=True) for n in range(3)]
    until_all_decode(bench)
    with looks(bench) as next_step:
        for _ in range(50):
            bench.step()
    assert next_step.call_count <= 3  # once pages are wanted, or the way here was one
    bench.drain()
    for job in jobs:
        job.check()


@pytest.mark.parametrize("what", ["arrives", "leaves", "ends", "waits without a place"])
def test_whatever_happens_the_next_step_knows(what):
    """Of those that wait without a place nothing has to be known."""
    bench = loop(max_running=3 if what == "waits without a place" else 4)
    jobs = [bench.add(prompt(9, n), max_tokens=60, ignore_eos=True) for n in range(2)]
    jobs.append(bench.add(prompt(9, 2), max_tokens=12 if what == "ends" else 60, ignore_eos=True))
    until_all_decode(bench)
    bench.step()
    assert bench.scheduler._steady
    with looks(bench) as next_step:
        if what == "arrives":
            jobs.append(bench.add(prompt(5), max_tokens=3))
        elif what == "leaves":
            bench.abort(jobs[0])
        elif what == "waits without a place":
            jobs.append(bench.add(prompt(5), max_tokens=3))
        else:
            while not jobs[-1].done:
                bench.step()
        if what != "ends":
            bench.step()
    assert (next_step.call_count > 0) == (what != "waits without a place")
    bench.drain()
    for job in jobs:
        job.check()


def test_pages_come_for_many_at_once(monkeypatch):
    """Rows that began one after another want theirs in different steps; those that soon do get them with the first one."""
    monkeypatch.setattr("serve.limits.ROOM", 2 * SOON)

    def reserving(soon: int) -> int:
        """In how many steps rows got pages while all decode."""
        monkeypatch.setattr("serve.scheduler.SOON", soon)
        bench = loop(max_tail=150)
        jobs = []
        for n in range(4):
            jobs.append(bench.add(prompt(9, n), max_tokens=130, ignore_eos=True))
            for _ in range(4):
                bench.step()
        until_all_decode(bench)
        steps = 0
        for _ in range(90):
            before = len(bench.runner.calls)
            bench.step()
            steps += any(call[0] == "reserve" for call in bench.runner.calls[before:])
        bench.drain()
        for job in jobs:
            job.check()
        return steps

    assert reserving(SOON) * 2 <= reserving(0)


def test_pages_that_are_only_wanted_soon_cost_nobody_anything(monkeypatch):
    """Where there are none nobody is preempted, and nothing stored goes, for them."""
    monkeypatch.setattr("serve.limits.ROOM", 8)
    bench = Loop(PLAN, make_limits(max_tail=40, max_running=2), 4000)
    for n in range(2):
        bench.add(prompt(9, n), max_tokens=40, ignore_eos=True)
        bench.step()
        bench.step()
    until_all_decode(bench)
    first, second = bench.scheduler.running
    tried = 0
    for _ in range(20):
        bench.step()
        calls = len(bench.runner.calls)
        with mock.patch.object(bench.scheduler.pages, "free", 0):
            bench.scheduler._make_more_room([first, second])
        assert len(bench.runner.calls) == calls
        tried += first.room - first.state.tail <= SOON
    assert tried > 9
    bench.drain()


@pytest.mark.parametrize("grammar", [False, True])
def test_tokens_alone_go_to_their_own_receiver(grammar):
    """The first output and the last one hold more; a choice whose grammar is followed is no exception."""
    bench, came = loop(), list[tuple[str, int | None]]()
    how = SamplingParams(max_tokens=9, seed=0, grammar=AnyText() if grammar else None)  # type: ignore[arg-type]
    request = GenerationRequest(request_id="a", prompt_ids=prompt(7, 3), sampling=how)
    want = expected(request.prompt_ids, 0, 9)

    def on_output(output: TokenOutput) -> None:
        came.append(("output", output.token_id))

    bench.engine._add(request, on_output, lambda choice, token: came.append(("token", token)))
    bench.drain()
    assert [token for _, token in came] == want
    assert Counter(kind for kind, _ in came) == {"output": 2, "token": len(want) - 2}
    assert came[0][0] == came[-1][0] == "output"
