"""What callers may get wrong: nobody else's row pays for it, and what can be told at once is."""

import dataclasses
import sys
from unittest import mock

import jax
import numpy as np
import pytest

import tangram_jax as tj
from calibrate.measure import calibrate_ratios
from tests.core.stepping import (
    CONFIG,
    PARAMS,
    ROW,
    SNAPKV,
    decode_step,
    dense_logits,
    new_cache,
    plan_of,
    prefill,
    prefill_chunk,
    random_tokens,
)

step = jax.jit(tj.step, static_argnums=(1, 2, 3))


def chunk_of(row, tokens, count):
    return tj.Chunk(np.int32(row), np.asarray(tokens, np.int32), np.int32(count))


def with_rows(plan, *rows):
    """A cache with 20 tokens in each, and room for three more."""
    cache = new_cache(plan)
    for row in rows:
        cache = tj.reserve(plan, cache, np.int32(row), np.int32(20), np.int32(3))
        _, cache = prefill(plan, cache, random_tokens(20), 20, row=np.int32(row))
    return cache


def same(cache, kept):
    for got, want in zip(jax.tree.leaves(cache), jax.tree.leaves(kept), strict=True):
        np.testing.assert_array_equal(got, want)


# --- pages that nobody reserved ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cluster", [pytest.param("layer", marks=pytest.mark.slow), "model"])
def test_a_row_that_found_no_pages_is_left_out(cluster):
    """It would read the pages of others."""
    plan = plan_of("1.0", 2, 8, cluster)
    cache = tj.init_cache(plan, CONFIG, num_pages=plan.pages(40), max_requests=3, max_tokens=200, max_tail=32)
    cache = tj.reserve(plan, cache, ROW, np.int32(40), np.int32(0))
    _, cache = prefill(plan, cache, random_tokens(40), 40)
    kept = jax.tree.map(np.asarray, tj.reserve(plan, cache, np.int32(2), np.int32(20), np.int32(5)))
    cache = jax.tree.map(jax.numpy.asarray, kept)
    for part, decode in (
        (chunk_of(2, random_tokens(20), 20), None),
        (tj.Packed(np.array([2, 5]), random_tokens(20), np.array([15, 5])), None),
        (None, tj.Decode(np.array([2, ROW]), np.array([3, 4]))),  # and ROW has nothing for one more
        (None, tj.Decode(np.array([2]), np.array([[3, 4]]), np.array([2]))),
    ):
        _, cache = step(PARAMS, CONFIG, plan, SNAPKV, cache, part, decode)
        same(cache, kept)


def test_chunks_packed_behind_one_that_is_left_out_have_their_own_tokens():
    """They stand where the counts say, whether a row before them found its pages or not."""
    plan, tokens = plan_of("1.0", 2, 8), random_tokens(24)
    cache = with_rows(plan, 0)
    cache = tj.reserve(plan, cache, ROW, np.int32(20), np.int32(0))
    for missing in (2, -1, 0):  # without a page, of no row, and without a page for more
        packed = tj.Packed(np.array([missing, ROW]), tokens, np.array([12, 8]))
        logits, after = step(PARAMS, CONFIG, plan, SNAPKV, jax.tree.map(jax.numpy.copy, cache), packed, None)
        np.testing.assert_allclose(logits[1], dense_logits(CONFIG, tokens[16:])[-1], atol=2e-4)
        assert after.tokens.tolist() == [20, 8, 0]


def test_a_row_at_its_capacity_is_left_out():
    """Its next entry would lie where the pages of the next group stand."""
    plan = plan_of("1.0", 2, 8)
    cache = tj.init_cache(plan, CONFIG, num_pages=600, max_requests=2, max_tokens=48, max_tail=16)
    tokens = random_tokens(49)
    cache = tj.reserve(plan, cache, ROW, np.int32(40), np.int32(16))
    _, cache = prefill(plan, cache, tokens[:40], 40)
    for at in range(40, 48):
        logits, cache = decode_step(
            PARAMS, CONFIG, plan, cache, rows=np.array([ROW]), tokens=tokens[at : at + 1]
        )
    np.testing.assert_allclose(logits[0], dense_logits(CONFIG, tokens[:48])[-1], atol=2e-4)
    kept = jax.tree.map(np.asarray, cache)
    _, cache = decode_step(PARAMS, CONFIG, plan, cache, rows=np.array([ROW]), tokens=tokens[48:])
    same(cache, kept)


