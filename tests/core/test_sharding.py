"""One model over several simulated devices says what it says on one, and each device does its part alone."""

import contextlib
import re
from collections.abc import Callable, Iterator
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType

import tangram_jax as tj
from benchmarks.gpu_program import as_on_hopper
from models.config import ModelConfig
from models.fp8_weights import in_fp8, with_fp8_weights
from models.gemma import gemma3_fields
from models.params import abstract_params
from models.sharding import pad_heads, tensor_mesh
from models.testing import random_params, tiny_config, tiny_gpt_oss_config
from pallas_kernels import all_reduce as kernels
from pallas_kernels.norms import rms_norm
from tangram_jax.sharding import TensorParallel, head_order
from tests.simulated import on_simulated_devices

SNAPKV = tj.get_scorer("snapkv")
EXPERTS = {"num_experts": 4, "experts_per_token": 2, "expert_size": 192}
SIZES = {"num_pages": 600, "max_requests": 3, "max_tokens": 128, "max_tail": 32}


def ragged_plan(config: ModelConfig, heads_per_page: int, *, alike: bool = False) -> tj.CachePlan:
    """`alike`: the same budget for all heads of a layer."""
    layers, heads = len(config.full_layers), config.num_kv_heads
    ratios = np.random.default_rng(0).uniform(0.2, 0.9, (1, layers, 1 if alike else heads))
    profile = tj.BudgetProfile.from_ratios(
        np.broadcast_to(ratios, (1, layers, heads)).astype(np.float32), retention=0.5, alpha=0.0
    )
    sliding = tj.SlidingLayers.of(config, 32)
    return tj.CachePlan.build(profile, heads_per_page, 16, window=8, min_entries=12, sliding=sliding)


def run(params, config, plan, devices: int = 1, dtype=np.float32, *, mixed: bool = True) -> np.ndarray:
    """Logits f32[8, V]: of two chunks of a row, greedy tokens, and a chunk beside tokens of the row and a copy of it.

    The last three only if `mixed`.
    """
    if devices > 1:
        tp = TensorParallel.of(config, plan, devices)
        params, cache, step = tp.place(params), tp.init_cache(**SIZES, dtype=dtype), tp.step
    else:
        cache = tj.init_cache(plan, config, **SIZES, dtype=dtype)

        def step(params, scorer, cache, chunk, decode):
            return tj.step(params, config, plan, scorer, cache, chunk, decode)

    step = jax.jit(step, static_argnums=1, donate_argnums=2)
    tokens = np.random.default_rng(1).integers(8, config.vocab_size, 90).astype(np.int32)
    cache = tj.reserve(plan, cache, np.int32(1), np.int32(90), np.int32(16))
    out = []
    for start in (0, 45):
        chunk = tj.Chunk(np.int32(1), tokens[start : start + 45], np.int32(45))
        logits, cache = step(params, SNAPKV, cache, chunk, None)
        out.append(logits)
    for _ in range(3):
        decode = tj.Decode(np.array([1, 3], np.int32), np.array([out[-1][0].argmax(), 0], np.int32))
        logits, cache = step(params, SNAPKV, cache, None, decode)
        out.append(logits[:1])
    if mixed:
        cache = tj.fork(plan, cache, np.int32(1), np.int32(2))
        cache = tj.reserve(plan, cache, np.int32(0), np.int32(10), np.int32(0))
        chunk = tj.Chunk(np.int32(0), tokens[:16], np.int32(10))
        decode = tj.Decode(np.array([1, 2], np.int32), np.array([9, 10], np.int32))
        logits, cache = step(params, SNAPKV, cache, chunk, decode)
        out.append(logits)
    # On a mesh every call of a program found the arrays where it expects them.
    assert devices == 1 or step._cache_size() == 2 + mixed
    return np.concatenate(out)


def check_ragged(devices: int = 2, **changes) -> None:
    config = tiny_config(num_layers=2, **changes)
    params, plan = random_params(config, 0), ragged_plan(config, 4)
    assert (head_order(plan, 2) != np.arange(4)).any()
    want = run(params, config, plan)
    np.testing.assert_allclose(run(params, config, plan, devices), want, atol=1e-4)


