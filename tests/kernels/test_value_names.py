"""Names of values while a kernel is lowered: those that JAX would print."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.mosaic.gpu import layout_inference

from benchmarks import weight_stream
from pallas_kernels import value_names


def test_the_names_that_jax_prints(monkeypatch):
    installed, seen = layout_inference.ValueSite.__str__, []

    def both(site):
        seen.append((installed(site), value_names.PRINTED(site)))
        return seen[-1][0]

    monkeypatch.setattr(layout_inference.ValueSite, "__str__", both)
    (layout, *_) = weight_stream.layouts(512, 1024)
    stream = jax.jit(functools.partial(weight_stream.stream, layout=layout, slots=5))
    shapes = jax.ShapeDtypeStruct((128,), jnp.float32), jax.ShapeDtypeStruct(layout.shape, jnp.bfloat16)
    stream.trace(*shapes).lower(lowering_platforms=("cuda",))
    assert installed is not value_names.PRINTED
    if not seen and jax.version.__version_info__ >= (0, 12):
        pytest.skip("JAX takes no names since 0.12")
    assert seen
    for ours, printed in seen:
        assert ours.startswith("%") == printed.startswith("%")
        if ours.startswith("%"):  # a number, which no other operation has
            assert re.split("[ :]", ours)[0] == re.split("[ :]", printed)[0]
        assert ours.rsplit(":", 1)[1] == printed.rsplit(":", 1)[1]