def test_a_row_whose_tail_is_full_is_left_out():
    """Its next chunk would lose entries, though all may be kept."""
    plan, tokens = plan_of("1.0", 2, 8), random_tokens(40)
    cache = tj.init_cache(plan, CONFIG, num_pages=600, max_requests=2, max_tokens=48, max_tail=4)
    cache = tj.reserve(plan, cache, ROW, np.int32(16), np.int32(20))
    _, cache = prefill(plan, cache, tokens[:16], 16)
    for given, tail in (
        (tokens[None, 16:19], 3),
        (tokens[None, 19:21], 3),
        (tokens[19:20], 4),
        (tokens[20:21], 4),
    ):
        _, cache = decode_step(PARAMS, CONFIG, plan, cache, rows=np.array([ROW]), tokens=given)
        assert cache.tail[ROW] == tail
    _, cache = prefill(plan, cache, tokens[20:32], 12)
    logits, cache = decode_step(PARAMS, CONFIG, plan, cache, rows=np.array([ROW]), tokens=tokens[32:33])
    np.testing.assert_allclose(logits[0], dense_logits(CONFIG, tokens[:33])[-1], atol=2e-4)


@pytest.mark.parametrize(("prompt", "room"), [(40, 8), (32, 0)], ids=["capacity", "pages"])
def test_a_row_is_left_out_where_one_group_alone_lacks_a_page(prompt, room):
    """Small groups have a place for the next token, in a page that they own."""
    ratios = np.array([[[0.1, 0.1, 1.0, 1.0], [0.1, 0.1, 0.1, 0.1]]], np.float32)
    profile = tj.BudgetProfile.from_ratios(ratios, retention=0.5, alpha=0.0)
    plan = tj.CachePlan.build(profile, 2, 8, window=8)  # group 1 keeps all, the others 12 entries
    cache = tj.init_cache(plan, CONFIG, num_pages=60, max_requests=2, max_tokens=40, max_tail=8)
    assert cache.layout.capacity == (3, 5, 3, 3)
    cache = tj.reserve(plan, cache, ROW, np.int32(prompt), np.int32(room))
    _, cache = prefill(plan, cache, random_tokens(prompt), prompt)
    kept = jax.tree.map(np.asarray, cache)
    _, cache = decode_step(PARAMS, CONFIG, plan, cache, rows=np.array([ROW]), tokens=np.array([9]))
    same(cache, kept)


def test_a_fork_takes_nothing_from_a_row_that_is_not_empty():
    plan = plan_of("1.0", 2, 8)
    cache = with_rows(plan, 0, 1)
    kept = jax.tree.map(np.asarray, cache)
    for src, dst in ((0, 1), (0, 0)):
        cache = tj.fork(plan, cache, np.int32(src), np.int32(dst))
        same(cache, kept)
    for row in (0, 1):
        cache = tj.release(plan, cache, np.int32(row))
    assert int(cache.num_free) == cache.num_pages


def test_pages_of_a_row_with_a_retention_of_its_own():
    profile = tj.BudgetProfile.uniform(CONFIG.num_layers, CONFIG.num_kv_heads, 0.3)
    plan = tj.CachePlan.build(profile, 2, 8, max_retention=1.0)
    own = plan.budgets_at(1.0)
    need = plan.pages(60, 10, own)
    assert need > plan.pages(60, 10) and plan.shared_pages(60, own) > plan.shared_pages(60)
    size = need + need - plan.shared_pages(60, own)
    cache = tj.init_cache(plan, CONFIG, num_pages=size, max_requests=3, max_tokens=160, max_tail=32)
    cache = tj.set_budgets(plan, cache, ROW, own)
    cache = tj.reserve(plan, cache, ROW, np.int32(60), np.int32(10))
    assert int(cache.num_free) == size - need
    _, cache = prefill(plan, cache, random_tokens(60), 60)
    cache = tj.fork(plan, cache, ROW, np.int32(2))
    assert int(cache.num_free) == 0 and int(cache.tokens[2]) == 60


