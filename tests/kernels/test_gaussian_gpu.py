"""The Gaussian model of queries on a Hopper GPU, against float64 NumPy and the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import gaussian
from tests.kernels.gaussian_cases import gaussian_error, make_gaussian

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    "options",
    [
        {"count": 100},
        {
            "chunk": 2048,
            "capacity": 320,
            "kv_heads": 4,
            "group": 8,
            "head_dim": 128,
            "unlocked": (0, 64, 320),
        },
        {"chunk": 1024, "capacity": 320, "kv_heads": 4, "group": 5, "count": 999},
        {"chunk": 512, "capacity": 104, "kv_heads": 2, "group": 4, "head_dim": 256, "dtype": jnp.float16},
        {"chunk": 4096, "kv_heads": 1, "group": 2, "head_dim": 256},
        {"chunk": 32, "capacity": 288, "head_dim": 128, "group": 1, "count": 31, "dtype": jnp.float16},
        {"chunk": 8, "head_dim": 64, "count": 3},
        {"chunk": 512, "kv_heads": 4, "head_dim": 128, "chunks": ((0, 60), (64, 300), (368, 0), (368, 144))},
        {"chunk": 128, "head_dim": 256, "chunks": ((0, 1), (8, 0), (8, 64), (72, 56))},
        {"chunk": 64, "chunks": ((0, 40), (40, 24), (64, 0))},
    ],
    ids=str,
)
def test_gaussian_logits(options):
    case = make_gaussian(**options)
    got = gaussian.gaussian_logits(*case.arrays, **case.options)
    error, norm_error = gaussian_error(got, case)
    assert error < 0.03
    assert norm_error < 1e-6
    with jax.default_matmul_precision("highest"):
        want = gaussian.gaussian_logits_reference(*case.arrays, **case.options)[0]
    there = np.repeat(case.expected()[2], options.get("group", 2), axis=1)
    assert np.abs(np.asarray(got[0]) - want)[there].max() < 0.003
    again = gaussian.gaussian_logits(*case.arrays, **case.options)
    np.testing.assert_array_equal(np.asarray(got[0])[there], np.asarray(again[0])[there])
