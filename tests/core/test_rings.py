"""Sliding-window layers: rings in the cache, exact whatever is chunked, decoded, taken back or copied."""

from dataclasses import replace
from functools import cache as memo
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tangram_jax as tj
from models.attention import dense_attend
from models.testing import (
    random_params,
    tiny_config,
    tiny_gemma2_config,
    tiny_gemma_config,
    tiny_gpt_oss_config,
)
from models.transformer import forward
from pallas_kernels import byte_pages
from tangram_jax.rings import RingChunk, Rings, SlidingLayers, chunk_pages

WINDOW = 20
CONFIG = tiny_config(num_layers=3, sliding_window=WINDOW, sliding_layers=(0, 2))
SNAPKV = tj.get_scorer("snapkv")
MAX_TAIL, TRAILING = 24, 8
SLOTS = 96

prefill_chunk = jax.jit(
    tj.prefill_chunk, static_argnums=(1, 2), static_argnames="scorer", donate_argnames="cache"
)
decode_step = jax.jit(tj.decode_step, static_argnums=(1, 2), donate_argnames="cache")


@memo
def params_of(config):
    return random_params(config, 0)


def random_tokens(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(8, CONFIG.vocab_size, count).astype(np.int32)


@partial(jax.jit, static_argnums=0)
def dense(config, params, tokens):
    positions = jnp.arange(len(tokens))
    return forward(params, config, tokens, positions, dense_attend(positions, config=config), ())[0]


def dense_logits(tokens, config=CONFIG):
    """f32[n, V], from one program for all lengths."""
    padded = np.zeros(160, np.int32)
    padded[: len(tokens)] = tokens
    return np.asarray(dense(config, params_of(config), padded))[: len(tokens)]


@memo
def plan_of(page_size=8, retention=1.0, config=CONFIG, heads_per_page=2, max_tail=MAX_TAIL):
    return tj.CachePlan.build(
        tj.BudgetProfile.uniform(len(config.full_layers), config.num_kv_heads, retention),
        heads_per_page,
        page_size,
        window=TRAILING,
        sliding=tj.SlidingLayers.of(config, max_tail),
    )


class Rows:
    """A cache and what its rows hold; checks every token's logits against dense attention."""

    def __init__(self, plan, config=CONFIG, exact=True, max_tokens=256, dtype=jnp.float32):
        self.plan, self.config, self.params, self.exact = plan, config, params_of(config), exact
        self.cache = tj.init_cache(
            plan, config, num_pages=900, max_requests=3, max_tokens=max_tokens, max_tail=MAX_TAIL, dtype=dtype
        )
        self.in_bytes = byte_pages.is_bytes(dtype)
        self.tokens = {row: np.zeros(0, np.int32) for row in range(3)}

    def reserve(self, row, tail=0):
        count = len(self.tokens[row])
        held = int(self.cache.tokens[row]) if tail else count
        extra = count - held + tail
        self.cache = tj.reserve(self.plan, self.cache, np.int32(row), np.int32(held), np.int32(extra))

    def check(self, row, logits):
        if self.exact:
            want = dense_logits(self.tokens[row], self.config)[-1]
            # Rounding to bytes moves logits, whose deviation is 1, by 0.23 at most; a wrong entry by more than 1.
            np.testing.assert_allclose(logits, want, atol=0.5 if self.in_bytes else 2e-4)

    def run(self, step):
        """step(cache) -> (logits, cache). Bytes must do as a float32 cache that holds what they stand for."""
        if self.in_bytes:
            floats = byte_pages.entries(self.cache.pool, jnp.float32)
            want, _ = step(replace(jax.tree.map(jnp.copy, self.cache), pool=floats))
        logits, self.cache = step(self.cache)
        if self.in_bytes:
            np.testing.assert_allclose(logits, want, atol=2e-4)
        return logits

    def chunk(self, row, tokens):
        self.tokens[row] = np.concatenate([self.tokens[row], tokens])
        self.reserve(row)
        padded = np.pad(tokens, (0, SLOTS - len(tokens)))
        how = dict(scorer=SNAPKV, row=np.int32(row), tokens=padded, count=np.int32(len(tokens)))
        logits = self.run(lambda c: prefill_chunk(self.params, self.config, self.plan, cache=c, **how))
        self.check(row, logits)

    def decode(self, tokens_of):
        """One token for each of some rows; slot 1 is empty."""
        rows, tokens = np.full(3, 9, np.int32), np.zeros(3, np.int32)
        for slot, (row, token) in zip((0, 2), tokens_of.items(), strict=False):
            self.reserve(row, tail=1)
            rows[slot], tokens[slot] = row, token
            self.tokens[row] = np.append(self.tokens[row], np.int32(token))
        how = dict(rows=rows, tokens=tokens)
        logits = self.run(lambda c: decode_step(self.params, self.config, self.plan, cache=c, **how))
        for slot, row in zip((0, 2), tokens_of, strict=False):
            self.check(row, logits[slot])

    def rollback(self, row, count):
        self.cache = tj.rollback(self.plan, self.cache, np.int32(row), np.int32(count))
        self.tokens[row] = self.tokens[row][: len(self.tokens[row]) - count]


@pytest.mark.parametrize(
    "page_size", [pytest.param(4, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.slow), 32]
)
@pytest.mark.parametrize("chunk", [7, 30, 90])
def test_full_retention_equals_dense_attention(page_size, chunk):
    """Chunks within a page, beyond the window, and beyond the ring; tokens until the ring has gone round."""
    rows = Rows(plan_of(page_size))
    prompt = random_tokens(100)
    for start in range(0, 100, chunk):
        rows.chunk(1, prompt[start : start + chunk])
    for token in random_tokens(MAX_TAIL, 1):
        rows.decode({1: token})


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(tiny_gemma_config(num_layers=3, sliding_layers=(0, 1)), marks=pytest.mark.slow),
        tiny_gemma2_config(num_layers=2, sliding_layers=(0,)),
        tiny_gpt_oss_config(num_layers=2, sliding_layers=(0,)),
    ],
    ids=lambda config: config.name,
)
def test_models_with_windows_of_their_own(config):
    """Gemma 3's two bases of RoPE, Gemma 2's soft caps, GPT-OSS's sinks: in windowed layers and full ones."""
    rows = Rows(plan_of(config=config), config)
    for part in np.split(random_tokens(90), [40, 47]):
        rows.chunk(1, part)
    for token in random_tokens(6, 1):
        rows.decode({1: token})


