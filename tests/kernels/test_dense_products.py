"""Products of some dozens of tokens on the CPU: how they are cut, and the kernel under the interpreter."""

from types import SimpleNamespace

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from benchmarks.dense_products import queries_as_result
from benchmarks.gpu_program import as_on_hopper
from models import products
from models.products import added_product, gated_product, product
from models.testing import random_params, tiny_config
from models.transformer import forward
from pallas_kernels import dense_products
from pallas_kernels.dense_products import (
    MOST_TOKENS,
    Tuning,
    added_products_reference,
    dense_products_reference,
    tuning_for,
)
from pallas_kernels.dense_products.tuning import STEP
from pallas_kernels.support import num_sms
from tests.kernels.dense_cases import check_added, check_products
from tests.kernels.expert_cases import relative_error


@pytest.mark.parametrize(
    ("tokens", "depth", "columns", "gate", "tuning"),
    [
        (3, 128, 64, None, Tuning(columns=64)),
        (72, 512, 128, None, Tuning(columns=64, splits=2)),
        (64, 576, 256, None, Tuning(columns=128)),
        (104, 1024, 256, "silu", Tuning(columns=64)),
        (40, 1024, 256, "gelu", Tuning(columns=128)),
    ],
    ids=[
        "one step, a few tokens",
        "split, two warpgroups",
        "slots used again",
        "gated, part of a warpgroup",
        "gated by tanh",
    ],
)
def test_kernel_in_the_interpreter(tokens, depth, columns, gate, tuning):
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    check_products(tokens, depth, columns, gate, tuning, "float16", interpret)
    assert not gpu_callbacks.get_races().races_found


@pytest.mark.parametrize(
    ("tokens", "depth", "columns", "tuning", "gates"),
    [
        (72, 128, 256, Tuning(columns=128), Tuning(columns=64)),
        (40, 256, 128, Tuning(columns=64), Tuning(columns=128)),
        (8, 256, 128, Tuning(columns=64, splits=2), Tuning(columns=128)),
    ],
    ids=["two warpgroups, two stores", "one", "split"],
)
def test_residual_and_norm_in_the_interpreter(tokens, depth, columns, tuning, gates):
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    check_added(tokens, depth, columns, tuning, "silu", gates, 1.0, interpret)
    assert not gpu_callbacks.get_races().races_found


@given(
    st.integers(5, 17).map(lambda n: 8 * n),
    st.integers(16, 240).map(lambda n: 64 * n),
    st.integers(32, 512).map(lambda n: 64 * n),
    st.booleans(),
)
def test_what_is_cut_is_cut_evenly(tokens, depth, columns, gated):
    tuning = tuning_for(tokens, depth, columns, gated=gated)
    if tuning is None:
        return
    assert tokens % 8 == 0 and tokens <= MOST_TOKENS
    assert depth % (STEP * tuning.splits) == 0 and columns % (tuning.columns * (1 + gated)) == 0
    assert not (gated and tuning.splits > 1)
    ctas = columns // (tuning.columns * (1 + gated)) * tuning.splits
    assert num_sms() / 2 < ctas <= num_sms()


@pytest.mark.parametrize(
    ("depth", "columns", "gated", "tuning"),
    [
        (4096, 6144, False, Tuning(columns=64)),
        (4096, 4096, False, Tuning(columns=64, splits=2)),
        (4096, 2 * 14336, True, Tuning(columns=128)),
        (14336, 4096, False, Tuning(columns=64, splits=2)),
        (9728, 2560, False, Tuning(columns=64, splits=2)),
        (2560, 2 * 9728, True, None),
        (2560, 2 * 9728, False, None),
        (576, 960, False, None),
    ],
    ids=[
        "qkv",
        "attention's output",
        "gate and up",
        "down",
        "of 4B",
        "too many for one round",
        "the same apart",
        "too few",
    ],
)
def test_models_are_cut_so(depth, columns, gated, tuning):
    assert tuning_for(128, depth, columns, gated=gated) == tuning
    assert tuning_for(16, depth, columns, gated=gated) is None  # XLA's products are as fast
    assert tuning_for(MOST_TOKENS + 8, depth, columns, gated=gated) is None


def test_few_tokens_have_the_kernel_where_matrices_are_small():
    """GPT-OSS-20B's and Qwen3-30B-A3B's: XLA's would be two kernels each."""
    for tokens in (1, 2, 8, 32):
        assert tuning_for(tokens, 2880, 5120) == Tuning(columns=64)
        assert tuning_for(tokens, 4096, 2880) == Tuning(columns=64, splits=2)
        assert tuning_for(tokens, 2048, 5120) == Tuning(columns=64)
        assert tuning_for(tokens, 4096, 4096) is None
    assert tuning_for(9, 2880, 5120) is None


