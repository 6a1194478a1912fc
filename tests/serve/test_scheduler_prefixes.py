"""The scheduler on a fake device: what several prompts begin with is prefilled once."""

import numpy as np

from serve.sessions import common_length
from tests.serve.loop import make_plan
from tests.serve.test_scheduler import FULL, loop, prompt

DOCUMENT = prompt(50, 1)
PLAN = make_plan()


def ask(question: int, length: int = 9) -> list[int]:
    return [*DOCUMENT, 8 + question, *prompt(length, 100 + question)]


def prefixes(bench) -> list[int]:
    return [len(s.tokens) for s in bench.scheduler.sessions if s.is_prefix]


def test_common_length():
    a = np.arange(1000)
    for count in (0, 1, 63, 64, 65, 500, 999):
        b = a.copy()
        b[count] = -1
        assert common_length(a, b) == common_length(b, a[: count + 1]) == count
    assert common_length(a, a[:70]) == 70
    assert common_length(a, a[:0]) == 0


def test_a_document_is_known_from_the_second_question_on():
    for plan in (PLAN, FULL):
        bench = loop(plan=plan)
        found = [bench.run(ask(i), max_tokens=5, ignore_eos=True) for i in range(5)]
        assert [job.cached for job in found] == [0, 0, 50, 50, 50]
        assert prefixes(bench) == [50]
        for job in found:
            job.check()


def test_questions_that_come_together_prefill_the_document_once():
    bench = loop(plan=PLAN)
    jobs = [bench.add(ask(i), max_tokens=5, ignore_eos=True) for i in range(3)]
    bench.drain()
    assert [job.cached for job in jobs] == [0, 50, 50]
    assert prefixes(bench) == [50]
    for job in jobs:
        job.check()


def test_a_question_goes_on_from_a_little_before_the_end_of_a_prefix():
    bench = loop(plan=PLAN)
    alike = [*DOCUMENT, 9, 9, 9]
    for question in (1, 2):
        bench.run([*alike, 20 + question, *prompt(9, question)], max_tokens=3)
    assert prefixes(bench) == [53]
    assert bench.run(ask(7), max_tokens=3).cached == 50  # the window is 8


def test_a_conversation_outlives_another_that_parts_from_its_last_message():
    bench = loop(plan=PLAN)
    first = bench.run(
        ask(0, 2), max_tokens=5, ignore_eos=True
    )  # the window reaches back to the document's end
    jobs = [bench.add(ask(i, 2), max_tokens=5, ignore_eos=True) for i in (1, 2)]
    bench.drain()
    assert [job.cached for job in jobs] == [50, 50]
    turn = bench.run([*ask(0, 2), *first.tokens(), 9, 9], max_tokens=3)
    assert turn.cached == 53 + 4
    for job in (*jobs, turn):
        job.check()


def test_a_prompt_that_is_the_beginning_of_another_is_left_at_its_end():
    bench = loop(plan=PLAN)
    jobs = [bench.add(text, max_tokens=4, ignore_eos=True) for text in (DOCUMENT, ask(1), ask(2))]
    bench.drain()
    assert [job.cached for job in jobs] == [0, 50, 50]
    for job in jobs:
        job.check()


def test_what_is_short_is_not_shared():
    bench = loop(plan=PLAN)
    for i in range(3):
        assert bench.run([*DOCUMENT[:11], 8 + i, *prompt(30, i)], max_tokens=3).cached == 0
    assert prefixes(bench) == []


def test_under_another_retention_nothing_is_shared_and_nobody_waits():
    """A copy of such a row would not be found: it was compressed under other budgets."""
    bench = loop(plan=make_plan(max_retention=0.9))
    jobs = [bench.add(ask(i), max_tokens=5, retention=own) for i, own in enumerate((None, 0.5, 0.9))]
    bench.step()
    assert len(bench.scheduler.running) == 3
    bench.drain()
    jobs.append(bench.run(ask(3), max_tokens=5, retention=0.2))
    assert [job.cached for job in jobs] == [0, 0, 0, 0]
    assert prefixes(bench) == []


