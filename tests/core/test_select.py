"""What `select` chooses, against Python's sort, and what chunks leave in the pages, against the scores that they had."""

import functools
from dataclasses import replace
from fractions import Fraction
from math import ceil, inf, isnan, nan
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import tangram_jax as tj
from tangram_jax import compress, step_layers
from tests.core.stepping import CONFIG, HEADS, PARAMS, ROW, SLOTS, entries_of, new_cache, random_tokens

SINKS, WINDOW, MIN_ENTRIES, MAX_TAIL, CHUNK = 4, 8, 12, 8, 24
BEFORE = WINDOW + MAX_TAIL  # candidates before the chunk's
NUMBERS = (0.0, -0.0, 0.5, -0.5, 1.0, -1.0, 3e38, -3e38, inf, -inf, nan)


class Choice(NamedTuple):
    """What one head has to decide."""

    open: range  # positions that may be locked
    adds: int  # how many will be
    window: range  # positions that stay for now


def choice(budget: int, tokens: int, tail: int, count: int) -> Choice:
    """Of a group whose row has so many tokens under the law, a tail, and a chunk; its budget in parts per million."""

    def held(n: int) -> tuple[int, int]:  # (locked, trailing window)
        entries = min(n, max(ceil(Fraction(budget, 1_000_000) * n), MIN_ENTRIES))
        return max(entries - WINDOW, 0), min(entries, WINDOW)

    after = tokens + tail + count
    (locked_before, window_before), (locked, window) = held(tokens), held(after)
    opened = range(tokens - window_before, after - window)
    return Choice(opened, max(locked - locked_before, 0), range(after - window, after))


def ranked(positions: range, score_of) -> list[int]:
    """Best first: sinks, then by score, NaN as the lowest. Python's sort leaves ties as they are, the earlier first."""

    def badness(position: int) -> float:
        score = inf if position < SINKS else score_of(position)
        return inf if isnan(score) else -score

    return sorted(positions, key=badness)


@functools.cache
def plan_of(cluster: str = "layer") -> tj.CachePlan:
    ratios = np.random.default_rng(3).uniform(0.05, 0.9, (1, *HEADS)).astype(np.float32)
    profile = tj.BudgetProfile.from_ratios(ratios, retention=0.5, alpha=0.0)
    return tj.CachePlan.build(
        profile, 2, 8, cluster, sinks=SINKS, window=WINDOW, min_entries=MIN_ENTRIES, max_retention=1.0
    )


@jax.jit
def selected(cache, tokens, tail, count, budgets, scores):
    """(order i32[M, Hp, C], adds i32[M]) of a row with such counts."""
    plan = plan_of()
    row = jnp.int32(0)
    counts = {"tokens": tokens[None], "tail": tail[None], "budgets": budgets[None]}
    cache = replace(cache, **counts)
    what = compress.candidates(plan, cache, row, CHUNK, count)
    return compress.select(plan, cache, what, scores), compress.counts(plan, cache, what).adds


@functools.cache
def empty_cache() -> tj.Cache:
    return new_cache(plan_of(), rows=1, max_tail=MAX_TAIL)


