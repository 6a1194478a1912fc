"""Ragged decode on the CPU: the reference, the plan, and the kernel under the interpreter."""

from functools import partial

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

from pallas_kernels import ragged_decode as rd
from pallas_kernels.ragged_decode import mosaic_gpu
from pallas_kernels.ragged_decode import plan as P
from pallas_kernels.ragged_decode.mosaic_gpu import ragged_decode_mosaic_gpu
from tests.kernels.ragged_cases import Case, make_case, relative_error
from tests.one_program import in_one

SLOW = partial(pytest.param, marks=pytest.mark.slow)
OPTIONS = [
    {},
    {"soft_cap": 20.0},
    {"sinks": True},
    {"new": True},
    {"soft_cap": 20.0, "sinks": True, "new": True},
    {"soft_cap": 20.0, "sinks": True, "tokens": 3},
]


def plan_of(case: Case, **how) -> rd.DecodePlan:
    return in_one(
        rd.plan_decode, jnp.asarray(case.lengths), case.table, first=case.first, column=case.column,
        page_size=case.page_size, skip=None if case.skip is None else jnp.asarray(case.skip), **how,
    ).layer(0)  # fmt: skip


def reference(case: Case) -> tuple[jax.Array, jax.Array]:
    return in_one(
        rd.ragged_decode_reference, case.q, case.pool, plan_of(case), scale=case.scale, **case.options
    )


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_reference_matches_dense_float64(options):
    case = make_case([[70, 33, 33], [0, 1, 128]], dtype=jnp.float32, **options)
    out, lse = reference(case)
    want, want_lse = case.expected()
    assert relative_error(out, want) < 1e-6
    np.testing.assert_allclose(lse, want_lse, atol=2e-6)


def test_reference_leaves_out_what_a_window_does_not_show():
    case = make_case([[70, 33, 33], [20, 16, 128]], dtype=jnp.float32, skip=[3, 15], new=True)
    out, lse = reference(case)
    want, want_lse = case.expected()
    assert relative_error(out, want) < 1e-6
    np.testing.assert_allclose(lse, want_lse, atol=2e-6)


def test_reference_of_an_empty_head_is_zero_and_minus_infinity():
    case = make_case([[0, 0, 5]])
    out, lse = reference(case)
    assert not np.asarray(out[0, :2], np.float32).any()
    assert np.isneginf(lse[0, :2]).all()


def pieces(plan: rd.DecodePlan) -> list[list[tuple[int, int, int]]]:
    """What each share holds, by NumPy: [(item, from unit, to unit)]."""
    shares, items = np.asarray(plan.shares)[0], np.asarray(plan.items)[0]
    result = []
    for row in shares:
        held = []
        if row[P.END] > row[P.START]:
            for i in range(row[P.FIRST_ITEM], row[P.LAST_ITEM] + 1):
                begin, stop = items[i, P.ITEM_BEGIN], items[i + 1, P.ITEM_BEGIN]
                held.append(
                    (
                        int(items[i, P.ITEM_NUMBER]),
                        max(row[P.START], begin) - begin,
                        min(row[P.END], stop) - begin,
                    )
                )
        result.append(held)
    return result


DIVISIONS = [
    {"num_shares": 7},
    {"num_shares": 132},
    {"splits": 3},
    {"splits": [1, 4, 2]},
    {"borders": [[0, 1, 4, 4, 14]]},
]


