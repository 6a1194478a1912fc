"""config.json files of GPT-OSS, as published and as transformers writes and reads them."""

import json

import numpy as np
import pytest

from models.config import ModelConfig, UnsupportedModelError, config_from_huggingface
from models.gpt_oss import GPT_OSS
from models.overrides import overridden
from models.registry import HUB_NAMES
from models.rope import rope_frequencies
from tests.models.checkpoints import GOLDEN

CONFIGS = json.loads((GOLDEN / "gpt_oss_configs.json").read_text())
TINY = json.loads((GOLDEN / "tiny_gpt_oss" / "config.json").read_text())
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.embed_tokens", "lm_head"]}


@pytest.mark.parametrize("number", range(4))
def test_configurations_agree_with_transformers(number):
    given, fields = CONFIGS[number]["given"], CONFIGS[number]["fields"]
    config = config_from_huggingface({"architectures": [GPT_OSS], **given}, "x")
    assert (config.vocab_size, config.hidden_size) == (fields["vocab_size"], fields["hidden_size"])
    assert (config.num_layers, config.num_heads) == (
        fields["num_hidden_layers"],
        fields["num_attention_heads"],
    )
    assert (config.num_kv_heads, config.head_dim) == (fields["num_key_value_heads"], fields["head_dim"])
    assert (config.num_experts, config.expert_size) == (
        fields["num_local_experts"],
        fields["intermediate_size"],
    )
    assert config.experts_per_token == fields["num_experts_per_tok"] and config.normalize_experts
    assert (config.swiglu_limit, config.norm_eps) == (fields["swiglu_limit"], fields["rms_norm_eps"])
    assert config.max_positions == fields["max_position_embeddings"] == 131_072
    assert config.sliding_window == fields["sliding_window"] and not config.tie_embeddings
    sliding = [i for i, kind in enumerate(fields["layer_types"]) if kind == "sliding_attention"]
    assert list(config.sliding_layers) == sliding
    for kind in (False, True):  # one RoPE for all layers
        found = rope_frequencies(config, sliding=kind)
        np.testing.assert_allclose(found, CONFIGS[number]["inv_freq"], rtol=2e-6)
    factor = config.rope_scaling.attention_factor if config.rope_scaling else 1.0
    assert factor == pytest.approx(CONFIGS[number]["attention_factor"])
    assert config.attention_sinks and config.qkv_bias and config.attn_out_bias and config.expert_bias


def test_the_published_one():
    given = {
        "architectures": [GPT_OSS],
        "quantization_config": MXFP4,
        "hidden_act": "silu",
        "eos_token_id": 200_002,
    }
    config = config_from_huggingface(given | CONFIGS[0]["given"], "gpt-oss-20b")
    assert (config.num_layers, config.num_experts, config.experts_per_token) == (24, 32, 4)
    assert config.sliding_layers == tuple(range(0, 24, 2)) and config.eos_token_ids == (200_002,)
    assert config.rope_scaling.truncate is False and config.rope_theta == 150_000.0
    assert config.rope_scaling.attention_factor == pytest.approx(1.3466, abs=1e-4)  # 0.1 ln 32 + 1


def test_without_biases_of_attention():
    config = config_from_huggingface(TINY | {"attention_bias": False}, "x")
    assert (config.qkv_bias, config.attn_out_bias, config.expert_bias) == (False, False, True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised weights other than mxfp4 .*'fp8'"),
        ({"quantization_config": 4}, "quantised weights other than mxfp4"),
        ({"quantization_config": MXFP4, "hidden_size": 40}, "mxfp4 with hidden_size=40 .not a multiple of 32"),
        ({"swiglu_limit": 0}, "swiglu_limit=0"),
        ({"swiglu_limit": None}, "swiglu_limit=None"),
        ({"swiglu_alpha": 1.0}, "swiglu_alpha=1.0"),
        ({"attention_bias": None}, "attention_bias=None"),
        ({"mlp_bias": True}, "mlp_bias=true"),
        ({"hidden_act": "gelu"}, "hidden_act=gelu"),
        ({"num_local_experts": 0}, "num_local_experts=0"),
        ({"num_experts_per_tok": 5}, "expected 1 to 4 experts a token"),
        ({"sliding_window": None}, "sliding layers with sliding_window=None"),
        ({"layer_types": ["sliding_attention"] * 3}, "sliding_window=24 in every layer"),
        ({"layer_types": ["full_attention"] * 2}, "layer_types of 2 layers, num_hidden_layers of 3"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope scaling of type 'longrope'"),
    ],
)  # fmt: skip
def test_unsupported_configurations(changes, message):
    with pytest.raises(UnsupportedModelError, match=message):
        config_from_huggingface(TINY | changes, "x")


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3MoeForCausalLM"])
def test_mxfp4_of_others_is_refused(architecture):
    given = TINY | {"architectures": [architecture], "attention_bias": False, "quantization_config": MXFP4}
    with pytest.raises(
        UnsupportedModelError, match=r"quantised weights by mxfp4;.* GPT-OSS by mxfp4, or not"
    ):
        config_from_huggingface(given, "x")


def test_overrides_of_rope():
    config = config_from_huggingface(overridden(TINY, {"rope_scaling": {"factor": 8.0}}), "x")
    assert (config.rope_scaling.factor, config.rope_scaling.truncate) == (8.0, False)
    silent = {key: x for key, x in TINY.items() if not key.startswith("rope_")}
    for file in (TINY, silent):
        assert config_from_huggingface(overridden(file, {"rope_scaling": None}), "x").rope_scaling is None
    usual = config_from_huggingface(silent, "x")
    assert config_from_huggingface(silent | {"rope_scaling": {}}, "x") == usual  # it was without a scaling
    assert config_from_huggingface(silent | {"rope_parameters": {}}, "x").rope_scaling is None
    assert usual.rope_scaling.kind == "yarn"  # the default, which the base alone leaves as it is
    assert config_from_huggingface(overridden(silent, {"rope_theta": 5e4}), "x") == usual.replace(
        rope_theta=5e4
    )


def test_short_names():
    assert HUB_NAMES["gpt-oss-20b"] == "openai/gpt-oss-20b" and "gpt-oss-120b" in HUB_NAMES


def test_a_limit_needs_experts_and_a_size():
    fields = {"vocab_size": 8, "num_layers": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 1}
    fields |= {"name": "x", "num_kv_heads": 1, "head_dim": 8, "max_positions": 8}
    with pytest.raises(ValueError, match="swiglu_limit needs experts and must be positive, got 7"):
        ModelConfig(**fields, swiglu_limit=7.0)
    experts = {"num_experts": 2, "experts_per_token": 1, "expert_size": 8}
    with pytest.raises(ValueError, match=r"must be positive, got -1.0"):
        ModelConfig(**fields, **experts, swiglu_limit=-1.0)
