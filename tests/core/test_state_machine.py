"""The cache's functions in any order: pages conserved, lengths and pages the plan's, contents never touched by others.

A model on the host holds abstract pages: which page of the pool stands for which is read off the table after each
operation, and must be one to one. So a page has two owners exactly where a fork shared it.
"""

import itertools
from dataclasses import dataclass, field, replace
from functools import cache, partial

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import tangram_jax as tj
from models.testing import random_params, tiny_config
from tangram_jax.offload import set_counts

CONFIG = tiny_config(
    num_layers=3, hidden_size=16, intermediate_size=16, num_heads=4, num_kv_heads=2, head_dim=4
)
PAGES, ROWS, SLOTS, CHUNK = 150, 5, 4, 16
MAX_TOKENS, MAX_TAIL, MAX_RETENTION = 96, 12, 0.9
BUDGETS = np.array([[0.05, 0.4], [0.25, 1.0], [0.7, 0.3]], np.float32)
PLANS = {
    "layer": {"heads_per_page": 2, "page_size": 4, "cluster": "layer", "min_entries": 8},
    "model": {"heads_per_page": 4, "page_size": 8, "cluster": "model", "min_entries": 0},
    "adjacent": {"heads_per_page": 1, "page_size": 4, "cluster": "adjacent", "min_entries": 3},
    "bytes": {"heads_per_page": 2, "page_size": 4, "cluster": "layer", "min_entries": 8},
}


@cache
def programs(name):
    """(plan, an empty cache as host arrays, jitted step) of one plan, compiled once."""
    profile = tj.BudgetProfile.from_ratios(BUDGETS[None].repeat(2, 0), retention=0.5, alpha=0.0)
    plan = tj.CachePlan.build(profile, sinks=2, window=8, max_retention=MAX_RETENTION, **PLANS[name])
    empty = tj.init_cache(
        plan, CONFIG, num_pages=PAGES, max_requests=ROWS, max_tokens=MAX_TOKENS, max_tail=MAX_TAIL,
        dtype=np.uint8 if name == "bytes" else np.float32,
    )  # fmt: skip
    scorer = tj.get_scorer("keydiff")
    params = random_params(CONFIG, 0)
    step = jax.jit(partial(tj.step, params, CONFIG, plan, scorer), donate_argnums=0)
    return plan, jax.tree.map(np.asarray, empty), step


@dataclass
class Row:
    """What one row of the cache must hold."""

    budgets: np.ndarray
    tokens: int = 0
    tail: int = 0
    pages: list[list[int]] = field(default_factory=list)  # abstract pages of each group
    entries: list[np.ndarray] = field(
        default_factory=list
    )  # of each group [n, 2, Hp, D], as last seen; of bytes D + 1

    @property
    def total(self) -> int:
        return self.tokens + self.tail

    @property
    def empty(self) -> bool:
        return not any(self.pages)


