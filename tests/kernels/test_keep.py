"""Scoring, writing and appending on the CPU: the references, and the kernels under the interpreter."""

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

from pallas_kernels import append as ap
from pallas_kernels import keep
from pallas_kernels.append.mosaic_gpu import append_mosaic_gpu
from pallas_kernels.keep.window import window_sums_mosaic_gpu
from pallas_kernels.keep.write import write_pages_mosaic_gpu
from tests.kernels.keep_cases import (
    append_arguments,
    appended,
    make_case,
    make_window,
    window_error,
    write_arguments,
    written,
)

INTERPRET = plgpu.InterpretGPUParams(detect_races=True)


def no_races() -> bool:
    return not gpu_callbacks.get_races().races_found


def test_append_reference_is_the_loop():
    case = make_case(num_pages=120)
    x = append_arguments(case, batch=6)
    got = ap.append_reference(case.pool, case.new(6), **x)
    np.testing.assert_array_equal(got, appended(case, x))


@pytest.mark.parametrize(
    ("shape", "batch"),
    [({}, 5), ({"heads_per_page": 1, "head_dim": 128, "dtype": jnp.float16}, 1), ({"packed": True}, 5)],
    ids=str,
)
def test_append_kernel_in_the_interpreter(shape, batch):
    case = make_case(num_pages=120, **shape)
    x = append_arguments(case, batch)
    got = append_mosaic_gpu(case.pool, case.new(batch), **x, interpret=INTERPRET)
    np.testing.assert_array_equal(got, appended(case, x))
    assert no_races()


def test_write_reference_is_the_loop():
    case = make_case()
    x = write_arguments(case, capacity=8, chunk=20, pages=3)
    got = keep.write_pages_reference(case.pool, case.keys, case.values, **x)
    np.testing.assert_array_equal(got, written(case, x))


@pytest.mark.parametrize(
    "shape",
    [{}, {"heads_per_page": 1, "head_dim": 128, "dtype": jnp.float16, "layers": 1}, {"packed": True}],
    ids=str,
)
def test_write_kernel_in_the_interpreter(shape):
    case = make_case(**shape)
    x = write_arguments(case, capacity=8, chunk=20, pages=2)
    want = written(case, x)
    x.pop("chunk")
    got = write_pages_mosaic_gpu(case.pool, case.keys, case.values, **x, interpret=INTERPRET)
    np.testing.assert_array_equal(got, want)
    assert no_races()


WINDOWS = [
    {},
    {"power": 2, "count": 100},
    {"count": 7, "head_dim": 128, "group": 1},
    {"chunk": 32, "count": 31, "soft_cap": 1.5},
    {"chunk": 64, "window": 64, "capacity": 128, "group": 3, "dtype": jnp.float16},
]


@pytest.mark.parametrize("options", WINDOWS, ids=str)
def test_window_sums(options):
    case = make_window(**options)
    assert window_error(keep.window_sums_reference(*case.arrays, **case.options), case) < 1e-5
    got = window_sums_mosaic_gpu(*case.arrays, **case.options, interpret=INTERPRET)
    assert window_error(got, case) < 1e-5
    assert no_races()


def test_unsupported_features_are_named():
    case = make_case()
    for pool, words in [
        (jnp.zeros((2, 2, 1, 16, 80), jnp.bfloat16), "head dimension 80"),
        (case.pool.astype(jnp.float32), "float32"),
        (case.pool, "platform cpu"),
    ]:
        with pytest.raises(NotImplementedError, match=words):
            ap.check_supported(pool, [k.astype(pool.dtype) for k in case.keys])
        with pytest.raises(NotImplementedError, match=words):
            keep.check_write_supported(pool, [k.astype(pool.dtype) for k in case.keys], pool)
    with pytest.raises(NotImplementedError, match="same dtype or of bytes"):
        ap.check_supported(case.pool, [k.astype(jnp.float16) for k in case.keys])
    for options, words in [
        ({"window": 20}, "window of 20"),
        ({"capacity": 20}, "tails of 20"),
        ({"chunk": 72}, "chunks of 72"),
        ({"group": 16, "window": 128, "head_dim": 128, "chunk": 256}, "shared memory"),
        ({"dtype": jnp.float32}, "float32"),
        ({}, "platform cpu"),
    ]:
        window = make_window(**options)
        with pytest.raises(NotImplementedError, match=words):
            keep.check_window_supported(*window.arrays[:3], window.options["window"])


def test_layers_share_one_kernel_text():
    """Kernels are compiled once per distinct text: all layers of a step must hold the same one."""
    case = make_window()
    options = {key: value for key, value in case.options.items() if key != "layer"}

    def step(*arrays):
        return [window_sums_mosaic_gpu(*arrays, layer=jnp.int32(n), **options) for n in range(3)]

    text = jax.jit(step).trace(*case.arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("kernel_hash") == 1  # one function, called by every layer


def test_the_writing_kernels_name_the_pool_as_input_and_output():
    """XLA copies nothing where the output is the donated input: said in the program, measured on a GPU."""
    case = make_case(num_pages=120)
    x = append_arguments(case, batch=5)

    def run(pool, new):
        return append_mosaic_gpu(pool, new, **x)

    traced = jax.jit(run, donate_argnums=0).trace(case.pool, case.new(5))
    assert "output_operand_alias<" in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_a_pool_on_a_mesh_is_refused():
    mesh = jax.sharding.AbstractMesh((2,), ("tensor",))
    spec = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, None, "tensor"))
    pool = jax.ShapeDtypeStruct((8, 2, 2, 16, 64), jnp.bfloat16, sharding=spec)

    def run(pool):
        with pytest.raises(NotImplementedError, match="mesh of 2 devices"):
            ap.check_supported(pool, [pool])
        return pool

    jax.jit(run).trace(pool)