def test_groups_of_several_layers_heads():
    """Two groups: one with heads of both layers, one with room for two more."""
    plan = plan_of(heads_per_page=5)
    assert plan.rings.num_groups == 2
    rows = Rows(plan)
    rows.chunk(1, random_tokens(50))
    rows.decode({1: 9})


@pytest.mark.parametrize("longest", [16, pytest.param(50, marks=pytest.mark.slow)])
def test_rows_shorter_than_a_ring_or_a_window(longest):
    plan = plan_of(4)
    assert plan.rings.slots > longest
    rows = Rows(plan, max_tokens=longest)
    assert rows.cache.layout.width == plan.pages(longest)
    rows.chunk(1, random_tokens(longest - 10))
    rows.chunk(1, random_tokens(4, 1))
    for token in random_tokens(6, 2):
        rows.decode({1: token})


def test_a_step_copies_no_pool():
    plan = plan_of()
    cache = jax.eval_shape(
        lambda: tj.init_cache(plan, CONFIG, num_pages=9000, max_requests=3, max_tokens=256, max_tail=MAX_TAIL)
    )
    chunk = tj.Chunk(np.int32(0), np.zeros(SLOTS, np.int32), np.int32(1))
    decode = tj.Decode(np.zeros(2, np.int32), np.zeros(2, np.int32))
    for given in ((chunk, None), (None, decode), (chunk, decode)):
        step = jax.jit(tj.step, static_argnums=(1, 2, 3), donate_argnums=4)
        compiled = step.lower(params_of(CONFIG), CONFIG, plan, SNAPKV, cache, *given).compile()
        assert compiled.memory_analysis().temp_size_in_bytes < cache.pool.size * 4 / 2


@pytest.mark.parametrize("page_size", [4, 32])
def test_taking_back_a_tail_and_a_window(page_size):
    """As much as a row can take back at most, then other tokens, then a chunk."""
    rows = Rows(plan_of(page_size))
    rows.chunk(0, random_tokens(90))
    rows.chunk(0, random_tokens(17, 7))
    for token in random_tokens(MAX_TAIL, 1):
        rows.decode({0: token})
    rows.rollback(0, MAX_TAIL + TRAILING)
    rows.chunk(0, random_tokens(TRAILING + 5, 2))
    for token in random_tokens(10, 3):
        rows.decode({0: token})
    rows.rollback(0, 9)
    rows.decode({0: 11})


@pytest.mark.parametrize("before", range(5))
def test_a_whole_chunk_is_written_wherever_in_a_page_it_begins(before):
    """16 tokens from the last slot of a page on lie in 5 pages of 4; without the fifth its newest would be lost."""
    rings = plan_of(4).rings
    numbers = np.arange(rings.num_groups * rings.pages).reshape(rings.num_groups, -1)
    pages, rows = chunk_pages(rings, RingChunk(jnp.asarray(numbers), jnp.int32(before), jnp.int32(16)), 16)
    where = {}  # slot of the first group's ring -> row of the chunk
    for page, of_page in zip(np.asarray(pages)[0], np.asarray(rows).reshape(-1, 4), strict=True):
        where |= {
            int(4 * page + slot): int(row) for slot, row in enumerate(of_page) if page >= 0 and row >= 0
        }
    assert [where[before + row] for row in range(16)] == list(range(16))


