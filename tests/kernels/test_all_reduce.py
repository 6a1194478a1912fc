"""All-reduces between linked GPUs on the CPU: what they are given, and the kernels under the interpreter."""

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

from pallas_kernels import all_reduce
from pallas_kernels.all_reduce import exchange
from pallas_kernels.all_reduce.links import are_few, link_table
from pallas_kernels.all_reduce.reference import added_norm_reference, all_reduce_reference
from tests.kernels.all_reduce_cases import EPS, close, make_case

SHAPES = [(2, 3, 256), (4, 1, 512), (3, 5, 384)]


def links(devices):
    return jax.ShapeDtypeStruct((1 + devices, 2), jnp.int32)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernels_in_the_interpreter(shape, dtype):
    interpret, case = plgpu.InterpretGPUParams(detect_races=True), make_case(*shape, dtype)
    got = all_reduce.all_reduce(case.shares[0], case.shares, interpret=interpret)
    assert (got == all_reduce_reference(case.shares)).all() and got.dtype == dtype
    for offset in (0.0, 1.0):
        given = (case.x, case.shares[0], case.weight, case.shares)
        got = all_reduce.added_norm(*given, eps=EPS, offset=offset, interpret=interpret)
        want = added_norm_reference(case.x, case.shares, case.weight, eps=EPS, offset=offset)
        assert (got[0] == want[0]).all()
        close(got[1], want[1], dtype)
    assert not gpu_callbacks.get_races().races_found


def test_the_reference_adds_in_float32():
    shares = jnp.asarray([[[256.0]], [[0.5]], [[0.5]]], jnp.bfloat16)  # in bfloat16 256 + 0.5 is 256
    total, _ = added_norm_reference(jnp.ones((1, 1), jnp.bfloat16), shares, jnp.ones(1), eps=EPS)
    assert float(total[0, 0]) == 258


@pytest.mark.parametrize("rows", [4, 2048])
@pytest.mark.parametrize(("devices", "columns"), [(2, 4096), (4, 8192), (8, 3840), (2, 2880), (1, 256)])
def test_kernels_are_lowered_for_a_gpu(devices, columns, rows):
    x = jax.ShapeDtypeStruct((rows, columns), jnp.bfloat16)

    def both(x, share, weight, links):
        total, normed = all_reduce.added_norm(x, share, weight, links, eps=EPS)
        return all_reduce.all_reduce(total, links), normed

    traced = jax.jit(both).trace(x, x, jax.ShapeDtypeStruct((columns,), jnp.bfloat16), links(devices))
    assert traced.lower(lowering_platforms=("cuda",)).as_text().count("@mosaic_gpu_v2") == (
        1 if columns == 2880 else 2  # rows that are padded for it are normalised by XLA
    )


def test_what_is_not_supported():
    def check(rows, columns, dtype=jnp.bfloat16):
        all_reduce.check_supported(jax.ShapeDtypeStruct((rows, columns), dtype))

    check(256, 8192), check(8192, 4096), check(1, 7300)
    with pytest.raises(NotImplementedError, match="sums of 8200 columns: the kernel takes up to 8192"):
        check(1, 8200)
    with pytest.raises(NotImplementedError, match="sums of float32: the kernel takes bfloat16 and float16"):
        check(1, 64, dtype=jnp.float32)


def test_other_devices_than_gpus_are_not_linked():
    assert all_reduce.links_of(tuple(jax.devices())) is None


def test_a_table_of_links():
    table = link_table([0x1_0000_0002, 0x7F_8000_0000])
    assert (table[:, 0] == [[0, -1], [1, -1]]).all()
    assert (table[:, 1:] == [[2, 1], [-(2**31), 0x7F]]).all()


def test_links_in_passing():
    links = jnp.asarray(np.arange(1, 13).reshape(2, 3, 2))
    got = np.asarray(all_reduce.in_passing(links))
    assert (got != links).sum() == 2 and not got[:, 0, 1].any()


@pytest.mark.parametrize(("devices", "columns"), [(2, 4096), (8, 8192)])
def test_links_say_whether_rows_are_awaited(devices, columns, monkeypatch):
    """All that is awaited at once ends with what they say (nothing here tells what a kernel does with it)."""
    found = []

    class Post(exchange._Post):
        def end_turn(self):
            super().end_turn()
            found.append(len(list(self._waits.uses)))

    monkeypatch.setattr(exchange, "_Post", Post)
    x = jax.ShapeDtypeStruct((3, columns), jnp.bfloat16)
    jax.jit(all_reduce.all_reduce).trace(x, links(devices)).lower(lowering_platforms=("cuda",))
    words = columns  # awaited of each device by 128 threads, with as many numbers
    assert found == [-(-devices // max(exchange.AWAITED // (words // 128), 1))]


def test_rows_that_are_sent_as_they_are():
    """As many as have places in a mailbox; of wide rows and many devices fewer."""
    most = {
        (devices, columns): max(n for n in range(600) if are_few(n, columns, devices))
        for devices in (1, 2, 4, 8)
        for columns in (512, 4096, 8192)
    }
    assert {devices: most[devices, 512] for devices in (1, 2, 4, 8)} == {1: 256, 2: 256, 4: 128, 8: 64}
    assert [most[devices, 4096] for devices in (1, 2, 4, 8)] == [256, 191, 63, 27]
    assert [most[devices, 8192] for devices in (1, 2, 4, 8)] == [256, 95, 31, 13]