class CacheMachine(RuleBasedStateMachine):
    name = "layer"
    steps = 0  # operations over all examples

    @initialize(seed=st.integers(0, 1000))
    def start(self, seed):
        self.plan, empty, self.step = programs(self.name)
        self.cache = jax.tree.map(jax.numpy.asarray, empty)
        self.capacity = np.array(self.cache.layout.capacity)
        self.rows = [self._empty_row() for _ in range(ROWS)]
        self.fresh = itertools.count()
        self.random = np.random.default_rng(seed)

    def _empty_row(self):
        width = self.plan.heads_per_page
        none = np.zeros((0, 2, width, CONFIG.head_dim + (self.name == "bytes")), np.float32)
        return Row(
            self.plan.group_ppm, pages=[[] for _ in self.capacity], entries=[none for _ in self.capacity]
        )

    # The model's side

    @property
    def free(self) -> int:
        return PAGES - len({page for row in self.rows for pages in row.pages for page in pages})

    def _missing(self, row: Row, tokens: int, tail: int) -> int:
        wanted = np.minimum(self.plan.group_pages(tokens, tail, row.budgets), self.capacity)
        return sum(max(0, int(w) - len(p)) for w, p in zip(wanted, row.pages, strict=True))

    def _reserve(self, index: int, tokens: int, tail: int) -> bool:
        """On the device and, if there are pages enough, in the model; both take all or nothing."""
        row = self.rows[index]
        enough = self._missing(row, tokens, tail) <= self.free
        self.cache = tj.reserve(self.plan, self.cache, np.int32(index), np.int32(tokens), np.int32(tail))
        if enough:
            needed = self.plan.group_pages(tokens, tail, row.budgets)
            for pages, wanted, most in zip(row.pages, needed, self.capacity, strict=True):
                while len(pages) < min(wanted, most):
                    pages.append(next(self.fresh))
        return enough

    def _unlocked(self, row: Row) -> int:
        """Most tokens that a rollback may forget: the tail, and of the window what every group holds."""
        window = np.minimum(self.plan.lengths(row.tokens, row.budgets), self.plan.window).min()
        return max(0, row.tail + int(window))

    def _pick(self, data, rows):
        return data.draw(st.sampled_from(list(rows)), label="row")

    def _used(self):
        return [i for i, row in enumerate(self.rows) if not row.empty]

    # Operations

    @precondition(lambda self: any(row.empty for row in self.rows))
    @rule(
        data=st.data(),
        tokens=st.integers(1, MAX_TOKENS - MAX_TAIL),
        room=st.integers(0, MAX_TAIL),
        retention=st.sampled_from([None, None, 0.1, 0.5, MAX_RETENTION]),
    )
    def admit(self, data, tokens, room, retention):
        index = self._pick(data, [i for i, row in enumerate(self.rows) if row.empty])
        row = self.rows[index]
        if retention:
            row.budgets = self.plan.budgets_at(retention)
            self.cache = tj.set_budgets(self.plan, self.cache, np.int32(index), row.budgets)
        if self._reserve(index, tokens, room):
            assert sum(map(len, row.pages)) == self.plan.group_pages(tokens, room, row.budgets).sum()

    @precondition(lambda self: self._used())
    @rule(data=st.data(), count=st.integers(1, CHUNK), decode=st.booleans(), trim=st.booleans())
    def chunk(self, data, count, decode, trim):
        """The next tokens of one row, beside the decode tokens of others or not."""
        index = self._pick(data, self._used())
        row = self.rows[index]
        count = max(count, -row.tail)
        if row.total + count > MAX_TOKENS or not self._reserve(index, row.total + count, 0):
            return
        others = self._ready([i for i in self._used() if i != index]) if decode else []
        tokens = self.random.integers(0, CONFIG.vocab_size, CHUNK).astype(np.int32)
        before = self.plan.locked(row.tokens, row.budgets)
        self._run(tj.Chunk(np.int32(index), tokens, np.int32(count)), others)
        row.tokens, row.tail = row.total + count, 0
        lengths = self.plan.lengths(row.tokens, row.budgets)
        seen = self._entries(index, lengths)
        for m, kept in enumerate(before):  # locked is locked
            np.testing.assert_array_equal(seen[m][:kept], row.entries[m][:kept])
        row.entries = seen
        if trim:
            self._trim(index, row.tokens, 0)
            assert sum(map(len, row.pages)) == self.plan.group_pages(row.tokens, 0, row.budgets).sum()

    @precondition(lambda self: self._used())
    @rule(rows=st.sets(st.integers(0, ROWS - 1), min_size=1, max_size=SLOTS), times=st.integers(1, MAX_TAIL))
    def decode(self, rows, times):
        for _ in range(times):
            ready = self._ready([i for i in sorted(rows) if not self.rows[i].empty])
            if ready:
                self._run(None, ready)

    def _ready(self, candidates):
        """Those that can take one more tail token, its pages reserved."""
        ready = []
        for i in candidates:
            row = self.rows[i]
            fits = row.total > 0 and 0 <= row.tail < MAX_TAIL and row.total < MAX_TOKENS
            if fits and len(ready) < SLOTS and self._reserve(i, row.tokens, row.tail + 1):
                ready.append(i)
        return ready

    def _run(self, chunk, decoding):
        rows = np.full(SLOTS, ROWS, np.int32)
        at = self.random.permutation(SLOTS)[: len(decoding)]
        rows[at] = decoding
        tokens = self.random.integers(0, CONFIG.vocab_size, SLOTS).astype(np.int32)
        logits, self.cache = self.step(self.cache, chunk, tj.Decode(rows, tokens))
        assert np.isfinite(np.asarray(logits)).all()
        for i in decoding:
            row = self.rows[i]
            row.tail += 1
            seen = self._entries(i, self.plan.lengths(row.tokens, row.budgets) + row.tail)
            for old, new in zip(row.entries, seen, strict=True):
                np.testing.assert_array_equal(new[:-1], old)
                assert np.abs(new[-1]).sum() > 0
            row.entries = seen

    @precondition(lambda self: self._used() and any(row.empty for row in self.rows))
    @rule(data=st.data())
    def fork(self, data):
        source = self._pick(data, self._used())
        target = self._pick(data, [i for i, row in enumerate(self.rows) if row.empty])
        src = self.rows[source]
        full = self.plan.locked(src.tokens, src.budgets) // self.plan.page_size
        shared = [pages[:n] for pages, n in zip(src.pages, full, strict=True)]
        need = sum(map(len, src.pages)) - sum(map(len, shared))
        if need > self.free:
            return
        assert sum(map(len, shared)) == self.plan.shared_group_pages(src.tokens, src.budgets).sum()
        self.cache = tj.fork(self.plan, self.cache, np.int32(source), np.int32(target))
        pages = [s + [next(self.fresh) for _ in p[len(s) :]] for s, p in zip(shared, src.pages, strict=True)]
        self.rows[target] = Row(src.budgets, src.tokens, src.tail, pages, list(src.entries))

    @precondition(lambda self: self._used())
    @rule(data=st.data(), share=st.floats(0, 1))
    def rollback(self, data, share):
        index = self._pick(data, self._used())
        row = self.rows[index]
        count = int(share * self._unlocked(row))
        self.cache = tj.rollback(self.plan, self.cache, np.int32(index), np.int32(count))
        row.tail -= count
        row.entries = [e[: len(e) - count] for e in row.entries]

    @precondition(lambda self: self._used())
    @rule(data=st.data(), room=st.integers(0, MAX_TAIL))
    def trim(self, data, room):
        index = self._pick(data, self._used())
        row = self.rows[index]
        self._trim(index, row.tokens, max(row.tail, min(room, MAX_TAIL)))

    def _trim(self, index, tokens, tail):
        self.cache = tj.trim(self.plan, self.cache, np.int32(index), np.int32(tokens), np.int32(tail))
        row = self.rows[index]
        needed = self.plan.group_pages(tokens, tail, row.budgets)
        row.pages = [p[:n] for p, n in zip(row.pages, needed, strict=True)]

    @precondition(lambda self: self._used())
    @rule(data=st.data())
    def finish(self, data):
        """The end of a request; an abort or preemption in the middle of its prompt is the same call."""
        index = self._pick(data, self._used())
        self.cache = tj.release(self.plan, self.cache, np.int32(index))
        self.rows[index] = self._empty_row()

    @precondition(lambda self: self._used())
    @rule(data=st.data())
    def reserve_too_much(self, data):
        """A caller that miscounted gets nothing, and breaks nothing."""
        index = self._pick(data, self._used())
        if self._missing(self.rows[index], MAX_TOKENS, MAX_TAIL) > self.free:
            assert not self._reserve(index, MAX_TOKENS, MAX_TAIL)

    # What must hold

    def _entries(self, index, lengths):
        """The entries of a row as they lie in its pages, of each group: [n, 2, Hp, D], of bytes [n, 2, Hp, D + 1], the scale
        last; empty columns as zeros.
        """
        pool, table, first = (
            np.asarray(self.cache.pool),
            np.asarray(self.cache.table),
            self.cache.layout.first,
        )
        out = []
        for m, n in enumerate(lengths):
            at = np.arange(n)
            page = table[index, first[m] + at // self.plan.page_size]
            assert (page >= 0).all()
            slot, before = at % self.plan.page_size, pool.shape[3] - self.plan.page_size
            taken = pool[page, :, :, before + slot]
            if self.name == "bytes":
                scales = pool[page, :, :, slot // CONFIG.head_dim, slot % CONFIG.head_dim]
                taken = np.concatenate([taken, scales[..., None]], axis=-1)
            out.append(np.where((self.plan.head_at[m] >= 0)[:, None], taken, 0))
        return out

    @invariant()
    def pages_are_conserved(self):
        if not hasattr(self, "rows"):
            return
        type(self).steps += 1
        c = jax.tree.map(np.asarray, self.cache)
        free = c.free[: c.num_free]
        assert len(set(free.tolist())) == len(free) == self.free
        held = c.table[c.table >= 0]
        np.testing.assert_array_equal(c.owners, np.bincount(held, minlength=PAGES))
        assert set(free.tolist()).isdisjoint(held.tolist())
        assert set(free.tolist()) | set(held.tolist()) == set(range(PAGES))

        stands_for: dict[int, int] = {}
        for index, row in enumerate(self.rows):
            for m, pages in enumerate(row.pages):
                columns = c.table[index, c.layout.first[m] :][: self.capacity[m]]
                assert (columns >= 0).sum() == len(pages)
                assert (columns[: len(pages)] >= 0).all()
                for abstract, real in zip(pages, columns.tolist(), strict=False):
                    assert stands_for.setdefault(abstract, real) == real
        assert len(set(stands_for.values())) == len(stands_for)

    @invariant()
    def lengths_are_the_plans(self):
        if not hasattr(self, "rows"):
            return
        np.testing.assert_array_equal(self.cache.tokens, [row.tokens for row in self.rows])
        np.testing.assert_array_equal(self.cache.tail, [row.tail for row in self.rows])
        np.testing.assert_array_equal(self.cache.budgets, [row.budgets for row in self.rows])
        for index, row in enumerate(self.rows):
            seen = self._entries(index, self.plan.lengths(row.tokens, row.budgets) + row.tail)
            for mine, theirs in zip(row.entries, seen, strict=True):
                np.testing.assert_array_equal(mine, theirs)


def run(name, examples, steps, derandomize):
    machine = type(f"CacheMachine_{name}", (CacheMachine,), {"name": name, "steps": 0})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            suppress_health_check=list(HealthCheck),
            database=None,
            derandomize=derandomize,
        ),
    )
    return machine.steps


