"""A layer's products as one kernel on each of two linked GPUs, which has a share of them, against the reference."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.shapes import SHAPES
from models.sharding import tensor_mesh
from pallas_kernels import all_reduce
from pallas_kernels import layer_products as lp
from pallas_kernels.layer_products.tuning import TUNING, token_slots, weight_slots
from pallas_kernels.support import num_sms
from tests.kernels import mixture_cases
from tests.kernels.expert_cases import relative_error
from tests.kernels.layer_cases import Case, columns_of
from tests.kernels.share_cases import exact, options, shares_of

pytestmark = pytest.mark.gpu


def half(name: str) -> tuple[int, ...]:
    """Of the columns of a model's layers, but for the residual stream's."""
    attended, width, inner, heads = columns_of(SHAPES[name])
    return attended // 2, width, inner // 2, heads // 2


def tuning_of(case, by_tile: bool) -> lp.Tuning:
    fp8 = getattr(case, "fp8", False)
    slots = {
        "weight_slots": weight_slots(case.tokens, fp8) if fp8 else 11,
        "token_slots": token_slots(case.tokens, fp8),
    }
    by_warp = fp8 and case.tokens <= TUNING["9.0"].most_by_warp
    return lp.Tuning(ctas=num_sms(), **slots, fp8=fp8, by_warp=by_warp, by_tile=by_tile, narrow_gates=not fp8)


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("tokens", [1, 7, 40, 64])
@pytest.mark.parametrize(
    ("case", "by_tile"),
    [
        (Case(0, *half("llama-3.1-8b")), True),
        (Case(0, *half("llama-3.1-8b")[:3], dtype="float16"), False),
        (Case(0, *half("gemma-3-12b"), gate="gelu", offset=1.0, post_norms=True), False),
        (Case(0, *half("llama-3.1-70b")), True),
        (Case(0, *half("llama-3.1-70b"), fp8=True), False),
        (Case(0, *half("llama-3.1-70b"), fp8=True), True),
        (mixture_cases.Case(2048, 2048, 384, 8, heads=2560), True),
        (Case(0, 2048, 4096, 4096, 3072), True),
    ],
    ids=["Llama-3.1-8B", "its last, float16", "Gemma-3-12B", "Llama-3.1-70B", "in FP8, by tokens", "in FP8", "Qwen3-30B-A3B",
         "as many gates as columns"],
)  # fmt: skip
def test_shares_of_models(case, by_tile, tokens, devices):
    """Ten layers one after another, whose sums the devices wait for, and as often."""
    if jax.device_count() < devices:
        pytest.skip(f"needs {devices} GPUs")
    if tokens > 1 and isinstance(case, mixture_cases.Case):
        pytest.skip("of one token only")
    case = dataclasses.replace(case, tokens=tokens)
    mesh = tensor_mesh(devices)
    links = all_reduce.links_of(tuple(mesh.devices.flat))
    if links is None:
        pytest.skip("these GPUs do not reach each other's memory")
    attended, x, weights = shares_of(case, devices)
    run = partial(lp.layer_products, **options(case), tuning=tuning_of(case, by_tile))

    @jax.jit
    @partial(
        jax.shard_map, mesh=mesh, in_specs=(P("tensor"), P(), P("tensor"), P("tensor")),
        out_specs=P(None, "tensor"), check_vma=False,
    )  # fmt: skip
    def layers(attended, x, weights, links):
        counters, outs = lp.counters_of(jnp.arange(3)), []
        weights = jax.tree.map(lambda leaf: leaf[0], weights)
        for _ in range(10):
            outs.append(run(attended[0], x, weights, counters, links=links[0]))
            x = jax.lax.optimization_barrier((x, outs[-1][0]))[0]
        return jax.tree.map(lambda *x: jnp.stack(x)[:, None], *outs), counters[None, None]

    shared = NamedSharding(mesh, P("tensor"))
    given = (
        jax.device_put(attended, shared),
        jax.device_put(x, NamedSharding(mesh, P())),
        jax.tree.map(lambda leaf: jax.device_put(leaf, shared), weights),
    )
    jax.block_until_ready(layers(*given, all_reduce.in_passing(links)))
    want = exact(case, attended, x, weights)
    for _ in range(10):
        (out, heads), counters = layers(*given, links)
        assert not np.asarray(counters).any()
        out = np.asarray(out, np.float32)
        assert (out == out[:1, :1]).all()  # the same bits each time, on all devices
        near = {"bfloat16": 2.0**-6, "float16": 2.0**-9}[case.dtype]
        assert relative_error(out[0, 0], want[0]) < near
        if case.heads:
            assert (np.asarray(heads) == np.asarray(heads)[:1]).all()
            assert relative_error(np.asarray(heads[0], np.float32), want[1]) < near
