"""The products between two attentions: the kernel in the interpreter against plain operations, and what it refuses."""

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import decode_products as dp
from pallas_kernels.decode_products import mosaic_gpu

EPS = 1e-5


def operands(
    tokens: int,
    kv_heads: int = 1,
    group: int = 2,
    inner: int = 256,
    width: int = 4096,
    dtype=jnp.bfloat16,
    seed=0,
):
    rng = np.random.default_rng(seed)

    def draw(*shape: int, scale: float = 1.0, shift: float = 0.0) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape, dtype=np.float32) * scale + shift, dtype)

    angles = jnp.asarray(rng.uniform(0, 6, (tokens, 64)), jnp.float32)
    return (
        draw(tokens, kv_heads * group * 128),
        draw(tokens, width),
        draw(kv_heads * group * 128, width, scale=0.05),
        draw(width, scale=0.1, shift=1.0),
        draw(width, 2, inner, scale=width**-0.5),
        draw(inner, width, scale=0.05),
        draw(width, scale=0.1, shift=1.0),
        draw(width, kv_heads, group + 2, 128, scale=width**-0.5),
        jnp.cos(angles),
        jnp.sin(angles),
    )


def relative(got: jax.Array, want: jax.Array) -> float:
    got, want = (np.asarray(x, np.float64) for x in (got, want))
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


@pytest.mark.parametrize(
    ("clusters", "inner"),
    [  # halves of a tile's rows; the same with two blocks a tile; rows that cannot be halved; rounds of whole tiles
        pytest.param(64, 256, marks=pytest.mark.slow),
        (33, 256),
        pytest.param(33, 128, marks=pytest.mark.slow),
        pytest.param(3, 256, marks=pytest.mark.slow),
    ],
)
def test_interpreted(clusters: int, inner: int) -> None:
    args = operands(8, group=1, inner=inner)
    tuning = dp.Tuning(num_clusters=clusters)
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    got = mosaic_gpu.layer_products(*args, eps=EPS, tuning=tuning, interpret=interpret)
    want = dp.layer_products_reference(*args, eps=EPS)
    assert [x.shape for x in got] == [x.shape for x in want]
    for a, b in zip(got, want, strict=True):
        assert relative(a, b) < 0.01  # bfloat16 between the phases


def test_interpreted_projection() -> None:
    _, x, *_, norm, w_qkv, cos, sin = operands(16, group=1)
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    got = mosaic_gpu.project_qkv(
        x, norm, w_qkv, cos, sin, eps=EPS, tuning=dp.Tuning(num_clusters=3), interpret=interpret
    )
    for a, b in zip(got, dp.project_qkv_reference(x, norm, w_qkv, cos, sin, eps=EPS), strict=True):
        assert relative(a, b) < 0.01


@pytest.mark.parametrize(("tokens", "dtype"), [(8, jnp.bfloat16), (64, jnp.float16)])
def test_lowers_for_cuda(tokens: int, dtype) -> None:
    args = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands(tokens, dtype=dtype)]
    run = jax.jit(lambda *args: dp.layer_products(*args, eps=EPS))
    run.trace(*args).lower(lowering_platforms=("cuda",))


SUPPORTED = {
    "tokens": 8, "hidden_size": 4096, "intermediate_size": 14336, "head_dim": 128,
    "dtype": "bfloat16",
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "float32"}, "weights of float32"),
        ({"tokens": 72}, "72 tokens"),
        ({"tokens": 3}, "3 tokens"),
        ({"head_dim": 64}, "head dimension 64"),
        ({"hidden_size": 2560}, "hidden size 2560"),
        ({"intermediate_size": 1000}, "intermediate size 1000"),
        ({}, "platform cpu"),
    ],
)
def test_refuses(change: dict, message: str) -> None:
    with pytest.raises(NotImplementedError, match=message):
        dp.check_supported(**{**SUPPORTED, **change}, device=jax.devices("cpu")[0])
