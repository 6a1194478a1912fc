"""Chunked prefill and decode through the paged cache: exact at full retention, lawful and protective below it."""

import functools
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tangram_jax as tj
from benchmarks.shapes import LLAMA_8B, QWEN3_30B_A3B
from models.logits import AttentionLogits
from pallas_kernels import byte_pages
from tangram_jax.attention import chunk_attention
from tangram_jax.pages import LayerPages
from tangram_jax.step_layers import Layers
from tests.core.stepping import (
    CONFIG,
    HEADS,
    PARAMS,
    ROW,
    SLOTS,
    SNAPKV,
    decode_step,
    dense_logits,
    entries_of,
    new_cache,
    plan_of,
    prefill,
    prefill_chunk,
    ragged_profile,
    random_tokens,
)

SLOW = functools.partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(("cluster", "page_size", "chunk"), [
    ("layer", 8, 7), ("model", 64, 32), SLOW("layer", 64, 32), SLOW("model", 8, 7), SLOW("adjacent", 8, 7),
    SLOW("adjacent", 64, 32),
])  # fmt: skip
def test_full_retention_equals_dense_attention(cluster, page_size, chunk):
    tokens, generated = random_tokens(70), random_tokens(12, seed=1)
    want = dense_logits(CONFIG, np.concatenate([tokens, generated]))
    plan = plan_of("1.0", 2, page_size, cluster)
    cache = tj.reserve(plan, new_cache(plan), ROW, np.int32(70), np.int32(12))
    logits, cache = prefill(plan, cache, tokens, chunk)
    for i, out in enumerate(logits):
        np.testing.assert_allclose(out, want[min((i + 1) * chunk, 70) - 1], atol=1e-4)
    for i, token in enumerate(generated):
        # Slot 0 is empty: the number of no row.
        given = {"rows": np.array([9, 1], np.int32), "tokens": np.array([0, token], np.int32)}
        out, cache = decode_step(PARAMS, CONFIG, plan, cache, **given)
        np.testing.assert_allclose(out[1], want[70 + i], atol=1e-4)
    assert (int(cache.tokens[1]), int(cache.tail[1])) == (70, 12)
    assert int(cache.num_free) == 600 - plan.pages(70, 12)


def test_batched_decode_equals_each_request_alone():
    plan = plan_of("ragged", 2, 8, "model", min_entries=12)
    prompts = [random_tokens(n, seed=n) for n in (33, 70, 9)]
    together, alone = new_cache(plan), []
    for row, prompt in enumerate(prompts):
        together = tj.reserve(plan, together, np.int32(row), np.int32(len(prompt)), np.int32(4))
        _, together = prefill(plan, together, prompt, 24, row=np.int32(row))
        cache = tj.reserve(plan, new_cache(plan), ROW, np.int32(len(prompt)), np.int32(4))
        alone.append(prefill(plan, cache, prompt, 24)[1])
    for token in (20, 30, 40):
        tokens = np.full(3, token, np.int32)
        logits, together = decode_step(
            PARAMS, CONFIG, plan, together, rows=np.arange(3, dtype=np.int32), tokens=tokens
        )
        for row in range(3):
            out, alone[row] = decode_step(
                PARAMS, CONFIG, plan, alone[row], rows=np.array([1], np.int32), tokens=tokens[:1]
            )
            np.testing.assert_allclose(logits[row], out[0], atol=1e-4)