@pytest.mark.parametrize("how", DIVISIONS, ids=str)
def test_every_plan_covers_every_unit_once(how):
    lengths = np.array([[100, 0, 65], [33, 1, 0], [0, 0, 127]], np.int32)
    if "borders" in how:
        how = {"borders": jnp.asarray(how["borders"])}
    plan = in_one(
        rd.plan_decode,
        jnp.asarray(lengths),
        jnp.arange(120).reshape(3, 40),
        first=np.array([0, 9, 20]),
        column=np.array([0, 1, 0]),
        page_size=16,
        **how,
    ).layer(0)
    seen: dict[int, list[tuple[int, int, int]]] = {}
    for w, held in enumerate(pieces(plan)):
        for item, lo, hi in held:
            assert hi > lo
            seen.setdefault(item, []).append((w, lo, hi))
    row = np.asarray(plan.shares)[0]
    for item, length in enumerate(lengths.reshape(-1)):
        units = -(-int(length) // plan.unit)
        at = 0
        held = seen.get(item, [])
        for n, (w, lo, hi) in enumerate(held):
            assert lo == at
            assert w == held[0][0] + n  # no empty share between an item's pieces
            at = hi
            if n < len(held) - 1:
                assert row[w, P.HAND_TO] == held[-1][0]
        if len(held) > 1:
            assert row[held[-1][0], P.FIRST_SHARE] == held[0][0]
        assert at == units
    empty = np.flatnonzero(lengths.reshape(-1) == 0)
    assert (row[:, P.EMPTY] == empty.size).all()
    np.testing.assert_array_equal(np.sort(np.asarray(plan.items)[0, : empty.size, P.ITEM_EMPTY]), empty)


def test_slots_without_a_request_have_no_work():
    """No item of theirs is done, not even that of giving an empty one's output."""
    lengths = np.array([[-1, -1, -1], [100, 0, 65], [-1, -1, -1], [0, 64, 3]], np.int32)
    case = make_case(lengths, page_size=16)
    plan = plan_of(case)
    done = {item for held in pieces(plan) for item, *_ in held}
    empty = np.flatnonzero(lengths.reshape(-1) == 0)
    assert (np.asarray(plan.shares)[0, :, P.EMPTY] == empty.size).all()
    done |= set(np.asarray(plan.items)[0, : empty.size, P.ITEM_EMPTY].tolist())
    assert done == set(np.flatnonzero(lengths.reshape(-1) >= 0))


def test_small_layers_have_fewer_shares():
    """Of 128 entries, or an item's last ones, unless a number of shares was asked for."""
    lengths = jnp.full((1, 8), 300, jnp.int32)
    table = jnp.zeros((1, 9), jnp.int32)
    for page, how, full in ((64, {}, 24), (16, {}, 24), (128, {}, 24), (64, {"num_shares": 132}, 40)):
        plan = in_one(
            rd.plan_decode, lengths, table, first=np.zeros(8), column=np.zeros(8), page_size=page, **how
        )
        row = np.asarray(plan.shares)[0]
        assert (row[:, P.END] > row[:, P.START]).sum() == full


def test_equal_shares_differ_by_no_more_than_the_last():
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(7, 0.8, size=(16, 8)).astype(np.int32)
    table = jnp.zeros((16, 9), jnp.int32)
    plan = in_one(
        rd.plan_decode, jnp.asarray(lengths), table,
        first=np.zeros(8), column=np.zeros(8), page_size=64, num_shares=132, unit=64,
    ).layer(0)  # fmt: skip
    size = np.asarray(plan.shares)[0, :, P.END] - np.asarray(plan.shares)[0, :, P.START]
    total = int((-(-lengths // 64)).sum())
    assert size.sum() == total
    assert size.max() == -(-total // 132)


def test_plans_of_many_layers_are_the_layers_plans():
    rng = np.random.default_rng(1)
    lengths = rng.integers(0, 300, size=(3, 8)).astype(np.int32)
    first, column = np.arange(8, dtype=np.int32) * 20, np.arange(8, dtype=np.int32) % 2
    kwargs = dict(page_size=16, num_shares=9)
    table = jnp.asarray(rng.permutation(1200).reshape(6, 200), jnp.int32)
    rows = jnp.array([5, 0, 2])
    together = jax.jit(lambda x: rd.plan_decode(x, table, first, column, num_layers=2, rows=rows, **kwargs))(
        lengths
    )
    for layer in range(2):
        at = slice(4 * layer, 4 * layer + 4)
        alone = in_one(
            rd.plan_decode, jnp.asarray(lengths[:, at]), table,
            first=first[at], column=column[at], rows=rows, **kwargs,
        ).layer(0)  # fmt: skip
        for name in ("shares", "items", "heads", "sync"):
            np.testing.assert_array_equal(together.layer(layer).of_layer(name), alone.of_layer(name))


@pytest.mark.parametrize("options", [OPTIONS[0], SLOW(OPTIONS[3]), *OPTIONS[4:]], ids=str)
def test_kernel_in_the_interpreter(options):
    case = make_case([[70, 0, 130], [33, 1, 33]], group=4, head_dim=64, dtype=jnp.bfloat16, **options)
    check_interpreted(case, num_shares=4)


@pytest.mark.parametrize(
    "shape",
    [
        SLOW({"group": 16, "head_dim": 64, "page_size": 16}),
        {"group": 32, "head_dim": 64, "page_size": 64},
        {"group": 1, "head_dim": 256, "page_size": 64, "dtype": jnp.float16},
        {"group": 5, "head_dim": 128, "page_size": 128},
    ],
    ids=str,
)
def test_shapes_in_the_interpreter(shape):
    check_interpreted(make_case([[300, 129], [64, 65]], **shape), num_shares=3)


@pytest.mark.parametrize(
    "shape",
    [
        {"head_dim": 64, "page_size": 128, "soft_cap": 20.0, "sinks": True, "new": True},
        {"head_dim": 128, "page_size": 16, "dtype": jnp.float16, "group": 9},
        {"head_dim": 256, "page_size": 64, "skip": [5, 15], "new": True},
    ],
    ids=str,
)
def test_byte_pages_in_the_interpreter(shape):
    check_interpreted(make_case([[300, 129], [64, 65]], packed=True, **shape), num_shares=3)


@pytest.mark.parametrize(
    ("lengths", "shape"),
    [
        SLOW([[300, 129], [64, 65]], {"tokens": 2, "group": 3, "sinks": True}),
        ([[70, 0, 130], [0, 0, 0], [33, 1, 33]], {"tokens": 4, "soft_cap": 20.0}),
        SLOW([[700, 9]], {"tokens": 8, "group": 1, "head_dim": 64, "sinks": True}),
        SLOW([[300, 129], [0, 65]], {"tokens": 4, "group": 2, "head_dim": 256, "page_size": 64}),
        SLOW([[300, 129], [0, 65]], {"tokens": 8, "head_dim": 64, "dtype": jnp.float16}),
        SLOW([[300, 0], [64, 65]], {"tokens": 4, "group": 2, "page_size": 64, "packed": True}),
        ([[300, 129], [64, 65]], {"tokens": 3, "group": 4, "head_dim": 256, "packed": True, "sinks": True}),
        ([[300, 129], [64, 65]], {"tokens": 3, "head_dim": 64, "skip": [5, 15]}),
    ],
    ids=str,
)
def test_several_tokens_in_the_interpreter(lengths, shape):
    """Items that shares cut and whole ones, some without entries, queries that are no multiple of 8."""
    check_interpreted(make_case(lengths, **shape), num_shares=3)


@pytest.mark.parametrize("packed", [SLOW(False), True], ids=["float16", "bytes"])
def test_new_tokens_of_far_more_weight_in_the_interpreter(packed):
    """Some 2^40 times that of an entry, but no value: the output is that of the entries, weighed in float16."""
    case = make_case([[300, 64]], tokens=2, group=2, head_dim=64, dtype=jnp.float16, packed=packed)
    case.q = case.q.at[:, :, :2, 0].set(8).at[:, :, 2, 0].set(28).at[:, :, 3].set(0)
    assert case.expected()[1].min() > 24
    check_interpreted(case, num_shares=3)


def test_several_tokens_need_their_keys_and_values():
    case = make_case([[30, 64]], tokens=2)
    with pytest.raises(ValueError, match="has_new"):
        rd.ragged_decode(case.q, case.pool, plan_of(case), scale=0.1, tokens=2)


@pytest.mark.parametrize("page_size", [32, SLOW(128)])
def test_last_pages_are_loaded_in_part_in_the_interpreter(page_size):
    """One share, so that every slot has been full before; pages a quarter, a half, three quarters and wholly full."""
    part = page_size // 4
    lengths = [[600, 256 + part], [256 + part + 1, 2 * part + 1], [3 * part + 1, 1]]
    check_interpreted(make_case(lengths, head_dim=64, page_size=page_size), num_shares=1)


@pytest.mark.parametrize("how", [SLOW({"splits": 2}), {"splits": [1, 3]}], ids=str)
def test_divisions_in_the_interpreter(how):
    check_interpreted(make_case([[300, 129], [64, 65]], head_dim=64), **how)


def test_borders_of_the_caller_in_the_interpreter():
    """Two shares of one item, an empty one behind it, one that crosses three items, and the rest of the last."""
    case = make_case([[300, 40], [64, 65]], head_dim=64, sinks=True)
    check_interpreted(case, borders=jnp.asarray([[0, 1, 10, 10, 15, 17]]), unit=32)


@pytest.mark.parametrize("page_size", [16, SLOW(64)])
def test_windows_that_begin_within_a_page_in_the_interpreter(page_size):
    """Cut items too: only the first piece of a head has entries out of sight."""
    case = make_case([[300, 129], [64, 65]], head_dim=64, page_size=page_size, skip=[5, 15], new=True)
    check_interpreted(case, num_shares=3)


def test_layers_in_the_interpreter():
    """A call for the second layer takes that layer's rows of the plan."""
    case = make_case([[70, 33], [5, 64]], head_dim=64)
    lengths = jnp.concatenate(
        [jnp.full_like(jnp.asarray(case.lengths), 16), jnp.asarray(case.lengths)], axis=1
    )
    plan = in_one(
        rd.plan_decode, lengths, case.table, first=np.tile(case.first, 2), column=np.tile(case.column, 2),
        page_size=16, num_layers=2, num_shares=3,
    )  # fmt: skip
    check_interpreted(case, plan.layer(1))


def check_interpreted(case: Case, plan: rd.DecodePlan | None = None, **how) -> None:
    plan = plan_of(case, **how) if plan is None else plan
    out, lse = ragged_decode_mosaic_gpu(
        case.q, case.pool, plan, scale=case.scale, out_dtype=jnp.float32, **case.options,
        merge="separate", interpret=plgpu.InterpretGPUParams(detect_races=True),
    )  # fmt: skip
    want, want_lse = case.expected()
    assert relative_error(out, want) < 4e-3
    np.testing.assert_allclose(lse, want_lse, atol=2e-3)
    assert not gpu_callbacks.get_races().races_found


def test_unsupported_features_are_named():
    pool = (9, 2, 1, 16, 64)
    for q_shape, pool_shape, dtype, words in [
        ((1, 1, 4, 80), (9, 2, 1, 16, 80), "bfloat16", "head dimension 80"),
        ((1, 1, 33, 64), pool, "bfloat16", "33 query heads"),
        ((9, 1, 11, 64), pool, "bfloat16", "33 query heads"),
        ((1, 1, 4, 64), (9, 2, 1, 8, 64), "bfloat16", "page size 8"),
        ((1, 1, 4, 64), pool, "float32", "float32"),
        ((1, 1, 4, 64), pool, "bfloat16", "platform cpu"),
    ]:
        with pytest.raises(NotImplementedError, match=words):
            rd.check_supported(
                q_shape, jnp.dtype(dtype), pool_shape, jnp.dtype(dtype), tokens=max(q_shape[0] // 3, 1)
            )


@pytest.mark.parametrize(("num_shares", "slices"), [(9, 0), (132, 8), (133, 0)])
def test_ctas_wait_for_later_ones_where_all_are_on_the_device(monkeypatch, num_shares, slices):
    """There are 132 multiprocessors; with 9 shares no item can have many pieces."""
    configs = []
    monkeypatch.setattr(mosaic_gpu, "kernel_body", lambda config, *_: configs.append(config))
    case = make_case([[3000, 129]])
    plan = plan_of(case, num_shares=num_shares)
    ragged_decode = jax.jit(lambda q, pool: ragged_decode_mosaic_gpu(q, pool, plan, scale=0.777))
    ragged_decode.trace(case.q, case.pool)
    assert [config.slices for config in configs] == [slices]


def test_layers_share_one_kernel_text():
    """Kernels are compiled once per distinct text: all layers of a step must hold the same one."""
    case = make_case([[70, 33], [5, 64]])

    def step(q, pool, table, lengths):
        plan = rd.plan_decode(
            jnp.tile(lengths, (1, 3)), table, np.tile(case.first, 3), np.tile(case.column, 3),
            page_size=16, num_layers=3, num_shares=132,
        )  # fmt: skip
        for layer in range(3):
            out, _ = ragged_decode_mosaic_gpu(q, pool, plan.layer(layer), scale=0.1)
            q = q + out
        return q

    traced = jax.jit(step).trace(case.q, case.pool, case.table, case.lengths)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("kernel_hash") == 1  # one function, called by every layer


@pytest.mark.parametrize(
    ("head_dim", "group", "page_size", "options"),
    [
        SLOW(64, 1, 16, {}),
        SLOW(64, 16, 128, {"soft_cap": 20.0, "new": True}),
        SLOW(256, 1, 128, {"sinks": True}),
        SLOW(256, 16, 16, {"soft_cap": 20.0, "sinks": True, "new": True}),
        (64, 8, 64, {"sinks": True, "new": True}),  # GPT-OSS
        (256, 2, 64, {"new": True, "skip": [5, 0]}),  # Gemma 3
        SLOW(256, 16, 64, {"packed": True, "new": True}),
        SLOW(64, 8, 64, {"sinks": True, "tokens": 4}),
        SLOW(256, 2, 64, {"tokens": 8}),
        (128, 3, 16, {"packed": True, "tokens": 5, "soft_cap": 20.0, "skip": [5, 0]}),
    ],
    ids=str,
)
def test_lowers_for_a_gpu(head_dim, group, page_size, options):
    """The corners of what the kernel takes; with the slow ones each pair of them at least once."""
    case = make_case([[300, 129], [64, 0]], head_dim=head_dim, group=group, page_size=page_size, **options)

    def run(q, pool, plan, sinks):
        options = {**case.options, "sinks": sinks}
        return ragged_decode_mosaic_gpu(q, pool, plan, scale=0.1, **options)

    traced = jax.jit(run).trace(case.q, case.pool, plan_of(case), case.options.get("sinks"))
    assert "kernel_hash" in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("packed", [False, SLOW(True)])
def test_three_tokens_of_eight_heads_of_64_lower(packed):
    """24 x 64 numbers are no multiple of eight slices: it was refused while it was traced."""
    case = make_case([[3000, 129]], head_dim=64, group=8, tokens=3, packed=packed)
    plan = plan_of(case, num_shares=132)
    run = jax.jit(lambda q, pool: ragged_decode_mosaic_gpu(q, pool, plan, scale=0.1, **case.options))
    lowered = run.trace(case.q, case.pool).lower(lowering_platforms=("cuda",))
    assert "kernel_hash" in lowered.as_text()
