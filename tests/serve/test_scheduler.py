"""The scheduler on a fake device: who runs when, exact pages, preemption, forks and stored sessions."""

import numpy as np
import pytest

from serve.request import RequestRejected
from tests.serve.fake_device import VOCAB, expected
from tests.serve.loop import Loop, make_limits, make_plan

FULL = make_plan(1.0)  # 4 groups of one head each


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([seed, length]).integers(8, VOCAB, length).tolist()


def loop(num_pages: int = 1000, plan=FULL, **limits) -> Loop:
    return Loop(plan, make_limits(**limits), num_pages)


def running(bench: Loop) -> list[int]:
    return [int(s.request.request_id) for s in bench.scheduler.running]


def waiting(bench: Loop) -> list[int]:
    return [int(s.request.request_id) for s in bench.scheduler.waiting]


# Admission


def test_first_come_first_served_and_no_more_than_max_running():
    bench = loop(max_running=2)
    jobs = [bench.add(prompt(10, i), max_tokens=3 + i, ignore_eos=True) for i in range(5)]
    bench.step()
    assert (running(bench), waiting(bench)) == ([0, 1], [2, 3, 4])
    bench.drain()
    for job in jobs:
        job.check()


def test_a_request_that_does_not_fit_waits_and_so_do_those_behind_it():
    # 4 groups; 40 tokens and a room of 7 are 12 pages a group: two of them fill 96 pages, a third must wait.
    bench = loop(100, max_stored=0)
    jobs = [bench.add(prompt(40, i), max_tokens=8, ignore_eos=True) for i in range(3)]
    small = bench.add(prompt(4, 9), max_tokens=1)  # one page a group: would fit, but came last
    bench.step()
    assert (running(bench), waiting(bench)) == ([0, 1], [2, 3])
    assert bench.scheduler.pages.used == 2 * FULL.pages(40, 7) == 96
    bench.drain()
    assert bench.scheduler.counters["preemptions"] == 0
    for job in [*jobs, small]:
        job.check()
    assert bench.scheduler.pages.free == 100


def test_pages_are_counted_exactly_from_admission_to_the_end():
    plan = make_plan()
    bench = loop(plan=plan, max_stored=0)
    bench.add(prompt(50), max_tokens=30, ignore_eos=True)
    bench.step()  # room for the tail beside the chunk: 12, the longest tail
    assert bench.scheduler.pages.used == plan.pages(50, 12)
    while bench.scheduler.running[0].generated < 2:
        bench.step()
    assert bench.scheduler.pages.used == plan.pages(50, 12)
    bench.drain()
    assert bench.scheduler.pages.used == 0


def test_what_can_never_run_is_refused():
    bench = loop(100)
    scheduler = bench.scheduler
    scheduler.check(80, 20)  # 25 pages in each of 4 groups: all there are
    with pytest.raises(RequestRejected, match="can take 104 KV pages, the pool has 100"):
        scheduler.check(80, 21)
    with pytest.raises(RequestRejected, match="exceed the maximum of 160 tokens"):
        scheduler.check(100, 61)
    job = bench.run(prompt(80), max_tokens=20, ignore_eos=True)
    job.check()