@pytest.mark.parametrize("scorer", ["snapkv", SLOW("kv_compress"), "expected_attention", SLOW("keydiff")])
def test_a_request_that_is_not_finite_stays_alone(scorer):
    """NaN times a masked weight of zero is NaN: none may lie in the pool, neither in others' pages nor in free ones."""
    plan, scorer = plan_of("ragged", 2, 8, min_entries=12), tj.get_scorer(scorer)
    broken = PARAMS | {"embed": PARAMS["embed"].at[7].set(jnp.inf)}
    others, mine = np.full(60, 7, np.int32), random_tokens(50)

    def rest(cache):
        cache = tj.reserve(plan, cache, ROW, np.int32(50), np.int32(4))
        logits, cache = prefill(plan, cache, mine, 20, scorer=scorer)
        out, _ = decode_step(
            PARAMS, CONFIG, plan, cache, rows=np.array([0, 1], np.int32), tokens=np.array([9, 9], np.int32)
        )
        return np.array([*logits, out[1]])

    want = rest(new_cache(plan))
    for released in (False, True):
        cache = tj.reserve(plan, new_cache(plan), np.int32(0), np.int32(60), np.int32(4))
        logits, cache = prefill_chunk(
            broken, CONFIG, plan, cache, scorer=scorer, row=np.int32(0),
            tokens=np.pad(others, (0, SLOTS - 60)), count=np.int32(60),
        )  # fmt: skip
        assert np.isnan(logits).all()
        assert np.isfinite(cache.pool).all()
        cache = tj.release(plan, cache, np.int32(0)) if released else cache
        np.testing.assert_allclose(rest(cache), want, atol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "want"), [("float32", [1e5, 0, 2]), ("float16", [0, 0, 2]), ("uint8", [1e5, 0, 2])]
)
def test_what_is_infinite_in_the_pool_s_dtype_is_kept_out_of_it(dtype, want):
    plan = plan_of("1.0", 2, 8)
    cache = tj.init_cache(plan, CONFIG, num_pages=9, max_requests=1, dtype=dtype)
    given = jnp.array([1e5, jnp.nan, 2.0])
    np.testing.assert_array_equal(Layers(plan, CONFIG, cache)._finite(given), np.float32(want))


def test_first_tokens_stay_by_default():
    """Also where a small budget keeps no more than the window of a short first chunk."""
    plan = plan_of("0.1", 1, 8)
    assert plan.min_entries == 4 + 8
    tokens = random_tokens(150)
    cache = tj.reserve(plan, new_cache(plan), ROW, np.int32(150), np.int32(0))
    _, cache = prefill(plan, cache, tokens, 30)
    first = tj.reserve(plan, new_cache(plan), ROW, np.int32(150), np.int32(0))
    _, first = prefill(plan, first, tokens[:4], 4)  # their keys do not depend on what follows
    for group in range(plan.num_groups):
        kept, sinks = (
            np.asarray(c.pool)[np.asarray(c.table)[ROW, c.layout.first[group]], 0, 0] for c in (cache, first)
        )
        for key in sinks[:4]:
            assert (np.abs(kept - key).max(axis=-1) < 1e-5).any()


def holding(cache) -> tj.Cache:
    """A float32 cache that holds exactly what a cache of bytes does; a copy."""
    return replace(jax.tree.map(jnp.copy, cache), pool=byte_pages.entries(cache.pool, jnp.float32))


def test_a_step_reads_and_writes_bytes_as_the_entries_they_stand_for():
    """Before each step a float32 cache is set to what the bytes hold; then both must do the same, and keep the same entries.

    An entry written in bytes lies within half a step, A / 254, of the other's, its scale rounded up by an eighth at most.
    """
    plan = plan_of("ragged", 2, 8, "model", min_entries=12)
    cache = tj.init_cache(
        plan, CONFIG, num_pages=600, max_requests=3, max_tokens=160, max_tail=32, dtype=jnp.uint8
    )
    cache = tj.reserve(plan, cache, ROW, np.int32(100), np.int32(10))
    tokens, start = random_tokens(100), 0
    for count in (40, 30, 1, 1, 1, 20):  # chunks, a tail, and a chunk that compresses it
        part = tokens[start : start + count]
        both = []
        for twin in (holding(cache), cache):
            if count == 1:
                how = dict(rows=np.array([1], np.int32), tokens=part)
                both.append(decode_step(PARAMS, CONFIG, plan, twin, **how))
            else:
                both.append(prefill(plan, twin, part, count))
        (want, floats), (got, cache) = both
        np.testing.assert_allclose(got[0], want[0], atol=1e-4)
        start += count
        for head in range(plan.group_of.size):
            mine, theirs = (entries_of(plan, c, 1, head) for c in (holding(cache), floats))
            largest = np.abs(theirs).max(-1, keepdims=True, initial=0.0)
            assert (np.abs(mine - theirs) <= 1.126 * largest / 254 + 1e-4).all()