# --- counts --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [-3, 0, 30])
def test_a_chunk_has_the_tokens_that_it_has(count):
    plan, tokens = plan_of("1.0", 2, 8), random_tokens(20)
    cache = tj.reserve(plan, new_cache(plan), ROW, np.int32(60), np.int32(0))
    _, cache = prefill_chunk(
        PARAMS, CONFIG, plan, cache, scorer=SNAPKV, row=ROW, tokens=tokens, count=np.int32(count)
    )
    assert int(cache.tokens[ROW]) == (20 if count > 0 else 0)
    cache = tj.reserve(plan, cache, np.int32(2), np.int32(60), np.int32(0))
    packed = tj.Packed(np.array([2, ROW]), tokens, np.array([12, count]))
    before = int(cache.tokens[ROW])
    _, cache = step(PARAMS, CONFIG, plan, SNAPKV, cache, packed, None)
    assert cache.tokens[np.array([2, ROW])].tolist() == [12, before + (4 if count > 0 else 0)]


def test_counts_of_single_tokens():
    plan = plan_of("1.0", 2, 8)
    cache = with_rows(plan, 0, 2)
    decode = tj.Decode(np.array([0, 2]), np.array([5, 6]), np.array([1, 0]))
    _, cache = step(PARAMS, CONFIG, plan, SNAPKV, cache, None, decode)
    assert cache.tail.tolist() == [1, 0, 0]


# --- what is refused -----------------------------------------------------------------------------------------------------

TOKENS = np.arange(8, dtype=np.int32)
SHAPES = {
    "no tokens": (chunk_of(1, TOKENS[:0], 0), None),
    "tokens by rows": (chunk_of(1, TOKENS[None], 8), None),
    "one count for two rows": (tj.Packed(np.array([0, 1]), TOKENS, np.array([3])), None),
    "no rows": (None, tj.Decode(TOKENS[:0], TOKENS[:0])),
    "a row too few": (None, tj.Decode(TOKENS[:1], TOKENS[:2])),
    "a count too few": (None, tj.Decode(TOKENS[:2], TOKENS[:4].reshape(2, 2), TOKENS[:1])),
}


@pytest.mark.parametrize("what", SHAPES)
def test_arrays_of_other_shapes(what):
    plan = plan_of("1.0", 2, 8)
    with pytest.raises(ValueError, match="expected"):
        step(PARAMS, CONFIG, plan, SNAPKV, new_cache(plan), *SHAPES[what])


BEYOND = "is none of model tiny, whose vocabulary has 264: expected ids from 0 to 263"


@pytest.mark.parametrize("token", [-1, 264])
def test_tokens_beyond_the_vocabulary(token, monkeypatch):
    """Another one's embedding was taken. What is padding may be anything."""
    plan, wrong = plan_of("1.0", 2, 8), np.array([5, token], np.int32)
    cache = with_rows(plan, 0, 2)
    for part, decode in (
        (chunk_of(1, wrong, 2), None),
        (tj.Packed.of([0, 2], [wrong[:1], wrong[1:]], 16), None),
        (None, tj.Decode(np.array([0, 2]), wrong)),
        (None, tj.Decode(np.array([2]), wrong[None], np.array([2]))),
    ):
        with pytest.raises(ValueError, match=f"token {token} {BEYOND}"):
            tj.step(PARAMS, CONFIG, plan, SNAPKV, cache, part, decode)
    sample = random_tokens(60)
    sample[-1] = token
    with pytest.raises(ValueError, match=f"token {token} {BEYOND}"):
        calibrate_ratios(PARAMS, CONFIG, sample, SNAPKV, 0.5)
    decodes = tj.Decode(np.array([0, 9]), wrong), tj.Decode(np.array([0]), wrong[:1])
    logits, want = (step(PARAMS, CONFIG, plan, SNAPKV, cache, None, decode)[0] for decode in decodes)
    np.testing.assert_allclose(logits[0], want[0], atol=1e-4)
    after = mock.Mock(side_effect=InterruptedError)  # tokens are looked at before
    monkeypatch.setattr(sys.modules["tangram_jax.step"], "forward", after)
    for given in ((None, decodes[0]), (chunk_of(1, wrong, 1), None)):
        with pytest.raises(InterruptedError):
            tj.step(PARAMS, CONFIG, plan, SNAPKV, cache, *given)


