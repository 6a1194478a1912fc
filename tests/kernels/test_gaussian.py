"""The Gaussian model of queries on the CPU: the reference, and the kernels under the interpreter."""

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

from pallas_kernels import gaussian, support
from pallas_kernels.gaussian.logits import candidate_logits_mosaic_gpu
from pallas_kernels.gaussian.moments import query_gaussian_mosaic_gpu
from pallas_kernels.gaussian.reference import query_gaussian_reference
from tests.kernels.gaussian_cases import GaussianCase, gaussian_error, make_gaussian
from tests.one_program import in_one

INTERPRET = plgpu.InterpretGPUParams(detect_races=True)


def run_kernels(case: GaussianCase, interpret=None, ctas: int = 132):
    q, turns, count, *candidates = case.arrays
    options = dict(case.options)
    where = {name: options[name] for name in ("starts", "sizes")} | {"ctas": ctas, "interpret": interpret}
    linear, quadratic = query_gaussian_mosaic_gpu(q, turns, count, scale=options.pop("scale"), **where)
    return candidate_logits_mosaic_gpu(linear, quadratic, *candidates, **options | where, most=turns.shape[1])


@pytest.mark.parametrize(
    ("options", "ctas"),
    [
        pytest.param({"count": 100}, 8, marks=pytest.mark.slow),
        ({"chunk": 384, "group": 1, "count": 380, "unlocked": (0, 64, 64)}, 2),  # slots are used again
        ({"head_dim": 128, "kv_heads": 1, "group": 3, "capacity": 104, "dtype": jnp.float16}, 4),
        ({"head_dim": 256, "kv_heads": 1, "group": 1, "chunk": 192, "count": 192}, 1),
        pytest.param({"chunk": 32, "count": 31, "unlocked": (64, 0, 20)}, 8, marks=pytest.mark.slow),
        ({"chunks": ((0, 33), (40, 0), (40, 70))}, 16),
    ],
    ids=str,
)
def test_gaussian_logits(options, ctas):
    case = make_gaussian(**options)
    fine = 8 if case.arrays[0].dtype == jnp.float16 else 1
    reference = in_one(gaussian.gaussian_logits_reference, *case.arrays, **case.options)
    error, norm_error = gaussian_error(reference, case)
    # Of logits of size 1 to 3, because turned queries and covariances have 16 bits.
    assert error < 0.03 / fine
    assert norm_error < 1e-6
    got = run_kernels(case, INTERPRET, ctas)
    assert not gpu_callbacks.get_races().races_found
    error, norm_error = gaussian_error(got, case)
    assert error < 0.03 / fine
    assert norm_error < 1e-6
    logits, norms, there = case.expected()
    there = np.repeat(there, logits.shape[1] // norms.shape[1], axis=1)
    # To the reference much nearer: what is left are covariances that are rounded the other way.
    assert np.abs(np.asarray(got[0]) - reference[0])[there].max() < 0.003


def test_moments_of_queries_far_from_zero():
    """Second moments are not centred before they are summed: a mean of 30 spreads must not drown the covariance."""
    case = make_gaussian(chunk=128, kv_heads=1, group=1, dtype=jnp.float16)
    q, turns, count = case.arrays[:3]
    turns = jnp.zeros_like(turns).at[..., :32].set(1)
    q, where = q + 30, {name: case.options[name] for name in ("starts", "sizes")}
    _, got = query_gaussian_mosaic_gpu(q, turns, count, **where, scale=1.0, interpret=INTERPRET)
    want = np.cov(np.asarray(q, np.float64)[:, 0].T, bias=True) / 2
    assert np.abs(np.asarray(got[0, 0], np.float64) - want).max() < 0.002 * want.max()
    _, reference = query_gaussian_reference(q, turns[0], count[0], scale=1.0)
    assert np.abs(np.asarray(reference[0], np.float64) - want).max() < 0.002 * want.max()


@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [
        pytest.param(64, jnp.bfloat16, marks=pytest.mark.slow),
        (128, jnp.float16),
        pytest.param(256, jnp.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_layers_share_one_text_of_each_kernel(head_dim, dtype):
    case = make_gaussian(head_dim=head_dim, dtype=dtype)
    options = {key: value for key, value in case.options.items() if key != "layer"}

    def step(*arrays):
        return [run_kernels(GaussianCase(arrays, {**options, "layer": jnp.int32(n)})) for n in range(3)]

    text = jax.jit(step).trace(*case.arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("kernel_hash") == 2


def test_unsupported_features_are_named(monkeypatch):
    for options, words in [
        ({"head_dim": 80}, "head dimension 80"),
        ({"dtype": jnp.float32}, "float32"),
        ({"chunk": 72}, "chunks of 72"),
        ({"capacity": 20}, "tails of 20"),
        ({}, "platform cpu"),
    ]:
        case = make_gaussian(**options)
        with pytest.raises(NotImplementedError, match=words):
            gaussian.gaussian_logits(*case.arrays, **case.options)
    monkeypatch.setattr(support, "check_device", lambda *_: None)
    q, _, _, keys, values, tail = make_gaussian().arrays
    gaussian.check_supported(q, keys, values, tail)
    with pytest.raises(NotImplementedError, match="float16"):
        gaussian.check_supported(q, keys, values.astype(jnp.float16), tail)
