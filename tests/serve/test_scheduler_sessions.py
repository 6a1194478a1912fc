"""The scheduler on a fake device: stored sessions, which the next turn of a conversation takes over."""

from tests.serve.fake_device import expected
from tests.serve.loop import make_plan
from tests.serve.test_scheduler import FULL, loop, prompt, running, waiting


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


def test_a_stored_conversation_owns_no_page_that_its_answer_did_not_reach():
    bench = loop(plan=make_plan(), max_tail=60)
    stop = expected(prompt(40), 0, 4, ())[-1]
    bench.run(prompt(40), max_tokens=60, stop_token_ids=(stop,), ignore_eos=True)
    (session,) = bench.scheduler.sessions
    assert (session.state.compressed, session.state.tail) == (40, 4)  # a step was under way at the end
    assert bench.scheduler.pages.used == bench.scheduler.plan.pages(40, 4)


def test_a_prompt_whose_answer_was_compressed_can_be_asked_once_more():
    bench = loop(plan=make_plan(), max_tail=12)
    first = bench.run(prompt(40), max_tokens=30, ignore_eos=True)
    assert [len(session.tokens) for session in bench.scheduler.sessions] == [40, 69]
    left = next(iter(bench.scheduler.sessions))
    assert left.state.holding.owned.sum() == bench.scheduler.plan.pages(40)  # none of the answer's
    for seed in (5, 6):
        again = bench.run(prompt(40), max_tokens=30, ignore_eos=True, seed=seed)
        again.check()
        assert again.cached == 39
    # The conversation goes on from its own row.
    following = bench.run([*prompt(40), *first.tokens(), 9, 9], max_tokens=3)
    following.check()
    assert following.cached == 69
    bench.evict_all()


def test_a_prompt_is_left_behind_only_where_there_is_room_and_goes_first():
    def lengths(bench):
        return sorted(len(session.tokens) for session in bench.scheduler.sessions)

    bench = loop(plan=make_plan(), max_tail=12, max_stored=3)
    bench.run(prompt(20, 1), max_tokens=2, ignore_eos=True)
    bench.run(prompt(40), max_tokens=30, ignore_eos=True)
    assert lengths(bench) == [21, 40, 69]
    bench.run(prompt(30, 2), max_tokens=2, ignore_eos=True)
    assert lengths(bench) == [21, 31, 69]
    bench.run(prompt(50, 3), max_tokens=30, ignore_eos=True)  # its prompt would cost another conversation
    assert lengths(bench) == [31, 69, 79]


def test_turns_that_come_at_once_cost_each_other_as_few_rows_as_may_be():
    """Six conversations in the pages of four. Evicted by last use, each would make room for the one before it."""
    plan = make_plan()
    bench = loop(4 * plan.pages(53, 12), plan, max_running=8, max_stored=8)
    first, *later = bench.converse([prompt(40, seed) for seed in range(6)], turns=3)
    assert first == 0 and min(later) >= 3
    bench.evict_all()


def test_a_row_is_spared_for_the_next_prompts_only(monkeypatch):
    monkeypatch.setattr("serve.scheduler.NEXT", 2)
    bench = loop(plan=make_plan(), max_running=1)
    rows = [bench.run(prompt(40, seed), max_tokens=6, ignore_eos=True) for seed in range(3)]
    bench.add(prompt(40, 9), max_tokens=60, ignore_eos=True)
    bench.step()
    for seed in (2, 1, 0):
        bench.add([*prompt(40, seed), *rows[seed].tokens(), 7], max_tokens=3)
    turns = {s.tokens[0]: bench.scheduler.sessions.turn_of(s) for s in bench.scheduler.sessions}
    assert turns == {prompt(40, 0)[0]: None, prompt(40, 1)[0]: 1, prompt(40, 2)[0]: 0}


def test_prompts_given_up_early_cost_no_conversation_its_place():
    bench = loop(plan=make_plan(), max_stored=2)
    for seed in (1, 2):
        bench.run(prompt(40, seed), max_tokens=5, ignore_eos=True)
    for seed in (3, 4):
        job = bench.add(prompt(100, seed), max_tokens=5)
        bench.step()
        bench.abort(job)
        bench.drain()
    assert [len(session.tokens) for session in bench.scheduler.sessions] == [44, 44]
    turn = [*prompt(40, 1), *bench.jobs[0].tokens(), *prompt(60, 5)]
    job = bench.add(turn, max_tokens=5)  # a conversation that goes on is stored again
    bench.step()
    bench.abort(job)
    bench.drain()
    assert len(bench.scheduler.sessions) == 2
    assert bench.run(turn, max_tokens=5).cached > 44


