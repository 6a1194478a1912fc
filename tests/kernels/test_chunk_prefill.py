"""Chunk prefill on the CPU: the reference, the plan, and the kernel under the interpreter."""

from functools import partial

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

from pallas_kernels import chunk_prefill as cp
from pallas_kernels.chunk_prefill import columns as C
from pallas_kernels.chunk_prefill import cuts
from pallas_kernels.chunk_prefill.mosaic_gpu import chunk_prefill_mosaic_gpu
from tests.kernels.chunk_cases import Case, jitted_plan, make_case, plan_of, relative_error
from tests.one_program import in_one

SLOW = partial(pytest.param, marks=pytest.mark.slow)
TWO_REQUESTS = {"starts": [0, 24], "sizes": [19, 40]}
BEHIND = {"behind": [13, 29], "key_starts": [8, 48], "window": 30}


@pytest.mark.parametrize(
    "options",
    [{}, {"soft_cap": 20.0}, {"window": 9}, {**TWO_REQUESTS, "window": 30}, {**TWO_REQUESTS, **BEHIND}],
    ids=str,
)
def test_reference_matches_dense_float64(options):
    lengths = [[70, 33, 0], [0, 1, 128]] if "starts" in options else [[70, 33, 0]]
    case = make_case(lengths, 70, dtype=jnp.float32, **options)
    out, lse = in_one(
        cp.chunk_prefill_reference,
        case.q, case.k, case.v, case.pool, plan_of(case), scale=case.scale, soft_cap=case.soft_cap,
    )  # fmt: skip
    want, want_lse = case.expected()
    assert relative_error(out, want) < 1e-6
    np.testing.assert_allclose(lse, want_lse, atol=4e-6)


def seen_by(plan: cp.ChunkPlan) -> dict[tuple[int, int], set[tuple[str, int]]]:
    """Blocks of every tile, by (row, head), as the kernel counts them out; the masked ones marked."""
    result: dict[tuple[int, int], set[tuple[str, int]]] = {}
    taken: dict[tuple[int, int], set[tuple[str, int]]] = {}
    pieces: dict[tuple[int, int], list[int]] = {}
    (num_cut, *_), *merges = np.asarray(plan.of_layer("merges")).tolist()
    merges = merges[:num_cut]
    for tile in np.asarray(plan.of_layer("tiles"))[: int(plan.of_layer("count"))].tolist():
        where = tile[C.ROW], tile[C.HEAD]
        if tile[C.PIECES] < 0:
            pieces.setdefault(where, []).append(tile[C.PART])
            assert tile[C.MASKED] == 0
            assert where not in result  # pieces come before the tile that they are cut from
        elif tile[C.PIECES]:
            (merge,) = (row for row in merges if (row[C.MERGE_ROW], row[C.MERGE_HEAD]) == where)
            parts = [merge[C.MERGE_FIRST] + i * merge[C.MERGE_STEP] for i in range(merge[C.MERGE_PIECES])]
            assert tile[C.PIECES] == len(parts) and sorted(pieces.pop(where)) == parts
            assert tile[C.PART] == plan.most_pieces + tile[C.NUMBER] and parts[-1] < plan.most_pieces
            assert (merge[C.MERGE_END], merge[C.MERGE_NUMBER]) == (tile[C.END], tile[C.NUMBER])
        blocks = []
        whole = tile[C.LENGTH] // plan.block
        partial = int(tile[C.LENGTH] % plan.block > 0 and tile[C.PIECES] >= 0)
        if tile[C.PIECES] >= 0:
            blocks += [("own, masked", tile[C.CHUNK_LAST] - j) for j in range(tile[C.DIAGONAL])]
            edges = tile[C.MASKED] - tile[C.DIAGONAL] - partial
            blocks += [("own, masked", tile[C.CHUNK_FIRST] + j) for j in range(edges)]
        blocks += [("history, masked", whole)] * partial
        history = min(whole - tile[C.HISTORY_FIRST], tile[C.FREE])
        blocks += [("history", tile[C.HISTORY_FIRST] + j) for j in range(history)]
        blocks += [("own", tile[C.CHUNK_FREE] + j) for j in range(tile[C.FREE] - history)]
        assert len(blocks) == tile[C.MASKED] + tile[C.FREE]
        assert len(set(blocks)) == len(blocks)
        assert not set(blocks) & taken.setdefault(where, set())
        taken[where] |= set(blocks)
        if tile[C.PIECES] >= 0:
            result[where] = taken[where]
    assert not pieces
    assert len(result) == len(taken)
    return result


