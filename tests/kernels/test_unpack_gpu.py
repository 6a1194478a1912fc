"""Unpacking pages of bytes on a Hopper GPU."""

import jax.numpy as jnp
import pytest

from pallas_kernels import unpack
from tests.kernels.unpack_cases import CASES, check, make_case

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize(
    "shape", [*CASES, (128, 64, [50_000, 3, 20_000], 800), (64, 128, [1000], 8)], ids=str
)
def test_unpack(shape, dtype):
    case = make_case(*shape)
    check(unpack.unpack_pages(**case, most=shape[3], dtype=dtype), case, shape[3], dtype)