def test_chunks_and_decode_tokens_share_a_step():
    """One row decodes, two have a chunk, and a third chunk is of no row."""
    plan = plan_of("ragged", 2, 8, min_entries=12)
    texts = {0: random_tokens(40, 1), 1: random_tokens(90, 3), 2: random_tokens(20, 2)}
    cache = new_cache(plan)
    for row, text in texts.items():
        cache = tj.reserve(plan, cache, np.int32(row), np.int32(len(text)), np.int32(4))
    _, cache = prefill(plan, cache, texts[0], 40, row=np.int32(0))
    _, cache = prefill(plan, cache, texts[1][:60], 60, row=np.int32(1))
    apart = jax.tree.map(jnp.copy, cache)

    def chunk(row, tokens):
        return tj.Chunk(np.int32(row), np.pad(tokens, (0, SLOTS - len(tokens))), np.int32(len(tokens)))

    chunks = [chunk(2, texts[2]), chunk(cache.num_rows, texts[0][:1]), chunk(1, texts[1][60:])]
    decode = tj.Decode(np.array([0], np.int32), np.array([50], np.int32))
    both, cache = jax.jit(tj.step, static_argnums=(1, 2, 3))(
        PARAMS, CONFIG, plan, SNAPKV, cache, chunks, decode
    )
    short, apart = prefill(plan, apart, texts[2], 20, row=np.int32(2))
    long, apart = prefill(plan, apart, texts[1][60:], 30, row=np.int32(1))
    decoded, apart = decode_step(PARAMS, CONFIG, plan, apart, rows=decode.rows, tokens=decode.tokens)
    np.testing.assert_allclose(
        both[np.array([0, 2, 3])], jnp.stack([short[0], long[0], decoded[0]]), atol=1e-4
    )
    np.testing.assert_allclose(cache.pool, apart.pool, atol=1e-5)
    for name in ("tail", "tokens", "table", "free", "num_free"):
        np.testing.assert_array_equal(getattr(cache, name), getattr(apart, name))


@pytest.mark.parametrize("back", [3, 8, 14])
def test_rollback_and_run_again_changes_nothing(back):
    """Into the tail, to its end, and into the window: at full retention the next logits are the dense ones."""
    plan = plan_of("1.0", 2, 8)
    tokens = random_tokens(60)
    want = dense_logits(CONFIG, tokens)
    cache = tj.reserve(plan, new_cache(plan), ROW, np.int32(60), np.int32(8))
    _, cache = prefill(plan, cache, tokens[:50], 50)
    for token in random_tokens(8, 5):
        _, cache = decode_step(
            PARAMS, CONFIG, plan, cache, rows=np.array([1], np.int32), tokens=np.array([token], np.int32)
        )
    cache = tj.rollback(plan, cache, ROW, np.int32(back + 8 if back < 14 else back))
    start = 50 - back if back < 14 else 58 - back
    logits, cache = prefill(plan, cache, tokens[start:], 60 - start)
    np.testing.assert_allclose(logits[-1], want[-1], atol=1e-4)
    assert (int(cache.tokens[1]), int(cache.tail[1])) == (60, 0)


