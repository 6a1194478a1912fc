"""Thousands of random requests through the scheduler, some continued, some aborted: right tokens, no page lost."""

import numpy as np
import pytest

from serve.request import RequestRejected
from tangram_jax.rings import SlidingLayers
from tests.serve.fake_device import VOCAB, AnyText
from tests.serve.loop import Loop, make_limits, make_plan

FULL = make_plan(1.0)
# Several chunks in a step: of 8 or 24 tokens together.
PACKED = {"chunks_beside_decode": (8, 24), "packed_chunks": (8, 24)}


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([seed, length]).integers(8, VOCAB, length).tolist()


def loop(num_pages: int, plan, **limits) -> Loop:
    return Loop(plan, make_limits(**limits), num_pages)


def simulate(bench: Loop, seed: int, requests: int) -> None:
    """Random requests, new and continued, at random times, some aborted at random; ends when all are done."""
    random, bound = np.random.default_rng(seed), np.random.default_rng([seed, 1])
    limits, longest = bench.scheduler.limits, 120
    left = requests
    while left or bench.busy:
        while left and len(bench.scheduler.waiting) < random.integers(1, 9) and random.random() < 0.3:
            left -= 1
            text = prompt(int(random.integers(1, 60)), int(random.integers(40)))
            if random.random() < 0.3:  # one of a few documents, mostly whole, and a question
                document = prompt(50, 10_000 + int(random.integers(3)))
                text = document[: int(random.choice([50, 50, random.integers(50)]))] + text[:20]
            done = [job for job in bench.jobs[-12:] if job.done]
            if done and random.random() < 0.6:
                old = done[random.integers(len(done))]
                made = old.tokens(int(random.integers(old.request.n)))
                text = (
                    old.request.prompt_ids
                    + made[: random.integers(len(made) + 1) if random.random() < 0.4 else None]
                )
                text = text[: random.integers(len(text)) + 1] if random.random() < 0.15 else text
                text = text + prompt(int(random.integers(0, 12)), int(random.integers(1000)))
            text = text[:longest]
            most = int(random.integers(1, min(40, limits.max_model_len - len(text)) + 1))
            stops = tuple(int(t) for t in random.integers(8, VOCAB, random.integers(0, 5)))
            n = int(random.choice([1, 1, 1, 2, 4]))
            sampling = {
                "max_tokens": most,
                "seed": int(random.integers(3)),
                "stop_token_ids": stops,
                "ignore_eos": bool(random.random() < 0.5),
                "prompt_logprobs": 0 if random.random() < 0.05 else None,
            }
            if bound.random() < 0.4 and not sampling["ignore_eos"]:
                sampling["grammar"] = AnyText()
            own = bench.scheduler.plan.max_retention and bound.random() < 0.5
            retention = float(bound.choice([0.2, bench.scheduler.plan.max_retention])) if own else None
            try:
                bench.add(text, n, retention=retention, **sampling)
            except RequestRejected:
                assert len(text) + most > 30
        if random.random() < 0.02:
            alive = [job for job in bench.jobs[-30:] if not job.done and not job.aborted]
            if alive:
                job = alive[random.integers(len(alive))]
                bench.abort(job, None if random.random() < 0.5 else int(random.integers(job.request.n)))
        bench.step()


CASES = {
    "ample": (PACKED | {"max_running": 8, "packed_places": 4}, make_plan(), 1500),
    "one chunk a step": ({}, make_plan(), 300),
    "one row of each": ({"max_running": 1, "max_stored": 1}, make_plan(), 110),
    "nothing stored": (PACKED | {"max_stored": 0, "max_running": 5}, FULL, 170),
    "small pool": (PACKED | {"max_running": 4, "max_stored": 3, "max_tail": 9}, make_plan(), 130),
    "small full pool": (PACKED | {"max_running": 5, "max_stored": 5}, FULL, 170),
    "tiny window": (PACKED | {"max_running": 6, "max_tail": 3}, make_plan(window=1, min_entries=0), 120),
    "zero budgets": ({}, make_plan([[0.0, 0.6], [0.2, 0.9]], min_entries=0), 160),
    "sliding windows": ({}, make_plan(sliding=SlidingLayers(2, 9, max_tail=12)), 700),
    "rings in a small pool": (
        {"max_running": 4, "max_tail": 9},
        make_plan(sliding=SlidingLayers(1, 30, max_tail=9)),
        230,
    ),
    "host memory": (
        PACKED | {"max_running": 4, "max_stored": 3, "max_tail": 9, "host_bytes": 700},
        make_plan(max_retention=0.9),
        210,
    ),
    "rings in host memory": (
        {"max_running": 4, "max_stored": 2, "max_tail": 9, "host_bytes": 900},
        make_plan(sliding=SlidingLayers(1, 30, max_tail=9)),
        230,
    ),
    "long tails": ({"max_tail": 100, "max_running": 4}, make_plan(), 300),
    "budgets of their own": (PACKED | {"max_running": 4, "max_tail": 9}, make_plan(max_retention=0.9), 260),
    "all of it": (
        PACKED | {"max_running": 4, "max_stored": 2, "max_tail": 9, "host_bytes": 900},
        make_plan(max_retention=0.9, sliding=SlidingLayers(1, 30, max_tail=9)),
        300,
    ),
}


@pytest.fixture(autouse=True)
def _chunks_are_split(monkeypatch):
    """Where there are several sizes of them, small as they are."""
    monkeypatch.setattr("serve.limits.WORTH_A_STEP", 8)


@pytest.mark.parametrize("name", CASES)
def test_random_requests_all_end_with_the_right_tokens_and_no_page_lost(name):
    limits, plan, pages = CASES[name]
    bench = loop(pages, plan, **limits)
    simulate(bench, seed=len(name), requests=190 if plan is FULL else 130)  # few settle
    for job in bench.jobs:
        job.check()
    assert len(bench.jobs) > 80
    assert sum(job.request.sampling.grammar is not None for job in bench.jobs) > 10
    assert bench.scheduler.counters["prefix_hits"] > 0 or not limits.get("max_stored", 4)
    assert any(call[0] == "fork" for call in bench.runner.calls)
    assert any(call[0] == "load" for call in bench.runner.calls) == bool(limits.get("host_bytes"))
    assert bench.runner.packed > 10 if "packed_chunks" in limits else not bench.runner.packed
    assert any(call[0] == "settle" for call in bench.runner.calls) == (plan is FULL)
    bench.evict_all()


@pytest.mark.parametrize("name", ["ample", "small pool", "rings in a small pool", "all of it"])
def test_rows_with_room_for_few_tokens_at_a_time(name, monkeypatch):
    """Often some row must have pages, and others get theirs with it where there are any."""
    monkeypatch.setattr("serve.limits.ROOM", 4)
    monkeypatch.setattr("serve.scheduler.SOON", 2)
    limits, plan, pages = CASES[name]
    bench = loop(pages, plan, **limits)
    simulate(bench, seed=77, requests=70)
    for job in bench.jobs:
        job.check()
    bench.evict_all()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", CASES)
def test_random_requests_for_longer(name, seed):
    limits, plan, pages = CASES[name]
    bench = loop(pages, plan, **limits)
    simulate(bench, seed=1000 + seed, requests=1000)
    for job in bench.jobs:
        job.check()
    bench.evict_all()
