"""Heads out of their joint projection: the kernel, interpreted and on a GPU, against the model's own."""

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from models import transformer
from pallas_kernels import split_heads as kernel

CASES = [  # tokens, KV heads, group, head dimension
    (1, 8, 4, 128, jnp.bfloat16),
    (5, 4, 3, 64, jnp.float16),
    (3, 1, 1, 256, jnp.bfloat16),
    (kernel.FEW_TOKENS + 1, 2, 2, 64, jnp.bfloat16),
]


def operands(tokens: int, kv_heads: int, group: int, head_dim: int, dtype) -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(0)
    angles = rng.uniform(0, 6, (tokens, head_dim // 2))
    qkv = rng.standard_normal((tokens, kv_heads, group + 2, head_dim))
    return jnp.asarray(qkv, dtype), *(jnp.asarray(f(angles), jnp.float32) for f in (np.cos, np.sin))


def check(got: tuple[jax.Array, ...], args: tuple[jax.Array, ...]) -> None:
    precision = float(jnp.finfo(args[0].dtype).eps)
    for a, b in zip(got, transformer.split_heads(*args), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        # Products and sums may be fused or not: at most the last bit differs.
        np.testing.assert_allclose(np.float64(a), np.float64(b), rtol=precision, atol=1e-6)
    np.testing.assert_array_equal(got[2], args[0][:, :, -1])


@pytest.mark.parametrize(("tokens", "kv_heads", "group", "head_dim", "dtype"), CASES[1:])
def test_interpreted(tokens, kv_heads, group, head_dim, dtype):
    args = operands(tokens, kv_heads, group, head_dim, dtype)
    check(kernel.split_heads(*args, interpret=plgpu.InterpretGPUParams(detect_races=True)), args)


@pytest.mark.parametrize(("tokens", "kv_heads", "group", "head_dim", "dtype"), CASES)
def test_lowers_for_cuda(tokens, kv_heads, group, head_dim, dtype):
    args = operands(tokens, kv_heads, group, head_dim, dtype)
    jax.jit(kernel.split_heads).trace(*args).lower(lowering_platforms=("cuda",))


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        ((2, 8, 6, 128), "float32", "heads of float32"),
        ((2, 8, 6, 96), "bfloat16", "head dimension 96"),
        ((2, 3, 5, 64), "bfloat16", "3 KV heads of 64"),
        ((2, 8, 6, 128), "bfloat16", "platform cpu"),
    ],
)
def test_refuses(shape, dtype, message):
    with pytest.raises(NotImplementedError, match=message):
        kernel.check_supported(jnp.zeros(shape, dtype))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("tokens", "kv_heads", "group", "head_dim", "dtype"), [*CASES, (2048, 8, 4, 128, jnp.bfloat16)]
)
def test_on_a_gpu(tokens, kv_heads, group, head_dim, dtype):
    args = operands(tokens, kv_heads, group, head_dim, dtype)
    kernel.check_supported(args[0])
    check(kernel.split_heads(*args), args)