def test_what_has_no_kernel_is_said():
    x, weights = jnp.ones((64, 4096), jnp.bfloat16), jnp.ones((4096, 4096), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="platform cpu: the kernels run on NVIDIA Hopper GPUs"):
        dense_products.dense_products(x, weights)
    with pytest.raises(NotImplementedError, match="tokens of float32 and weights of bfloat16"):
        dense_products.dense_products(x.astype(jnp.float32), weights)
    with pytest.raises(
        NotImplementedError, match="60 tokens: the kernel takes 1 to 8, and multiples of 8 up to 128"
    ):
        dense_products.dense_products(x[:60], weights)
    with pytest.raises(ValueError, match="cannot be cut"):
        dense_products.dense_products(
            x, weights[:, :96], tuning=Tuning(columns=64), interpret=plgpu.InterpretGPUParams()
        )


def test_sums_that_are_of_too_few_or_no_bfloat16():
    x, weights, norm = jnp.ones((8, 64), jnp.bfloat16), jnp.ones((64, 192), jnp.bfloat16), jnp.ones(192)
    given = {"tuning": Tuning(columns=64), "interpret": plgpu.InterpretGPUParams()}
    with pytest.raises(ValueError, match="192 columns are an odd number of parts"):
        dense_products.added_products(x, weights, jnp.ones((8, 192), jnp.bfloat16), norm, **given)
    with pytest.raises(ValueError, match="norm's factors come take bfloat16"):
        dense_products.added_products(x, weights, jnp.ones((8, 192), jnp.float16), norm, **given)
    assert Tuning(columns=64, splits=2).leaves_squares(192)


@pytest.fixture
def asked(monkeypatch):
    """Gates of the products that models have the kernel for."""
    gates = []

    def asked_for(x, weights, *, gate, eps, tuning):
        gates.append(gate)
        return jnp.zeros((len(x), weights.shape[1] // (2 if gate else 1)), x.dtype)

    monkeypatch.setattr(dense_products, "dense_products", asked_for)
    return gates


def trace(x=None, weights=None, dtype=jnp.bfloat16, tokens=64, **config) -> None:
    """Both products of a model of 4096, x and weights somewhere."""
    config = tiny_config(hidden_size=4096, intermediate_size=8192, **config)
    x = jax.ShapeDtypeStruct((tokens, 4096), dtype, sharding=x)
    for function, columns in (
        (lambda x, w: product(x, w, (2, 2048), config), 2048),
        (lambda x, w: gated_product(x, w, config), 8192),
    ):
        jax.eval_shape(function, x, jax.ShapeDtypeStruct((4096, 2, columns), dtype, sharding=weights))


def test_models_have_the_kernel_on_gpus_on_which_it_was_measured(asked, monkeypatch):
    trace()
    assert not asked
    with as_on_hopper():
        trace()
        trace(gelu=True, dtype=jnp.float16)
        assert asked == [None, "silu", None, "gelu"]
        asked.clear()
        mesh = NamedSharding(AbstractMesh((2,), ("x",), axis_types=(AxisType.Auto,)), PartitionSpec())
        for given in (
            {"dtype": jnp.float32},
            {"tokens": 32},
            {"tokens": 100},
            {"x": mesh},
            {"weights": mesh},
        ):
            trace(**given)
        others = {"platform": "gpu", "compute_capability": "9.0", "core_count": 132}
        for kind in ("NVIDIA H20", "NVIDIA H200"):
            assert not asked  # on the former it was not measured
            monkeypatch.setattr(
                jax, "devices", lambda kind=kind: [SimpleNamespace(device_kind=kind, **others)]
            )
            trace()
    assert asked == [None, "silu"]


def test_layers_with_norms_behind_products(monkeypatch):
    """As on a GPU, with references for the kernels: close to layers whose norms are their own."""
    config = tiny_config(num_layers=3, hidden_size=128, norm_offset=1.0)
    params = random_params(config, 1, jnp.bfloat16)
    tokens = jnp.arange(40, dtype=jnp.int32)

    def logits(name):
        attend = queries_as_result
        return forward(params, config.replace(name=name), tokens, tokens, attend, ())[0]

    def added_products(*args, tuning, **options):
        calls.append(tuning)
        return added_products_reference(*args, **options)

    expected, calls = logits("apart"), []
    monkeypatch.setattr(products, "_dense_tuning", lambda *_, **__: Tuning(columns=64))
    monkeypatch.setattr(dense_products, "takes", lambda tokens, *_: tokens == 40)
    monkeypatch.setattr(dense_products, "added_products", added_products)
    monkeypatch.setattr(
        dense_products,
        "dense_products",
        lambda *args, tuning, **more: dense_products_reference(*args, **more),
    )
    found = logits("together")
    assert len(calls) == 2 + 1  # traced once for all layers but the last, whose norm is not of all tokens
    assert relative_error(found, expected) < 0.03
    x, matrix, norm = (jnp.ones(shape, jnp.bfloat16) for shape in ((40, 128), (128, 128), 128))
    assert added_product(x, matrix, x, norm, matrix, config)
    assert added_product(x, matrix, x, norm, None, config) is None
    assert added_product(*[a.astype(jnp.float16) for a in (x, matrix, x, norm, matrix)], config) is None
    for other in ({"post_norms": True}, {"attn_out_bias": True}, {"weights_fp8": True}):
        assert added_product(x, matrix, x, norm, matrix, config.replace(**other)) is None