@pytest.mark.parametrize("length", [1, 2, 8, 9, 100, 155])
@pytest.mark.parametrize("budgets", [1.0, "ragged"])
def test_a_pool_of_just_what_check_asks_for_suffices(length, budgets):
    plan = FULL if budgets == 1.0 else make_plan()
    for max_tokens in (1, 5, 30, 60):
        total = length + max_tokens
        if total > 160:
            continue
        entries = np.minimum(plan.lengths(total) + 12, total)
        bench = loop(int((-(-entries // 4)).sum()), plan)
        for seed in (0, 1):  # the second finds the first one's pages stored
            bench.run(prompt(length, seed), max_tokens=max_tokens, ignore_eos=True).check()


# Preemption


def test_the_latest_gives_way_and_comes_back():
    bench = loop(4 * 24, max_stored=0, max_tail=64)
    first = bench.add(prompt(30, 1), max_tokens=50, ignore_eos=True)
    second = bench.add(prompt(30, 2), max_tokens=50, ignore_eos=True)
    # Rooms are reserved 49 at a time here: only one fits at first, the other waits for its end.
    bench.step()
    assert (running(bench), waiting(bench)) == ([0], [1])
    bench.drain()
    first.check()
    second.check()


def test_preempted_in_order_of_arrival_and_nothing_is_lost():
    bench = loop(4 * 30, max_stored=0, max_tail=6)
    jobs = [bench.add(prompt(20, i), max_tokens=60, ignore_eos=True) for i in range(3)]
    seen = set()
    while bench.busy:
        bench.step()
        if bench.scheduler.counters["preemptions"] and bench.scheduler.running:
            seen.add(tuple(running(bench)))
    assert bench.scheduler.counters["preemptions"] > 0
    assert all(list(order) == sorted(order) for order in seen)
    assert min(min(order) for order in seen) == 0
    assert [jobs[0].outputs[0][-1].finish_reason] == ["length"]
    for job in jobs:
        job.check()


def test_the_first_is_never_preempted():
    bench = loop(4 * 26, max_stored=2, max_tail=8)
    bench.add(prompt(20, 0), max_tokens=80, ignore_eos=True)
    for i in range(1, 4):
        bench.add(prompt(20, i), max_tokens=40, ignore_eos=True)
    while bench.jobs[0].outputs[0] == [] or not bench.jobs[0].done:
        bench.step()
        assert 0 in running(bench) or bench.jobs[0].done
    bench.drain()
    assert bench.scheduler.counters["preemptions"] > 0


# Tails


def test_a_long_generation_is_compressed_again_and_again():
    plan = make_plan()
    bench = loop(plan=plan, max_tail=12)
    job = bench.add(prompt(20), max_tokens=60, ignore_eos=True)
    compressed = set()
    while bench.busy:
        bench.step()
        for s in bench.scheduler.running:
            assert s.state.tail <= 12
            compressed.add(s.state.compressed)
            if s.generated > 1 and not s.in_flight:
                assert bench.scheduler.pages.used <= plan.pages(s.state.compressed, 12)
    # The tail is full after 12 tokens, the 13th is in the chunk that compresses: every 13 tokens.
    assert compressed - {0} == {20, 33, 46, 59, 72}
    assert bench.engine.stats().tail_compressions_total == 4
    job.check()


def test_a_compressed_tail_gives_back_its_surplus():
    plan = make_plan(0.1)
    bench = loop(plan=plan, max_tail=64, max_stored=0)
    job = bench.add(prompt(20), max_tokens=70, ignore_eos=True)
    used = []
    while bench.busy:
        bench.step()
        used.append(bench.scheduler.pages.used)
    assert max(used) == plan.pages(20, 64)
    assert plan.pages(85, 4) in used
    job.check()


# Chunks


def test_chunks_are_small_beside_decode_and_large_alone():
    bench = loop(max_tail=64)
    bench.add(prompt(5), max_tokens=40, ignore_eos=True)
    sizes = []
    run = bench.runner.run

    def record(work):
        if work.chunk:
            sizes.append((len(work.chunk.tokens), len(work.decode)))
        return run(work)

    bench.runner.run = record
    for _ in range(3):
        bench.step()
    bench.add(prompt(20, 1), max_tokens=2)
    bench.drain()
    # The last 4 come with the 4 before them, so that a whole window of queries scores what is kept.
    assert sizes == [(5, 0), (8, 1), (8, 1), (8, 1)]
    sizes.clear()
    bench.run(prompt(70, 2), max_tokens=1)
    assert sizes == [(32, 0), (32, 0), (8, 0)]  # 6 and 2 again


def test_prompt_logprobs_run_in_chunks_of_their_own_and_use_no_stored_session():
    bench = loop()
    bench.run(prompt(50), max_tokens=1)
    seen = []
    run = bench.runner.run

    def record(work):
        if work.chunk:
            seen.append((work.chunk.start, work.chunk.tokens.tolist(), work.chunk.next_tokens))
        return run(work)

    bench.runner.run = record
    other = bench.add(prompt(6, 3), max_tokens=40, ignore_eos=True)
    for _ in range(4):
        bench.step()
    seen.clear()
    job = bench.add(prompt(50), max_tokens=4, prompt_logprobs=0, n=2)
    bench.drain()
    assert job.cached == 0
    scored = [
        (start, tokens, following.tolist()) for start, tokens, following in seen if following is not None
    ]
    assert scored[0][0] == 0
    text = [*prompt(50), 0]
    reached = set()
    for start, tokens, following in scored:
        assert len(tokens) <= 16
        assert tokens == text[start : start + len(tokens)]
        assert following == text[start + 1 : start + 1 + len(tokens)]
        reached |= set(range(start, start + len(tokens)))
    assert reached == set(range(50))
    job.check()
    other.check()


# Choices


def test_choices_fork_the_first_one():
    plan = make_plan()
    bench = loop(plan=plan)
    job = bench.add(prompt(60), n=3, max_tokens=10, ignore_eos=True)
    prefilled = 0
    run = bench.runner.run

    def record(work):
        nonlocal prefilled
        prefilled += len(work.chunk.tokens) if work.chunk else 0
        return run(work)

    bench.runner.run = record
    bench.drain()
    job.check()
    assert len({tuple(job.tokens(c)) for c in range(3)}) == 3
    forks = [call for call in bench.runner.calls if call[0] == "fork"]
    assert len(forks) == 2
    assert {call[1] for call in forks} == {forks[0][1]}
    # The forks run only their last window again; lengths of 8 entries are kept in the smallest group.
    assert prefilled <= 60 + 4 + 2 * plan.window
    assert bench.scheduler.pages.used < 3 * plan.pages(70)


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


# Stored sessions


def test_a_continued_conversation_prefills_what_is_new():
    bench = loop(plan=make_plan())
    text = prompt(40)
    for turn in range(5):
        job = bench.run(text, max_tokens=6, ignore_eos=True)
        assert job.cached == (0 if turn == 0 else len(text) - 7 - 1)  # all but the turn and the last token
        job.check()
        text = text + job.tokens() + prompt(7, turn)
    assert len(bench.scheduler.sessions) == 1


def test_regenerating_runs_only_the_last_token_again():
    bench = loop(plan=make_plan())
    first = bench.run(prompt(40), max_tokens=6, ignore_eos=True)
    second = bench.run(prompt(40), max_tokens=6, ignore_eos=True, seed=5)
    assert (first.cached, second.cached) == (0, 39)
    second.check()


def test_a_turn_that_comes_with_the_last_token_of_the_one_before():
    """A step is under way when the end of an answer is seen; the next turn must wait for it, not start anew."""
    bench = loop(plan=make_plan())
    text = prompt(40)
    stop = expected(text, 0, 6, ())[-1]
    job = bench.add(text, max_tokens=30, stop_token_ids=(stop,), ignore_eos=True)
    while not job.done:
        bench.step()
    assert bench.busy
    unlike = bench.add(prompt(41, 1), max_tokens=1)
    turn = bench.add([*text, *job.tokens(), 9, 10], max_tokens=5)
    bench.step()
    assert running(bench) == [1]  # another one need not wait
    bench.drain()
    assert turn.cached == 40 + len(job.tokens())
    turn.check()
    unlike.check()


def test_a_prompt_that_differs_within_what_was_compressed_starts_anew():
    bench = loop(plan=make_plan())
    text = prompt(40)
    bench.run(text, max_tokens=6)
    assert bench.run([*text[:20], 9, *text[21:]], max_tokens=6).cached == 0
    assert bench.run(text[:30], max_tokens=2).cached == 0  # shorter than what was compressed


def test_sessions_go_by_last_use_and_only_when_pages_are_needed():
    bench = loop(4 * 40, max_stored=4, max_running=2)
    texts = [prompt(30, i) for i in range(4)]
    for text in texts:
        bench.run(text, max_tokens=3, ignore_eos=True)
    assert bench.scheduler.pages.used == 4 * FULL.pages(32)
    used_again = bench.run([*texts[0], *bench.jobs[0].tokens(), 9], max_tokens=1)
    assert used_again.cached == 32
    assert len(bench.scheduler.sessions) == 4
    # 33 pages a group are stored, 40 there are: 80 tokens take 20, so two of the four have to go, the oldest two.
    bench.run(prompt(80, 9), max_tokens=1)
    held = [s.tokens[:30].tolist() for s in bench.scheduler.sessions]
    assert held == [texts[3], texts[0], prompt(80, 9)[:30]]


def test_no_more_sessions_than_rows_for_them():
    bench = loop(max_stored=2)
    for i in range(5):
        bench.run(prompt(10, i), max_tokens=2)
    assert [s.tokens[:10].tolist() for s in bench.scheduler.sessions] == [prompt(10, 3), prompt(10, 4)]


def test_a_session_that_was_found_but_cannot_grow_yet_is_kept():
    bench = loop(4 * 30, max_running=2)
    text = prompt(60)
    bench.run(text, max_tokens=1)  # 15 pages a group stored
    long = bench.add(prompt(40, 1), max_tokens=10, ignore_eos=True)  # 12 or 13 more
    bench.step()
    more = bench.add([*text, *prompt(40, 2)], max_tokens=1)
    for _ in range(3):
        bench.step()
    assert waiting(bench) == [2]
    assert len(bench.scheduler.sessions) == 1
    bench.drain()
    assert more.cached == 60
    more.check()
    long.check()


def test_pages_shared_among_stored_sessions_are_freed_with_the_last():
    plan = make_plan(1.0)
    bench = loop(4 * 40, plan, max_stored=4, max_running=4)
    bench.run(prompt(80), n=4, max_tokens=8, ignore_eos=True)
    sessions = bench.scheduler.sessions
    assert len(sessions) == 4
    shared = plan.shared_pages(80)
    assert shared == 4 * 18
    assert sessions.pages == bench.scheduler.pages.used < 4 * plan.pages(87)
    # Everything is held by sessions that share it; a request of the whole pool must still get in.
    bench.run(prompt(150, 1), max_tokens=10, ignore_eos=True).check()
    assert len(sessions) == 1


def test_an_aborted_choice_is_stored_an_aborted_request_is_not():
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
    bench.abort(again)  # the client is gone
    bench.drain()
    assert len(bench.scheduler.sessions) == 0
    assert bench.scheduler.pages.used == 0


@pytest.mark.parametrize("steps", range(12))
def test_abort_at_any_step_frees_every_page(steps):
    bench = loop(plan=make_plan())
    job = bench.add(prompt(70), n=2, max_tokens=30)
    for _ in range(steps):
        bench.step()
    bench.abort(job)
    bench.drain()
    assert bench.scheduler.pages.used == 0
    assert not bench.engine._sequences