def test_names_of_scorers():
    for name in ("", "other", None, 3):
        with pytest.raises(ValueError, match=f"unknown scorer {name!r}, expected one of: snapkv"):
            tj.get_scorer(name)


@pytest.mark.parametrize("scorer", ["snapkv", None, tj.scorers.SnapKV])
def test_what_is_no_scorer(scorer):
    plan = plan_of("1.0", 2, 8)
    with pytest.raises(TypeError, match=r"is no scorer: write one as tangram_jax\.get_scorer gives it"):
        tj.step(PARAMS, CONFIG, plan, scorer, new_cache(plan), chunk_of(1, TOKENS, 8), None)


def test_a_mask_is_no_row():
    plan = plan_of("1.0", 2, 8)
    with pytest.raises(TypeError, match=r"got a mask: write np.flatnonzero\(mask\)"):
        decode_step(PARAMS, CONFIG, plan, new_cache(plan), rows=np.array([True, False]), tokens=TOKENS[:2])


def test_a_cache_of_the_host():
    """As a checkpoint may give it back, outside of jit as well."""
    plan = plan_of("1.0", 2, 8)
    cache = jax.tree.map(np.asarray, with_rows(plan, 0))
    logits, after = tj.decode_step(PARAMS, CONFIG, plan, cache, rows=[0], tokens=[9])
    want, _ = decode_step(PARAMS, CONFIG, plan, cache, rows=np.array([0]), tokens=np.array([9]))
    np.testing.assert_allclose(logits, want, atol=1e-4)
    assert after.tail.tolist() == [1, 0, 0]


@pytest.mark.parametrize("changes", [{"num_layers": 3}, {"num_kv_heads": 2}])
def test_a_plan_for_another_model(changes):
    plan, other = plan_of("1.0", 2, 8), CONFIG.replace(**changes)
    with pytest.raises(ValueError, match=r"the profile has \(2, 4\) \(layers, KV heads\), model tiny has"):
        decode_step(PARAMS, other, plan, new_cache(plan), rows=np.array([1]), tokens=TOKENS[:1])


@pytest.mark.parametrize("profile", ["profile.npz", np.ones((2, 4))])
def test_what_is_no_profile(profile):
    with pytest.raises(
        TypeError, match=r"profile must be a BudgetProfile, got .*: write BudgetProfile\.load"
    ):
        tj.CachePlan.build(profile)


@pytest.mark.parametrize("of", ["query heads", "positions", "nothing"])
def test_scores_of_other_heads(of):
    """Those of query heads were taken for the first KV heads'."""

    @dataclasses.dataclass(frozen=True)
    class Own:
        query_rows = 0

        def score(self, x):
            shapes = {"query heads": (CONFIG.num_heads, *x.positions.shape), "positions": x.positions.shape}
            return np.zeros(shapes[of]) if of in shapes else None

    plan = plan_of("1.0", 2, 8)
    with pytest.raises(
        ValueError, match=r"\.score gives .*: expected scores of 4 KV heads and \d+ candidates"
    ):
        step(PARAMS, CONFIG, plan, Own(), new_cache(plan), chunk_of(1, TOKENS, 8), None)
    with pytest.raises(
        ValueError, match=r"\.score gives .*: expected scores of 4 KV heads and 60 candidates"
    ):
        calibrate_ratios(PARAMS, CONFIG, random_tokens(60), Own(), 0.5)


@pytest.mark.parametrize("other", [plan_of("1.0", 2, 16), plan_of("1.0", 1, 8), plan_of("ragged", 2, 8)])
def test_another_plan(other):
    plan = plan_of("1.0", 2, 8)
    cache = new_cache(plan)
    message = "the cache is of another plan, with pages of 2 heads and 8 tokens: give the plan that init_cache was given"
    for function, *rest in (
        (tj.reserve, ROW, 9, 3),
        (tj.trim, ROW, 0, 0),
        (tj.release, ROW),
        (tj.set_budgets, ROW, other.group_ppm),
        (tj.fork, ROW, 0),
    ):
        with pytest.raises(ValueError, match=message):
            function(other, cache, *rest)
    with pytest.raises(ValueError, match=message):
        decode_step(PARAMS, CONFIG, other, cache, rows=np.array([1]), tokens=TOKENS[:1])


