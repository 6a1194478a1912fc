"""Tokens dealt to experts by one kernel on a Hopper GPU, against XLA operations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import expert_products as ep
from tests.kernels.dispatch_cases import Case

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    "how",
    [
        {"block": 8},
        {"block": 16, "absent": (), "equal": True},
        {"block": 64, "absent": (0, 3, 31), "equal": True},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "sizes",
    [
        {"tokens": 32, "experts": 128, "count": 8, "size": 2048},
        {"tokens": 128, "experts": 32, "count": 4, "size": 2880},
        {"tokens": 128, "experts": 128, "count": 8, "size": 2048, "normalize": False},
        {"tokens": 32, "experts": 32, "count": 4, "size": 2880, "parts": 15, "bias": "bfloat16"},
        {"tokens": 37, "experts": 60, "count": 5, "size": 72, "dtype": "float16"},
        {"tokens": 3, "experts": 8, "count": 2, "size": 6144},
        {"tokens": 33, "experts": 5, "count": 5, "normalize": False},
        {"tokens": 70, "experts": 100, "count": 32, "normalize": False},
    ],
    ids=str,
)
def test_is_what_xla_makes(sizes, how):
    Case(**sizes, **how).check()


@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize(
    "sizes",
    [
        {"tokens": 1, "experts": 32, "count": 4, "parts": 45, "bias": "bfloat16"},
        {"tokens": 8, "experts": 128, "count": 4, "parts": 45, "bias": "float32", "normalize": False},
        {"tokens": 4, "experts": 128, "count": 8, "parts": 32},
        {"tokens": 2, "experts": 5, "count": 2},
    ],
    ids=str,
)
def test_choice_is_what_xla_makes(sizes, equal):
    Case(**sizes, equal=equal).check_choice()


def test_logits_that_are_none():
    """Experts that are there, and the same each time."""
    x, logits = jnp.ones((6, 64), jnp.bfloat16), np.full((6, 40), np.nan, np.float32)
    logits[1, 7], logits[2] = 1.0, -np.inf
    logits[3] = -np.abs(logits[3])
    run = jax.jit(lambda: ep.dispatch(x, jnp.asarray(logits)[None], count=4, block=8, normalize=True))
    _, _, plan = run()
    assert int(plan.blocks.counts.sum()) == 6 * 4 and (plan.position < ep.num_rows(6, 4, 40)).all()
