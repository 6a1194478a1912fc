"""Numbers that callers give: of other types, of more bits, and more than there is."""

import jax
import numpy as np
import pytest

import tangram_jax as tj
from tests.core.stepping import CONFIG, PARAMS, ROW, SNAPKV, decode_step, new_cache, plan_of
from tests.core.test_misuse import BEYOND, TOKENS, step, with_rows


@pytest.mark.parametrize(("token", "seen"), [(2**32 + 5, 2**31 - 1), (-(2**32) + 5, -(2**31))])
def test_tokens_beyond_int32(token, seen):
    """That of their lower half was taken."""
    plan = plan_of("1.0", 2, 8)
    with pytest.raises(ValueError, match=f"token {seen} {BEYOND}"):
        tj.step(PARAMS, CONFIG, plan, SNAPKV, new_cache(plan), tj.Chunk(1, np.array([5, token]), 2), None)


@pytest.mark.parametrize("wrong", ["tokens", "rows", "counts"])
def test_what_is_no_whole_number(wrong):
    plan, given = plan_of("1.0", 2, 8), {"row": 1, "tokens": TOKENS, "valid": 8}
    name = {"rows": "row", "counts": "valid"}.get(wrong, wrong)
    chunk = tj.Chunk(**given | {name: np.asarray(given[name], np.float32)})
    with pytest.raises(TypeError, match=f"{wrong} are whole numbers, got float32: write an array of int32"):
        step(PARAMS, CONFIG, plan, SNAPKV, new_cache(plan), chunk, None)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.uint32])
def test_other_integers_of_tokens_and_tails(dtype):
    with_rings = plan_of("0.4", 2, 8, sliding=tj.SlidingLayers(2, 20, 8))
    np.testing.assert_array_equal(with_rings.group_pages(dtype(10), dtype(3)), with_rings.group_pages(10, 3))
    plan = plan_of("1.0", 2, 8)
    cache = with_rows(plan, 0)
    owned = int((cache.row(0).pages >= 0).sum())
    for function, tokens in ((tj.reserve, 23), (tj.trim, 20)):
        cache = function(plan, cache, 0, dtype(tokens), dtype(0))
        assert int((cache.row(0).pages >= 0).sum()) == owned
    for token in (5, 6):
        _, cache = decode_step(PARAMS, CONFIG, plan, cache, rows=np.array([0]), tokens=np.array([token]))
    cache = tj.rollback(plan, cache, np.array([0]), np.array([1], dtype))
    assert cache.tail.tolist() == [1, 0, 0]
    for function, *wrong in ((tj.reserve, 20.5, 1), (tj.trim, 20, True), (tj.rollback, 1.5)):
        with pytest.raises(TypeError, match="numbers, got"):
            function(plan, cache, 0, *wrong)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.uint32])
def test_other_integers(dtype):
    plan = plan_of("1.0", 2, 8)
    cache = with_rows(plan, 0, 2)
    logits = [
        decode_step(
            PARAMS,
            CONFIG,
            plan,
            jax.tree.map(jax.numpy.copy, cache),
            rows=np.array([2, 0], kind),
            tokens=np.array([100, 9], kind),
        )[0]
        for kind in (np.int32, dtype)
    ]
    np.testing.assert_array_equal(*logits)


@pytest.mark.parametrize("window", [8, 1])
def test_a_rollback_forgets_what_there_is(window):
    """The tail and the window, and not what was there before: positions stay, and pages of others are not read."""
    plan = tj.CachePlan.build(
        tj.BudgetProfile.uniform(CONFIG.num_layers, CONFIG.num_kv_heads, 1.0), 2, 8, window=window
    )
    cache = with_rows(plan, ROW)
    _, cache = decode_step(PARAMS, CONFIG, plan, cache, rows=np.array([ROW]), tokens=np.array([7]))
    for count, left in ((-4, 21), (2**31 - 1, 20 - window), (1, 20 - window)):
        cache = tj.rollback(plan, cache, np.int32(ROW), np.int32(count))
        assert int(cache.tokens[ROW] + cache.tail[ROW]) == left
    cache = tj.rollback(plan, cache, np.int32(-1), np.int32(3))  # of no row


def test_numbers_of_64_bits_are_not_cut_before_they_are_looked_at():
    """A chunk by itself as in a step: what int32 does not hold is no other number that it holds."""
    plan = plan_of("1.0", 2, 8)
    how = {"scorer": SNAPKV, "row": ROW, "tokens": np.array([5, 6]), "count": 2}
    kept = with_rows(plan, ROW)
    with pytest.raises(ValueError, match="token 2147483647 is none of model"):
        tj.prefill_chunk(PARAMS, CONFIG, plan, kept, **how | {"tokens": np.array([5, 2**32 + 6])})
    _, cache = tj.prefill_chunk(PARAMS, CONFIG, plan, kept, **how | {"row": np.int64(2**32 + 1)})
    np.testing.assert_array_equal(cache.tokens, kept.tokens)
    packed = [tj.Packed.of([1], [np.array([3, 4])], 16)]
    with pytest.raises(ValueError, match="of packed chunks only the last logits"):
        tj.step(PARAMS, CONFIG, plan, SNAPKV, kept, packed, None, all_logits=True)