@example(tokens=0, tail=0, count=CHUNK, retention=None, draw="equal", seed=0)
@example(tokens=5, tail=0, count=1, retention=0.1, draw="equal", seed=0)
@example(tokens=100, tail=MAX_TAIL, count=CHUNK, retention=1.0, draw="nan", seed=0)
@given(
    tokens=st.integers(0, 130),
    tail=st.integers(-WINDOW, MAX_TAIL),
    count=st.integers(1, CHUNK),
    retention=st.sampled_from([None, 0.1, 0.6, 1.0]),
    draw=st.sampled_from(["special", "normal", "few", "equal", "nan"]),
    seed=st.integers(0, 2**32 - 1),
)
def test_select_is_a_stable_sort_of_what_is_open(tokens, tail, count, retention, draw, seed):
    """Padding and what is locked already, or not yet to be, come after it whatever their scores."""
    plan, rng = plan_of(), np.random.default_rng(seed)
    tail = max(tail, -min(tokens, WINDOW))  # no more is taken back than the window holds
    shape = (plan.num_groups, plan.heads_per_page, BEFORE + CHUNK)
    scores = {
        "special": lambda: rng.choice(NUMBERS, shape),
        "normal": lambda: rng.standard_normal(shape),
        "few": lambda: rng.choice([0.0, -0.0, 1.0, nan], shape),
        "equal": lambda: np.ones(shape),
        "nan": lambda: np.full(shape, nan),
    }[draw]().astype(np.float32)
    budgets = plan.budgets_at(retention)
    counts = (np.int32(x) for x in (tokens, tail, count))
    order, adds = (np.asarray(x) for x in selected(empty_cache(), *counts, budgets, scores))
    first = tokens + tail - BEFORE  # position of candidate 0
    for group, columns in enumerate(order):
        want = choice(int(budgets[group]), tokens, tail, count)
        assert adds[group] == want.adds <= len(want.open)
        for column, got in enumerate(columns):
            of_head = scores[group, column]
            best = ranked(want.open, lambda position, of_head=of_head: float(of_head[position - first]))
            assert (got[: len(best)] + first).tolist() == best
            assert sorted(got) == list(range(BEFORE + CHUNK))


@pytest.mark.parametrize(
    ("cluster", "scorer"), [("layer", "snapkv"), ("model", "expected_attention")], ids=["layer", "model"]
)
def test_chunks_keep_the_best_by_their_own_scores(cluster, scorer, monkeypatch):
    """In all layers; entries are known by their keys, as they were to be written. One chunk is shorter than the window."""
    plan, scored, written = plan_of(cluster), [], []

    def select(plan, cache, what, scores):
        jax.debug.callback(lambda *x: scored.append(x), what.positions, scores)
        return compress.select(plan, cache, what, scores)

    def write(plan, cache, what, order, tail, keys, values, start):
        jax.debug.callback(written.append, jnp.stack(keys))
        return compress.write(plan, cache, what, order, tail, keys, values, start)

    monkeypatch.setattr(step_layers, "select", select)
    monkeypatch.setattr(step_layers, "write", write)

    @functools.partial(jax.jit, donate_argnums=0)  # traced anew: nothing of this is left to other tests
    def prefill(cache, tokens, count):
        return tj.prefill_chunk(
            PARAMS, CONFIG, plan, cache, scorer=tj.get_scorer(scorer), row=ROW, tokens=tokens, count=count
        )[1]

    cache = tj.reserve(plan, new_cache(plan), ROW, np.int32(140), np.int32(0))
    locked = {head: set() for head in range(plan.group_of.size)}
    position_of = [{} for _ in locked]
    tokens = 0
    for count in (50, 3, 80):
        cache = prefill(cache, np.pad(random_tokens(count, seed=count), (0, SLOTS - count)), np.int32(count))
        jax.effects_barrier()
        positions, scores = (np.asarray(x) for x in scored.pop())
        keys = np.asarray(written.pop())[:, :count].swapaxes(1, 2).reshape(len(locked), count, -1)
        for head, group in enumerate(plan.group_of.reshape(-1)):
            position_of[head] |= {key.tobytes(): tokens + i for i, key in enumerate(keys[head])}
            of_head = dict(zip(positions, scores[group, plan.column_of.reshape(-1)[head]], strict=True))
            what = choice(int(plan.group_ppm[group]), tokens, 0, count)
            locked[head] |= set(ranked(what.open, of_head.__getitem__)[: what.adds])
            kept = [position_of[head][entry.tobytes()] for entry in entries_of(plan, cache, ROW, head)]
            assert len(kept) == plan.lengths(tokens + count)[group]
            assert set(kept) == locked[head] | set(what.window)
        tokens += count
    assert (
        len({frozenset(positions) for positions in locked.values()}) > plan.num_groups
    )  # heads' own choices
