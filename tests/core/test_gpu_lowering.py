"""The step as a Hopper GPU would run it, traced and lowered without one: the kernels fit the engine, and all apply."""

import functools
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tangram_jax as tj
from benchmarks.gpu_program import as_on_hopper
from models.fp8_weights import in_fp8
from models.products import gated_product, product
from models.testing import random_params, tiny_config, tiny_gemma2_config, tiny_gpt_oss_config
from pallas_kernels import chunk_prefill, fp8_products, keep, ragged_decode
from tangram_jax import gpu_attention

SLOW = functools.partial(pytest.param, marks=pytest.mark.slow)
SHAPE = {"num_layers": 2, "hidden_size": 256, "num_heads": 16, "num_kv_heads": 4, "head_dim": 64}
CONFIG = tiny_config(**SHAPE)
GEMMA2 = tiny_gemma2_config(**SHAPE, sliding_layers=(0,))
GPT_OSS = tiny_gpt_oss_config(**SHAPE, sliding_layers=(0,))


@pytest.fixture
def hopper():
    with as_on_hopper():
        yield


def lowered(function, *args, **kwargs) -> str:
    return jax.jit(function).trace(*args, **kwargs).lower(lowering_platforms=("cuda",)).as_text()


def kernels(text: str) -> int:
    """How many; each stands in the text once for all layers."""
    found = re.findall(r'kernel_hash = "([^"]*)"', text)
    assert len(found) == len(set(found))
    return len(found)


@pytest.mark.parametrize(
    ("scorer", "cluster", "dtype", "batch"),
    [
        pytest.param("snapkv", "layer", jnp.bfloat16, 8, marks=pytest.mark.slow),
        pytest.param("expected_attention", "model", jnp.bfloat16, 1, marks=pytest.mark.slow),
        ("snapkv", "model", jnp.uint8, 8),
    ],
    ids=["sums", "moments", "bytes"],
)
def test_steps_lower(hopper, caplog, scorer, cluster, dtype, batch):
    profile = tj.BudgetProfile.from_ratios(
        np.random.default_rng(0).uniform(0.1, 0.9, (1, CONFIG.num_layers, CONFIG.num_kv_heads)), retention=0.5
    )
    plan = tj.CachePlan.build(profile, 2, 16, cluster)
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), random_params(CONFIG, 0))
    cache = tj.init_cache(
        plan, CONFIG, num_pages=64, max_requests=4, max_tokens=2048, max_tail=64, dtype=dtype
    )
    prefill = functools.partial(
        tj.prefill_chunk, model_config=CONFIG, plan=plan, scorer=tj.get_scorer(scorer)
    )
    tokens = np.zeros(128, np.int32)
    text = lowered(
        lambda params, cache, **given: prefill(params, cache=cache, **given),
        params, cache, row=np.int32(1), tokens=tokens, count=np.int32(100),
    )  # fmt: skip
    # Attention, writing, and the window's sums or the model's moments and logits; bytes are unpacked.
    assert kernels(text) == (3 if scorer == "snapkv" else 4) + (dtype == jnp.uint8)
    assert "stablehlo.while" not in text  # the host would wait for the loop's condition
    text = lowered(
        lambda params, cache, **given: tj.decode_step(params, CONFIG, plan, cache, **given),
        params, cache, rows=np.zeros(batch, np.int32), tokens=np.zeros(batch, np.int32),
    )  # fmt: skip
    assert kernels(text) == 3  # its plan, attention, appending
    assert "stablehlo.while" not in text
    assert not caplog.records  # nothing was left to XLA with a warning


