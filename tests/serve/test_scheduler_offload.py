"""The scheduler on a fake device: rows that go to host memory and come back."""

import numpy as np

from serve.engine import _UnderWay
from tests.serve.fake_device import expected
from tests.serve.loop import make_plan
from tests.serve.test_scheduler import loop, prompt, waiting

PLAN = make_plan()


def calls(bench, name):
    return [call for call in bench.runner.calls if call[0] == name]


def hosted(bench):
    return [len(session.tokens) for session in bench.scheduler.offload.store]


def test_a_conversation_that_was_pushed_out_goes_on_where_it_was():
    bench = loop(plan=PLAN, max_stored=1, host_bytes=10_000)
    texts = [prompt(40, seed) for seed in range(3)]
    for turn in range(3):
        for i, text in enumerate(texts):
            job = bench.run(text, max_tokens=6, ignore_eos=True)
            job.check()
            assert job.cached == (0 if turn == 0 else len(text) - 7 - 1)
            texts[i] = text + job.tokens() + prompt(7, turn)
    # One of the three is always in the pool, and the others have left it for the host alone.
    assert len(bench.scheduler.sessions) == 1
    assert hosted(bench) == [len(text) - 7 - 1 for text in texts[:2]]
    counters = bench.scheduler.counters
    assert counters["offloaded_tokens"] == counters["restored_tokens"] + sum(hosted(bench))
    assert counters["offloaded_bytes"] == counters["restored_bytes"] + bench.scheduler.offload.store.used
    bench.evict_all()


def test_what_waits_for_its_turn_is_spared_on_the_host_too():
    """One of six conversations is in the pool, three have left it. By last use none would be there at its turn."""
    bench = loop(plan=PLAN, max_running=1, max_stored=1, host_bytes=3 * PLAN.pages(53, 12))
    first, *later = bench.converse([prompt(40, seed) for seed in range(6)], turns=3)
    assert first == 0 and min(later) >= 2


def test_only_what_holds_something_travels():
    bench = loop(plan=PLAN, host_bytes=10_000)
    bench.run(prompt(40), max_tokens=6, ignore_eos=True)
    bench.evict_all()
    assert [call[2] for call in calls(bench, "save")] == [PLAN.pages(40, 5)]


def test_what_is_not_worth_it_is_lost():
    bench = loop(plan=PLAN, host_bytes=10_000)  # least_shared: 12
    bench.run(prompt(7), max_tokens=5, ignore_eos=True)
    bench.evict_all()
    assert not hosted(bench)
    bench.run(prompt(8), max_tokens=5, ignore_eos=True)
    bench.evict_all()
    assert hosted(bench) == [12]
    # A prompt left beside an answer that was compressed, at nobody's cost: not at that of others on the host either.
    bench.run(prompt(40), max_tokens=30, ignore_eos=True)
    assert len(bench.scheduler.sessions) == 2
    bench.evict_all()
    assert hosted(bench) == [12, 69]


def test_the_pool_serves_where_it_has_nearly_as_much():
    bench = loop(plan=PLAN, host_bytes=10_000)
    text = prompt(40)
    longer = text + expected(text, 0, 6, ())
    bench.run(longer, max_tokens=1, ignore_eos=True)
    bench.evict_all()
    bench.run(text, max_tokens=1, ignore_eos=True)
    job = bench.run([*longer, *prompt(9, 1)], max_tokens=2)
    job.check()
    assert (job.cached, calls(bench, "load")) == (40, [])


def test_nothing_is_lost_while_pages_lack():
    bench = loop(4 * 30, plan=make_plan(1.0), max_running=2, host_bytes=10_000)
    text = prompt(60)
    bench.run(text, max_tokens=1)
    bench.evict_all()
    long = bench.add(prompt(60, 1), max_tokens=10, ignore_eos=True)
    bench.step()
    more = bench.add([*text, *prompt(10, 2)], max_tokens=1)
    for _ in range(3):
        bench.step()
    assert (waiting(bench), hosted(bench), calls(bench, "load")) == ([2], [60], [])
    bench.drain()
    assert more.cached == 60
    more.check()
    long.check()


def test_a_prompt_whose_logprobs_are_wanted_runs_whole():
    """Of what comes from the host there would be none."""
    bench = loop(plan=PLAN, host_bytes=10_000)
    bench.run(prompt(40), max_tokens=1)
    bench.evict_all()
    job = bench.run(prompt(40), max_tokens=1, prompt_logprobs=0)
    assert (job.cached, calls(bench, "load"), hosted(bench)) == (0, [], [40])


