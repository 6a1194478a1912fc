"""Tokens dealt to experts by one kernel, on the CPU: under the interpreter, lowered, and what it refuses."""

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

from pallas_kernels import expert_products as ep
from tests.kernels.dispatch_cases import Case


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(tokens=3, experts=8, count=2, block=8), marks=pytest.mark.slow),
        Case(tokens=37, experts=12, count=3, block=16, absent=(0, 5, 36), dtype="float16"),
        Case(tokens=34, experts=5, count=5, normalize=False, equal=True, parts=3, bias="bfloat16"),
        Case(tokens=2, experts=130 // 2, count=1, block=8, absent=(0, 1)),
    ],
    ids=str,
)
def test_in_the_interpreter(case):
    case.check(ctas=2, interpret=plgpu.InterpretGPUParams(detect_races=True))
    assert not gpu_callbacks.get_races().races_found


@pytest.mark.parametrize(
    "case",
    [
        Case(tokens=2, experts=32, count=4, parts=45, bias="bfloat16"),
        Case(tokens=3, experts=60, count=4, normalize=False, equal=True),
    ],
    ids=str,
)
def test_choice_in_the_interpreter(case):
    case.check_choice(interpret=plgpu.InterpretGPUParams(detect_races=True))
    assert not gpu_callbacks.get_races().races_found


@pytest.mark.parametrize(
    "case",
    [
        Case(tokens=32, experts=128, count=8, size=2048),
        Case(tokens=128, experts=32, count=4, size=2880, absent=(), block=16, parts=15, bias="bfloat16"),
        Case(tokens=5, experts=60, count=4, normalize=False),
    ],
    ids=str,
)
@pytest.mark.parametrize("wide", [False, True], ids=["", "beside 64-bit numbers"])
def test_lowers_for_a_gpu(case, wide, monkeypatch):
    monkeypatch.setattr(ep.support, "check_device", lambda *_: None)
    x, logits, bias, there = case.given()
    how = {"count": case.count, "normalize": case.normalize}

    def both(x, logits):
        rows, *_ = ep.dispatch(x, logits, bias, there, block=case.block, **how)
        return rows, ep.choose(logits, bias, **how)

    with jax.enable_x64(wide):
        lowered = jax.jit(both).trace(x, logits).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("kernel_hash") == 2


@pytest.mark.parametrize(
    ("shape", "dtype", "experts", "count", "reason"),
    [
        ((129, 64), "bfloat16", 8, 2, "129 tokens, 8 experts: the kernel takes 128 and 128 at most"),
        ((8, 64), "bfloat16", 129, 2, "8 tokens, 129 experts"),
        ((8, 64), "bfloat16", 128, 33, "33 experts of a token: the kernel takes 1 to 32"),
        ((8, 36), "bfloat16", 8, 2, "rows of 36 bfloat16: the kernel takes multiples of 16 bytes"),
        ((8, 64), "bfloat16", 8, 2, "platform cpu"),
    ],
)
def test_what_is_not_supported(shape, dtype, experts, count, reason):
    x, logits = np.zeros(shape, jnp.dtype(dtype)), np.zeros((1, shape[0], experts), np.float32)
    with pytest.raises(NotImplementedError, match=reason):
        ep.dispatch(x, logits, count=count, block=8, normalize=True)
    if "rows" not in reason:
        with pytest.raises(NotImplementedError, match=reason):
            ep.choose(logits, None, count=count, normalize=True)