@pytest.mark.parametrize(
    "dtype", [jnp.bfloat16, pytest.param(jnp.uint8, marks=pytest.mark.slow)], ids=["bfloat16", "bytes"]
)
def test_drafts_lower(hopper, caplog, dtype):
    """Attention is the kernel alone: it reads a row's tokens as the model leaves them, and they see each other in it."""
    plan = tj.CachePlan.build(tj.BudgetProfile.uniform(CONFIG.num_layers, CONFIG.num_kv_heads, 0.5), 2, 16)
    params = random_params(CONFIG, 0, dtype=jnp.bfloat16)
    cache = tj.init_cache(
        plan, CONFIG, num_pages=64, max_requests=4, max_tokens=2048, max_tail=64, dtype=dtype
    )

    decode = tj.Decode(np.zeros(2, np.int32), np.zeros((2, 4), np.int32))
    traced = jax.jit(
        lambda params, cache: tj.step(params, CONFIG, plan, tj.get_scorer("snapkv"), cache, None, decode)
    ).trace(params, cache)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert kernels(text) == 3  # its plan, attention, appending
    assert not re.search(r"= (exp|log|log1p|tanh)\b", str(traced.jaxpr))  # of two attentions to be merged
    assert not caplog.records


@pytest.mark.parametrize(
    ("config", "scorer", "count"),
    [
        SLOW(CONFIG, "snapkv", 3),
        (CONFIG, "expected_attention", 4),
        (GEMMA2, "snapkv", 5),
    ],
    ids=["sums", "moments", "windows"],
)
def test_packed_chunks_lower(hopper, caplog, config, scorer, count):
    """As many kernels as of one chunk, those of layers with a window of their own shapes."""
    profile = tj.BudgetProfile.uniform(len(config.full_layers), config.num_kv_heads, 0.5)
    plan = tj.CachePlan.build(profile, 2, 16, sliding=tj.SlidingLayers.of(config, 32))
    params = random_params(config, 0, dtype=jnp.bfloat16)
    cache = tj.init_cache(
        plan, config, num_pages=64, max_requests=4, max_tokens=2048, max_tail=32, dtype=jnp.bfloat16
    )
    packed = tj.Packed(*(np.zeros(n, np.int32) for n in (2, 64, 2)))
    text = lowered(
        lambda params, cache, *given: tj.step(params, config, plan, tj.get_scorer(scorer), cache, *given),
        params, cache, packed, None,
    )  # fmt: skip
    assert kernels(text) == count
    assert "stablehlo.while" not in text
    assert not caplog.records


def test_products_with_fp8_weights_lower(hopper, caplog):
    params, config = in_fp8(random_params(CONFIG, 0, jnp.bfloat16), CONFIG)
    plan = tj.CachePlan.build(tj.BudgetProfile.uniform(2, 4, 0.5), 2, 16)
    cache = tj.init_cache(plan, config, num_pages=64, max_requests=4, max_tokens=256, dtype=jnp.bfloat16)
    rows = dict(rows=np.zeros(8, np.int32), tokens=np.zeros(8, np.int32))
    text = lowered(lambda params, cache: tj.decode_step(params, config, plan, cache, **rows), params, cache)
    assert kernels(text) == 3 + 4  # attention's plan, attention, appending, and the four products
    assert "stablehlo.while" not in text
    assert not caplog.records


@pytest.mark.parametrize(("tokens", "count"), [(32, 0), (64, 1), (60, 0), (136, 0)])
def test_products_of_some_dozens_of_tokens_lower(hopper, tokens, count):
    config = tiny_config(hidden_size=4096, intermediate_size=8192)
    x = jax.ShapeDtypeStruct((tokens, 4096), jnp.bfloat16)
    weights = jax.ShapeDtypeStruct((4096, 2, 8192), jnp.bfloat16)
    text = lowered(lambda x, w: gated_product(x, w, config), x, weights)
    assert kernels(text) == count and text.count("stablehlo.dot_general") == 1 - count
    for columns in ((8, 6, 128), (4096,)):  # the latter are split along the depth
        weights = jax.ShapeDtypeStruct((4096, *columns), jnp.bfloat16)
        text = lowered(lambda x, w, columns=columns: product(x, w, columns, config), x, weights)
        assert kernels(text) == count and text.count("stablehlo.dot_general") == 1 - count


