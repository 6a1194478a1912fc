"""The benchmark of weight layouts: each reads every piece once, and the kernel lowers and runs in the interpreter."""

import functools

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import weight_stream

DEPTH, COLUMNS = 512, 1024
TILES = [weight_stream.tiles(DEPTH, COLUMNS, spread=spread) for spread in (False, True)]
LAYOUTS = weight_stream.layouts(DEPTH, COLUMNS) + TILES


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_every_piece_is_read_once(layout):
    pieces = np.arange(DEPTH * COLUMNS // weight_stream.BLOCK**2)
    corners = {tuple(map(int, layout.corner(jnp.int32(piece)))) for piece in pieces}
    rows, columns = (np.arange(0, size, weight_stream.BLOCK).tolist() for size in layout.shape)
    assert corners == {(row, column) for row in rows for column in columns}
    stream = jax.jit(functools.partial(weight_stream.stream, layout=layout, slots=12))
    shapes = jax.ShapeDtypeStruct((128,), jnp.float32), jax.ShapeDtypeStruct(layout.shape, jnp.bfloat16)
    assert "kernel_hash" in stream.trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
@pytest.mark.parametrize("ctas", [7, 12])
def test_every_load_is_one_ctas(layout, ctas):
    read = []
    for cta in range(ctas):
        count, places, _ = weight_stream.loads_of(layout, ctas, jnp.int32(cta), None)
        read += [tuple(map(int, corner)) for n in range(int(count)) for corner in places(n)]
    assert len(read) == len(set(read)) == DEPTH * COLUMNS // weight_stream.BLOCK**2


@pytest.mark.parametrize(("layout", "ctas"), [(LAYOUTS[1], 3), (TILES[1], 7)], ids=["in_out", "tiles spread"])
def test_interpreted(layout, ctas):
    small, weights = jnp.arange(128.0), jnp.ones(layout.shape, jnp.bfloat16)
    how = {"slots": 3, "ctas": ctas, "interpret": plgpu.InterpretGPUParams(detect_races=True)}
    run = functools.partial(weight_stream.stream, layout=layout, **how)
    np.testing.assert_array_equal(jax.jit(run)(small, weights), small)


def test_tiles_are_compared_where_some_multiprocessors_idle():
    names = {layout.name for layout in weight_stream.layouts(64, 28672)}
    assert {"tiles last", "tiles spread"} <= names
    assert len(weight_stream.layouts(64, 4096)) == len(names) - 2
