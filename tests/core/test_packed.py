"""Chunks of several rows in one run of tokens: each is as alone, whatever the others hold."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tangram_jax as tj
from tests.core.stepping import CONFIG, PARAMS, SNAPKV, new_cache, plan_of, prefill, random_tokens

SIZE, PLACES = 64, 3
GAUSSIAN = tj.get_scorer("expected_attention")
step = jax.jit(tj.step, static_argnums=(1, 2, 3), donate_argnums=4)


def packed(texts: dict[int, np.ndarray]) -> tj.Packed:
    """Rows and their next tokens; what is left are empty chunks."""
    empty = PLACES - len(texts)
    rows, nothing = [*texts, *[99] * empty], [np.zeros(0, np.int32)] * empty
    return tj.Packed.of(rows, [*texts.values(), *nothing], SIZE)


def started(plan, texts, begun: dict[int, int], retentions=(None, None, None)):
    """A cache with pages for `texts` of rows, the first tokens of which are in it."""
    cache = new_cache(plan)
    for row, text in texts.items():
        if plan.max_retention:
            cache = tj.set_budgets(plan, cache, np.int32(row), plan.budgets_at(retentions[row]))
        cache = tj.reserve(plan, cache, np.int32(row), np.int32(len(text)), np.int32(4))
        if begun[row]:
            _, cache = prefill(plan, cache, text[: begun[row]], begun[row], row=np.int32(row))
    return cache


def held(plan, cache, row: int) -> list[np.ndarray]:
    """Keys and values of all that the row holds; what lies behind that in its pages nobody sees."""
    lengths = plan.lengths(int(cache.tokens[row]), np.asarray(cache.budgets[row])) + int(cache.tail[row])
    first, out = cache.layout.first, []
    for group, length in enumerate(np.asarray(lengths)):
        pages = cache.table[row, first[group] : first[group] + -(-length // plan.page_size)]
        entries = np.asarray(cache.pool[pages]).transpose(1, 2, 0, 3, 4)
        out.append(entries.reshape(*entries.shape[:2], -1, CONFIG.head_dim)[:, :, :length])
    return out


@pytest.mark.parametrize("begun", [{0: 40, 1: 60, 2: 0}, {0: 40, 1: 89, 2: 3}], ids=["long", "short"])
def test_packed_chunks_are_each_as_alone(begun):
    """Beside a row that decodes, with budgets of their own: from the beginning or behind other tokens, down to one."""
    plan = plan_of("ragged", 2, 8, min_entries=12, max_retention=1.0)
    texts = {0: random_tokens(40, 1), 1: random_tokens(90, 3), 2: random_tokens(20, 2)}
    cache = started(plan, texts, begun, (None, 1.0, 0.2))
    apart = jax.tree.map(jnp.copy, cache)
    decode = tj.Decode(np.array([0, -1], np.int32), np.array([50, 7], np.int32))
    rest = {row: texts[row][begun[row] :] for row in (2, 1)}
    both, cache = step(PARAMS, CONFIG, plan, SNAPKV, cache, packed(rest), decode)
    assert both.shape[0] == PLACES + 2
    want = []
    for row, text in rest.items():
        logits, apart = prefill(plan, apart, text, len(text), row=np.int32(row))
        want += logits
    decoded, apart = step(PARAMS, CONFIG, plan, SNAPKV, apart, None, decode)
    np.testing.assert_allclose(both[jnp.array([0, 1, PLACES])], [*want, decoded[0]], atol=1e-4)
    for name in ("tail", "tokens", "table", "free", "num_free"):
        np.testing.assert_array_equal(getattr(cache, name), getattr(apart, name))
    for row in texts:
        for got, alone in zip(held(plan, cache, row), held(plan, apart, row), strict=True):
            np.testing.assert_allclose(got, alone, atol=1e-4)


def test_a_chunk_that_is_not_finite_leaves_those_packed_with_it_alone():
    plan = plan_of("ragged", 2, 8, min_entries=12)
    broken = PARAMS | {"embed": PARAMS["embed"].at[7].set(jnp.inf)}
    mine, others = random_tokens(20), np.full(30, 7, np.int32)
    out = []
    for neighbours in ({}, {1: others}):
        texts = neighbours | {0: mine}
        cache = started(plan, texts, dict.fromkeys(texts, 0))
        logits, cache = step(broken, CONFIG, plan, GAUSSIAN, cache, packed(texts), None)
        assert np.isnan(logits[0]).all() == bool(neighbours)
        again, _ = step(broken, CONFIG, plan, GAUSSIAN, cache, packed({0: mine[:9]}), None)
        out.append((logits[len(neighbours)], again[0]))
    np.testing.assert_allclose(*out, atol=1e-5)


def test_empty_chunks_of_any_number_of_no_row_write_nothing():
    plan = plan_of("ragged", 2, 8, min_entries=12)
    texts = {1: random_tokens(30)}
    _, cache = step(PARAMS, CONFIG, plan, GAUSSIAN, started(plan, texts, {1: 0}), packed(texts), None)
    before = jax.tree.map(np.array, cache)
    rows, counts = np.array([-1, 3, 2**30], np.int32), np.full(PLACES, 5, np.int32)
    empty = tj.Packed(rows, np.full(SIZE, 9, np.int32), counts)
    _, cache = step(PARAMS, CONFIG, plan, GAUSSIAN, cache, empty, None)
    for name in ("pool", "tail", "tokens", "table", "num_free"):
        np.testing.assert_array_equal(getattr(cache, name), getattr(before, name))


def test_chunks_are_placed_where_they_fit():
    text = random_tokens(20)
    packed = tj.Packed.of([1, 99], [text, text[:0]], 20)  # the empty one would begin behind all slots
    assert packed.tokens.tolist() == text.tolist() and packed.counts.tolist() == [20, 0]
    with pytest.raises(ValueError, match=r"chunks of \[9, 8\] tokens do not fit into 23 slots"):
        tj.Packed.of([1, 2], [text[:9], text[:8]], 23)
    for wrong in (
        tj.Packed.of([1, 2], [text + 0.5, text], 64),
        tj.Packed.of(np.array([True, True]), [text, text], 64),
    ):
        with pytest.raises(TypeError, match="numbers"):
            tj.step(
                PARAMS, CONFIG, plan_of("1.0", 2, 8), SNAPKV, new_cache(plan_of("1.0", 2, 8)), wrong, None
            )


def test_packed_chunks_have_no_logits_of_every_token():
    plan = plan_of("ragged", 2, 8, min_entries=12)
    with pytest.raises(ValueError, match="as a list of chunks"):
        tj.step(
            PARAMS,
            CONFIG,
            plan,
            SNAPKV,
            new_cache(plan),
            packed({0: random_tokens(9)}),
            None,
            all_logits=True,
        )


def test_several_chunks_do_not_copy_the_pool():
    """The second one's tail was read from it, which must come before the first one's write."""
    plan = plan_of("ragged", 2, 8, min_entries=12)
    cache = tj.init_cache(plan, CONFIG, num_pages=40_000, max_requests=3, max_tokens=256, max_tail=32)
    tokens = np.zeros(SIZE, np.int32)
    apart = [tj.Chunk(np.int32(row), tokens, np.int32(9)) for row in range(2)]
    rows = np.array([2], np.int32)
    for chunks in (apart, packed({0: tokens[:9], 1: tokens[:9]})):
        args = (PARAMS, CONFIG, plan, SNAPKV, cache, chunks, tj.Decode(rows, rows))
        memory = step.lower(*args).compile().memory_analysis()
        assert memory.temp_size_in_bytes < cache.pool.nbytes / 4