TILES = [*((4, window) for window in (None, 1, 100, 128, 700)), (3, None), (5, 100)]


@pytest.mark.parametrize(
    ("group", "window", "behind", "given"),
    [
        *((*tile, None, True) for tile in TILES[::2]),
        *(SLOW(*tile, None, True) for tile in TILES[1::2]),
        *(SLOW(*tile, None, False) for tile in TILES),
        *(
            (4, window, [99, 128, 0], given)
            for window, given in ((None, False), (1, True), (100, True), (700, True))
        ),
    ],
    ids=str,
)
def test_plan_names_every_block_once(group, window, behind, given):
    """Few tiles of unequal work are cut into pieces."""
    rng = np.random.default_rng(0)
    starts, sizes = ([0, 200, 208], [197, 3, 700]) if given else ([0], [900])
    lengths = rng.integers(0, 1000, (len(starts), 4)).astype(np.int32)
    lengths[0] = 0, 256, 5000, 60000
    plan = jitted_plan(
        jnp.asarray(lengths),
        jnp.zeros((len(starts), 99), jnp.int32),
        np.arange(4),
        np.zeros(4),
        q_shape=(912 if given else 900, 4, group, 128),
        page_size=16,
        starts=np.asarray(starts) if given else None,
        sizes=np.asarray(sizes) if given else None,
        window=window,
        behind=None if behind is None else np.asarray(behind[: len(starts)]),
    ).layer(0)
    got = seen_by(plan)
    want = {}
    for b, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        for at in range(0, size, plan.positions):
            query = np.arange(at, at + plan.positions)[:, None] + (behind[b] if behind else 0)
            for head in range(4):
                blocks = set()
                for j in range(-(-(int(query.max()) + 1) // plan.block)):
                    key = np.arange(j * plan.block, (j + 1) * plan.block)[None]
                    sees = (key <= query) & (query - key < (window or 1 << 30))
                    if sees.any():
                        blocks.add(("own" if sees.all() else "own, masked", j))
                n = int(lengths[b, head])
                blocks |= {("history", j) for j in range(n // plan.block)}
                blocks |= {("history, masked", n // plan.block)} if n % plan.block else set()
                want[start + at, head] = blocks
    assert got == want
    tiles = np.asarray(plan.of_layer("tiles"))[: int(plan.of_layer("count"))]
    cut = tiles[:, C.PIECES] < 0
    assert cut.any()
    for rows in (tiles[cut], tiles[~cut]):
        assert (np.diff(rows[:, C.MASKED] + rows[:, C.FREE]) <= 0).all()


@pytest.mark.parametrize(
    ("tokens", "group", "head_dim", "warpgroups"),
    [
        (8192, 8, 64, 3),
        (2048, 8, 64, 3),
        (512, 8, 64, 2),
        (8192, 16, 64, 3),
        (8192, 8, 128, 2),
        (8192, 2, 256, 2),
    ],
)
def test_warpgroups_of_a_chunk(tokens, group, head_dim, warpgroups):
    shape = tokens, 8, group, head_dim
    tuning = cp.Tuning(num_ctas=132).for_chunk(*shape)
    assert tuning.warpgroups == warpgroups
    assert tuning.for_chunk(*shape) == tuning
    threads = 128 * (warpgroups * tuning.compute_registers + tuning.load_registers)
    assert threads <= 65536 // (128 * (warpgroups + 1)) // 8 * 8 * 128 * (warpgroups + 1)


def test_plan_without_a_sort_is_the_sorted_one():
    lengths = jnp.asarray([[70, 0, 129, 5000, 5000, 128, 1, 777]])
    how = {"q_shape": (2048, 8, 4, 128), "page_size": 64, "window": 300}
    args = (lengths, jnp.zeros((1, 900), jnp.int32), np.arange(8), np.zeros(8))
    known = jitted_plan(*args, **how).layer(0)
    given = jitted_plan(*args, **how, starts=np.array([0]), sizes=np.array([2048])).layer(0)
    assert seen_by(known) == seen_by(given)
    assert (known.tiles[..., C.PIECES] == 0).all()  # too many tiles to cut any
    np.testing.assert_array_equal(known.count, given.count)


@pytest.mark.parametrize("requests", [1, 2])
def test_plan_of_all_layers_is_that_of_each(requests):
    """Also where some layers' histories are cut into pieces and others' are not."""
    lengths = np.random.default_rng(0).integers(0, 9000, (requests, 3 * 4))
    lengths[:, 4:8] = 300
    first, column = np.arange(12) * 7, np.arange(12) % 3
    table = jnp.zeros((requests, 900), jnp.int32)
    how = {"q_shape": (256, 4, 4, 128), "page_size": 64}
    together = jitted_plan(jnp.asarray(lengths), table, first, column, **how, num_layers=3)
    cut = []
    for layer in range(3):
        mine = slice(4 * layer, 4 * layer + 4)
        alone = jitted_plan(jnp.asarray(lengths[:, mine]), table, first[mine], column[mine], **how)
        for name in ("tiles", "count", "merges", "sync", "heads"):
            np.testing.assert_array_equal(together.layer(layer).of_layer(name), alone.layer(0).of_layer(name))
        cut.append(bool((alone.tiles[..., C.PIECES] > 0).any()))
    assert cut == [True, False, True]
    with pytest.raises(ValueError, match="12 heads do not divide into 5 layers"):
        jitted_plan(jnp.asarray(lengths), table, first, column, **how, num_layers=5)


@pytest.mark.parametrize(("entries", "cut"), [(1024, 0), (1025, 8)])
def test_short_histories_are_not_cut(entries, cut):
    case = make_case([[entries] * 8], 32, page_size=64)
    merges = plan_of(case, cp.Tuning(num_ctas=132)).of_layer("merges")
    assert int(merges[0, 0]) == cut


def check_interpreted(case: Case, tuning: cp.Tuning | None = None) -> None:
    tuning = tuning or cp.Tuning(num_ctas=2)
    plan = plan_of(case, tuning)
    assert tuning.num_ctas == 1 or not int(plan.of_layer("merges")[0, 0])
    out, lse = chunk_prefill_mosaic_gpu(
        case.q, case.k, case.v, case.pool, plan, scale=case.scale, soft_cap=case.soft_cap,
        tuning=tuning, interpret=plgpu.InterpretGPUParams(detect_races=True),
    )  # fmt: skip
    want, want_lse = case.expected()
    mine = ~np.isneginf(want_lse)
    assert relative_error(np.asarray(out)[mine], want[mine]) < 4e-3
    np.testing.assert_allclose(np.asarray(lse)[mine], want_lse[mine], atol=1e-4)
    assert not gpu_callbacks.get_races().races_found


@pytest.mark.slow  # by default others have a soft cap, or a window
def test_kernel_in_the_interpreter():
    check_interpreted(make_case([[70, 0]], 24, group=4, head_dim=64, soft_cap=20.0, window=9))


@pytest.mark.parametrize(
    "shape",
    [
        SLOW({"group": 3, "head_dim": 64, "page_size": 16, "heads_per_page": 1}),
        SLOW({"group": 2, "head_dim": 256, "page_size": 128, "dtype": jnp.float16}),
        {"group": 2, "head_dim": 128, "page_size": 32, "dtype": jnp.float16, "soft_cap": 20.0},
        SLOW({"group": 16, "head_dim": 128, "page_size": 32}),
        SLOW({"group": 11, "head_dim": 128, "page_size": 64}),
    ],
    ids=str,
)
def test_shapes_in_the_interpreter(shape):
    check_interpreted(make_case([[130]], 16, **shape))


@pytest.mark.slow
def test_three_places_for_blocks_in_the_interpreter():
    """Their number need be no power of two."""
    check_interpreted(make_case([[400]], 16, group=4, head_dim=64), cp.Tuning(num_ctas=1, stages=3))


@pytest.mark.slow
def test_requests_in_the_interpreter():
    check_interpreted(make_case([[129], [5]], 56, starts=[0, 8], sizes=[3, 47], group=4, head_dim=64))


@pytest.mark.slow
def test_a_window_that_hides_whole_blocks_in_the_interpreter():
    check_interpreted(make_case([[3]], 300, group=1, head_dim=64, window=20))


@pytest.mark.slow
@pytest.mark.parametrize("group", [3, 12])
def test_three_warpgroups_in_the_interpreter(group):
    case, tuning = make_case([[70]], 100, group=group, head_dim=64), cp.Tuning(num_ctas=1, larger_tile=1.0)
    assert tuning.for_chunk(100, 1, group, 64).warpgroups == 3
    check_interpreted(case, tuning)


def test_a_plan_of_other_queries_is_refused():
    tuning = cp.Tuning(num_ctas=1, larger_tile=1.0)
    plan = plan_of(make_case([[70]], 16, group=4, head_dim=64), tuning)  # of two warpgroups
    case = make_case([[70]], 100, group=4, head_dim=64)
    with pytest.raises(ValueError, match=r"not one of queries \(100, 1, 4, 64\)"):
        chunk_prefill_mosaic_gpu(case.q, case.k, case.v, case.pool, plan, scale=1.0, tuning=tuning)


@pytest.mark.slow
@pytest.mark.parametrize(("group", "behind"), [(4, 5), (5, 99)])
def test_keys_before_the_queries_in_the_interpreter(group, behind):
    """Fewer than the window shows, and as many as it shows."""
    check_interpreted(make_case([[0]], 70, group=group, head_dim=64, window=100, behind=[behind]))


def test_keys_before_those_of_requests_in_the_interpreter():
    """None, and as many as the window shows."""
    requests = {"starts": [0, 8], "sizes": [3, 15], "behind": [0, 40], "key_starts": [0, 24]}
    check_interpreted(make_case([[0], [5]], 24, group=5, head_dim=64, window=41, **requests))


@pytest.mark.slow  # the histories of several requests are cut by default
@pytest.mark.parametrize("larger_tile", [1.31, 0.0])
def test_pieces_of_a_history_in_the_interpreter(monkeypatch, larger_tile):
    """With two and three warpgroups."""
    monkeypatch.setattr(cuts, "MIN_PIECE", 1)
    monkeypatch.setattr(cuts, "CUT_FROM", 1)
    case = make_case([[400, 9]], 16, group=7, head_dim=64, page_size=64)
    tuning = cp.Tuning(num_ctas=1, larger_tile=larger_tile)
    assert (plan_of(case, tuning).tiles[..., C.PIECES] == 3).any()
    check_interpreted(case, tuning)


def test_pieces_of_the_histories_of_several_requests_in_the_interpreter(monkeypatch):
    """Of one and of two blocks of queries; a third has no tokens."""
    monkeypatch.setattr(cuts, "MIN_PIECE", 1)
    monkeypatch.setattr(cuts, "CUT_FROM", 1)
    monkeypatch.setattr(cuts, "CUT_BELOW", 4)  # tiles for the one CTA
    requests = {"starts": [0, 8, 40], "sizes": [5, 30, 0]}
    case = make_case([[390], [260], [900]], 40, group=6, head_dim=64, page_size=64, **requests)
    tuning = cp.Tuning(num_ctas=1)
    plan = plan_of(case, tuning)
    pieces = plan.tiles[0, : int(plan.of_layer("count")), C.PIECES]
    assert (pieces < 0).sum() == 3 + 2 * 2 and sorted(pieces[pieces > 0].tolist()) == [2, 2, 3]
    check_interpreted(case, tuning)


def test_without_any_history_nothing_is_cut():
    given = {"q_shape": (64, 2, 4, 128), "page_size": 16, "behind": np.array([3])}
    none, table = np.zeros((1, 2), np.int32), jnp.zeros((1, 1), jnp.int32)
    assert not cp.plan_chunk(none, table, none[0], none[0], **given).most_pieces
    assert jitted_plan(jnp.asarray(none), table, none[0], none[0], **given).most_pieces


def test_unsupported_features_are_named():
    pool = (9, 2, 1, 16, 64)
    for q_shape, pool_shape, dtype, words in [
        ((8, 1, 4, 80), (9, 2, 1, 16, 80), "bfloat16", "head dimension 80"),
        ((8, 1, 17, 64), pool, "bfloat16", "17 query heads"),
        ((8, 1, 4, 64), (9, 2, 1, 8, 64), "bfloat16", "page size 8"),
        ((8, 1, 4, 64), pool, "float32", "float32"),
        ((8, 1, 4, 64), pool, "bfloat16", "platform cpu"),
    ]:
        with pytest.raises(NotImplementedError, match=words):
            cp.check_supported(q_shape, jnp.dtype(dtype), pool_shape, jnp.dtype(dtype))
    with pytest.raises(NotImplementedError, match="a pool of bytes: unpack its pages first"):
        cp.check_supported((8, 1, 4, 64), jnp.dtype("bfloat16"), (9, 2, 1, 17, 64), jnp.dtype("uint8"))


def test_layers_share_one_kernel_text():
    """Kernels are compiled once per distinct text: all layers of a step must hold the same one."""
    case = make_case([[70, 33]], 64)

    def step(q, k, v, pool, table, lengths):
        plan = jitted_plan(
            jnp.tile(lengths, 3), table, np.tile(case.first, 3), np.tile(case.column, 3),
            q_shape=q.shape, page_size=16, num_layers=3,
        )  # fmt: skip
        for layer in range(3):
            q = q + chunk_prefill_mosaic_gpu(q, k, v, pool, plan.layer(layer), scale=0.1)[0]
        return q

    traced = jax.jit(step).trace(case.q, case.k, case.v, case.pool, case.table, case.lengths)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("kernel_hash") == 1  # one function, called by every layer


@pytest.mark.parametrize(
    ("head_dim", "group"), [SLOW(64, 1), SLOW(64, 16), SLOW(128, 5), (256, 1), SLOW(256, 16)]
)
def test_lowers_for_a_gpu(group, head_dim):
    case = make_case([[70, 33]], 70, group=group, head_dim=head_dim, page_size=64, soft_cap=30.0, window=100)

    def run(q, k, v, pool, plan):
        return chunk_prefill_mosaic_gpu(q, k, v, pool, plan, scale=0.1, soft_cap=30.0)

    traced = jax.jit(run).trace(case.q, case.k, case.v, case.pool, plan_of(case))
    assert "kernel_hash" in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.slow  # `test_steps_lower_beside_64_bit_numbers` has it by default
def test_lowers_in_a_program_of_64_bits():
    with jax.enable_x64(True):
        test_lowers_for_a_gpu(16, 64)