@pytest.mark.parametrize(
    ("slots", "each", "tokens"),
    [
        (36, 1, 36),
        (45, 1, 48),
        SLOW(64, 1, 64),
        (130, 1, 130),
        (12, 5, 80),
        SLOW(25, 3, 96),
        (25, 5, 125),
        SLOW(11, 4, 44 + 4),
    ],
)
def test_a_step_of_some_dozens_of_tokens_has_a_multiple_of_eight(hopper, slots, each, tokens):
    """Others have no kernel for their products."""
    params = random_params(CONFIG, 0, jnp.bfloat16)
    plan = tj.CachePlan.build(tj.BudgetProfile.uniform(2, 4, 0.5), 2, 16)
    cache = tj.init_cache(plan, CONFIG, num_pages=64, max_requests=4, max_tokens=256, dtype=jnp.bfloat16)
    decode = tj.Decode(np.zeros(slots, np.int32), np.zeros((slots, each)[: 1 + (each > 1)], np.int32))

    def step(params, cache):
        return tj.step(params, CONFIG, plan, None, cache, None, decode)[0]

    text = str(jax.make_jaxpr(step)(params, cache))
    assert f"bf16[{tokens},{CONFIG.hidden_size}]" in text


def test_products_of_many_tokens_in_fp8_lower(hopper, caplog):
    params, config = in_fp8(random_params(CONFIG, 0, jnp.bfloat16), CONFIG)
    x = jnp.ones((fp8_products.LEAST_NARROW, CONFIG.hidden_size), jnp.bfloat16)

    for dynamic, count in ((False, 1), (True, 2)):
        given = config.replace(activations_fp8=dynamic)
        weights = params["layers"][0]["gate_up"]
        text = lowered(lambda x, w, given=given: product(x, w, (w.columns,), given), x, weights)
        assert kernels(text) == count
    assert not caplog.records


def test_norms_of_many_tokens_are_written_in_fp8_alone(hopper, caplog):
    """All but the first add before; what else is quantised are the tokens of attn_out and down."""
    params, config = in_fp8(random_params(CONFIG, 0, jnp.bfloat16), CONFIG)
    plan = tj.CachePlan.build(tj.BudgetProfile.uniform(2, 4, 0.5), 2, 16)
    cache = tj.init_cache(plan, config, num_pages=64, max_requests=4, max_tokens=512, dtype=jnp.bfloat16)
    chunk = dict(row=np.int32(1), tokens=np.zeros(320, np.int32), count=np.int32(300))
    text = lowered(
        lambda params, cache: tj.prefill_chunk(
            params, config.replace(activations_fp8=True), plan, cache, scorer=tj.get_scorer("snapkv"), **chunk
        ),
        params,
        cache,
    )
    # Attention, writing, the window's sums; four products; norms; and those tokens, of a depth each.
    assert kernels(text) == 3 + 4 + 2 + 2
    assert not caplog.records


@pytest.mark.parametrize(("tokens", "dynamic"), [(24, False), (312, False), (312, True), (300, True)])
def test_products_with_fp8_weights_pad_nothing(hopper, tokens, dynamic):
    """XLA would in kernels of its own. Only bfloat16 tokens that are no multiple of eight need it."""
    params, config = in_fp8(random_params(CONFIG, 0, jnp.bfloat16), CONFIG)
    config, weights = config.replace(activations_fp8=dynamic), params["layers"][0]["gate_up"]
    x = jnp.ones((tokens, CONFIG.hidden_size), jnp.bfloat16)
    text = lowered(lambda x, w: product(x, w, (w.columns,), config), x, weights)
    assert "stablehlo.pad" not in text
    assert ("stablehlo.slice" in text) == (tokens % 8 > 0)  # which XLA fuses with what reads it


def trace_step(config, dtype=jnp.bfloat16) -> None:
    """A chunk and tokens of a model with windows, in bfloat16, over a cache of `dtype`."""
    profile = tj.BudgetProfile.uniform(len(config.full_layers), config.num_kv_heads, 0.5)
    plan = tj.CachePlan.build(profile, 2, 16, sliding=tj.SlidingLayers.of(config, 32))
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), random_params(config, 0))
    cache = tj.init_cache(
        plan, config, num_pages=64, max_requests=4, max_tokens=256, max_tail=32, dtype=dtype
    )
    chunk = tj.Chunk(np.int32(1), np.zeros(128, np.int32), np.int32(100))
    decode = tj.Decode(np.zeros(2, np.int32), np.zeros(2, np.int32))
    step = functools.partial(tj.step, config=config, plan=plan, scorer=tj.get_scorer("snapkv"))
    jax.eval_shape(lambda params, cache: step(params, cache=cache, chunk=chunk, decode=decode), params, cache)


