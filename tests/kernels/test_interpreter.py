"""The interpreter in tests, which `tests.interpreter` changes: what it computes, and that it still sees races."""

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax


@pytest.mark.parametrize("apart", [True, False])
def test_races_are_found(apart, raced):
    """Two warpgroups write to rows of their own, or to the same one."""

    def kernel(x, out, held):
        wg = lax.axis_index("wg")
        held[wg if apart else 0] = x[wg] + 1.0
        out[wg] = held[wg if apart else 0]

    x = jnp.arange(256, dtype=jnp.float32).reshape(2, 128)
    run = plgpu.kernel(
        kernel, out_type=jax.ShapeDtypeStruct(x.shape, x.dtype), num_threads=2, thread_name="wg",
        scratch_types=[plgpu.SMEM((2, 128), jnp.float32)], interpret=plgpu.InterpretGPUParams(detect_races=True),
    )  # fmt: skip
    try:
        out = run(x)
    except jax.errors.JaxRuntimeError as error:  # what a race is from JAX 0.12 on
        assert not apart and "RACE DETECTED" in str(error)
        return
    assert raced() == [not apart]
    if apart:
        np.testing.assert_array_equal(out, x + 1)