@pytest.mark.parametrize("page_size", [1, 2, 4, 10, 16, 32, 64])
@pytest.mark.parametrize("max_tail", [0, 1, 2, 24])
def test_a_ring_holds_what_may_be_seen_again_beside_the_page_that_is_written(page_size, max_tail):
    """A chunk writes whole pages: one that ends with the first slot of a page overwrites what lay in its others."""
    rings = Rings.build(SlidingLayers(2, WINDOW, max_tail), 4, 2, page_size, TRAILING)
    assert rings.slots >= WINDOW - 1 + TRAILING + page_size - 1  # after a chunk
    assert rings.slots >= WINDOW - 1 + TRAILING + max_tail  # and once its tail is full


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.uint8], ids=["floats", "bytes"])
def test_copies_go_their_own_ways(dtype):
    rows = Rows(plan_of(4), dtype=dtype)
    rows.chunk(0, random_tokens(61))
    rows.decode({0: 20})
    rows.cache = tj.fork(rows.plan, rows.cache, np.int32(0), np.int32(2))
    rows.tokens[2] = rows.tokens[0]
    for first, second in zip(random_tokens(12, 1), random_tokens(12, 2), strict=True):
        rows.decode({0: first, 2: second})
    rows.chunk(2, random_tokens(30, 3))
    rows.decode({0: 30, 2: 31})


@pytest.mark.parametrize("retention", [1.0, 0.3])
def test_pages_are_what_the_plan_says(retention):
    plan = plan_of(4, retention)
    rows = Rows(plan, exact=retention == 1.0)
    for count in (5, 20, 70):
        rows.chunk(1, random_tokens(count, count))
        held = len(rows.tokens[1])
        assert int(rows.cache.num_free) <= 900 - plan.pages(held)
        rows.cache = tj.trim(plan, rows.cache, np.int32(1), np.int32(held), np.int32(0))
        assert int(rows.cache.num_free) == 900 - plan.pages(held)
    most = plan.pages(100_000) - plan.pages(50_000)
    compressed = plan.lengths(100_000).sum() - plan.lengths(50_000).sum()
    assert most * 4 == compressed  # the rings do not grow
    before = int(rows.cache.num_free)
    rows.cache = tj.fork(plan, rows.cache, np.int32(1), np.int32(2))
    assert before - int(rows.cache.num_free) == plan.pages(held) - plan.shared_pages(held)
    rows.cache = tj.release(plan, tj.release(plan, rows.cache, np.int32(1)), np.int32(2))
    assert int(rows.cache.num_free) == 900


def test_a_chunk_and_decode_tokens_share_a_step():
    rows = Rows(plan_of(32))
    rows.chunk(0, random_tokens(60))
    rows.chunk(2, random_tokens(40, 5))
    rows.tokens = {
        0: np.append(rows.tokens[0], np.int32(50)),
        2: np.append(rows.tokens[2], random_tokens(25, 6)),
    }
    rows.reserve(0, tail=1)
    rows.reserve(2)
    chunk = tj.Chunk(np.int32(2), np.pad(random_tokens(25, 6), (0, 7)), np.int32(25))
    decode = tj.Decode(np.array([0, 9], np.int32), np.array([50, 0], np.int32))
    logits, rows.cache = jax.jit(tj.step, static_argnums=(1, 2, 3))(
        rows.params, CONFIG, rows.plan, SNAPKV, rows.cache, chunk, decode
    )
    rows.check(2, logits[0])
    rows.check(0, logits[1])
    rows.decode({0: 12, 2: 13})


def test_a_plan_must_fit_the_model():
    without = tj.CachePlan.build(tj.BudgetProfile.uniform(1, CONFIG.num_kv_heads, 1.0), 2, 8)
    with pytest.raises(ValueError, match=r"sliding=SlidingLayers.of\(model_config\)"):
        tj.init_cache(without, CONFIG, num_pages=10, max_requests=1)
    shorter = tj.CachePlan.build(
        tj.BudgetProfile.uniform(1, CONFIG.num_kv_heads, 1.0), 2, 8, sliding=tj.SlidingLayers(2, WINDOW - 1)
    )
    with pytest.raises(ValueError, match="do not have the same sliding-window layers"):
        tj.init_cache(shorter, CONFIG, num_pages=10, max_requests=1)
    with pytest.raises(ValueError, match="rings hold 24"):
        tj.init_cache(plan_of(), CONFIG, num_pages=10, max_requests=1, max_tail=25)
    for wrong, name in (((1, 0), "window"), ((1.5, 8), "count"), ((1, 8, -1), "max_tail")):
        with pytest.raises(
            ValueError, match=rf"sliding\.{name} must be a whole number of at least [01]; got"
        ):
            tj.CachePlan.build(tj.BudgetProfile.uniform(1, 4, 1.0), 2, 8, sliding=tj.SlidingLayers(*wrong))