@pytest.mark.parametrize("config", [GEMMA2, GPT_OSS], ids=lambda config: config.name)
def test_kernels_are_told_of_soft_caps_and_sinks(hopper, config, monkeypatch):
    """In layers with a window and in those without."""
    told = []

    def listen(module, name):
        function = getattr(module, name)

        def noted(*args, **kwargs):
            told.append((name, kwargs["scale"], kwargs["soft_cap"], kwargs.get("sinks") is not None))
            return function(*args, **kwargs)

        monkeypatch.setattr(module, name, noted)

    listen(chunk_prefill, "chunk_prefill")
    listen(ragged_decode, "ragged_decode")
    listen(keep, "window_sums")
    trace_step(config)
    logits = config.attention_scale, config.attention_soft_cap
    chunk, decode = ("chunk_prefill", *logits, False), ("ragged_decode", *logits, config.attention_sinks)
    scores = ("window_sums", *logits, False)
    assert sorted(told) == sorted([chunk, chunk, decode, decode, scores])


def test_windows_have_their_kernel_over_a_cache_of_bytes(hopper, monkeypatch):
    """It reads no entries: those that a window shows were gathered before."""
    windows, kernel = [], chunk_prefill.chunk_prefill

    def noted(q, k, v, pool, plan, **how):
        windows.append(plan.window)
        return kernel(q, k, v, pool, plan, **how)

    monkeypatch.setattr(chunk_prefill, "chunk_prefill", noted)
    trace_step(GEMMA2, jnp.uint8)
    assert GEMMA2.sliding_window in windows


def test_chunks_with_a_soft_cap_have_no_use_for_cudnn(hopper, monkeypatch, caplog):
    def refuse(*_):
        raise NotImplementedError("head dimension 80")

    monkeypatch.setattr(chunk_prefill, "check_supported", refuse)
    monkeypatch.setattr(gpu_attention, "cudnn_attention", lambda *_, **__: pytest.fail("no soft cap there"))
    trace_step(GEMMA2)
    assert "XLA operations, several times slower: cuDNN has no soft cap, and head dimension 80" in caplog.text


@pytest.mark.parametrize(
    ("capability", "largest"), [("9.0", 256), ("10.3", 256), ("8.6", 128), ("7.5", 0), ("gfx942", 0)]
)
def test_heads_that_cudnn_takes(monkeypatch, capability, largest):
    """What the composition cannot take goes to XLA operations, with no error from the depths of cuDNN."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(compute_capability=capability)])
    for head_dim in (64, 128, 256):
        pool = jax.ShapeDtypeStruct((4, 2, 1, 16, head_dim), jnp.bfloat16)
        supported = gpu_attention.chunk_supported((64, 2, 4, head_dim), pool.dtype, pool)
        assert supported == (head_dim <= largest)


def test_steps_lower_beside_64_bit_numbers(hopper):
    with jax.enable_x64(True):
        plan = tj.CachePlan.build(tj.BudgetProfile.uniform(2, 4, 0.5), 2, 16)
        params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), random_params(CONFIG, 0))
        cache = tj.init_cache(plan, CONFIG, num_pages=8, max_requests=2, max_tokens=256, dtype=jnp.bfloat16)
        chunk = dict(row=np.int32(1), tokens=np.zeros(64, np.int32), count=np.int32(50))
        scorer = tj.get_scorer("expected_attention")
        text = lowered(
            lambda params, cache: tj.prefill_chunk(params, CONFIG, plan, cache, scorer=scorer, **chunk),
            params,
            cache,
        )
        assert kernels(text) == 4
        rows = dict(rows=np.zeros(2, np.int32), tokens=np.zeros(2, np.int32))
        text = lowered(
            lambda params, cache: tj.decode_step(params, CONFIG, plan, cache, **rows), params, cache
        )
        assert kernels(text) == 3
