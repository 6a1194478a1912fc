"""Unpacking pages of bytes on the CPU: the reference, and the kernel under the interpreter."""

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

from pallas_kernels import unpack
from pallas_kernels.unpack.mosaic_gpu import unpack_pages_mosaic_gpu
from tests.kernels.unpack_cases import CASES, check, make_case
from tests.one_program import in_one


@pytest.mark.parametrize("shape", CASES, ids=str)
def test_reference_is_the_loop(shape):
    case = make_case(*shape)
    got = in_one(unpack.unpack_pages_reference, **case, most=shape[3], dtype=jnp.float16)
    check(got, case, shape[3], jnp.float16)


@pytest.mark.parametrize("shape", CASES[:1], ids=str)
def test_kernel_in_the_interpreter(shape):
    case = make_case(*shape)
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    got = unpack_pages_mosaic_gpu(**case, most=shape[3], dtype=jnp.bfloat16, interpret=interpret)
    check(got, case, shape[3], jnp.bfloat16)
    assert not gpu_callbacks.get_races().races_found


def test_unsupported_features_are_named():
    pool = make_case(*CASES[0])["pool"]
    for given, dtype, words in [
        (jax.ShapeDtypeStruct((4, 2, 1, 16, 64), jnp.bfloat16), jnp.bfloat16, "nothing to unpack"),
        (pool, jnp.float32, "float32"),
        (pool, jnp.bfloat16, "platform cpu"),
    ]:
        with pytest.raises(NotImplementedError, match=words):
            unpack.check_supported(given, jnp.dtype(dtype))