def test_a_cache_of_another_head_dim():
    plan = plan_of("1.0", 2, 8)
    cache = tj.init_cache(
        plan, dataclasses.replace(CONFIG, head_dim=2 * CONFIG.head_dim), num_pages=9, max_requests=1
    )
    with pytest.raises(
        ValueError, match=f"the cache is not for model {CONFIG.name}, whose heads have {CONFIG.head_dim}"
    ):
        tj.decode_step(PARAMS, CONFIG, plan, cache, rows=np.array([ROW]), tokens=np.array([3]))


def test_budgets_in_fractions():
    plan = plan_of("1.0", 2, 8)
    cache = new_cache(plan)
    for wrong in (plan.group_budgets, 0.3, np.int32(9), plan.group_ppm[1:]):
        with pytest.raises(
            ValueError, match=r"write those of plan.budgets_at\(retention\), parts per million"
        ):
            tj.set_budgets(plan, cache, ROW, np.asarray(wrong))
    cache = tj.set_budgets(plan, cache, ROW, (-plan.group_ppm).tolist())
    assert not cache.budgets[ROW].any()


def test_a_cache_of_nothing():
    with pytest.raises(ValueError, match="num_pages must be a whole number of at least 1; got -1"):
        tj.init_cache(plan_of("1.0", 2, 8), CONFIG, num_pages=-1, max_requests=2)


@pytest.mark.parametrize("name", ["num_pages", "max_requests", "max_tokens", "max_tail"])
@pytest.mark.parametrize("wrong", [1.5, float("nan"), "20", [20]], ids=str)
def test_sizes_of_a_cache_are_whole_numbers(name, wrong):
    sizes = {"num_pages": 20, "max_requests": 2, name: wrong}
    with pytest.raises(ValueError, match=f"{name} must be a whole number of at least [01]; got "):
        tj.init_cache(plan_of("1.0", 2, 8), CONFIG, **sizes)


def test_what_a_plan_is_made_of():
    profile = tj.BudgetProfile.uniform(2, 4, 0.5)
    for name in ("heads_per_page", "page_size", "sinks", "window", "min_entries"):
        for wrong in (float("nan"), float("inf"), 1.5, "2", -1):
            with pytest.raises(ValueError, match=f"{name} must be a whole number of at least [01]; got "):
                tj.CachePlan.build(profile, **{"heads_per_page": 2, name: wrong})
    with pytest.raises(TypeError, match=r"got ModelConfig: write SlidingLayers.of\(config\)"):
        tj.CachePlan.build(profile, 2, sliding=CONFIG)


def test_a_model_of_more_positions_than_tokens_can_be_counted():
    longest = CONFIG.replace(max_positions=10_000_000)
    cache = tj.init_cache(plan_of("0.1", 2, 8), longest, num_pages=1, max_requests=1)
    assert cache.layout.max_tokens == 1_000_000
    with pytest.raises(ValueError, match="max_tokens must lie between 1 and 1000000"):
        tj.init_cache(plan_of("0.1", 2, 8), longest, num_pages=1, max_requests=1, max_tokens=1_000_001)


@pytest.mark.parametrize("sizes", [{"sinks": -4}, {"window": -5}])
def test_a_sample_without_so_many_tokens(sizes):
    with pytest.raises(ValueError, match="sinks and window are numbers of tokens"):
        calibrate_ratios(PARAMS, CONFIG, random_tokens(60), SNAPKV, 0.5, **sizes)


def test_the_scorers_that_are_used_are_those_of_calibration():
    """A `score` of its own counts, also where what it derives from has a kernel."""
    asked = []

    @dataclasses.dataclass(frozen=True)
    class Own(tj.scorers.SnapKV):
        def score(self, x):
            asked.append(x)
            return super().score(x)

    plan = plan_of("1.0", 2, 8)
    cache = tj.reserve(plan, new_cache(plan), ROW, np.int32(20), np.int32(0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "tangram_jax.chunk_scores.keep.window_sums", lambda *args, **kwargs: pytest.fail("asked")
        )
        step(PARAMS, CONFIG, plan, Own(), cache, chunk_of(1, random_tokens(20), 20), None)
    assert len(asked) == CONFIG.num_layers