def test_without_stored_rows_nobody_waits():
    bench = loop(plan=PLAN, max_stored=0)
    jobs = [bench.add(ask(i), max_tokens=5) for i in range(3)]
    bench.drain()
    assert [job.cached for job in jobs] == [0, 0, 0]


def test_one_place_is_enough():
    bench = loop(plan=PLAN, max_running=1, max_stored=1)
    found = [bench.run(ask(i), max_tokens=5) for i in range(4)]
    # The row of each answer takes the one place; the prefix is there for as long as its prompt runs.
    assert [job.cached for job in found] == [0, 0, 0, 0]
    jobs = [bench.add(ask(i), max_tokens=5, ignore_eos=True) for i in range(4, 7)]
    bench.drain()
    for job in jobs:
        job.check()


def test_a_prompt_that_is_aborted_keeps_nobody_waiting():
    bench = loop(plan=PLAN)
    first, second = (bench.add(ask(i, 60), max_tokens=5) for i in range(2))
    bench.step()
    bench.abort(first)
    bench.drain()
    assert second.done
    second.check()


def test_no_copy_is_left_where_a_row_was_compressed_already():
    """A row that was rolled back into its window must reach its old count with one chunk."""
    bench = loop(plan=PLAN)
    bench.run([*DOCUMENT, 1, 2, 3, 4, 5], max_tokens=3)
    job = bench.add([*DOCUMENT, 1, 2, 3, *prompt(30)], max_tokens=3)
    bench.scheduler.waiting[0].borders[54] = None
    bench.drain()
    assert job.cached == 53
    assert prefixes(bench) == []
    job.check()


def conversations(bench, count: int) -> list[list[int]]:
    """So many other ones: what their next turns begin with."""
    texts = [prompt(40, 500 + i) for i in range(count)]
    return [text + bench.run(text, max_tokens=5, ignore_eos=True).tokens() for text in texts]


def left(bench, texts: list[list[int]]) -> int:
    held = [s.tokens.tolist() for s in bench.scheduler.sessions]
    return sum(text[:-1] in held for text in texts)


def test_prompts_given_up_cost_no_conversation_its_place():
    bench = loop(plan=PLAN, max_stored=8)
    others = conversations(bench, 6)
    text = prompt(150, 77)
    for parts in range(90, 20, -10):  # edited again and again, each time given up before its first token
        job = bench.add([*text[:parts], *prompt(150 - parts, parts)], max_tokens=5)
        for _ in range(4):
            bench.step()
        bench.abort(job)
        bench.drain()
    assert left(bench, others) == 6


def test_a_prefix_in_use_does_not_go_for_one_that_nobody_has_asked_for():
    """A copy that is left for those that may come takes the place of another such, not of one that prompts went on from."""
    bench = loop(plan=PLAN, max_stored=5)
    assert [bench.run(ask(i), max_tokens=5).cached for i in range(3)] == [0, 0, 50]
    other = prompt(70, 9)
    for seed in (1, 2):  # the second finds the store full, and leaves a copy of 70 tokens
        bench.run([*other, 8 + seed, *prompt(9, seed)], max_tokens=5)
    assert sorted(prefixes(bench)) == [50, 70]
    assert bench.run(ask(3), max_tokens=5).cached == 50


def test_a_prompt_given_up_after_a_prefix_costs_no_conversation_its_place():
    bench = loop(plan=PLAN, max_stored=5)
    for i in range(2):
        bench.run(ask(i), max_tokens=5)
    others = conversations(bench, 2)
    held = set(bench.scheduler.sessions)
    assert len(held) == 5
    job = bench.add(ask(2), max_tokens=5)
    bench.step()
    bench.abort(job)
    bench.drain()
    assert left(bench, others) == 2
    assert set(bench.scheduler.sessions) == held


