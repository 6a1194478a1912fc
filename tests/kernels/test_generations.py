"""Which GPUs there are kernels for, and the records of tuning that they get: a new generation is a new record."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import append, chunk_prefill, expert_products, ragged_decode, support
from pallas_kernels.chunk_prefill import tuning as chunk_tuning
from pallas_kernels.expert_products import tuning as expert_tuning
from pallas_kernels.ragged_decode import tuning as decode_tuning

TABLES = [
    decode_tuning.TUNING,
    chunk_tuning.TUNING,
    expert_tuning.TUNING,
    expert_tuning.PACKED_TUNING,
]
POOL = jax.ShapeDtypeStruct((9, 2, 1, 16, 64), jnp.bfloat16)
BFLOAT16 = jnp.dtype("bfloat16")


def gpu(capability: str) -> SimpleNamespace:
    return SimpleNamespace(platform="gpu", compute_capability=capability)


CHECKS = {
    "ragged_decode": lambda gpu: ragged_decode.check_supported((1, 1, 4, 64), BFLOAT16, POOL.shape, BFLOAT16, device=gpu),
    "chunk_prefill": lambda gpu: chunk_prefill.check_supported((8, 1, 4, 64), BFLOAT16, POOL.shape, BFLOAT16, device=gpu),
    "expert_products": lambda gpu: expert_products.check_supported("bfloat16", "bfloat16", (4, 64, 2, 64), device=gpu),
    "experts in MXFP4": lambda gpu: expert_products.check_supported("bfloat16", "int32", (), device=gpu),
    "append": lambda gpu: append.check_supported(POOL, [POOL], device=gpu),
}  # fmt: skip


@pytest.mark.parametrize("kernel", CHECKS)
def test_kernels_name_the_generations_that_they_run_on(kernel):
    CHECKS[kernel](gpu("9.0"))
    for capability in ("8.0", "10.0", "12.0", "gfx942"):
        with pytest.raises(NotImplementedError) as error:
            CHECKS[kernel](gpu(capability))
        assert (
            str(error.value) == f"compute capability {capability}: the kernels run on 9.0 (Hopper)"
        )  # as people search for it
    with pytest.raises(NotImplementedError, match="platform cpu: the kernels run on NVIDIA Hopper GPUs"):
        CHECKS[kernel](None)


def test_a_record_is_all_that_a_kernel_needs_for_another_generation(monkeypatch):
    record = decode_tuning.Tuning(slots=6)
    monkeypatch.setitem(support.GENERATIONS, "10.0", "Blackwell")
    monkeypatch.setitem(decode_tuning.TUNING, "10.0", record)
    CHECKS["ragged_decode"](gpu("10.0"))
    assert ragged_decode.tuning_for(gpu("10.0")) is record
    assert ragged_decode.tuning_for(gpu("9.0")) is ragged_decode.DEFAULT
    with pytest.raises(
        NotImplementedError, match=r"8\.0: the kernels run on 9\.0 \(Hopper\) and 10\.0 \(Blackwell\)"
    ):
        CHECKS["ragged_decode"](gpu("8.0"))
    with pytest.raises(NotImplementedError, match=r"10\.0: the kernels run on 9\.0 \(Hopper\)$"):
        CHECKS["chunk_prefill"](gpu("10.0"))
    with pytest.raises(
        NotImplementedError, match="platform cpu: the kernels run on NVIDIA Hopper and Blackwell GPUs"
    ):
        CHECKS["ragged_decode"](None)


def test_records_are_of_known_generations():
    for table in TABLES:
        assert set(table) <= set(support.GENERATIONS)


def test_where_there_is_no_gpu_kernels_are_lowered_with_hopper_s_record(monkeypatch):
    assert ragged_decode.tuning_for() is ragged_decode.DEFAULT
    assert chunk_prefill.tuning_for() is chunk_prefill.DEFAULT
    monkeypatch.setattr(jax, "devices", lambda: [gpu("9.0")])
    assert ragged_decode.tuning_for() is decode_tuning.TUNING["9.0"]
    assert chunk_prefill.tuning_for() is chunk_tuning.TUNING["9.0"]
    assert expert_products.tuning_for(33, 1) is expert_tuning.MANY
    assert expert_products.packed_tuning_for(1, 4) is expert_tuning.PACKED_FEW
