"""A row over pages of bytes, for the tests of what unpacks them."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels import byte_pages


def make_case(head_dim: int, page_size: int, lengths: list[int], most: int, seed: int = 0) -> dict[str, Any]:
    """The arguments of `unpack_pages`."""
    rng = np.random.default_rng(seed)
    heads, columns = len(lengths), 3
    num_pages = heads * most + 2
    shape = (num_pages, 2, columns, page_size)
    values = jnp.asarray(rng.integers(1, 256, (*shape, head_dim)), jnp.uint8)
    scales = jnp.asarray(rng.integers(40, 240, shape), jnp.uint8)
    return {
        "pool": byte_pages.join(values, scales),
        "table": jnp.asarray(rng.permutation(num_pages), jnp.int32),
        "lengths": jnp.asarray(lengths, jnp.int32),
        "first": jnp.asarray(2 + most * rng.permutation(heads), jnp.int32),
        "column": jnp.asarray(rng.integers(0, columns, heads), jnp.int32),
    }


def check(got: Any, case: dict[str, Any], most: int, dtype: Any) -> None:
    """Against a loop in NumPy over the pages that heads have."""
    pool, table = np.asarray(case["pool"]), np.asarray(case["table"])
    size, head_dim = byte_pages.page_size(pool), pool.shape[-1]
    assert got.shape == (len(case["lengths"]) * most, 2, 1, size, head_dim) and got.dtype == dtype
    for k, length in enumerate(np.asarray(case["lengths"])):
        for page in range(-(-length // size)):
            held = pool[table[case["first"][k] + page], :, case["column"][k]]
            scale = held[:, :-size].reshape(2, -1)[:, :size].astype(np.int32)
            step = ((scale + (110 << 3)) << 20).view(np.float32)[..., None] / 127
            want = (held[:, -size:].astype(np.float64) - 128) * step
            np.testing.assert_allclose(
                np.asarray(got[k * most + page, :, 0], np.float64),
                want,
                rtol=2**-8 if dtype == jnp.bfloat16 else 2**-11,
                atol=1e-7,
            )


CASES = [(64, 16, [70, 0, 1, 64], 5), (128, 64, [300, 130], 6), (256, 32, [33, 90, 96], 3)]
