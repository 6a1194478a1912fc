"""Products with the weights of experts on the CPU: the plan, the reference, and the kernel under the interpreter."""

import dataclasses
from functools import partial

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

from pallas_kernels import expert_products as ep
from pallas_kernels.expert_products.mosaic_gpu import expert_products_mosaic_gpu
from pallas_kernels.expert_products.packed_gpu import packed_products_mosaic_gpu
from pallas_kernels.expert_products.tuning import (
    FEW,
    FP8_FEW,
    FP8_MANY,
    FP8_SOME,
    MANY,
    NARROW_MANY,
    PACKED_FEW,
    PACKED_MORE,
    PACKED_SOME,
)
from tests.kernels.expert_cases import Case, make_case, random_rows, relative_error
from tests.one_program import in_one

plan_experts = jax.jit(ep.plan_experts, static_argnums=(1, 2))
SLOW = partial(pytest.param, marks=pytest.mark.slow)
PACKED = {"packed": "mxfp4", "like_gpt_oss": True}
DIRECT = {"bfloat16": {}, "packed, shared experts": PACKED | {"busy": 3}, "FP8": {"packed": "fp8", "busy": 3}}


@settings(max_examples=20)
@given(st.data())
def test_plan(data):
    """Every token's row belongs to its expert's blocks, and no two blocks have a row in common."""
    num_experts = data.draw(st.sampled_from([1, 3, 8]))
    per_token = data.draw(st.integers(1, min(num_experts, 3)))
    tokens = data.draw(st.sampled_from([1, 2, 7, 40, 300]))
    block = data.draw(st.sampled_from([8, 64]))
    experts = make_case(
        tokens, per_token, num_experts, busy=data.draw(st.integers(per_token, num_experts))
    ).experts
    experts[data.draw(st.lists(st.integers(0, tokens - 1), max_size=tokens))] = num_experts  # of no expert
    there = experts < num_experts
    plan = jax.tree.map(np.asarray, plan_experts(experts, num_experts, block))
    assert not plan.position[~there].any()
    position, token = plan.position[there], plan.token
    assert len(np.unique(position)) == position.size and (position < len(token)).all()
    assert len(token) == ep.num_rows(tokens, per_token, num_experts)
    np.testing.assert_array_equal(token[position], np.nonzero(there)[0])
    np.testing.assert_array_equal(plan.blocks.counts, np.bincount(experts[there], minlength=num_experts))
    owner = np.full(len(token), -1)
    for number in range(int(plan.blocks.total())):
        expert, row, rows = (int(x) for x in plan.blocks.place(number, block))
        assert 0 < rows <= block and rows % 8 == 0 and row % 8 == 0
        assert (owner[row : row + rows] == -1).all() and row + rows <= len(token)
        owner[row : row + rows] = expert
    np.testing.assert_array_equal(owner[position], experts[there])
    assert int(plan.blocks.total()) <= len(plan.blocks.expert)


def test_plans_of_64_bits_are_of_32():
    with jax.enable_x64(True):
        for plan in (
            ep.plan_experts(np.zeros((5, 2), np.int32), 4, 8),
            ep.plan_directly(np.zeros((5, 2), np.int32)),
        ):
            assert {x.dtype for x in jax.tree.leaves(plan) if isinstance(x, jax.Array)} == {
                jnp.dtype(jnp.int32)
            }


@settings(max_examples=25)
@given(st.lists(st.booleans(), min_size=1, max_size=6), st.integers(1, 3))
def test_direct_plan(there, per_token):
    """Every row of a token that is there is a block, at its place, and there are no others."""
    experts = make_case(len(there), per_token, 5).experts
    for given_there in (there, None) if all(there) else (there,):
        blocks = ep.plan_directly(experts, None if given_there is None else np.array(there)).blocks
        found = [blocks.place(np.int32(n), 8) for n in range(int(blocks.total()))]
        live = np.flatnonzero(there)
        assert [int(expert) for expert, _, _ in found] == list(experts[live].ravel())
        assert [int(blocks.token(row)) for _, row, _ in found] == list(live.repeat(per_token))
        rows = live[:, None] * per_token + np.arange(per_token)
        assert [(int(row), rows) for _, row, rows in found] == [(8 * row, 8) for row in rows.ravel()]
        tiles = [blocks.tile(np.int32(n), 3) for n in range(3 * len(found))]
        assert sorted((int(b), int(c)) for b, c in tiles) == [
            (b, c) for b in range(len(found)) for c in range(3)
        ]


def plan_of(case: Case, block: int) -> ep.ExpertPlan:
    plan = in_one(ep.plan_experts, jnp.asarray(case.experts), num_experts=case.num_experts, block=block)
    return plan._replace(block=block)


