"""Gemma 2: soft caps on the scores of attention and on the logits, in configurations, files and the model."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.attention import dense_attend, masked_attention
from models.config import UnsupportedModelError, config_from_huggingface
from models.gemma import GEMMA2
from models.gguf import GGUFFile
from models.registry import load_model
from models.testing import reference_decode, tiny_tokenizer
from models.transformer import forward, soft_cap
from models.weights import assemble_params
from tests.models.checkpoints import GOLDEN, golden_tensors
from tests.models.gguf_files import with_tiny_vocabulary, write_gguf

HF_CONFIG = json.loads((GOLDEN / "tiny_gemma2" / "config.json").read_text())
CAPS = {"gemma2.attn_logit_softcapping": 2.0, "gemma2.final_logit_softcapping": 5.0}


@pytest.fixture(scope="module")
def gemma():
    """(tensors, config, parameters, golden tokens and logits)"""
    source, config = golden_tensors("tiny_gemma2")
    params = assemble_params(source, config, jnp.float32, progress=False)
    return source, config, params, np.load(GOLDEN / "tiny_gemma2.npz")


def dense_logits(params, config, tokens):
    tokens = jnp.asarray(tokens, jnp.int32)
    positions = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    attend = dense_attend(positions, config=config)
    return np.asarray(forward(params, config, tokens, positions, attend, None)[0])


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_soft_cap": None},
        {"attention_soft_cap": 2.2},
        {"logits_soft_cap": None},
        {"sliding_window": 25},
        {"sliding_layers": (1,)},
        {"query_scale": None},
        {"post_norms": False},
    ],
)
def test_every_field_matters_to_the_golden_logits(gemma, changes):
    """Guards against golden files that would agree without one of them."""
    _, config, params, golden = gemma
    logits = dense_logits(params, config.replace(**changes), golden["tokens"])
    assert np.abs(logits - golden["logits"]).max() > 0.01


def test_decoding_with_a_cache_agrees_with_the_golden_logits(gemma):
    _, config, params, golden = gemma
    _, logits = reference_decode(params, config, golden["tokens"].tolist(), 1)
    np.testing.assert_allclose(logits[0], golden["logits"][-1], atol=1e-3)


@given(st.floats(-1e6, 1e6, width=32), st.floats(0.5, 100.0, width=32))
def test_a_soft_cap_bends_and_bounds(x, cap):
    bent = float(soft_cap(jnp.float32(x), cap))
    assert abs(bent) <= min(abs(x), cap) * (1 + 1e-5) and bent * x >= 0.0
    assert bent == pytest.approx(cap * np.tanh(np.float64(x) / cap), rel=1e-5, abs=1e-30)


def test_scores_are_capped_before_the_mask():
    """A query that sees one entry gets its value, and two far apart no more than the cap says."""
    q = jnp.full((2, 1, 4), 100.0)
    k = jnp.stack([jnp.full((1, 4), 1.0), jnp.full((1, 4), -1.0)])
    v = jnp.asarray([[[1.0] * 4], [[0.0] * 4]])
    mask = jnp.asarray([[True, False], [True, True]])
    out = masked_attention(q, k, v, mask, cap=0.5)
    np.testing.assert_allclose(out[0, 0], 1.0)
    np.testing.assert_allclose(out[1, 0], 1 / (1 + np.exp(-1.0)), rtol=1e-6)  # 0.5 and -0.5


def test_the_published_ones():
    """Of 2B and 27B what their files say; layer types and rest are transformers' defaults."""
    said = {"architectures": [GEMMA2], "hidden_act": "gelu_pytorch_tanh", "sliding_window_size": 4096}
    small = config_from_huggingface(said, "gemma-2-2b")
    assert (small.num_layers, small.hidden_size, small.head_dim) == (26, 2304, 256)
    assert (small.attention_soft_cap, small.logits_soft_cap) == (50.0, 30.0)
    assert small.sliding_layers == tuple(range(0, 26, 2)) and small.sliding_window == 4096
    assert small.sliding_rope_theta is None and small.rope_theta == 10_000.0 and not small.qk_norm
    assert small.norm_offset == 1.0 and small.gelu and small.post_norms and small.tie_embeddings
    assert small.embed_scale == pytest.approx(2304**0.5) and small.attention_scale == 256**-0.5
    large = said | {"hidden_size": 4608, "num_hidden_layers": 46, "num_attention_heads": 32, "head_dim": 128}
    large |= {"num_key_value_heads": 16, "intermediate_size": 36_864, "query_pre_attn_scalar": 144}
    assert config_from_huggingface(large, "gemma-2-27b").attention_scale == 144**-0.5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attn_logit_softcapping": 0}, "attn_logit_softcapping=0"),
        ({"final_logit_softcapping": "30"}, "final_logit_softcapping='30'"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ({"hidden_activation": "gelu"}, "hidden_activation=gelu"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar=0"),
        ({"sliding_window": None}, "sliding layers with sliding_window=None"),
        ({"layer_types": ["sliding_attention"] * 3}, "sliding_window=24 in every layer"),
    ],
)
def test_unsupported_configurations(changes, message):
    with pytest.raises(UnsupportedModelError, match=message):
        config_from_huggingface(HF_CONFIG | changes, "x")


