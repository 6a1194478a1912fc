"""A layer of a decode step as one kernel on a GPU, against the two kernels that it is made of, and the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import decode_layer as dl
from pallas_kernels import layer_products as lp
from pallas_kernels import ragged_decode as rd
from pallas_kernels.layer_products.tuning import token_slots
from pallas_kernels.ragged_decode.mosaic_gpu import ragged_decode_mosaic_gpu
from pallas_kernels.support import num_sms
from tests.kernels import layer_cases, ragged_cases
from tests.kernels.decode_layer_cases import heads_of

pytestmark = pytest.mark.gpu
LLAMA = {"width": 4096, "inner": 14336, "heads": 6144}
SMALL = {"width": 512, "inner": 1536, "heads": 768}


def case_of(
    tokens, kv_heads, longest, *, width, inner, heads, gate="silu", post_norms=False, how=None, **attention
):
    """Attention of requests of many lengths, some empty, its heads, and the layer after it."""
    rng = np.random.default_rng(tokens)
    lengths = np.rint(longest * rng.random((tokens, kv_heads)) ** 2).astype(np.int32)
    lengths[:, 1] = lengths[:, 0]
    lengths[tokens // 2] = 0
    attend = ragged_cases.make_case(lengths, new=True, **attention)
    depth, dtype = attend.q[0, :, :-2].size, str(attend.q.dtype)
    layer = layer_cases.Case(
        tokens, depth, width, inner, heads, gate=gate, post_norms=post_norms, dtype=dtype
    )
    return attend, layer, *heads_of(attend, splits=2, rows=-(-tokens // 64) * 64, **(how or {}))


@pytest.mark.parametrize("tokens", [2, 8, 40, 64])
@pytest.mark.parametrize(
    "kv_heads, longest, how",
    [
        (8, 700, LLAMA | {"page_size": 64}),
        (8, 40, LLAMA | {"how": {"norms": True, "bad": True}}),
        (8, 3000, SMALL | {"soft_cap": 30.0, "page_size": 128, "dtype": jnp.float16, "how": {"bias": True}}),
        (4, 900, SMALL | {"head_dim": 256, "group": 2, "gate": "gelu", "post_norms": True, "how": {"norms": True}}),
        (4, 900, SMALL | {"head_dim": 64, "group": 8, "sinks": True, "last": True, "page_size": 32}),
    ],
    ids=["Llama-3.1-8B", "short", "soft cap", "Gemma", "sinks, the last layer"],
)  # fmt: skip
def test_same_bits_as_two_kernels(tokens, kv_heads, longest, how):
    last = how.get("last", False)
    how = {name: value for name, value in how.items() if name != "last"}
    attend, layer, heads, made = case_of(tokens, kv_heads, longest, **how)
    _, x, weights = layer.arrays()
    tuning = lp.Tuning(
        ctas=num_sms(), token_slots=token_slots(tokens), weight_slots=11, narrow_gates=True, by_tile=True
    )
    options = {"eps": 1e-5, "gate": layer.gate}
    of_attention = {name: attend.options.get(name) for name in ("soft_cap", "sinks")} | {
        "scale": attend.scale
    }

    @jax.jit
    def run(heads, pool, x, weights):
        plan = rd.plan_decode(
            jnp.asarray(attend.lengths), attend.table, attend.first, attend.column, page_size=attend.page_size
        ).layer(0)
        counters = lp.counters_of(jnp.arange(2))
        attended, _, new = ragged_decode_mosaic_gpu(
            heads, pool, plan, has_new=True, made=made, out_dtype=x.dtype, **of_attention
        )
        after, product = lp.layer_products(
            attended.reshape(tokens, -1),
            x,
            weights._replace(heads=None, next_norm=None) if last else weights,
            counters,
            tuning=tuning,
            **options,
        )
        following = jnp.full(1, not last, jnp.int32)
        given = heads, pool, plan, x, weights, counters, following
        outs = []
        for _ in range(6):  # one after the other: the same call twice would be one to XLA
            out = dl.decode_layer(*given, made=made, products_tuning=tuning, **of_attention, **options)
            outs.append(out)
            given = *given[:3], jax.lax.optimization_barrier((x, out[0]))[0], *given[4:]
        reference = dl.decode_layer_reference(*given, made=made, **of_attention, **options)
        return (after, product, new), outs, reference, counters

    for _ in range(5):
        apart, outs, reference, counters = run(heads, attend.pool, x, weights)
        assert not np.asarray(counters).any()
        for after, parts, new in outs:
            np.testing.assert_array_equal(after, apart[0])
            np.testing.assert_array_equal(new, apart[2])
            if not last:
                np.testing.assert_array_equal(parts[:, :tokens].sum(0).astype(x.dtype), apart[1])
    after, parts, new = outs[0]
    assert np.isfinite(np.asarray(after, np.float32)).all()
    assert layer_cases.relative_error(after, reference[0]) < 0.02
    assert layer_cases.relative_error(new, reference[2]) < 0.01
    if not last:
        assert layer_cases.relative_error(parts[:, :tokens].sum(0), reference[1][0]) < 0.02
