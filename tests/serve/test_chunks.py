"""Which chunks share a step: short ones that fit whole, first come first served, and none at another's cost."""

import pytest

from tests.serve.loop import make_limits, make_plan
from tests.serve.test_scheduler import loop, prompt

PACKED = {
    "max_running": 8,
    "max_tail": 20,
    "chunks_beside_decode": (8, 32),
    "packed_chunks": (8, 32),
    "packed_places": 4,
}


def steps_of(bench) -> list[list[tuple[int, int]]]:
    """(request, tokens) of the chunks of every step from here on."""
    seen, run = [], bench.runner.run

    def record(work, read_all):
        seen.append([(int(c.sequence.request.request_id), len(c.tokens)) for c in work.chunks])
        return run(work, read_all)

    bench.runner.run = record
    return seen


@pytest.mark.parametrize(
    ("sizes", "steps"),
    [
        ((5, 6, 7, 4, 2, 3), [[(0, 5), (1, 6), (2, 7), (3, 4)], [(4, 2), (5, 3)]]),  # four places
        ((12, 12, 3), [[(0, 12), (1, 12)], [(2, 3)]]),  # each begins at a multiple of 8, of 32
        ((5, 40, 6), [[(0, 5), (2, 6)], [(1, 32)], [(1, 8)]]),  # what is too long comes next, alone
        ((30, 5, 6), [[(0, 30)], [(1, 5), (2, 6)]]),
        ((20, 20), [[(0, 20)], [(1, 20)]]),
        ((9,), [[(0, 9)]]),
    ],
)
def test_short_chunks_that_fit_whole_share_a_step(sizes, steps):
    bench = loop(**PACKED)
    seen = steps_of(bench)
    jobs = [bench.add(prompt(size, i), max_tokens=5) for i, size in enumerate(sizes)]
    bench.drain()
    assert [chunks for chunks in seen if chunks] == steps
    for job in jobs:
        job.check()


@pytest.mark.parametrize(
    ("tokens", "chunks", "worth"),
    [(129, 2, False), (256, 2, True), (129, 3, True), (20, 2, True), (512, 2, True), (60, 4, True)],
)
def test_empty_slots_may_cost_as_much_as_the_steps_that_are_saved(tokens, chunks, worth):
    limits = make_limits(packed_chunks=(128, 512), packed_places=4)
    assert limits.worth_packing(tokens, chunks) == worth


def test_where_too_many_decode_there_is_one_chunk_a_step():
    """The program of several has fewer decode slots: 3 of 6 here."""
    bench = loop(**PACKED | {"max_running": 6})
    for i in range(4):
        bench.add(prompt(4, i), max_tokens=19, ignore_eos=True)
    for _ in range(3):
        bench.step()
    seen = steps_of(bench)
    for i in range(2):
        bench.add(prompt(4, 10 + i), max_tokens=2)
    bench.drain()
    assert [chunks for chunks in seen if chunks] == [[(4, 4)], [(5, 4)]]


def test_a_long_tail_is_given_pages_piece_by_piece():
    """64 tokens at a time, up to the longest tail; a token for which there is no page yet would be left out by the step."""
    bench = loop(plan=make_plan(), max_tail=100, max_stored=0)
    job = bench.add(prompt(8), max_tokens=150, ignore_eos=True)
    rooms = {}
    while bench.busy:
        bench.step()
        for s in bench.scheduler.running:
            rooms.setdefault((s.state.compressed, s.room), s.state.tail)
            assert bench.scheduler.pages.used == bench.scheduler.plan.pages(s.state.compressed, s.room)
    # The tail is full at 100: the chunk that compresses it brings one more, and 48 are left.
    assert rooms == {(8, 64): 0, (8, 100): 65, (109, 48): 0}
    job.check()


def test_tails_that_are_full_together_are_compressed_together():
    bench = loop(plan=make_plan(), **PACKED)
    seen = steps_of(bench)
    jobs = [bench.add(prompt(6, i), max_tokens=30, ignore_eos=True) for i in range(3)]
    bench.drain()
    assert [[request for request, _ in chunks] for chunks in seen if chunks] == [[0, 1, 2], [0, 1, 2]]
    assert bench.engine.stats().tail_compressions_total == 3
    for job in jobs:
        job.check()