def test_models_without_caps():
    config = config_from_huggingface(
        HF_CONFIG | {"attn_logit_softcapping": None, "final_logit_softcapping": None}, "x"
    )
    assert config.attention_soft_cap is None and config.logits_soft_cap is None
    with pytest.raises(ValueError, match=r"logits_soft_cap must be positive or None, got -1"):
        config.replace(logits_soft_cap=-1.0)


def write(path, gemma, **changes):
    fields = {"architecture": "gemma2", "floats": CAPS, "ints": {"gemma2.attention.sliding_window": 24}}
    return write_gguf(path, *gemma[:2], **(fields | changes))


def test_gguf(gemma, tmp_path):
    """Through the file's own names, norms with the offset in them and metadata; only the scale is not in it."""
    _, config, params, _ = gemma
    file = GGUFFile(write(tmp_path / "g.gguf", gemma))
    said = {"name": config.name, "norm_eps": config.norm_eps, "query_scale": config.query_scale}
    tokens = {"bos_token_id": config.bos_token_id, "eos_token_ids": config.eos_token_ids}
    assert file.config.replace(**said, **tokens) == config
    assert file.config.query_scale == 16**-0.5
    read = assemble_params(file, file.config, jnp.float32, style="gguf", progress=False)
    near = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), read, params)
    assert max(jax.tree.leaves(near)) < 1e-6


def test_gguf_where_the_file_says_little(gemma, tmp_path):
    """As llama.cpp: a window of 4096, caps of 50 and 30, and in 46 layers the scale of 27B."""
    source, config, *_ = gemma
    deep = config.replace(num_layers=46, max_positions=8192)
    found = GGUFFile(write(tmp_path / "d.gguf", (source, deep), floats={}, ints={})).config
    assert (found.attention_soft_cap, found.logits_soft_cap) == (50.0, 30.0)
    assert found.sliding_window == 4096 and found.sliding_layers == tuple(range(0, 46, 2))
    assert found.attention_scale == (32 / 4) ** -0.5


def test_loading(gemma, tmp_path, cache, monkeypatch):
    shutil.copytree(GOLDEN / "tiny_gemma2", tmp_path / "m")
    tiny_tokenizer().save(str(tmp_path / "m"))
    asked = []
    monkeypatch.setattr("models.registry.download", lambda repo, **_: asked.append(repo) or tmp_path / "m")
    loaded = load_model("Gemma-2-9B", progress=False)
    assert (loaded.name, asked) == ("gemma-2-9b", ["google/gemma-2-9b-it"])
    assert loaded.config.replace(name=gemma[1].name, eos_token_ids=gemma[1].eos_token_ids) == gemma[1]
    with pytest.raises(UnsupportedModelError, match="Gemma go beyond the range of float16, take bfloat16"):
        load_model(tmp_path / "m", dtype="float16", progress=False)

    path = write(tmp_path / "g.gguf", with_tiny_vocabulary(*gemma[:2]))
    first = load_model(path, progress=False)
    assert (first.config.attention_soft_cap, first.config.logits_soft_cap) == (2.0, 5.0)
    again = load_model(path, progress=False)  # from the cache
    assert again.config == first.config and again.config.sliding_layers == (0, 2)
