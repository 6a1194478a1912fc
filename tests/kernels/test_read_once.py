"""Which loads of a kernel have the hint that the L2 may give their lines up first."""

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jaxlib.mlir.dialects import llvm

from pallas_kernels import layer_products, read_once
from pallas_kernels.layer_products import Tuning, device_ops
from pallas_kernels.layer_products.mosaic_gpu import layer_products_mosaic_gpu

bf16 = jnp.bfloat16


@pytest.fixture
def hints(monkeypatch):
    """Of the loads to shared memory, in the order in which they are lowered: whether they have one."""
    seen: list[bool] = []
    policy = read_once.policy

    def note():
        seen.append((hint := policy()) is not None)
        return hint

    monkeypatch.setattr(read_once, "policy", note)
    return seen


def lower(function, *args):
    jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",))


def test_loads_that_are_marked(hints):
    def kernel(x, out, held, barrier):
        def load(first, copy):
            copy(x.at[pl.ds(first, 64)], held, barrier)
            plgpu.barrier_wait(barrier)

        load(0, read_once.load_once)
        jax.lax.fori_loop(1, 3, lambda n, _: load(n * 64, read_once.load_once), None)
        load(192, plgpu.copy_gmem_to_smem)
        plgpu.copy_smem_to_gmem(held, out)
        plgpu.wait_smem_to_gmem(0)

    call = plgpu.kernel(
        kernel, out_type=jax.ShapeDtypeStruct((64, 64), bf16),
        scratch_types=[plgpu.SMEM((64, 64), bf16), plgpu.Barrier()],
    )  # fmt: skip
    lower(call, jax.ShapeDtypeStruct((256, 64), bf16))
    assert hints == [True, True, False]


def test_weights_and_not_tokens(hints, monkeypatch):
    texts = []
    inline_ptx = device_ops.mgpu_utils.inline_ptx

    def note(text, *args, **options):
        texts.append(text)
        return inline_ptx(text, *args, **options)

    monkeypatch.setattr(device_ops.mgpu_utils, "inline_ptx", note)

    def array(*shape):
        return jax.ShapeDtypeStruct(shape, bf16)

    weights = layer_products.LayerWeights(
        array(256, 256), array(256), array(256, 512), array(256, 256), next_norm=array(256), heads=array(256, 384)
    )  # fmt: skip
    tuning = Tuning(ctas=8, weight_slots=4, token_slots=2)

    def ended(attended, x, weights, counters):
        return layer_products_mosaic_gpu(
            attended, x, weights, counters, gate="silu", eps=1e-5, offset=0.0, tuning=tuning
        )

    counters = jax.eval_shape(layer_products.counters_of, jax.ShapeDtypeStruct((8,), jnp.int32))
    lower(ended, array(8, 256), array(8, 256), weights, counters)
    assert sorted(hints) == [False] * 4 + [True] * 4  # each of four products has one of both
    # And rows of parts of two products, and three others, are dropped when they are read: only the time would tell.
    assert sum("discard.global.L2" in text for text in texts) == 5


def test_the_hint_in_text(monkeypatch):
    """As JAX has loads from 0.12 on."""
    seen = []
    monkeypatch.setattr(llvm, "inline_asm", lambda result, *args, **options: seen.append(args))
    monkeypatch.setattr(read_once, "policy", lambda: "policy")
    read_once._hint_text()
    load = "@$0 cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [$1], [$2, {$4,$5}], [$3];"
    llvm.inline_asm(None, ["p", "s", "t", "b", "x", "y"], load, "b,r,l,r,r,r", has_side_effects=True)
    llvm.inline_asm(None, ["p"], "@$0 nop;", "b")
    operands, text, constraints = seen[0]
    assert operands[-1] == "policy" and constraints == "b,r,l,r,r,r,l"
    assert text.endswith("::bytes.L2::cache_hint [$1], [$2, {$4,$5}], [$3], $6;")
    assert seen[1] == (["p"], "@$0 nop;", "b")
