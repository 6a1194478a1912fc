"""Ragged decode on a Hopper GPU: the kernel over the grid of features, against float64 NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import ragged_decode as rd
from tests.kernels import plan_cases
from tests.kernels.ragged_cases import Case, make_case, relative_error

pytestmark = pytest.mark.gpu

SKEWED = [[1000, 377, 377, 0], [65, 2000, 2000, 129], [0, 0, 0, 0], [1, 64, 64, 5000]]
OPTIONS = [
    {},
    {"soft_cap": 20.0},
    {"sinks": True},
    {"new": True},
    {"soft_cap": 20.0, "sinks": True, "new": True},
]


def plan_of(case: Case, **how) -> rd.DecodePlan:
    return rd.plan_decode(
        jnp.asarray(case.lengths), case.table, case.first, case.column,
        page_size=case.page_size, skip=None if case.skip is None else jnp.asarray(case.skip), **how,
    ).layer(0)  # fmt: skip


def run(case: Case, plan: rd.DecodePlan | None = None, out_dtype=jnp.float32):
    plan = plan_of(case) if plan is None else plan
    return rd.ragged_decode(case.q, case.pool, plan, scale=case.scale, out_dtype=out_dtype, **case.options)


def check(case: Case, **how) -> None:
    plan = plan_of(case, **how)
    out, lse = run(case, plan)
    want, want_lse = case.expected()
    assert relative_error(out, want) < 4e-3
    np.testing.assert_allclose(lse, want_lse, atol=2e-3)
    again, lse_again = run(case, plan)  # the counters are back at zero, and repeats are bit-identical
    np.testing.assert_array_equal(out, again)
    np.testing.assert_array_equal(lse, lse_again)
    assert not np.asarray(plan.sync).any()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_options(head_dim, options):
    check(make_case(SKEWED, head_dim=head_dim, **options))


@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_pages(head_dim, page_size):
    case = make_case(SKEWED, head_dim=head_dim, page_size=page_size, heads_per_page=4, dtype=jnp.float16)
    check(case)
    check(case, num_shares=2)  # many tiles each: last pages are loaded as far as they are filled


@pytest.mark.parametrize("group", [*range(1, 17), 20, 24, 32])
def test_groups(group):
    check(make_case(SKEWED, group=group, page_size=64, sinks=True, new=True))


@pytest.mark.parametrize("page_size", [16, 128])
@pytest.mark.parametrize("group", [1, 2, 8, 16, 32])
@pytest.mark.parametrize("head_dim", [64, 256])
def test_groups_of_other_heads(head_dim, group, page_size):
    """GPT-OSS has 8 queries of 64 for a KV head, Gemma 3 two of 256."""
    check(make_case(SKEWED, head_dim=head_dim, group=group, page_size=page_size, sinks=True, new=True))


@pytest.mark.parametrize(
    "how", [{"splits": 4}, {"splits": [1, 7, 2, 3]}, {"num_shares": 5}, {"num_shares": 300}], ids=str
)
def test_divisions(how):
    check(make_case(SKEWED), **how)


@pytest.mark.parametrize("packed", [False, True], ids=["bfloat16", "bytes"])
@pytest.mark.parametrize("group", [4, 16, 24, 32])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_many_pieces(head_dim, group, packed):
    """Put together by several CTAs; the last one with other items in its share, or alone with its piece."""
    if packed:
        group = min(group, rd.max_queries(head_dim, jnp.uint8))
    lengths = [[9000, 2500, 40, 3000]]
    case = make_case(
        lengths, head_dim=head_dim, group=group, page_size=64, sinks=True, new=True, packed=packed
    )
    check(case)
    check(case, num_shares=40)
    check(case, splits=33)


# Tokens, query heads of a KV head, head dimension: all that fills 32 queries or leaves columns empty.
TOKENS = [(2, 4, 128), (4, 4, 128), (8, 4, 128), (3, 5, 128), (3, 8, 64), (4, 1, 64), (4, 8, 64), (8, 4, 64), (16, 2, 64),
          (4, 2, 256), (8, 2, 256), (8, 4, 256)]  # fmt: skip


def case_of_tokens(lengths, tokens, group, head_dim, packed, **how) -> Case:
    """As many of the tokens as byte pages take."""
    if packed:
        tokens = min(tokens, rd.max_queries(head_dim, jnp.uint8) // group)
    return make_case(lengths, tokens=tokens, group=group, head_dim=head_dim, packed=packed, **how)


@pytest.mark.parametrize("packed", [False, True], ids=["bfloat16", "bytes"])
@pytest.mark.parametrize(("tokens", "group", "head_dim"), TOKENS, ids=str)
def test_several_tokens(tokens, group, head_dim, packed):
    """Whole items, cut ones, and those of a request without entries."""
    case = case_of_tokens(SKEWED, tokens, group, head_dim, packed, page_size=64)
    check(case)
    check(case, num_shares=2)
    check(case, splits=4)


@pytest.mark.parametrize("packed", [False, True], ids=["bfloat16", "bytes"])
@pytest.mark.parametrize(("tokens", "group", "head_dim"), TOKENS, ids=str)
def test_several_tokens_over_many_pieces(tokens, group, head_dim, packed):
    case = case_of_tokens([[9000, 2500, 40, 3000]], tokens, group, head_dim, packed, page_size=64, sinks=True)
    check(case)
    check(case, num_shares=40)
    check(case, splits=33)


@pytest.mark.parametrize("packed", [False, True], ids=["16 bits", "bytes"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("options", [*OPTIONS[1:3], {"soft_cap": 20.0, "sinks": True}], ids=str)
def test_several_tokens_options(options, dtype, packed):
    check(make_case(SKEWED, tokens=4, dtype=dtype, packed=packed, **options))
    check(make_case(SKEWED, tokens=4, dtype=dtype, packed=packed, skip=[0, 15, 0, 0], **options))


def test_several_tokens_as_the_reference():
    """Both in bfloat16, and requests one after another."""
    case = make_case([[300, 65, 65, 0], [0, 0, 0, 0], [64, 2000, 2000, 1]], tokens=4, page_size=64)
    out, lse = run(case, out_dtype=None)
    want, want_lse = rd.ragged_decode_reference(
        case.q, case.pool, plan_of(case), scale=case.scale, **case.options
    )
    assert out.dtype == want.dtype == jnp.bfloat16
    assert out.shape == want.shape == (12, 4, 4, 128)
    assert relative_error(out, np.asarray(want, np.float64)) < 6e-3
    np.testing.assert_allclose(lse, want_lse, atol=2e-3)


def test_borders_of_the_caller():
    """Of units of 32 entries: heads hold 32, 12, 12, 0 of the first request, 3, 63, 63, 5, none, and 1, 2, 2, 157."""
    borders = jnp.asarray([[0, 1, 32, 32, 58, 130, 190, 195, 200, 340, 351, 352]])
    assert borders[0, -1] == sum(-(-length // 32) for row in SKEWED for length in row)
    check(make_case(SKEWED, new=True), borders=borders, unit=32)


@pytest.mark.parametrize("batch", [1, 7, 64])
def test_batches(batch):
    rng = np.random.default_rng(batch)
    lengths = np.repeat(rng.lognormal(6, 1.0, size=(batch, 4)).astype(np.int32), 2, axis=1)
    lengths[rng.random(batch) < 0.2] = 0
    check(make_case(lengths, page_size=32, new=True))


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_windows_that_begin_within_a_page(head_dim, page_size):
    lengths = [[1000] * 4, [65] * 4, [0] * 4, [1040] * 4, [16] * 4]
    case = make_case(lengths, head_dim=head_dim, page_size=page_size, skip=[15, 0, 0, 9, 15], new=True)
    check(case)
    check(case, num_shares=3)


@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_byte_pages(head_dim, page_size):
    case = make_case(SKEWED, head_dim=head_dim, page_size=page_size, heads_per_page=4, new=True, packed=True)
    check(case)
    check(case, num_shares=2)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("group", [1, 5, 8, 16])
def test_byte_pages_options(group, options):
    dtype = jnp.float16 if group == 5 else jnp.bfloat16
    check(make_case(SKEWED, group=group, page_size=64, packed=True, dtype=dtype, **options))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_byte_pages_of_windows(head_dim):
    lengths = [[1000] * 4, [65] * 4, [0] * 4, [1040] * 4, [16] * 4]
    case = make_case(lengths, head_dim=head_dim, page_size=64, skip=[15, 0, 0, 9, 15], new=True, packed=True)
    check(case, num_shares=3)


def test_output_dtype_follows_the_queries():
    case = make_case(SKEWED)
    out, _ = run(case, out_dtype=None)
    assert out.dtype == jnp.bfloat16
    assert relative_error(out, case.expected()[0]) < 6e-3


@pytest.mark.parametrize("packed", [False, True], ids=["bfloat16", "bytes"])
def test_pool_beyond_2_to_31_elements(packed):
    num_pages, page, head_dim = 70_000, 64, 128
    case = make_case([[3000, 3000], [500, 500]], page_size=page, head_dim=head_dim, packed=packed)
    assert num_pages * case.pool[0].size > 2**31
    shift = num_pages - case.pool.shape[0]  # the far end of the pool
    place = jax.jit(lambda x: jnp.zeros((num_pages, *x.shape[1:]), x.dtype).at[shift:].set(x))
    want = case.expected()[0]
    case.pool, case.table = place(case.pool), case.table + shift
    out, _ = run(case)
    assert relative_error(out, want) < 4e-3


def test_each_layer_reads_its_own_plan():
    """The layers of one step have different lengths and places; all go through one kernel."""
    cases = [make_case(np.asarray(SKEWED) // (n + 1), page_size=64, seed=n) for n in range(3)]
    most = max(case.table.shape[1] for case in cases)
    pages, tables, first = 0, [], []
    for n, case in enumerate(cases):  # one pool and one table for the three
        tables.append(np.pad(np.asarray(case.table) + pages, ((0, 0), (0, most - case.table.shape[1]))))
        first.append(case.first + n * most)
        pages += case.pool.shape[0]
    pool = jnp.concatenate([case.pool for case in cases])
    table = jnp.asarray(np.concatenate(tables, axis=1))
    column = np.concatenate([case.column for case in cases])

    @jax.jit
    def step(q, pool, table, lengths):
        plan = rd.plan_decode(lengths, table, np.concatenate(first), column, page_size=64, num_layers=3)
        return [rd.ragged_decode(q[n], pool, plan.layer(n), scale=cases[n].scale)[0] for n in range(3)]

    lengths = jnp.concatenate([jnp.asarray(case.lengths) for case in cases], axis=1)
    for _ in range(2):
        for case, out in zip(cases, step([case.q for case in cases], pool, table, lengths), strict=True):
            assert relative_error(out, case.expected()[0]) < 6e-3


def test_layers_compile_one_kernel():
    """Byte-identical kernels are compiled once by the runtime: eight layers take about as long as one."""
    import time

    case = make_case([[70, 33], [5, 64]], group=7)

    def step(layers: int, scale: float):
        def run(q, pool, table, lengths):
            plan = rd.plan_decode(
                jnp.tile(lengths, (1, layers)), table, np.tile(case.first, layers), np.tile(case.column, layers),
                page_size=16, num_layers=layers,
            )  # fmt: skip
            for layer in range(layers):
                q = q + rd.ragged_decode(q, pool, plan.layer(layer), scale=scale)[0]
            return q

        lowered = jax.jit(run).trace(case.q, case.pool, case.table, jnp.asarray(case.lengths)).lower()
        start = time.perf_counter()
        lowered.compile()
        return time.perf_counter() - start

    step(1, 0.1)
    one, many = step(1, 0.2), step(16, 0.3)
    print(f"compile: 1 layer {one:.2f} s, 16 layers {many:.2f} s")
    assert many < 4 * one + 2


@pytest.mark.parametrize("case", [*plan_cases.CASES, (128, 3, 8, 9000, None), (500, 2, 8, 9000, None)])
def test_plans_are_those_of_xla(case):
    plan_cases.compare(case)
