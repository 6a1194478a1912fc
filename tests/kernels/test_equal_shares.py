"""The equal shares of decode attention: in which order they go through the items, and where their borders are."""

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import ragged_decode as rd
from pallas_kernels.ragged_decode import plan as P
from tests.kernels import plan_cases


def test_columns_of_a_page_are_read_at_the_same_time():
    """Shares that divide by the columns have the same pages, one column each."""
    lengths = jnp.asarray([[700, 700, 90, 90], [33, 33, 0, 0], [1, 1, 512, 512]])
    first, column = np.array([0, 0, 50, 50]), np.array([1, 0, 0, 1])
    plan = rd.plan_decode(
        lengths, jnp.arange(300).reshape(3, 100), first, column, page_size=16, num_shares=14
    )
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


@pytest.mark.parametrize("case", plan_cases.CASES)
def test_the_kernel_makes_the_same_plan(case):
    plan_cases.compare(case, interpret=plgpu.InterpretGPUParams(detect_races=True))