def check_biases() -> None:
    """Of heads each device has its own in their order; that of what attention gives is added once."""
    check_ragged(qkv_bias=True, attn_out_bias=True)


def check_biases_before_norms() -> None:
    """The latter before Gemma's norm."""
    gemma = gemma3_fields(hidden_size=64, query_scale=0.25)
    config = tiny_config(num_layers=1, qkv_bias=True, attn_out_bias=True, **gemma)
    params, plan = random_params(config, 0), ragged_plan(config, 4)
    assert (head_order(plan, 2) != np.arange(4)).any()
    want = run(params, config, plan)
    np.testing.assert_allclose(run(params, config, plan, 2), want, atol=1e-4)


def check_ragged_on_four() -> None:
    check_ragged(4)


@contextlib.contextmanager
def linked_by_xla() -> Iterator[None]:
    """Devices have links, which nothing is sent over: sums by XLA in the place of our kernels."""

    def all_reduce(share, links):
        return jax.lax.psum(share, "tensor")

    def added_norm(x, share, weight, links, *, eps, offset):
        x = x + all_reduce(share, links)
        return x, rms_norm(x, weight, eps, offset)

    def links_of(devices):
        place = jax.sharding.NamedSharding(tensor_mesh(len(devices)), jax.sharding.PartitionSpec("tensor"))
        return jax.device_put(np.zeros((len(devices), 1 + len(devices), 2), np.int32), place)

    with mock.patch.multiple(
        kernels, all_reduce=mock.Mock(wraps=all_reduce), added_norm=mock.Mock(wraps=added_norm),
        check_supported=lambda share: None, links_of=links_of,
    ):  # fmt: skip
        yield


def check_linked(check: Callable[[], None] = check_biases) -> None:
    """Nothing is added twice or left out."""
    with linked_by_xla():
        check()
        assert kernels.all_reduce.call_count and kernels.added_norm.call_count
        # A mesh may have an axis more, and what was placed on one takes the program without links too.
        config = tiny_config(num_layers=1)
        mesh = jax.make_mesh(
            (1, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:2]
        )
        tp = TensorParallel.of(config, ragged_plan(config, 4), 2, mesh=mesh)
        params, cache = tp.place(random_params(config, 0)), tp.init_cache(**SIZES)
        rows = np.array([1], np.int32)
        with_links, without = (
            jax.jit(tp.step, static_argnums=1)(given, SNAPKV, cache, None, tj.Decode(rows, rows))[0]
            for given in (tp.in_passing(params), {name: x for name, x in params.items() if name != "links"})
        )
        assert "links" in params
        other = jax.make_mesh(
            (2, 1), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:2]
        )
        tp = TensorParallel.of(config, ragged_plan(config, 4), 1, mesh=other)
        assert "links" not in tp.place(random_params(config, 0))  # "data" adds nothing up
        np.testing.assert_allclose(with_links, without, atol=1e-5)


def check_gpt_oss() -> None:
    """Windows, sinks, biases, experts, in bytes; and a vocabulary that is not divided."""
    check_like_gpt_oss()


def check_gpt_oss_linked() -> None:
    check_linked(check_gpt_oss)


def check_packed_experts() -> None:
    """The same in MXFP4, of which each device has two whole: a token may have none there, one or both of its two."""
    check_like_gpt_oss(experts_mxfp4=True, expert_size=64, num_experts=4, experts_per_token=2)


def check_like_gpt_oss(**changes) -> None:
    config = tiny_gpt_oss_config(num_layers=2, sliding_layers=(0,), vocab_size=265, **changes)
    params, plan = random_params(config, 0), ragged_plan(config, 2)
    want = run(params, config, plan, dtype=np.uint8)
    got = run(params, config, plan, 2, np.uint8)
    # A sum in another order may round a byte otherwise, which moves logits by 0.02; a wrong head by 1.
    np.testing.assert_allclose(got, want, atol=0.1)


def check_fp8() -> None:
    """Weights in FP8: a dense layer with a window, which has heads in their order, one without, and experts."""
    config = tiny_config(
        num_layers=3, head_dim=32, intermediate_size=256, sliding_layers=(0,), sliding_window=24,
        num_experts=3, experts_per_token=2, expert_size=128, dense_layers=(0, 1),
    )  # fmt: skip
    plan = ragged_plan(config, 4)
    assert (head_order(plan, 2) != np.arange(4)).any()
    params, config = in_fp8(random_params(config, 0), config)
    want = run(params, config, plan)
    np.testing.assert_allclose(run(params, config, plan, 2), want, atol=1e-4)


