"""Queries, keys and values that the decode kernel makes itself, on the CPU."""

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

from models.rope import rotate
from pallas_kernels import ragged_decode as rd
from pallas_kernels.decode_layer import decode_layer, heads_reference
from pallas_kernels.layer_products import LayerWeights
from pallas_kernels.norms import rms_norm
from pallas_kernels.ragged_decode.mosaic_gpu import ragged_decode_mosaic_gpu
from tests.kernels.decode_layer_cases import heads_of
from tests.kernels.ragged_cases import make_case, relative_error
from tests.kernels.test_ragged_decode import plan_of
from tests.one_program import in_one

LENGTHS = [[70, 33, 33], [0, 1, 128]]


@pytest.mark.parametrize("options", [{}, {"bias": True, "norms": True}], ids=str)
def test_reference_is_what_models_make(options):
    case = make_case(LENGTHS, dtype=jnp.float32, new=True)
    heads, made = heads_of(case, **options)
    x = heads.parts.sum(0).reshape(case.q.shape)
    if heads.bias is not None:
        x = x + heads.bias.reshape(case.q.shape[1:])
    q, k, v = x[:, :, :-2], x[:, :, -2:-1], x[:, :, -1:]
    if heads.q_norm is not None:
        q, k = (rms_norm(x, w, made.eps, made.offset) for x, w in ((q, heads.q_norm), (k, heads.k_norm)))
    cos, sin = heads.rope[0, :, : q.shape[-1] // 2], heads.rope[1, :, q.shape[-1] // 2 :]
    q, k = (rotate(x.reshape(len(x), -1, x.shape[-1]), cos, sin).reshape(x.shape) for x in (q, k))
    assert relative_error(heads_reference(heads, made), jnp.concatenate([q, k, v], axis=2)) < 1e-6


@pytest.mark.parametrize("options", [{}, {"bias": True, "norms": True, "bad": True, "rows": 8}], ids=str)
def test_interpreted_kernel_makes_them(options):
    case = make_case(LENGTHS, new=True, group=3)
    heads, made = heads_of(case, **options)
    q = heads_reference(heads, made)
    plan = plan_of(case, num_shares=5)
    out, lse, new = ragged_decode_mosaic_gpu(
        heads, case.pool, plan, scale=case.scale, has_new=True, made=made, merge="separate",
        out_dtype=case.q.dtype, interpret=plgpu.InterpretGPUParams(detect_races=True),
    )  # fmt: skip
    want, want_lse = in_one(rd.ragged_decode_reference, q, case.pool, plan, scale=case.scale, has_new=True)
    assert np.isfinite(np.asarray(out, np.float32)).all()
    assert relative_error(out, np.asarray(want, np.float64)) < 0.01
    np.testing.assert_allclose(lse, want_lse, atol=0.02)
    np.testing.assert_allclose(
        np.asarray(new, np.float32), np.asarray(q[:, :, -2:], np.float32), atol=0.02, rtol=0.01
    )
    assert not gpu_callbacks.get_races().races_found


def test_weights_without_heads_are_refused():
    """They are the last layer's in `layer_products`; here all layers have the same kernel."""
    case = make_case(LENGTHS, new=True)
    heads, made = heads_of(case)
    weights = LayerWeights(*[case.pool] * 4)
    with pytest.raises(ValueError, match="give some of the same shapes for the last layer"):
        decode_layer(
            heads,
            case.pool,
            plan_of(case),
            case.q,
            weights,
            case.lengths,
            case.lengths,
            made=made,
            scale=1.0,
            eps=1e-5,
        )