def test_a_prefix_is_brought_back_once_and_stays_on_the_host():
    bench = loop(plan=PLAN, max_stored=4, max_running=4, host_bytes=10_000)
    document = prompt(50)
    for seed in range(2):
        bench.run([*document, 8 + seed, *prompt(9, seed)], max_tokens=2)
    bench.evict_all()
    assert 50 in hosted(bench)
    jobs = [bench.add([*document, 20 + seed, *prompt(9, seed)], max_tokens=2) for seed in range(3)]
    bench.drain()
    for job in jobs:
        job.check()
        assert job.cached == 50
    assert len(calls(bench, "load")) == 1
    saved = len(calls(bench, "save"))
    bench.evict_all()
    assert hosted(bench).count(50) == 1
    assert len(calls(bench, "save")) == saved + 3  # the three conversations; the prefix is there


def test_a_prefix_that_comes_back_takes_the_place_of_another_row():
    bench = loop(plan=PLAN, max_stored=2, host_bytes=10_000)
    document = prompt(50)
    for seed in range(2):
        bench.run([*document, 8 + seed, *prompt(9, seed)], max_tokens=2)
    bench.evict_all()
    for seed in (5, 6):
        bench.run(prompt(20, seed), max_tokens=2)
    job = bench.add([*document, 20, *prompt(9)], max_tokens=2, ignore_eos=True)
    bench.step()
    assert [(len(s.tokens), s.is_prefix) for s in bench.scheduler.sessions] == [(21, False), (50, True)]
    bench.drain()
    assert job.cached == 50
    job.check()


def test_a_conversation_stays_for_its_next_turn_when_another_prompt_parts_from_it():
    bench = loop(plan=PLAN, host_bytes=10_000)
    text = prompt(40)
    first = bench.run(text, max_tokens=6, ignore_eos=True)
    bench.evict_all()
    edited = [*text[:36], 9, *prompt(20, 1)]
    assert bench.run(edited, max_tokens=2).cached == 36
    bench.evict_all()
    turn = bench.run([*text, *first.tokens(), *prompt(5)], max_tokens=2)
    assert turn.cached == 45
    turn.check()


def test_a_preempted_generation_goes_on_without_its_prompt():
    """A token was fed and not read when it was pushed out: it is not known, and the row goes without it."""
    bench = loop(plan=PLAN, max_tail=60, host_bytes=10_000)
    job = bench.add(prompt(40), max_tokens=20, ignore_eos=True)
    for _ in range(9):
        bench.step()
    (sequence,) = bench.scheduler.running
    work = bench.scheduler.schedule()
    bench.engine._under_way.append(_UnderWay([bench.runner.run(work, None)], None))
    known = len(sequence.tokens)
    assert (sequence.in_flight, sequence.state.cached) == (2, known + 1)
    prefilled = bench.engine._numbers.prefilled
    bench.scheduler._preempt(sequence)
    assert hosted(bench) == [known]
    bench.drain()
    job.check()
    assert bench.engine._numbers.prefilled - prefilled == PLAN.window  # two tokens to feed: a chunk
    assert not hosted(bench)


def test_a_prompt_that_is_preempted_within_has_found_nothing_but_what_was_there():
    """What it had prefilled itself comes back from the host, and was counted as found, and its prompt twice."""
    bench = loop(plan=PLAN, max_tail=60, host_bytes=10_000)
    text = prompt(90)
    bench.run(text[:20], max_tokens=1)
    before = bench.scheduler.counters["prefix_queries"]
    job = bench.add(text, max_tokens=2, ignore_eos=True)
    bench.step()
    (sequence,) = bench.scheduler.running
    assert 20 < sequence.state.cached < 90
    bench.scheduler._preempt(sequence)
    bench.drain()
    job.check()
    assert job.cached == 20
    assert bench.scheduler.counters["prefix_queries"] - before == 90
    assert bench.scheduler.counters["prefix_hits"] == 20


def test_copies_under_way_let_others_go_on_first():
    bench = loop(plan=PLAN, max_running=3, host_bytes=10_000)
    texts = [prompt(40, seed) for seed in range(2)]
    for text in texts:
        bench.run(text, max_tokens=1)
    bench.evict_all()
    jobs = [bench.add([*text, *prompt(30, 5)], max_tokens=1) for text in texts]
    bench.scheduler._admit()
    assert (waiting(bench), len(calls(bench, "load"))) == ([3], 1)
    bench.drain()
    assert [job.cached for job in jobs] == [40, 40]
    np.testing.assert_array_equal(hosted(bench), [])


def test_one_that_has_had_its_day_holds_nothing():
    """After a failed step there is another scheduler, and memory on the host for one of them."""
    bench = loop(plan=PLAN, max_stored=1, host_bytes=10_000)
    for seed in range(3):
        bench.run(prompt(40, seed), max_tokens=6, ignore_eos=True)
    bench.add(prompt(40, 9), max_tokens=30)
    bench.step()
    bench.step()
    before = bench.scheduler
    assert before.running and len(before.sessions) and before.offload.store.used
    assert bench.engine._recover(RuntimeError("a step failed"))
    assert bench.scheduler is not before
    assert not [*before.running, *before.waiting, *before.sessions, *before.offload.store]
    assert not before.offload.store.used and before._steady is None
    bench.run(prompt(40, 1), max_tokens=6, ignore_eos=True).check()