def check_the_pool_stays() -> None:
    """A step takes a cache's memory over on every device, and needs little beside it."""
    config = tiny_config(num_layers=1)
    plan = ragged_plan(config, 2)
    tp = TensorParallel.of(config, plan, 2)
    params = tp.place(random_params(config, 0))
    cache = tp.init_cache(**SIZES | {"num_pages": 20_000})
    step = jax.jit(tp.step, static_argnums=1, donate_argnums=2)
    rows = np.array([1], np.int32)
    memory = step.lower(params, SNAPKV, cache, None, tj.Decode(rows, rows)).compile().memory_analysis()
    mine = cache.pool.nbytes // 2
    assert cache.pool.addressable_shards[0].data.nbytes == mine
    assert memory.alias_size_in_bytes >= mine > 10 * memory.temp_size_in_bytes


def check_padded_real_weights() -> None:
    """SmolLM2's 9 query and 3 KV heads go on three devices; zero heads make them 24 and 8, for two and four."""
    from models.registry import load_model

    model = load_model(progress=False)
    config, plan = model.config, ragged_plan(model.config, 3, alike=True)
    want = run(model.params, config, plan)
    np.testing.assert_allclose(run(model.params, config, plan, 3), want, atol=1e-3)
    params, config = pad_heads(model.params, config, 24, 8)
    plan = ragged_plan(config, 4, alike=True)
    for devices in (2, 4):
        np.testing.assert_allclose(run(params, config, plan, devices), want, atol=1e-3)


def check_real_weights_in_fp8() -> None:
    """SmolLM2's, dealt as they are converted, or as they are read from what is kept of that."""
    from models.registry import load_model
    from models.sharding import tensor_mesh

    whole = load_model(progress=False, quantization="fp8")
    plan = ragged_plan(whole.config, 3, alike=True)
    want = run(whole.params, whole.config, plan)
    dealt = load_model(progress=False, quantization="fp8", mesh=tensor_mesh(3))
    codes = dealt.params["layers"][0]["gate_up"].codes
    assert codes.addressable_shards[0].data.shape[0] == codes.shape[0] // 3
    np.testing.assert_allclose(run(dealt.params, dealt.config, plan, 3), want, atol=1e-3)


def test_on_simulated_devices():
    """`test_linked_layers` has linked ones, with biases of heads; `test_engine_parallel` others."""
    on_simulated_devices(__file__, "check_the_pool_stays")


@pytest.mark.slow
@pytest.mark.parametrize(
    "function",
    [
        "check_biases_before_norms",
        "check_fp8",
        "check_gpt_oss",
        "check_gpt_oss_linked",
        "check_linked",
        "check_packed_experts",
        "check_ragged",
        "check_ragged_on_four",
        "check_padded_real_weights",
        "check_real_weights_in_fp8",
    ],
)
def test_on_simulated_devices_for_longer(function):
    on_simulated_devices(__file__, function)


@given(
    seed=st.integers(0, 99), devices=st.sampled_from([1, 2, 4]), columns=st.sampled_from([1, 2]),
    groups=st.sampled_from([1, 3]), layers=st.integers(1, 3), cluster=st.sampled_from(["layer", "adjacent"]),
)  # fmt: skip
def test_every_head_is_where_its_column_is(seed, devices, columns, groups, layers, cluster):
    heads = devices * columns * groups
    config = tiny_config(num_layers=layers, num_heads=heads, num_kv_heads=heads, intermediate_size=heads)
    budgets = np.random.default_rng(seed).integers(1, 4, (layers, heads)) / 4
    profile = tj.BudgetProfile.from_ratios(budgets[None].astype(np.float32), retention=0.5)
    plan = tj.CachePlan.build(profile, devices * columns, 16, cluster)
    mine = TensorParallel.of(config, plan, devices, mesh=abstract_mesh(devices)).share_plan
    assert (mine.num_groups, mine.heads_per_page) == (plan.num_groups, columns)
    order = head_order(plan, devices)
    np.testing.assert_array_equal(np.sort(order), np.broadcast_to(np.arange(heads), order.shape))
    for device, share in enumerate(np.split(order, devices, axis=1)):
        for layer in range(layers):
            np.testing.assert_array_equal(plan.group_of[layer, share[layer]], mine.group_of[layer])
            column = device * columns + mine.column_of[layer]
            np.testing.assert_array_equal(plan.column_of[layer, share[layer]], column)


