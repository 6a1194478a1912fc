"""Norms whose results are tokens in FP8: the kernel under the interpreter."""

from functools import partial

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

from pallas_kernels import fp8_products as fp8
from tests.kernels.fp8_cases import check_normed_tokens

SLOW = partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("tokens", "depth", "offset", "added"),
    [
        (10, 144, 0.0, True),
        (9, 16, 1.0, False),
        (16, 576, 1.0, True),
        (256, 64, 0.0, False),
        SLOW(10, 144, 0.0, False),
        SLOW(9, 16, 1.0, True),
        SLOW(16, 576, 1.0, False),
        SLOW(256, 64, 0.0, True),
    ],
)
def test_kernel_in_the_interpreter(tokens, depth, offset, added):
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    check_normed_tokens(tokens, depth, offset, added, interpret=interpret)
    assert not gpu_callbacks.get_races().races_found


def test_what_is_not_supported():
    x = jnp.ones((4, 64), jnp.bfloat16)
    interpret, how = plgpu.InterpretGPUParams(), {"eps": 1e-5}
    with pytest.raises(NotImplementedError, match="norms of 16400 numbers: the kernel takes up to 16384"):
        fp8.normed_tokens(jnp.ones((4, 16400)), jnp.ones(16400), interpret=interpret, **how)
    with pytest.raises(
        NotImplementedError, match="norms of bfloat16 with weights of float32: the kernel takes one"
    ):
        fp8.normed_tokens(x, jnp.ones(64), interpret=interpret, **how)
    with pytest.raises(
        NotImplementedError, match="tokens of 24 numbers in FP8: the kernel takes multiples of 16"
    ):
        fp8.normed_tokens(jnp.ones((4, 24)), jnp.ones(24), interpret=interpret, **how)
    with pytest.raises(NotImplementedError, match="platform cpu"):
        fp8.normed_tokens(x, x[0], **how)
