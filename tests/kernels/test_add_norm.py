"""Residual addition and norm: the kernel in the interpreter and on a GPU against the model's own, and what it refuses."""

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from models import transformer
from pallas_kernels import add_norm as kernel

EPS = 1e-5
CASES = [(1, 4096, jnp.bfloat16), (3, 128, jnp.float16), (5, 2560, jnp.bfloat16), (2, 384, jnp.bfloat16)]


def operands(tokens: int, width: int, dtype) -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(0)
    x, delta, weight = (rng.standard_normal(shape) for shape in ((tokens, width), (tokens, width), (width,)))
    return tuple(jnp.asarray(a, dtype) for a in (3 * x, delta, 1 + weight / 10))


def check(got: tuple[jax.Array, jax.Array], args: tuple[jax.Array, ...]) -> None:
    want = transformer.add_norm(*args, EPS)
    np.testing.assert_array_equal(got[0], want[0])
    # The mean is summed in another order: at most the last bit differs.
    np.testing.assert_allclose(
        np.float64(got[1]), np.float64(want[1]), rtol=2 * float(jnp.finfo(args[0].dtype).eps)
    )
    assert got[1].dtype == args[0].dtype


@pytest.mark.parametrize(("tokens", "width", "dtype"), CASES)
def test_interpreted(tokens, width, dtype):
    args = operands(tokens, width, dtype)
    check(kernel.add_norm(*args, EPS, interpret=plgpu.InterpretGPUParams(detect_races=True)), args)


@pytest.mark.parametrize(("tokens", "width", "dtype"), CASES)
def test_lowers_for_cuda(tokens, width, dtype):
    run = jax.jit(lambda *args: kernel.add_norm(*args, EPS))
    run.trace(*operands(tokens, width, dtype)).lower(lowering_platforms=("cuda",))


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        ((2, 4096), "float32", "stream of float32"),
        ((2, 576), "bfloat16", "hidden size 576"),
        ((2, 32768), "bfloat16", "hidden size 32768"),
        ((2, 4096), "bfloat16", "platform cpu"),
    ],
)
def test_refuses(shape, dtype, message):
    with pytest.raises(NotImplementedError, match=message):
        kernel.check_supported(jnp.zeros(shape, dtype))


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "width", "dtype"), [*CASES, (2048, 8192, jnp.bfloat16)])
def test_on_a_gpu(tokens, width, dtype):
    args = operands(tokens, width, dtype)
    kernel.check_supported(args[0])
    check(kernel.add_norm(*args, EPS), args)
