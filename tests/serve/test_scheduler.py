"""The scheduler on a fake device: who runs when, exact pages, preemption and chunks."""

import itertools

import numpy as np
import pytest

from serve.engine import Engine
from serve.request import EngineUnavailable, GenerationRequest, RequestRejected, SamplingParams
from serve.rows import Rows
from tests.serve.fake_device import VOCAB
from tests.serve.loop import Job, Loop, make_limits, make_plan

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


def test_a_request_that_cannot_be_taken_in_ends():
    bench, outputs = loop(), []

    class Broken:
        def start(self, ignore_end):
            raise MemoryError

    how = SamplingParams(max_tokens=2, grammar=Broken())
    request = GenerationRequest(request_id="a", prompt_ids=prompt(5), sampling=how, n=2)
    with pytest.raises(MemoryError) as raised:
        bench.engine._add(request, outputs.append)
    assert bench.engine._recover(raised.value)
    assert [(o.choice, o.finish_reason) for o in outputs] == [(0, "error"), (1, "error")]
    bench.run(prompt(9)).check()


def test_requests_that_are_not_taken_in_yet_count(monkeypatch):
    monkeypatch.setattr("serve.engine.MOST_REQUESTS", 3)
    monkeypatch.setattr(Engine, "ready", True)
    bench = loop()
    bench.runner.check_sampling = lambda _: None
    for n in range(4):
        request = GenerationRequest(
            request_id=f"{n}", prompt_ids=prompt(5), sampling=SamplingParams(max_tokens=2)
        )
        if n < 3:
            bench.engine.submit(request, lambda _: None)
            continue
        with pytest.raises(EngineUnavailable, match="3 requests are queued already"):
            bench.engine.submit(request, lambda _: None)


def test_a_request_that_cannot_be_let_in_ends_alone(monkeypatch):
    bench, whole = loop(), Rows.wanted

    def wanted(self, budgets, tokens, tail):
        if tokens == 20:
            raise ValueError
        return whole(self, budgets, tokens, tail)

    monkeypatch.setattr(Rows, "wanted", wanted)
    bad, good = bench.add(prompt(20), max_tokens=4), bench.add(prompt(9, 1), max_tokens=4)
    with pytest.raises(ValueError) as raised:
        bench.engine.step()
    assert bench.engine._recover(raised.value)
    bench.drain()
    good.check()
    assert [o.finish_reason for o in bad.outputs[0]] == ["error"]


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


def test_a_request_is_refused_by_what_its_own_retention_takes():
    """Counted under the largest budgets that a row may have, it would be refused though it fits."""
    plan = make_plan(1.0, max_retention=0.9)
    bench = loop(64, plan)  # 101 tokens: 51 of them and a tail of 12 are 16 pages in each of 4 groups
    bench.scheduler.check(80, 21, 0.5)
    with pytest.raises(RequestRejected, match="can take 68 KV pages, the pool has 64"):
        bench.scheduler.check(84, 21, 0.5)
    with pytest.raises(RequestRejected, match="can take 104 KV pages, the pool has 64"):
        bench.scheduler.check(80, 21)
    bench.run(prompt(80), max_tokens=21, ignore_eos=True, retention=0.5).check()


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
    assert bench.scheduler.counters["prefix_queries"] == 3 * 20  # of each prompt once


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


def test_those_who_run_have_room_to_go_on_before_others_are_let_in():
    bench = loop(600, max_running=16, max_stored=0, max_tail=64)  # as many as fit would soon be preempted
    jobs = [bench.add(prompt(40, i), max_tokens=100, ignore_eos=True) for i in range(24)]
    bench.drain()
    for job in jobs:
        job.check()
    assert not bench.scheduler.counters["preemptions"]


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
                used = bench.scheduler.pages.used - bench.scheduler.sessions.pages  # the prompt's, stored
                assert used <= plan.pages(s.state.compressed, 12)
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