def test_a_conversation_that_is_as_long_as_a_prefix_is_left_alone():
    bench = loop(plan=PLAN, max_stored=10)
    for i in range(2):
        bench.run(ask(i), max_tokens=5)
    first = bench.run(DOCUMENT, max_tokens=5, ignore_eos=True)
    for i in range(2, 4):
        assert bench.run(ask(i), max_tokens=5).cached == 50
    turn = bench.run([*DOCUMENT, *first.tokens(), 9, 9], max_tokens=2)
    assert turn.cached == 54


def test_questions_that_come_while_others_decode():
    bench = loop(plan=PLAN, max_running=6, max_tail=100, max_stored=6)
    jobs = []
    for i in range(5):
        jobs.append(bench.add(ask(i), max_tokens=60, ignore_eos=True))
        for _ in range(12):
            bench.step()
    bench.drain()
    assert [job.cached for job in jobs] == [0, 0, 50, 50, 50]
    for job in jobs:
        job.check()


def test_nothing_is_left_for_prompts_that_were_given_up_while_they_waited():
    bench = loop(plan=PLAN, max_stored=8)
    first = bench.add(prompt(120, 77), max_tokens=5)
    bench.step()
    for count in (100, 110):  # chunks have 32 tokens
        job = bench.add([*prompt(120, 77)[:count], 9, 9, 9], max_tokens=3)
        bench.step()
        bench.abort(job)
    bench.drain()
    assert first.done
    assert prefixes(bench) == []


def test_a_prompt_whose_logprobs_are_wanted_shares_nothing():
    bench = loop(plan=PLAN)
    jobs = [bench.add(ask(i), max_tokens=3, prompt_logprobs=0) for i in range(2)]
    bench.drain()
    assert [job.cached for job in jobs] == [0, 0]


def test_a_short_border_is_run_as_a_small_chunk():
    bench = loop(plan=PLAN)
    jobs = [bench.add([*DOCUMENT[:14], *prompt(60, i)], max_tokens=3, ignore_eos=True) for i in range(2)]
    bench.drain()
    assert [job.cached for job in jobs] == [0, 14]


def test_a_prompt_goes_on_from_a_prefix_only_once_all_of_it_fits():
    """Copied before, the row would be lost with its pages, or the prompt run without any."""
    bench = loop(52 + 72 + 12 + 40, max_running=2)
    for i in range(2):
        bench.run(ask(i), max_tokens=1)
    (prefix,) = [s for s in bench.scheduler.sessions if s.is_prefix]
    for session in list(bench.scheduler.sessions):
        if session is not prefix:
            bench.scheduler.sessions.remove(session)
            bench.scheduler.rows.release(session.state)
    assert bench.scheduler.pages.used == FULL.pages(50) == 52
    long = bench.add(prompt(60), max_tokens=40, ignore_eos=True)
    bench.step()
    assert bench.scheduler.pages.used == 52 + FULL.pages(60, 12) == 52 + 72
    # Of 100 tokens and a tail of 12 the prefix has 13 pages in each of 4 groups, 3 of which are copied; 15 more are missing.
    assert bench.scheduler.rows.copied_pages(prefix.state) == 12
    job = bench.add(ask(2, 49), max_tokens=20, ignore_eos=True)
    for _ in range(3):
        bench.step()
    assert len(bench.scheduler.waiting) == 1 and prefixes(bench) == [50]
    bench.drain()
    long.check()
    job.check()
    assert job.cached == 50


def test_an_edited_prompt_takes_the_conversation_over_where_a_copy_would_cost_another_one():
    bench = loop(4 * (6 + 18))
    bench.run(prompt(20, 3), max_tokens=2, ignore_eos=True)
    text = prompt(40)
    bench.run(text, max_tokens=6, ignore_eos=True)
    assert bench.scheduler.pages.used == 4 * (6 + 12)
    # Of 57 tokens 15 pages are wanted: 3 more, or 7 with the 4 of a copy's that are not shared.
    job = bench.run([*text[:36], 9, *prompt(20, 1)], max_tokens=2, ignore_eos=True)
    job.check()
    assert job.cached == 36
    assert [len(s.tokens) for s in bench.scheduler.sessions] == [21, 58]
