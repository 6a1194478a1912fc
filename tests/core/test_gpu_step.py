"""On a Hopper GPU: the step with our kernels, or cuDNN for chunks, against XLA operations and dense float32."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tangram_jax as tj
from models.attention import dense_attend
from models.config import ModelConfig
from models.fp8_weights import in_floats
from models.testing import (
    random_params,
    tiny_config,
    tiny_gemma2_config,
    tiny_gemma_config,
    tiny_gpt_oss_config,
)
from models.transformer import forward
from pallas_kernels import chunk_prefill, ragged_decode
from tangram_jax import gpu_attention

pytestmark = pytest.mark.gpu

SHAPE = {"num_layers": 2, "hidden_size": 256, "num_heads": 16, "num_kv_heads": 4, "head_dim": 64}
CONFIG = tiny_config(**SHAPE)
GEMMA = tiny_gemma_config(**SHAPE, sliding_layers=(0,), sliding_window=150, embed_scale=16.0)
GEMMA2 = tiny_gemma2_config(**SHAPE, sliding_layers=(0,), sliding_window=150, embed_scale=16.0)
# Every token goes through all experts: which ones are best may change with rounding, and all that follows with them.
GPT_OSS = tiny_gpt_oss_config(**SHAPE, sliding_layers=(0,), sliding_window=150, experts_per_token=4)
HEADS = (CONFIG.num_layers, CONFIG.num_kv_heads)
SNAPKV, GAUSSIAN = (tj.get_scorer(name) for name in ("snapkv", "expected_attention"))
ROW = np.int32(1)


def functions():
    """Traced anew: the dispatch is decided while tracing, and a jit of the same function finds the old trace."""
    jax.clear_caches()
    prefill = jax.jit(
        tj.prefill_chunk, static_argnums=(1, 2), static_argnames="scorer", donate_argnames="cache"
    )
    return prefill, jax.jit(tj.decode_step, static_argnums=(1, 2), donate_argnames="cache")


def run_prompt(prefill, params, plan, cache, tokens, size, config=CONFIG):
    logits = None
    for start in range(0, len(tokens), size):
        part = tokens[start : start + size]
        padded = np.pad(part, (0, size - len(part)))
        logits, cache = prefill(
            params, config, plan, cache, scorer=SNAPKV, row=ROW, tokens=padded, count=np.int32(len(part))
        )
    return logits, cache


def new_cache(plan, tail: int, config: ModelConfig = CONFIG, dtype=jnp.bfloat16) -> tj.Cache:
    cache = tj.init_cache(
        plan, config, num_pages=4096, max_requests=4, max_tokens=2048, max_tail=64, dtype=dtype
    )
    return tj.reserve(plan, cache, ROW, np.int32(1024), np.int32(tail))


def refuse(*_, **__):
    raise NotImplementedError("for this test")


def relative(got, want) -> float:
    got, want = (np.asarray(x, np.float64) for x in (got, want))
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def uniform_plan(config, page_size, cluster="layer"):
    profile = tj.BudgetProfile.uniform(len(config.full_layers), config.num_kv_heads, 1.0)
    sliding = tj.SlidingLayers.of(config, max_tail=64)
    return tj.CachePlan.build(profile, 2, page_size, cluster, sliding=sliding)


def errors_against_dense(
    config: ModelConfig, plan: tj.CachePlan, chunk: int, dtype=jnp.bfloat16
) -> list[float]:
    """Of the logits after a prompt in chunks and of the tokens that follow one by one."""
    tokens = np.random.default_rng(0).integers(8, config.vocab_size, 530).astype(np.int32)
    exact = random_params(config, 0)
    attend = dense_attend(jnp.arange(530), config=config)
    want, _ = jax.jit(lambda p, t: forward(p, config, t, jnp.arange(530), attend, ()))(exact, tokens)
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), exact)
    prefill, decode = functions()
    cache = new_cache(plan, 64, config, dtype)
    logits, cache = run_prompt(prefill, params, plan, cache, tokens[:512], chunk, config)
    errors = [relative(logits, want[511])]
    for i in range(512, 530):
        beside = i % 2  # empty slots; the step adds one to a token alone
        rows, given = np.array([9] * beside + [1], np.int32), np.array([0] * beside + [tokens[i]], np.int32)
        out, cache = decode(params, config, plan, cache, rows=rows, tokens=given)
        assert out.shape == (1 + beside, config.vocab_size)
        errors.append(relative(out[-1], want[i]))
    return errors


@pytest.mark.parametrize("cluster", ["layer", "model"])
@pytest.mark.parametrize("page_size", [16, 64])
def test_full_retention_is_dense_attention(cluster, page_size):
    errors = errors_against_dense(CONFIG, uniform_plan(CONFIG, page_size, cluster), 128)
    # bfloat16 under sharp random attention; a wrong entry or position gives about 1.
    assert max(errors) < 0.1, errors


@pytest.mark.parametrize("cluster", ["layer", "model"])
@pytest.mark.parametrize("config", [CONFIG, GEMMA, GPT_OSS], ids=lambda config: config.name)
def test_pages_of_bytes_are_dense_attention(config, cluster, caplog):
    errors = errors_against_dense(config, uniform_plan(config, 64, cluster), 128, jnp.uint8)
    assert max(errors) < 0.1, errors
    assert "XLA operations" not in caplog.text and "cuDNN" not in caplog.text


@pytest.mark.parametrize("division", ["split_map", "uniform"])
@pytest.mark.parametrize("config", [CONFIG, GPT_OSS], ids=lambda config: config.name)
def test_divisions_of_the_work_are_dense_attention(config, division, caplog):
    """Of heads that hold all entries, as many CTAs for each as if they held very different numbers."""
    plan = uniform_plan(config, 64)
    budgets = np.linspace(0.1, 1.0, plan.num_groups, dtype=np.float32)
    errors = errors_against_dense(config, replace(plan, division=division, group_budgets=budgets), 128)
    assert max(errors) < 0.1, errors
    assert "XLA operations" not in caplog.text


@pytest.mark.parametrize("way", ["kernels", "others"])
@pytest.mark.parametrize("config", [GEMMA2, GPT_OSS], ids=lambda config: config.name)
def test_soft_caps_and_sinks_are_dense_attention(config, way, monkeypatch, caplog):
    """Without our kernels chunks go to cuDNN, which knows no soft cap: those of Gemma 2 to XLA operations."""
    if way == "others":
        monkeypatch.setattr(chunk_prefill, "check_supported", refuse)
        monkeypatch.setattr(ragged_decode, "check_supported", refuse)
    errors = errors_against_dense(config, uniform_plan(config, 64), 128)
    assert max(errors) < 0.1, errors
    assert ("Decode attention runs as XLA operations" in caplog.text) == (way == "others")
    capped = config.attention_soft_cap is not None
    assert ("cuDNN has no soft cap" in caplog.text) == (way == "others" and capped)


@pytest.mark.parametrize("way", ["kernels", "cudnn"])
@pytest.mark.parametrize("chunk", [128, 512])
@pytest.mark.parametrize("page_size", [16, 64])
def test_sliding_windows_are_dense_attention(page_size, chunk, way, monkeypatch):
    """Rings that have gone round, chunks shorter and longer than the window."""
    if way == "cudnn":
        monkeypatch.setattr(chunk_prefill, "check_supported", refuse)
    errors = errors_against_dense(GEMMA, uniform_plan(GEMMA, page_size), chunk)
    assert max(errors) < 0.1, errors


@pytest.mark.parametrize("cluster", ["layer", "model"])
def test_kernels_and_xla_agree_on_a_ragged_cache(cluster, monkeypatch):
    budgets = np.random.default_rng(1).uniform(0.1, 0.9, (1, *HEADS)).astype(np.float32)
    profile = tj.BudgetProfile.from_ratios(budgets, retention=0.5, alpha=0.0)
    plan = tj.CachePlan.build(profile, 2, 16, cluster, min_entries=64)
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), random_params(CONFIG, 0))
    tokens = np.random.default_rng(2).integers(8, CONFIG.vocab_size, 900).astype(np.int32)
    prefill, _ = functions()
    _, cache = run_prompt(prefill, params, plan, new_cache(plan, 64), tokens[:768], 256)
    caches = [jax.tree.map(jnp.copy, cache) for _ in range(3)]  # each is donated once
    rows, next_token = np.array([1, 9, 9, 9], np.int32), np.array([50, 0, 0, 0], np.int32)

    def rest(cache):
        prefill, decode = functions()
        logits, _ = run_prompt(prefill, params, plan, jax.tree.map(jnp.copy, cache), tokens[768:], 256)
        out, cache = decode(params, CONFIG, plan, cache, rows=rows, tokens=next_token)
        again, _ = decode(params, CONFIG, plan, cache, rows=rows, tokens=next_token)
        return logits, out[0], again[0]

    traced: list[str] = []
    for module, name in (
        (chunk_prefill, "chunk_prefill"),
        (gpu_attention, "chunk_composition"),
        (ragged_decode, "ragged_decode"),
    ):
        function = getattr(module, name)

        def noted(*args, name=name, function=function, **kwargs):
            traced.append(name)
            return function(*args, **kwargs)

        monkeypatch.setattr(module, name, noted)

    fast = rest(caches[0])
    assert set(traced) == {"chunk_prefill", "ragged_decode"}
    traced.clear()
    monkeypatch.setattr(chunk_prefill, "check_supported", refuse)
    composed = rest(caches[1])  # chunks as on GPUs that are not Hopper
    assert set(traced) == {"chunk_composition", "ragged_decode"}
    traced.clear()
    monkeypatch.setattr(gpu_attention, "chunk_supported", lambda *_: False)
    monkeypatch.setattr(ragged_decode, "check_supported", refuse)
    slow = rest(caches[2])
    assert not traced
    for got, other_way, want in zip(fast, composed, slow, strict=True):
        assert relative(got, want) < 0.1
        assert relative(other_way, want) < 0.1


def test_fp8_weights_are_the_floats_that_they_stand_for(caplog):
    """In prompts and in steps of one token, which gets empty slots beside it, and of nine."""
    config = CONFIG.replace(weights_fp8=True)
    plan = uniform_plan(config, 64)
    params = random_params(config, 0, dtype=jnp.bfloat16)
    floats, plain = in_floats(params, config)
    tokens = np.random.default_rng(0).integers(8, config.vocab_size, 512).astype(np.int32)
    outs = []
    for which, of in ((params, config), (floats, plain)):
        prefill, decode = functions()
        logits, cache = run_prompt(prefill, which, plan, new_cache(plan, 64), tokens, 128, of)
        rows = (np.array([1], np.int32), np.array([9] * 8 + [1], np.int32))
        one, cache = decode(which, of, plan, cache, rows=rows[0], tokens=tokens[:1])
        nine, _ = decode(which, of, plan, cache, rows=rows[1], tokens=tokens[:9])
        outs.append((logits, one[0], nine[8]))
    for got, want in zip(*outs, strict=True):
        assert relative(got, want) < 5e-2
    assert "FP8 weights are unpacked" not in caplog.text


@pytest.mark.parametrize("scorer", [SNAPKV, GAUSSIAN], ids=["snapkv", "expected_attention"])
@pytest.mark.parametrize(
    ("packed", "config"),
    [(False, CONFIG), (True, CONFIG), (True, GPT_OSS)],
    ids=["a list", "packed", "packed, windows and sinks"],
)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.uint8], ids=["bfloat16", "bytes"])
def test_chunks_of_several_rows_are_each_as_alone(dtype, packed, config, scorer, caplog):
    """Under budgets of their own, beside a row that decodes, and with a chunk of no row."""
    shape = 1, len(config.full_layers), config.num_kv_heads
    ratios = np.random.default_rng(0).uniform(0.1, 0.9, shape).astype(np.float32)
    profile = tj.BudgetProfile.from_ratios(ratios, retention=0.5, alpha=0.0)
    sliding = tj.SlidingLayers.of(config, max_tail=64)
    plan = tj.CachePlan.build(profile, 2, 16, max_retention=1.0, sliding=sliding)
    params = random_params(config, 0, dtype=jnp.bfloat16)
    cache = tj.init_cache(
        plan, config, num_pages=4096, max_requests=4, max_tokens=2048, max_tail=64, dtype=dtype
    )
    rng = np.random.default_rng(1)
    texts = [rng.integers(8, config.vocab_size, n).astype(np.int32) for n in (300, 250, 128)]
    prefill, decode = functions()
    for row, (text, retention) in enumerate(zip(texts, (None, 0.2, 1.0), strict=True)):
        budgets = plan.budgets_at(retention)
        cache = tj.set_budgets(plan, cache, np.int32(row), budgets)
        cache = tj.reserve(plan, cache, np.int32(row), np.int32(len(text) + 128), np.int32(8))
        for start in range(0, len(text) - 1, 128):
            part = text[start : start + 128]
            padded, count = np.pad(part, (0, 128 - len(part))), np.int32(len(part))
            _, cache = prefill(
                params, config, plan, cache, scorer=scorer, row=np.int32(row), tokens=padded, count=count
            )
    sizes = ((1, 56), (2, 68), (4, 0)) if packed else ((1, 100), (2, 128), (4, 1))
    more = [tj.Chunk(np.int32(row), texts[0][:128], np.int32(n)) for row, n in sizes]
    together = tj.Packed.of([1, 2, 4], [texts[0][:56], texts[0][:68], texts[0][:0]], 128)
    token = tj.Decode(np.array([0], np.int32), np.array([9], np.int32))
    apart = jax.tree.map(jnp.copy, cache)
    both, cache = jax.jit(tj.step, static_argnums=(1, 2, 3))(
        params, config, plan, scorer, cache, together if packed else more, token
    )
    assert "Scores are taken by XLA operations" not in caplog.text
    alone = []
    for chunk in more[:2]:
        out, apart = prefill(
            params, config, plan, apart, scorer=scorer, row=chunk.row, tokens=chunk.tokens, count=chunk.valid
        )
        alone.append(out)
    out, apart = decode(params, config, plan, apart, rows=token.rows, tokens=token.tokens)
    for name in ("tokens", "tail", "table", "num_free"):
        np.testing.assert_array_equal(getattr(cache, name), getattr(apart, name))
    rows, tokens = np.array([1, 2], np.int32), np.array([10, 11], np.int32)
    after, alike = (decode(params, config, plan, c, rows=rows, tokens=tokens)[0] for c in (cache, apart))
    for got, want in zip([*both[np.array([0, 1, 3])], *after], [*alone, out[0], *alike], strict=True):
        assert relative(got, want) < 5e-2