def abstract_mesh(devices: int) -> AbstractMesh:
    return AbstractMesh((devices,), ("tensor",), axis_types=(AxisType.Auto,))


@pytest.mark.parametrize(
    "linked", [pytest.param(False, marks=pytest.mark.slow), True], ids=["apart", "linked"]
)
@pytest.mark.parametrize(
    ("fields", "more"),
    [
        pytest.param({}, (0, 0), marks=pytest.mark.slow),
        ({"weights_fp8": True}, (4, 4)),
        pytest.param(EXPERTS | {"experts_mxfp4": True}, (2, 3), marks=pytest.mark.slow),
    ],
    ids=["floats", "fp8", "mxfp4"],
)
def test_each_device_runs_the_kernels(fields, more, linked, caplog):
    """Traced and lowered for Hopper GPUs, on its columns of the pages; packed weights' products have kernels of their own.

    Of experts the rows of many tokens, too. Between linked GPUs sums have kernels, alone and with a norm.
    """
    config = tiny_config(num_layers=2, hidden_size=256, num_heads=16, num_kv_heads=4, head_dim=64, **fields)
    plan = ragged_plan(config, 4)
    tp = TensorParallel.of(config, plan, 2, mesh=abstract_mesh(2))
    params = abstract_params(config, jnp.bfloat16)
    cache = jax.eval_shape(lambda: tj.init_cache(plan, config, **SIZES, dtype=jnp.bfloat16))
    rows = np.zeros(8, np.int32)
    chunk = tj.Chunk(np.int32(1), np.zeros(128, np.int32), np.int32(100))
    step = jax.jit(tp.step, static_argnums=1)
    if linked:
        params["links"] = jax.ShapeDtypeStruct((2, 3, 2), jnp.int32)
    counts = np.add((3, 3), more) + 2 * linked
    with as_on_hopper():
        for given, count in zip(((None, tj.Decode(rows, rows)), (chunk, None)), counts, strict=True):
            program = step.trace(params, SNAPKV, cache, *given).lower(lowering_platforms=("cuda",)).as_text()
            assert len(set(re.findall(r'kernel_hash = "([^"]*)"', program))) == count
            assert "stablehlo.while" not in program
            assert ("stablehlo.all_reduce" in program) != linked
    assert not caplog.records  # nothing was left to XLA with a warning


def test_what_cannot_be_dealt():
    config = with_fp8_weights(tiny_config(num_layers=2, head_dim=16))
    plan = tj.CachePlan.build(tj.BudgetProfile.uniform(2, 4, 0.5), 4)
    with pytest.raises(
        ValueError, match=r"KV heads of 32 and 64 columns in FP8 cannot be put in order: .* 64"
    ):
        TensorParallel.of(config, plan, 2, mesh=abstract_mesh(2))
    config = tiny_config(num_layers=2)
    profile = tj.BudgetProfile.uniform(2, 4, 0.5)
    for heads_per_page, cluster, message in (
        (1, "layer", "heads_per_page a multiple of 2 that divides 4"),
        (2, "model", "cluster 'layer'"),
    ):
        plan = tj.CachePlan.build(profile, heads_per_page, cluster=cluster)
        with pytest.raises(ValueError, match=message):
            TensorParallel.of(config, plan, 2, mesh=abstract_mesh(2))
    plan = tj.CachePlan.build(profile, 4)
    with pytest.raises(ValueError, match="kv_heads = 4 is not a multiple of 3"):
        TensorParallel.of(config, plan, 3, mesh=abstract_mesh(3))
    config = config.replace(**EXPERTS | {"num_experts": 5}, experts_mxfp4=True)
    with pytest.raises(ValueError, match="experts = 5 is not a multiple of 2"):
        TensorParallel.of(config, plan, 2, mesh=abstract_mesh(2))
