"""Which loads of a kernel have the hint that the L2 may give their lines up first."""

from collections import Counter

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import launch_context

from pallas_kernels import layer_products, read_once
from pallas_kernels.layer_products import Tuning
from pallas_kernels.layer_products.mosaic_gpu import layer_products_mosaic_gpu

bf16 = jnp.bfloat16


@pytest.fixture
def loads(monkeypatch):
    """Counts loads by their policy, None being the ordinary one, as they are lowered."""
    seen: Counter[int | None] = Counter()
    nvvm = launch_context.nvvm
    lowered = getattr(nvvm, read_once.LOAD)
    made = []
    constant = read_once.c

    def note(value, kind):
        made.append(value)
        return constant(value, kind)

    def counted(*args, **options):
        made.clear()
        lowered(*args, **options)
        seen[made[0] if made else None] += 1

    monkeypatch.setattr(read_once, "c", note)
    monkeypatch.setattr(nvvm, read_once.LOAD, counted)
    return seen


def lower(function, *args):
    jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",))


def test_loads_that_are_marked(loads):
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
    assert loads == {read_once.EVICT_FIRST: 2, None: 1}


def test_weights_and_not_tokens(loads):
    def array(*shape):
        return jax.ShapeDtypeStruct(shape, bf16)

    weights = layer_products.LayerWeights(
        array(256, 256),
        array(256),
        array(256, 512),
        array(256, 256),
        next_norm=array(256),
        heads=array(256, 384),
    )
    tuning = Tuning(ctas=8, weight_slots=4, token_slots=2)

    def ended(attended, x, weights, counters):
        return layer_products_mosaic_gpu(
            attended, x, weights, counters, gate="silu", eps=1e-5, offset=0.0, tuning=tuning
        )

    counters = jax.eval_shape(layer_products.counters_of, jax.ShapeDtypeStruct((8,), jnp.int32))
    lower(ended, array(8, 256), array(8, 256), weights, counters)
    assert loads == {read_once.EVICT_FIRST: 4, None: 4}  # each of four products has one of both