def test_a_fork_goes_its_own_way():
    plan = plan_of("1.0", 2, 8)
    tokens, one, other = random_tokens(53), random_tokens(20, 7), random_tokens(20, 8)
    cache = tj.reserve(plan, new_cache(plan), ROW, np.int32(53), np.int32(20))
    _, cache = prefill(plan, cache, tokens, 53)
    before = int(cache.num_free)
    cache = tj.fork(plan, cache, ROW, np.int32(2))
    assert before - int(cache.num_free) == plan.pages(53, 20) - plan.shared_pages(53)
    for a, b in zip(one, other, strict=True):
        logits, cache = decode_step(
            PARAMS, CONFIG, plan, cache, rows=np.array([1, 2], np.int32), tokens=np.array([a, b], np.int32)
        )
    for got, branch in zip(logits, (one, other), strict=True):
        np.testing.assert_allclose(got, dense_logits(CONFIG, np.concatenate([tokens, branch]))[-1], atol=1e-4)
    cache = tj.release(plan, tj.release(plan, cache, ROW), np.int32(2))
    assert int(cache.num_free) == 600
    assert int(cache.owners.sum()) == 0


def test_a_fork_without_enough_pages_leaves_its_row_empty():
    plan = plan_of("1.0", 2, 8)
    need = plan.pages(53, 20) - plan.shared_pages(53)
    cache = tj.init_cache(
        plan, CONFIG, num_pages=plan.pages(53, 20) + need - 1, max_requests=3, max_tokens=160, max_tail=32
    )
    cache = tj.reserve(plan, cache, ROW, np.int32(53), np.int32(20))
    _, cache = prefill(plan, cache, random_tokens(53), 53)
    before = jax.tree.map(np.asarray, (cache.owners, cache.num_free, cache.table))
    cache = tj.fork(plan, cache, ROW, np.int32(2))
    assert (cache.tokens[2], cache.tail[2]) == (0, 0)
    for got, want in zip((cache.owners, cache.num_free, cache.table), before, strict=True):
        np.testing.assert_array_equal(got, want)


def test_any_number_of_no_row_is_an_empty_slot():
    plan = plan_of("1.0", 2, 8)
    cache = tj.reserve(plan, new_cache(plan), np.int32(2), np.int32(53), np.int32(20))
    _, cache = prefill(plan, cache, random_tokens(53), 53, row=np.int32(2))
    pool = np.asarray(cache.pool)
    for row in (-1, 3, 99):
        _, cache = decode_step(
            PARAMS, CONFIG, plan, cache, rows=np.array([row], np.int32), tokens=np.array([9], np.int32)
        )
        assert cache.tail.tolist() == [0, 0, 0]
        np.testing.assert_array_equal(cache.pool, pool)
        _, cache = prefill(plan, cache, random_tokens(20), 20, row=np.int32(row))
        assert cache.tokens.tolist() == [0, 0, 53]
        np.testing.assert_array_equal(cache.pool, pool)


@pytest.mark.parametrize("number", [-1, -3, 3, 99])
def test_what_is_done_to_a_number_of_no_row_does_nothing(number):
    plan = plan_of("1.0", 2, 8)
    cache = tj.reserve(plan, new_cache(plan), ROW, np.int32(20), np.int32(12))
    _, cache = prefill(plan, cache, random_tokens(20), 10)
    _, cache = decode_step(PARAMS, CONFIG, plan, cache, rows=np.array([number, 1]), tokens=np.array([5, 6]))
    cache = tj.reserve(plan, cache, cache.num_rows - 1, 9, 0)
    number = number if number < 0 else number - 3 + cache.num_rows
    assert int(cache.row(number).tokens) == 0 and (np.asarray(cache.row(number).pages) < 0).all()
    want = jax.tree.map(np.asarray, cache)
    for function, *rest in (
        (tj.reserve, number, 9, 3),
        (tj.trim, number, 0, 0),
        (tj.release, number),
        (tj.set_budgets, number, np.full_like(plan.group_ppm, 1000)),
        (tj.fork, number, 0),
        (tj.fork, 1, number),
        (tj.rollback, np.array([number, 0]), np.array([2, 0])),
    ):
        cache = function(plan, cache, *rest)
        for got, kept in zip(jax.tree.leaves(cache), jax.tree.leaves(want), strict=True):
            np.testing.assert_array_equal(got, kept, err_msg=function.__name__)


