"""Chunk prefill on a Hopper GPU: the kernel over the grid of features, against float64 NumPy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import chunk_prefill as cp
from pallas_kernels.chunk_prefill import columns as C
from tests.kernels.chunk_cases import Case, make_case, plan_of, relative_error

pytestmark = pytest.mark.gpu

RAGGED = [[1000, 0, 377], [65, 2000, 1], [0, 0, 0], [129, 64, 5000]]
REQUESTS = {"starts": [0, 104, 112, 240], "sizes": [97, 3, 128, 60]}
TOKENS = 312


def run(case: Case, tuning: cp.Tuning = cp.DEFAULT, plan: cp.ChunkPlan | None = None):
    plan = plan or plan_of(case, tuning)
    return cp.chunk_prefill(
        case.q, case.k, case.v, case.pool, plan, scale=case.scale, soft_cap=case.soft_cap, tuning=tuning
    )


def check(case: Case, tuning: cp.Tuning = cp.DEFAULT) -> None:
    out, lse = run(case, tuning)
    assert out.dtype == case.q.dtype
    want, want_lse = case.expected()
    mine = ~np.isneginf(want_lse)
    assert relative_error(np.asarray(out)[mine], want[mine]) < 4e-3
    np.testing.assert_allclose(np.asarray(lse)[mine], want_lse[mine], atol=1e-4)
    again, lse_again = run(case, tuning)  # repeats are bit-identical
    np.testing.assert_array_equal(np.asarray(out)[mine], np.asarray(again)[mine])
    np.testing.assert_array_equal(np.asarray(lse)[mine], np.asarray(lse_again)[mine])


@pytest.mark.parametrize("options", [{}, {"soft_cap": 20.0}, {"window": 50}], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("group", [4, 5])
def test_requests_and_options(group, head_dim, options):
    check(make_case(RAGGED, TOKENS, group=group, head_dim=head_dim, **REQUESTS, **options))


@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_pages(head_dim, page_size):
    check(
        make_case(
            RAGGED,
            TOKENS,
            head_dim=head_dim,
            page_size=page_size,
            heads_per_page=4,
            dtype=jnp.float16,
            **REQUESTS,
        )
    )


@pytest.mark.parametrize("group", range(1, 17))
def test_groups(group):
    check(make_case(RAGGED, TOKENS, group=group, page_size=64, **REQUESTS))


@pytest.mark.parametrize("window", [None, 50], ids=str)
@pytest.mark.parametrize("group", [*range(1, 9), 11, 12, 16])
def test_three_warpgroups(group, window):
    tuning = dataclasses.replace(cp.DEFAULT, larger_tile=0.0)
    check(
        make_case(RAGGED, TOKENS, group=group, head_dim=64, page_size=64, window=window, **REQUESTS), tuning
    )
    if window is None:  # one request, whose history is cut
        check(make_case([[9000, 0]], 64, group=group, head_dim=64, page_size=64), tuning)


@pytest.mark.parametrize("tokens", [1, 77, 128, 1000])
def test_one_request_of_any_length(tokens):
    check(make_case([[1500, 0, 37]], tokens, page_size=64))


@pytest.mark.parametrize("window", [1, 128, 129, 600])
@pytest.mark.parametrize("group", [4, 3])
def test_windows(group, window):
    check(make_case([[600, 64]], 1000, group=group, page_size=64, window=window))


@pytest.mark.parametrize("behind", [0, 5, 127, 1023])
@pytest.mark.parametrize(("group", "head_dim"), [(2, 256), (4, 128), (3, 64)])
def test_keys_before_the_queries(group, head_dim, behind):
    check(make_case([[0, 0]], 600, group=group, head_dim=head_dim, window=1024, behind=[behind]))
    check(make_case([[0, 0]], 90, group=group, head_dim=head_dim, window=128, behind=[behind]))


def test_keys_before_the_queries_of_several_requests():
    case = {"behind": [7, 0, 49, 23], "key_starts": [0, 112, 120, 304], "window": 50}
    check(make_case(RAGGED, TOKENS, **REQUESTS, **case))


def test_a_group_that_does_not_divide_in_float16():
    check(make_case(RAGGED, TOKENS, group=7, head_dim=256, page_size=16, dtype=jnp.float16, **REQUESTS))


def test_many_tiles_for_each_cta():
    rng = np.random.default_rng(0)
    check(make_case(rng.lognormal(6, 1.0, (1, 8)), 1024, page_size=64, group=8, head_dim=64))
    check(make_case(rng.lognormal(6, 1.0, (1, 4)), 512, page_size=64), cp.Tuning(num_ctas=5))


@pytest.mark.parametrize("tokens", [30, 256])
@pytest.mark.parametrize(("group", "head_dim"), [(4, 64), (4, 128), (4, 256), (3, 64), (5, 128), (5, 256)])
def test_histories_cut_into_pieces(group, head_dim, tokens):
    """Also with a plan used again: its counters are zero after each call."""
    case = make_case([[30000, 3000, 0, 77]], tokens, group=group, head_dim=head_dim, page_size=64)
    plan = plan_of(case)
    assert int((plan.of_layer("tiles")[: int(plan.of_layer("count")), C.PIECES] < 0).sum()) > 50
    check(case)
    first, *others = (run(case, plan=plan) for _ in range(4))
    for other in others:
        for a, b in zip(first, other, strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    assert not np.asarray(plan.sync).any()


@pytest.mark.parametrize(("group", "head_dim"), [(4, 128), (5, 128), (3, 64), (2, 256)])
def test_histories_of_several_requests_cut_into_pieces(group, head_dim):
    """Of one and of several blocks of queries, with and without history, and of no tokens."""
    requests = {"starts": [0, 40, 48, 48], "sizes": [33, 5, 0, 80]}
    lengths = [[30000, 3000, 0, 77], [9000, 20000, 1, 0], [5000] * 4, [0, 0, 12000, 500]]
    case = make_case(lengths, 128, group=group, head_dim=head_dim, page_size=64, **requests)
    plan = plan_of(case)
    assert int((plan.of_layer("tiles")[: int(plan.of_layer("count")), C.PIECES] < 0).sum()) > 50
    check(case)
    first, *others = (run(case, plan=plan) for _ in range(3))
    mine = ~np.isneginf(case.expected()[1])
    for other in others:
        for a, b in zip(first, other, strict=True):
            np.testing.assert_array_equal(np.asarray(a)[mine], np.asarray(b)[mine])
    assert not np.asarray(plan.sync).any()


def test_pieces_with_options_and_several_merges_for_each_cta():
    case = make_case([[30000, 3000, 0, 77]], 256, page_size=64, window=300, soft_cap=20.0)
    check(case, cp.Tuning(num_ctas=20))
    assert int(plan_of(case, cp.Tuning(num_ctas=20)).of_layer("merges")[0, 0])


def test_pool_beyond_2_to_31_elements():
    num_pages, page, head_dim = 70_000, 64, 128
    shape = (num_pages, 2, 2, page, head_dim)
    assert np.prod(shape) > 2**31
    case = make_case([[3000, 500]], 200, page_size=page, head_dim=head_dim)
    pages = np.asarray(case.pool)
    shift = num_pages - pages.shape[0]  # the far end of the pool
    place = jax.jit(lambda x: jnp.zeros(shape, jnp.bfloat16).at[shift:].set(x))
    want, want_lse = case.expected()
    case.pool, case.table = place(case.pool), case.table + shift
    out, lse = run(case)
    assert relative_error(out, want) < 4e-3
    np.testing.assert_allclose(lse, want_lse, atol=1e-4)


def test_layers_compile_one_kernel():
    """Byte-identical kernels are compiled once by the runtime: sixteen layers take about as long as one."""
    import time

    case = make_case([[70, 33]], 64, group=2)

    def seconds(layers: int, scale: float) -> float:
        def step(q, k, v, pool, table, lengths):
            plan = cp.plan_chunk(
                jnp.tile(lengths, layers), table, np.tile(case.first, layers), np.tile(case.column, layers),
                q_shape=q.shape, page_size=16, num_layers=layers,
            )  # fmt: skip
            for layer in range(layers):
                q = q + cp.chunk_prefill(q, k, v, pool, plan.layer(layer), scale=scale)[0]
            return q

        lowered = (
            jax.jit(step)
            .trace(case.q, case.k, case.v, case.pool, case.table, jnp.asarray(case.lengths))
            .lower()
        )
        start = time.perf_counter()
        lowered.compile()
        return time.perf_counter() - start

    seconds(1, 0.1)
    one, many = seconds(1, 0.2), seconds(16, 0.3)
    print(f"compile: 1 layer {one:.2f} s, 16 layers {many:.2f} s")
    assert many < 4 * one + 4