@pytest.mark.parametrize(
    ("ahead", "beside_decode", "size"),
    [
        (1, True, 32), (32, True, 32), (33, True, 128), (64, True, 128), (129, True, 128), (256, True, 128),
        (257, True, 512), (600, True, 512), (1024, True, 512), (1025, True, 2048), (9000, True, 2048),
        (256, False, 128), (1024, False, 512), (4096, False, 2048), (4097, False, 8192), (9000, False, 8192),
    ],
)  # fmt: skip
def test_a_chunk_is_not_left_half_empty(ahead, beside_decode, size):
    limits = make_limits(chunks_beside_decode=(32, 128, 512, 2048), max_chunk=8192)
    assert limits.chunk_size(ahead, beside_decode) == size


def test_chunks_are_small_beside_decode_and_large_alone():
    bench = loop(max_tail=64)
    bench.add(prompt(5), max_tokens=40, ignore_eos=True)
    sizes = []
    run = bench.runner.run

    def record(work, read_all):
        sizes.extend((len(chunk.tokens), len(work.decode)) for chunk in work.chunks)
        return run(work, read_all)

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


def steps_until_an_answer(bench: Loop, job: Job) -> int:
    for count in itertools.count():
        if job.outputs[0]:
            return count
        bench.step()
    raise AssertionError


@pytest.mark.parametrize("packed", [(), (16,)])
def test_a_short_prompt_does_not_wait_for_all_of_a_long_one(packed):
    bench = loop(packed_chunks=packed)
    jobs = [bench.add(prompt(9), max_tokens=60, ignore_eos=True)]
    steps_until_an_answer(bench, jobs[0])
    jobs.append(bench.add(prompt(96, 1), max_tokens=4, ignore_eos=True))  # 12 chunks of 8
    bench.step()
    jobs.append(bench.add(prompt(5, 2), max_tokens=4, ignore_eos=True))
    assert steps_until_an_answer(bench, jobs[2]) <= 4
    assert 4 < steps_until_an_answer(bench, jobs[1]) <= 16
    bench.drain()
    for job in jobs:
        job.check()


@pytest.mark.parametrize("packed", [(), (16,)])
def test_a_long_prompt_has_every_other_step_whatever_else_wants_one(packed):
    bench = loop(max_running=9, max_tail=2, packed_chunks=packed)
    jobs = [bench.add(prompt(9, i), max_tokens=100, ignore_eos=True) for i in range(8)]
    for job in jobs:
        steps_until_an_answer(bench, job)
    jobs.append(bench.add(prompt(96, 9), max_tokens=4, ignore_eos=True))
    assert steps_until_an_answer(bench, jobs[-1]) <= 2 * 12 + 8
    assert all(len(job.tokens()) > 8 for job in jobs[:8])
    bench.drain()
    for job in jobs:
        job.check()


def test_prompt_logprobs_run_in_chunks_of_their_own_and_use_no_stored_session():
    bench = loop()
    bench.run(prompt(50), max_tokens=1)
    seen = []
    run = bench.runner.run

    def record(work, read_all):
        seen.extend((chunk.start, chunk.tokens.tolist(), chunk.next_tokens) for chunk in work.chunks)
        return run(work, read_all)

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


def test_streams_go_on_while_a_long_prompt_is_scored():
    bench = loop()
    stream = bench.add(prompt(6, 3), max_tokens=60, ignore_eos=True)
    for _ in range(4):
        bench.step()
    steps = []
    run = bench.runner.run

    def record(work, read_all):
        steps.append(work.scores_prompt)
        return run(work, read_all)

    bench.runner.run = record
    scored = bench.add(prompt(100), max_tokens=1, prompt_logprobs=0)
    bench.drain()
    assert sum(steps) >= 7  # chunks of at most 16
    assert not any(a and b for a, b in itertools.pairwise(steps))  # never two in a row
    stream.check()
    scored.check()