def test_other_choices_cost_no_conversation_its_place():
    bench = loop(plan=make_plan(), max_stored=3, max_running=4)
    for seed in (1, 2):
        bench.run(prompt(40, seed), max_tokens=5, ignore_eos=True)
    job = bench.run(prompt(30, 3), n=4, max_tokens=5, ignore_eos=True)
    held = sorted(len(session.tokens) for session in bench.scheduler.sessions)
    assert held == [34, 44, 44]
    assert bench.run([*prompt(40, 2), *bench.jobs[1].tokens(), *prompt(9)], max_tokens=2).cached > 40
    assert bench.run([*prompt(30, 3), *job.tokens(), *prompt(9)], max_tokens=2).cached > 30


def test_a_turn_given_up_early_keeps_the_conversation_its_place():
    """What ran of it was stored before; lost with the turn, the next one would prefill all of it."""
    bench = loop(plan=make_plan(), max_stored=2)
    first = bench.run(prompt(40, 1), max_tokens=5, ignore_eos=True)
    turn = [*prompt(40, 1), *first.tokens(), *prompt(60, 5)]
    others = [bench.add(prompt(20, seed), max_tokens=4, ignore_eos=True) for seed in (2, 3)]
    for _ in range(3):
        bench.step()
    job = bench.add(turn, max_tokens=5)  # chunks of 8 while the others decode
    while not all(other.done for other in others):
        bench.step()
    assert bench.scheduler.sessions.full and not job.outputs[0]
    bench.abort(job)
    bench.drain()
    assert bench.run(turn, max_tokens=5).cached > 44


def test_other_choices_go_before_conversations():
    bench = loop(plan=make_plan(), max_stored=3, max_running=4)
    conversation = bench.run(prompt(40, 1), max_tokens=5, ignore_eos=True)
    bench.run(prompt(30, 2), n=2, max_tokens=5, ignore_eos=True)
    bench.run(prompt(20, 3), max_tokens=5, ignore_eos=True)  # costs the second choice its place
    assert sorted(len(session.tokens) for session in bench.scheduler.sessions) == [24, 34, 44]
    assert bench.run([*prompt(40, 1), *conversation.tokens(), 9], max_tokens=2).cached == 44


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
    assert bench.run(text[:30], max_tokens=2).cached == 0  # shorter than what was compressed
    assert bench.run([*text[:20], 9, *text[21:]], max_tokens=6).cached == 0


def test_no_session_goes_where_that_would_not_be_enough():
    bench = loop(4 * 40, max_running=2)
    bench.run(prompt(20), max_tokens=2, ignore_eos=True)
    long = bench.add(prompt(60, 1), max_tokens=12, ignore_eos=True)
    bench.step()
    assert bench.scheduler.pages.used == FULL.pages(21) + FULL.pages(60, 11) == 4 * (6 + 18)
    more = bench.add(prompt(80, 2), max_tokens=20, ignore_eos=True)  # 23 pages in each group, 16 are free
    for _ in range(3):
        bench.step()
        assert (waiting(bench), len(bench.scheduler.sessions)) == ([2], 1)
    bench.drain()
    long.check()
    more.check()


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


def test_a_preempted_generation_that_finds_just_its_tokens_stored():
    """They were compressed as a prompt; one token runs again for its logits, in a chunk: the row cannot decode before."""
    text = next(prompt(40, s) for s in range(50) if 2 not in expected(prompt(40, s), 0, 20))
    bench = loop(plan=FULL, max_tail=60)
    longer = text + expected(text, 0, 13)
    bench.run(longer, max_tokens=1)
    job = bench.add(text, max_tokens=20, ignore_eos=True)
    while True:
        bench.step()
        (sequence,) = bench.scheduler.running
        if len(sequence.tokens) + sequence.in_flight == len(longer):
            break
    bench.scheduler._preempt(sequence)
    bench.drain()
    job.check()