def test_any_order_of_operations():
    """In bytes, of which more could go wrong."""
    assert run("bytes", 10, 40, derandomize=True) >= 200


@pytest.mark.parametrize("tokens", range(60, 64))
def test_a_copy_has_all_entries_wherever_in_a_page_they_begin(tokens):
    """Window and tail are 20 entries: 6 pages of 4, where the first has one alone; left out, the newest would be others'."""
    plan, empty, _ = programs("bytes")
    cache = jax.tree.map(jax.numpy.asarray, empty)
    noise = np.random.default_rng(0).integers(0, 256, cache.pool.shape, np.uint8)
    src, dst, n, tail = (np.int32(x) for x in (0, 1, tokens, MAX_TAIL))
    cache = set_counts(
        tj.reserve(plan, replace(cache, pool=jax.numpy.asarray(noise)), src, n, tail), src, n, tail
    )
    cache = jax.tree.map(np.asarray, tj.fork(plan, cache, src, dst))
    for first, count in zip(cache.layout.first, plan.group_pages(tokens, MAX_TAIL), strict=True):
        pages = cache.table[:2, first : first + count]
        np.testing.assert_array_equal(cache.pool[pages[1]], noise[pages[0]])


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_any_order_of_operations_ten_thousand_times(name):
    done = 0
    while done < 10_000:
        done += run(name, 100, 100, derandomize=False)