@pytest.mark.parametrize(
    ("block", "options"),
    [
        (8, {}),
        SLOW(64, {}),
        SLOW(8, {"busy": 3}),
        (64, {"busy": 3}),
        (8, {"like_gpt_oss": True}),
        SLOW(64, {"like_gpt_oss": True}),
        SLOW(8, {"packed": "mxfp4"}),
        (64, {"packed": "mxfp4"}),
        (8, {"packed": "fp8", "like_gpt_oss": True}),
        SLOW(64, {"packed": "fp8", "like_gpt_oss": True}),
    ],
    ids=str,
)
def test_reference(block, options):
    case = make_case(150, 3, 6, **options)
    plan = plan_of(case, block)
    out = case.products(ep.expert_products_reference, plan)
    assert relative_error(out, case.expected()) < 1e-5


@pytest.mark.parametrize(
    "options", [{}, {"busy": 3}, {"like_gpt_oss": True}, {"packed": "mxfp4"}, {"packed": "fp8"}], ids=str
)
def test_reference_of_a_direct_plan(options):
    case = make_case(4, 3, 6, **options)
    there = np.array([False, True, False, True])
    out = case.products(ep.expert_products_reference, ep.plan_directly(jnp.asarray(case.experts), there))
    assert relative_error(out[there], case.expected()[there]) < 1e-5