@pytest.mark.parametrize(("tokens", "least"), [(1, 4), (3, 4), SLOW(3, 8), SLOW(4, 4)])
def test_a_step_of_few_tokens_with_empty_slots_is_the_same_step(tokens, least, monkeypatch):
    """As on a GPU: see `_missing_slots`. The last row has no page."""
    plan = plan_of("ragged", 2, 8, min_entries=12)
    cache = new_cache(plan)
    for row in range(tokens - 1):
        cache = tj.reserve(plan, cache, np.int32(row), np.int32(20), np.int32(4))
        _, cache = prefill(plan, cache, random_tokens(20, seed=row), 20, row=np.int32(row))
    apart = jax.tree.map(jnp.copy, cache)
    given = {"rows": np.arange(tokens, dtype=np.int32), "tokens": random_tokens(tokens)}
    want, cache = decode_step(PARAMS, CONFIG, plan, cache, **given)
    monkeypatch.setattr(sys.modules["tangram_jax.step"], "_missing_slots", lambda *_: least - tokens)
    anew = functools.partial(tj.decode_step)  # a jit of the function itself finds its old trace
    traced = jax.jit(anew, static_argnums=(1, 2), donate_argnames="cache")
    got, apart = traced(PARAMS, CONFIG, plan, apart, **given)
    assert got.shape == (tokens, CONFIG.vocab_size)
    np.testing.assert_allclose(got[: tokens - 1], want[: tokens - 1], atol=1e-4)
    for a, b in zip(jax.tree.leaves(apart), jax.tree.leaves(cache), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


@pytest.mark.parametrize(("config", "tokens", "each", "slots"), [
    (CONFIG, 1, 1, 1), (CONFIG, 3, 1, 0), (CONFIG, 39, 1, 0), (CONFIG, 65, 1, 7), (CONFIG, 129, 1, 0), (CONFIG, 60, 5, 4),
    (CONFIG, 66, 4, 0), (CONFIG, 125, 5, 0),
    *((CONFIG.replace(weights_fp8=True), *case) for case in ((1, 1, 7), (16, 1, 0), (512 + 29, 1, 3), (60, 5, 1))),
    *((LLAMA_8B, *case) for case in ((1, 1, 1), (5, 1, 0), (12, 1, 4), (36, 1, 4), (20, 4, 1))),  # whose layers are a kernel
    (QWEN3_30B_A3B, 1, 1, 0),  # whose layers are one of one token
    (QWEN3_30B_A3B.replace(tensor_axis="tensor"), 1, 1, 1), (LLAMA_8B.replace(tensor_axis="tensor"), 12, 1, 0),
])  # fmt: skip
def test_empty_slots_on_a_gpu(config, tokens, each, slots, monkeypatch):
    """Up to a multiple of eight, if slots of `each` can and it is not more than have kernels."""
    step = sys.modules["tangram_jax.step"]
    assert step._missing_slots(config, tokens, each) == 0
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert step._missing_slots(config, tokens, each) == slots
    # Linked, a share of Llama's layers is a kernel.
    more = 4 if config.tensor_axis and not config.num_experts else slots
    assert step._missing_slots(config, tokens, each, jax.ShapeDtypeStruct((1, 3, 2), jnp.int32)) == more


def test_empty_slots_beside_a_chunk_change_nothing(monkeypatch):
    plan = plan_of("ragged", 2, 8, min_entries=12)
    caches = [tj.reserve(plan, new_cache(plan), np.int32(row), np.int32(20), np.int32(4)) for row in (0, 0)]
    chunk = tj.Chunk(np.int32(1), random_tokens(SLOTS), np.int32(SLOTS - 3))
    decode = tj.Decode(np.array([0, 2], np.int32), np.array([20, 30], np.int32))
    outs = []
    for cache, empty in zip(caches, (0, 3), strict=True):
        monkeypatch.setattr(sys.modules["tangram_jax.step"], "_missing_slots", lambda *_, empty=empty: empty)
        _, cache = prefill(plan, cache, random_tokens(20), 20, row=np.int32(0))
        cache = tj.reserve(plan, cache, np.int32(1), np.int32(SLOTS), np.int32(4))
        traced = jax.jit(functools.partial(tj.step), static_argnums=(1, 2, 3))  # anew
        outs.append(traced(PARAMS, CONFIG, plan, SNAPKV, cache, chunk, decode))
    assert outs[0][0].shape == outs[1][0].shape == (3, CONFIG.vocab_size)
    for got, want in zip(jax.tree.leaves(outs[1]), jax.tree.leaves(outs[0]), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-4)


def test_the_pool_is_never_copied():
    """Donated and written in place: the compiled step needs less temporary memory than the pool's size."""
    plan = tj.CachePlan.build(ragged_profile(), 2, 16)
    cache = tj.init_cache(plan, CONFIG, num_pages=40_000, max_requests=2, max_tokens=256, max_tail=32)
    rows = np.array([0], np.int32)
    chunk = tj.Chunk(ROW, np.zeros(SLOTS, np.int32), ROW)
    step = jax.jit(tj.step, static_argnums=(1, 2, 3), donate_argnums=4)
    compiled = [
        decode_step.lower(PARAMS, CONFIG, plan, cache, rows=rows, tokens=rows).compile(),
        prefill_chunk.lower(
            PARAMS, CONFIG, plan, cache, scorer=SNAPKV, row=ROW, tokens=np.zeros(SLOTS, np.int32), count=ROW
        ).compile(),
        step.lower(PARAMS, CONFIG, plan, SNAPKV, cache, chunk, tj.Decode(rows, rows)).compile(),
    ]
    for program in compiled:
        assert program.memory_analysis().temp_size_in_bytes < cache.pool.nbytes / 4


def test_the_mask_of_a_large_chunk_is_no_constant_of_the_program():
    q, kv = jnp.zeros((2048, 4, 2, 16)), jnp.zeros((2048, 4, 16))
    zeros = np.zeros(4, np.int32)
    pages = LayerPages(
        jnp.zeros((4, 2, 4, 8, 16)), jnp.zeros((1, 16), jnp.int32), jnp.asarray(zeros[None]), zeros, zeros
    )
    lowered = jax.jit(lambda q, kv: chunk_attention(q, kv, kv, pages, AttentionLogits(0.25))).lower(q, kv)
    assert len(lowered.as_text()) < 2**20


def test_a_plan_for_another_model_is_refused():
    plan = tj.CachePlan.build(tj.BudgetProfile.uniform(3, 5, 0.5))
    with pytest.raises(ValueError, match="calibrate a profile for this model"):
        new_cache(plan)


def test_limits_of_a_cache():
    plan = plan_of("1.0", 2, 8)
    config = CONFIG.replace(max_positions=2_000_000)
    small = dict(num_pages=1, max_requests=1)
    assert tj.init_cache(plan, config, **small).layout.max_tokens == 1_000_000
    with pytest.raises(ValueError, match="max_tokens must lie between 1 and 1000000; got 1000001"):
        tj.init_cache(plan, config, max_tokens=1_000_001, **small)
    for dtype in ("int8", "float8_e4m3fn"):
        with pytest.raises(ValueError, match=f"a cache of {dtype}: write .* uint8 for 8-bit keys"):
            tj.init_cache(plan, config, dtype=dtype, **small)
    nothing = tj.CachePlan.build(
        tj.BudgetProfile(budgets=np.zeros(HEADS), retention=0.5), 2.0, 8.0, min_entries=0
    )
    with pytest.raises(ValueError, match="no group may keep anything"):
        tj.init_cache(nothing, CONFIG, max_tail=0, **small)
