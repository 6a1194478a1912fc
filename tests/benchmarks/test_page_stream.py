"""The benchmark of page orders: each reads every piece once, and the kernel lowers and runs in the interpreter."""

import functools

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np

from benchmarks import page_stream


def test_every_piece_is_read_once():
    for order in page_stream.orders(8, 16).values():
        assert order.shape == (8, 16)
        assert sorted(order.flatten().tolist()) == list(range(128))


def test_heads_of_pages():
    orders = page_stream.orders(8, 16)
    for cta, (pages, heads) in enumerate(zip(orders["four at once"], orders["by heads"], strict=True)):
        assert set(pages % 8) == {cta % 4, cta % 4 + 4}
        assert (heads.reshape(4, 4) % 4 == np.arange(4)[:, None]).all()
    assert (orders["four at once"][:4] // 8 == orders["four at once"][0] // 8).all()


def test_lowered_and_interpreted():
    stream = functools.partial(page_stream.stream, slots=3, pieces=2)
    order = jnp.asarray(page_stream.orders(4, 8)["pieces"])
    small, x = jnp.arange(128.0), jnp.ones((32, page_stream.ROWS, page_stream.COLUMNS), jnp.bfloat16)
    lowered = jax.jit(stream).trace(small, x, order).lower(lowering_platforms=("cuda",))
    assert "kernel_hash" in lowered.as_text()
    interpreted = functools.partial(stream, interpret=plgpu.InterpretGPUParams(detect_races=True))
    np.testing.assert_array_equal(jax.jit(interpreted)(small, x, order), small)