def test_streams_do_not_stand_still_for_a_crowd_of_prompts():
    """Nor those whose tails are only nearly full. Each prompt is one chunk."""
    limits = PACKED | {
        "max_running": 40,
        "max_tail": 40,
        "max_stored": 0,
        "max_chunk": 64,
        "packed_places": 4,
    }
    bench = loop(4000, plan=make_plan(), **limits)
    streams = []
    for i in range(4):
        streams.append(bench.add(prompt(20, i), max_tokens=110, ignore_eos=True))
        for _ in range(3):
            bench.step()
    while max(s.state.tail for s in bench.scheduler.running) < 37:
        bench.step()
    crowd = [bench.add(prompt(30, 100 + i), max_tokens=3, ignore_eos=True) for i in range(24)]
    idle, longest = [0] * 4, 0
    while not all(job.done for job in crowd):
        before = [len(job.tokens()) for job in streams]
        bench.step()
        idle = [
            0 if len(job.tokens()) > n else i + 1 for job, n, i in zip(streams, before, idle, strict=True)
        ]
        longest = max(longest, *idle)
    assert longest <= 3
    bench.drain()
    for job in bench.jobs:
        job.check()


def test_no_more_tails_are_compressed_together_than_fit():
    """Of a window of 16 tokens two, where four have places."""
    bench = loop(plan=make_plan(window=16), **PACKED | {"packed_places": 4, "max_tail": 24})
    seen = steps_of(bench)
    for i in range(6):
        bench.add(prompt(20, i), max_tokens=60, ignore_eos=True)
        bench.step()
    while bench.busy:
        bench.step()
        early = [s for s in bench.scheduler.running if s.due and s.state.tail < 24]
        assert len(early) <= 1  # more would stand still for nothing
    assert max(len(chunks) for chunks in seen) == 2
    for job in bench.jobs:
        job.check()


@pytest.mark.parametrize("packed", [True, False])
def test_nearly_full_tails_are_compressed_with_a_full_one(packed):
    """From then on they are full together: it costs no more compressions."""
    bench = loop(plan=make_plan(), **(PACKED if packed else {}) | {"max_tail": 12})
    seen, jobs = steps_of(bench), []
    for i in range(3):
        jobs.append(bench.add(prompt(6, i), max_tokens=40, ignore_eos=True))
        bench.step()
    bench.drain()
    tails = [sorted(request for request, _ in chunks) for chunks in seen if chunks][3:]
    assert tails == ([[0, 1, 2]] * 3 if packed else [[0], [1], [2]] * 3)
    for job in jobs:
        job.check()


@pytest.mark.parametrize("scored", [0, 1])
def test_a_prompt_whose_logprobs_are_wanted_is_alone_in_its_step(scored):
    """The program of several chunks has no logits but their last ones."""
    bench = loop(**PACKED)
    seen = steps_of(bench)
    for i in range(3):
        bench.add(prompt(4, i), max_tokens=1, prompt_logprobs=0 if i == scored else None)
    bench.drain()
    others = [[(scored, 4)], [(i, 4) for i in range(3) if i != scored]]
    assert seen == (others if scored == 0 else others[::-1])


def test_a_chunk_preempts_nobody_whose_chunk_is_in_the_same_step(monkeypatch):
    """Two generations whose tails are full at once, and any number of pages from what one needs to what both do."""
    monkeypatch.setattr("serve.rows.Rows.keeps_all", lambda *_: False)
    plan, shared, preempted = make_plan(1.0), 0, 0
    for pages in range(plan.pages(46, 20), 2 * plan.pages(46, 20) + 1, 3):
        bench = loop(pages, plan=plan, **PACKED | {"max_stored": 0, "max_running": 2, "packed_places": 2})
        jobs = [bench.add(prompt(6, i), max_tokens=40, ignore_eos=True) for i in range(2)]
        bench.drain()  # the device looks whether every chunk still has its row and its pages
        for job in jobs:
            job.check()
        shared += bench.runner.packed > 1
        preempted += bench.scheduler.counters["preemptions"] > 0
        bench.evict_all()
    assert shared and preempted


def test_a_prompt_that_others_share_is_left_behind_by_a_packed_chunk_too():
    bench = loop(**PACKED | {"least_shared": 6})
    seen = steps_of(bench)
    shared = prompt(12)
    jobs = [bench.add(text, max_tokens=4) for text in (prompt(5, 1), [*shared, 8, 9], [*shared, 10, 11])]
    bench.drain()
    assert [(0, 5), (1, 12)] in seen  # as far as the third one shares it
    assert jobs[2].cached == 12
    for job in jobs:
        job.check()
