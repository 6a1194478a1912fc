"""The equal shares of decode attention: in which order they go through the items, and where their borders are."""

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import ragged_decode as rd
from pallas_kernels.ragged_decode import plan as P
from tests.kernels import plan_cases
from tests.one_program import in_one


def test_columns_of_a_page_are_read_at_the_same_time():
    """Shares that divide by the columns have the same pages, one column each."""
    lengths = jnp.asarray([[700, 700, 90, 90], [33, 33, 0, 0], [1, 1, 512, 512]])
    first, column = np.array([0, 0, 50, 50]), np.array([1, 0, 0, 1])
    plan = in_one(
        rd.plan_decode, lengths, jnp.arange(300).reshape(3, 100),
        first=first, column=column, page_size=16, num_shares=14,
    )  # fmt: skip
    one, other = np.split(np.asarray(plan.shares)[0], 2)
    assert (one[:, P.COLUMN] == 0).all() and (other[:, P.COLUMN] == 1).all()
    np.testing.assert_array_equal(one[:, [P.LENGTH, P.OFFSET]], other[:, [P.LENGTH, P.OFFSET]])
    np.testing.assert_array_equal(one[:, P.FIRST_PAGES :], other[:, P.FIRST_PAGES :])


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("total", [*range(9), 18, 31, 100])
def test_shares_differ_by_a_unit_and_empty_ones_are_the_last(total, parts):
    """A piece of an item behind an empty share would not be put together with the others."""
    sizes = np.diff(P.equal_borders(jnp.array([total]), num_shares=9, least=2, parts=parts)[0])
    used = sizes[: np.count_nonzero(sizes)]
    assert used.sum() == total
    assert np.ptp(used) <= 1 if used.size else total == 0
    assert sizes.max() <= max(-(-total // 9), 2)


@pytest.mark.parametrize("heads_per_page", [1, 4])
def test_no_share_has_parts_of_two_items_if_there_is_room(heads_per_page):
    lengths = (
        np.random.default_rng(0).integers(1, 900, (3, 8 // heads_per_page)).repeat(heads_per_page, axis=1)
    )
    first, column = np.arange(8) // heads_per_page * 64, np.arange(8) % heads_per_page
    plan = in_one(
        rd.plan_decode, jnp.asarray(lengths), jnp.zeros((3, 512), jnp.int32),
        first=first, column=column, page_size=16,
    )  # fmt: skip
    shares = np.asarray(plan.shares)[0]
    used = shares[shares[:, P.END] > shares[:, P.START]]
    assert len(used) == (-(-lengths // P.LEAST_SHARE)).sum() <= plan.num_shares
    assert (used[:, P.FIRST_ITEM] == used[:, P.LAST_ITEM]).all()


def test_pieces_are_not_made_whole_where_shares_run_out():
    lengths = jnp.full((40, 8), 130)  # two shares each, were each whole
    plan = in_one(
        rd.plan_decode, lengths, jnp.zeros((40, 160), jnp.int32),
        first=np.arange(8) * 20, column=np.zeros(8), page_size=16,
    )  # fmt: skip
    np.testing.assert_array_equal(plan.items[0, :4, P.ITEM_BEGIN], [0, 5, 10, 15])


FEW, MANY, NONE, ONE, WHOLE = plan_cases.CASES


@pytest.mark.parametrize(
    "case", [FEW, *(pytest.param(case, marks=pytest.mark.slow) for case in (MANY, NONE, ONE)), WHOLE]
)
def test_the_kernel_makes_the_same_plan(case):
    plan_cases.compare(case, interpret=plgpu.InterpretGPUParams(detect_races=True))