@pytest.mark.parametrize(
    ("tuning", "sizes", "options"),
    [
        (dataclasses.replace(FEW, num_ctas=2, stages=3), (5, 2, 4, 128, 192), {}),
        (dataclasses.replace(FEW, num_ctas=2, stages=2), (80, 1, 2, 64, 64), {}),
        (dataclasses.replace(MANY, num_ctas=3, stages=2), (100, 2, 3, 128, 128), {}),
        (dataclasses.replace(MANY, num_ctas=3, stages=2), (40, 2, 3, 128, 128), {"like_gpt_oss": True}),
        (dataclasses.replace(PACKED_FEW, num_ctas=2), (5, 2, 4, 192, 128), PACKED),
        SLOW(dataclasses.replace(PACKED_FEW, num_ctas=2, deep=1), (3, 2, 4, 192, 320), PACKED),
        pytest.param(
            dataclasses.replace(PACKED_MORE, num_ctas=2), (40, 2, 3, 128, 128), PACKED, marks=pytest.mark.slow
        ),
        pytest.param(
            dataclasses.replace(FP8_SOME, num_ctas=2),
            (5, 2, 4, 192, 128),
            {"packed": "fp8"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            dataclasses.replace(FP8_FEW, num_ctas=2),
            (3, 2, 4, 192, 320),
            PACKED | {"packed": "fp8"},
            marks=pytest.mark.slow,
        ),
        (
            dataclasses.replace(FP8_FEW, num_ctas=2, rows=24, warpgroups=2),
            (40, 2, 3, 128, 128),
            {"packed": "fp8"},
        ),
        (dataclasses.replace(FP8_MANY, num_ctas=2), (150, 2, 3, 256, 128), {"packed": "fp8"}),
    ],
    ids=[
        "few rows",
        "one expert",
        "two warpgroups",
        "biases and a limit",
        "packed",
        "packed, steps of a tile",
        "packed, warpgroups",
        "FP8",
        "FP8, longer steps",
        "FP8, warpgroups",
        "FP8, many rows",
    ],
)
def test_kernel_in_the_interpreter(tuning, sizes, options):
    case = make_case(*sizes, dtype=jnp.float16, **options)
    plan = plan_of(case, tuning.rows)
    kernel = packed_products_mosaic_gpu if "packed" in options else expert_products_mosaic_gpu
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    out = case.products(kernel, plan, tuning=tuning, interpret=interpret)
    assert relative_error(out, case.expected()) < 2e-3
    assert not gpu_callbacks.get_races().races_found


@pytest.mark.parametrize(
    ("changes", "sizes", "options"),
    [
        ({}, (150, 2, 3, 256, 128), {}),
        SLOW({"rows": 64}, (70, 2, 3, 384, 128), {"like_gpt_oss": True}),
        pytest.param(
            {"rows": 64, "warpgroups": 1, "deep": 4},
            (40, 2, 3, 192, 256),
            {"busy": 2},
            marks=pytest.mark.slow,
        ),
        pytest.param({"rows": 16, "warpgroups": 1}, (20, 2, 3, 320, 128), {}, marks=pytest.mark.slow),
    ],
    ids=["many rows", "biases and a limit", "odd depth", "few rows"],
)
def test_kernel_for_rows_in_fp8_in_the_interpreter(changes, sizes, options):
    tuning = dataclasses.replace(NARROW_MANY, num_ctas=2, **changes)
    case = make_case(*sizes, packed="fp8", **options)
    plan = plan_of(case, tuning.rows)
    how = {
        "tuning": tuning,
        "dtype": jnp.float16,
        "interpret": plgpu.InterpretGPUParams(detect_races=True),
    }
    assert max(case.errors_in_fp8(packed_products_mosaic_gpu, plan, **how)) < 1e-3
    assert not gpu_callbacks.get_races().races_found


@pytest.mark.parametrize(
    ("there", "kind"),
    [
        *(([True, False, True, True], kind) for kind in DIRECT),
        *(([False] * 2, kind) for kind in ("bfloat16", "FP8")),
        SLOW([False] * 2, "packed, shared experts"),
        *(SLOW(there, kind) for there in ([True], [True, False], [False, True, True]) for kind in DIRECT),
    ],
    ids=str,
)
def test_kernel_of_a_direct_plan_in_the_interpreter(there, kind):
    """Also of tokens between which some are not there, and of experts that several tokens have."""
    options = DIRECT[kind]
    tuning = dataclasses.replace(PACKED_FEW if options else FEW, num_ctas=3)
    case = make_case(len(there), 2, 5, 192, 128, dtype=jnp.float16, **options)
    there = np.array(there)
    absent = case.x.at[np.flatnonzero(~there)].set(np.nan)
    case = dataclasses.replace(case, x=absent)
    plan = ep.plan_directly(jnp.asarray(case.experts), jnp.asarray(there))
    kernel = packed_products_mosaic_gpu if options else expert_products_mosaic_gpu
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    out = case.products(kernel, plan, tuning=tuning, interpret=interpret)
    if there.any():
        assert relative_error(out[there], case.expected()[there]) < 2e-3
    assert not gpu_callbacks.get_races().races_found


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize(
    ("options", "one", "few"),
    [({}, FEW, FEW), (PACKED, PACKED_FEW, PACKED_SOME), ({"packed": "fp8"}, FP8_FEW, FP8_SOME)],
    ids=["bfloat16", "packed", "FP8"],
)
def test_lowers_for_a_gpu(options, one, few, direct):
    case = make_case(3, 2, 5, 256, 256, dtype=jnp.bfloat16, **options)
    tuning = one if direct else few
    kernel = packed_products_mosaic_gpu if options else expert_products_mosaic_gpu
    plan = (
        ep.plan_directly(jnp.asarray(case.experts))
        if direct
        else ep.plan_experts(jnp.asarray(case.experts), case.num_experts, tuning.rows)
    )
    traced = jax.jit(lambda x: dataclasses.replace(case, x=x).products(kernel, plan, tuning=tuning)).trace(
        case.x
    )
    assert traced.lower(lowering_platforms=("cuda",)).as_text().count("kernel_hash") == 2


def test_where_a_direct_plan_is_worth_it():
    """One request with an empty slot always; four tokens that are unlikely to share experts, but for MXFP4."""
    assert ep.goes_directly(2, 2, 8) and ep.goes_directly(4, 8, 128)
    assert not ep.goes_directly(8, 8, 128) and not ep.goes_directly(4, 4, 32)


@pytest.mark.parametrize(
    ("count", "size", "dtype"), [(6, 384, "float16"), (9, 264, "float16"), (3, 16, "float8_e4m3fn")]
)
def test_rows_in_the_interpreter(count, size, dtype):
    x, rows = random_rows(count, size, dtype)
    found = ep.gather_rows(x, rows, interpret=plgpu.InterpretGPUParams(detect_races=True))
    np.testing.assert_array_equal(found, x[rows])
    assert not gpu_callbacks.get_races().races_found


def test_what_is_not_supported():
    with pytest.raises(
        NotImplementedError, match="experts of float32: the kernel takes bfloat16 and float16"
    ):
        ep.check_supported("float32", "float32", (4, 64, 2, 64))
    with pytest.raises(NotImplementedError, match="float16 for rows of bfloat16"):
        ep.check_supported("bfloat16", "float16", (4, 64, 2, 64))
    with pytest.raises(
        NotImplementedError, match="experts of 64 x 96: the kernel takes multiples of 64 and 64"
    ):
        ep.check_supported("bfloat16", "bfloat16", (4, 64, 2, 96))
    with pytest.raises(
        NotImplementedError, match="rows of float16 for packed experts: the kernel takes bfloat16"
    ):
        ep.check_supported("float16", "int32", (4, 2, 1, 1, 17, 32))
    for weights in (("bfloat16", (4, 64, 2, 64)), (jnp.int32, (4, 2, 1, 1, 17, 32))):
        for dtype in ("bfloat16", jnp.bfloat16):
            with pytest.raises(NotImplementedError, match="platform cpu"):
                ep.check_supported(dtype, *weights)


def test_a_plan_for_other_blocks_is_refused():
    case = make_case(4, 1, 2, dtype=jnp.float16)
    plan = plan_of(case, 8)
    with pytest.raises(ValueError, match="a plan for blocks of 8 rows, expected 64"):
        expert_products_mosaic_gpu(case.x[plan.token], case.gate_up, plan, tuning=FEW)
    case = make_case(4, 1, 2, dtype=jnp.bfloat16, packed="mxfp4")
    with pytest.raises(ValueError, match="a plan for blocks of 8 rows, expected 16"):
        packed_products_mosaic_gpu(case.x[plan.token], case.gate_up, plan, tuning=PACKED_SOME)
    with pytest.raises(ValueError, match="a plan for blocks of 8 rows, expected 16"):
        packed_products_mosaic_gpu(case.x, case.gate_up, ep.plan_directly(case.experts), tuning=PACKED_SOME)
